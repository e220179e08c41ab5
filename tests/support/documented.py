"""The blocks of a documentation page: programs, files, and commands with what they print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    """A command, and what it prints; ``…`` stands for anything."""

    command: str
    printed: str

    def matches(self, output: str) -> bool:
        """Whether the command printed what the page says."""
        pattern = ".*".join(map(re.escape, self.printed.split("…")))
        return re.fullmatch(pattern, output, re.DOTALL) is not None


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows.

    Attributes:
        files: Blocks with a title, by that name.
        program: All Python without a title, in a row.
        data: The blocks of JSON without a title.
        examples: What the ``console`` blocks run, in a row.
    """

    files: dict[str, str]
    program: str
    data: tuple[str, ...]
    examples: tuple[Example, ...]

    @staticmethod
    def read(path: Path) -> Page:
        """The page in a Markdown file."""
        blocks = [match.groupdict() for match in _BLOCK.finditer(path.read_text())]

        def untitled(language: str) -> list[str]:
            return [block["text"] for block in blocks if block["language"] == language and not block["title"]]

        return Page(
            files={block["title"]: block["text"] for block in blocks if block["title"]},
            program="\n".join(untitled("python")),
            data=tuple(untitled("json")),
            examples=tuple(
                Example(command, printed)
                for text in untitled("console")
                for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
            ),
        )
