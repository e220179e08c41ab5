"""Sentences of the documentation, docstrings and comments: their length, and words that have a plainer one.

``python tests/support/prose.py [PATH …]`` lists the offences, one a line: file, line, how many words, the sentence's beginning.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST_WORDS: Final = 25
"""The longest sentence, in words. A name in backquotes, a link's text of one word and a formula count as one word."""

_END: Final = re.compile(r"(?<=[.!?:;])[)\"']*\s+(?=\S)")
_ABBREVIATIONS: Final = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|Fig|Eq|Sec|No|al|approx)\.$")
_SECTION: Final = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note|Contract|Source|See):\s*$")
_ENTRY: Final = re.compile(r"^(\s*)(\*{0,2}[\w.*]+(?: \([^)]*\))?): ")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence, where it begins, and how many words it has."""

    path: Path
    line: int
    text: str

    @property
    def words(self) -> int:
        """How many words it has."""
        text = re.sub(r"``[^`]*``|`[^`]*`", "CODE", self.text)
        text = re.sub(r":\w+:CODE", "CODE", text)
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
        return sum(1 for word in text.split() if re.search(r"\w", word))


def sentences(path: Path) -> Iterator[Sentence]:
    """All sentences of a file: prose of Markdown; docstrings and comments of Python; comments of C++."""
    text = path.read_text()
    match path.suffix:
        case ".md":
            paragraphs = _markdown(text)
        case ".py" | ".pyi":
            paragraphs = _python(text)
        case ".cc" | ".h":
            paragraphs = _cxx(text)
        case _:
            raise ValueError(f"{path}: expected Markdown, Python or C++")
    for line, paragraph in paragraphs:
        yield from _split(path, line, paragraph)


def _split(path: Path, line: int, paragraph: list[str]) -> Iterator[Sentence]:
    text = "\n".join(paragraph)
    begun = 0
    for end in _END.finditer(text):
        if text[end.start() - 1] in ":;" or _ABBREVIATIONS.search(text[: end.start()]):
            continue  # one sentence still
        yield Sentence(path, line + text.count("\n", 0, begun), " ".join(text[begun : end.start()].split()))
        begun = end.end()
    if text[begun:].strip():
        yield Sentence(path, line + text.count("\n", 0, begun), " ".join(text[begun:].split()))


def _markdown(text: str) -> Iterator[tuple[int, list[str]]]:
    fenced, begun, paragraph = False, 1, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        body = line.strip()
        fence = body.startswith(("```", "~~~"))
        apart = (
            fence or not body or body.startswith(("|", "#", "- ", "* ", "!!!", "<", ":::", "> ")) or re.match(r"\d+\. ", body)
        )
        if (apart or fenced) and paragraph:
            yield begun, paragraph
            paragraph = []
        if fence:
            fenced = not fenced
        elif fenced or not body or body.startswith(("#", "!!!", "<", ":::")):
            pass
        elif body.startswith("|"):
            for cell in body.strip("|").replace("\\|", "¦").split("|"):
                if cell.strip(" -:"):
                    yield number, [cell.strip()]
        else:
            if not paragraph:
                begun = number
            paragraph.append(re.sub(r"^([-*>]|\d+\.) ", "", body))
    if paragraph:
        yield begun, paragraph


def _docstring(text: str, first: int) -> Iterator[tuple[int, list[str]]]:
    begun, paragraph, code = first, list[str](), -1
    for number, line in enumerate(text.splitlines(), first):
        indent, body = len(line) - len(line.lstrip()), line.strip()
        if code >= 0 and body and indent <= code:
            code = -1
        entry = _ENTRY.match(line) is not None and (not paragraph or indent > 0)
        if (not body or code >= 0 or _SECTION.match(body) or entry or body.startswith(("- ", "* ", ">>>", "|"))) and paragraph:
            yield begun, paragraph
            paragraph = []
        if not body or code >= 0 or _SECTION.match(body) or body.startswith((">>>", "|")):
            continue
        if not paragraph:
            begun = number
        paragraph.append(_ENTRY.sub("", line).strip() if entry else body)
        if body.endswith("::"):
            yield begun, paragraph
            paragraph, code = [], indent
    if paragraph:
        yield begun, paragraph


def _comments(found: Iterator[tuple[int, str, bool]]) -> Iterator[tuple[int, list[str]]]:
    begun, last, paragraph = 0, -1, list[str]()
    for number, body, alone in found:
        if (number != last + 1 or not alone or not body) and paragraph:
            yield begun, paragraph
            paragraph = []
        last = number
        if body:
            if not paragraph:
                begun = number
            paragraph.append(body)
    if paragraph:
        yield begun, paragraph


def _python(text: str) -> Iterator[tuple[int, list[str]]]:
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield from _docstring(statement.value.value, statement.lineno)
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (
        (token.start[0], re.sub(r"^#+:?\s*", "", token.string), not lines[token.start[0] - 1][: token.start[1]].strip())
        for token in tokens
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|fmt|type|pyright|!)", token.string)
    )
    yield from _comments(comments)


def _cxx(text: str) -> Iterator[tuple[int, list[str]]]:
    found = (
        (number, line) for number, line in enumerate(text.splitlines(), 1) if "//" in line and '"' not in line.split("//")[0]
    )
    yield from _comments((number, line.split("//", 1)[1].strip(), not line.split("//")[0].strip()) for number, line in found)


def long_sentences(path: Path, most: int = MOST_WORDS) -> list[str]:
    """The sentences of a file that have too many words, each as ``path:line: N words: beginning``."""
    return [
        f"{found.path}:{found.line}: {found.words} words: {found.text[:100]}" for found in sentences(path) if found.words > most
    ]


def files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files under these paths that have prose."""
    for path in paths:
        yield from (
            sorted(found for found in path.rglob("*") if found.suffix in {".md", ".py", ".pyi", ".cc", ".h"})
            if path.is_dir()
            else [path]
        )


if __name__ == "__main__":
    for path in files([Path(argument) for argument in sys.argv[1:]]):
        for offence in long_sentences(path):
            print(offence)
