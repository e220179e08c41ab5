"""Records as lines: through Python's logging, and in a file per rank."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

from adaptra.errors import OptionError
from adaptra.runtime.measuring.reduces import StepReduces
from adaptra.runtime.telemetry.records import MARK, VERSION, NormsTold, StepTaken, TimestampedRecord, to_line

logger = logging.getLogger(__name__)

_ATTRIBUTE: Final = "adaptra_told"


class JsonFormatter(logging.Formatter):
    """Writes each of adaptra's records as the line of JSON that ``docs/formats.md`` describes.

    For a handler of the logger ``adaptra``. Records of steps have level DEBUG, all others INFO. Other log entries, of adaptra
    or any other package, become a line of the same form, with the event ``log``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of JSON, without its end."""
        timestamped = getattr(record, _ATTRIBUTE, None)
        if isinstance(timestamped, TimestampedRecord):
            return to_line(timestamped)
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        fields = {"level": record.levelname, "logger": record.name, "text": text}
        return json.dumps({MARK: VERSION, "time": record.created, "event": "log", **fields})


class LogSink:
    """Passes records to Python's logging."""

    @property
    def follows_steps(self) -> bool:
        """True if records of steps would be logged."""
        return logger.isEnabledFor(logging.DEBUG)

    def take(self, timestamped: TimestampedRecord) -> None:
        """See :meth:`.recorder.Sink.take`."""
        level = logging.DEBUG if isinstance(timestamped.record, StepTaken | StepReduces | NormsTold) else logging.INFO
        logger.log(level, "rank %d: %s", timestamped.record.rank, timestamped.record, extra={_ATTRIBUTE: timestamped})

    def close(self) -> None:
        """Do nothing, because nothing was opened."""

    def __str__(self) -> str:
        return "the log"


class FileSink:
    """Appends each rank's records to a file of its own, line by line, so that a killed run loses its last lines at most.

    Args:
        folder: The folder of the files ``rank-0.jsonl``, …; made if it does not exist.
        ranks: The ranks whose records will come.

    Raises:
        OptionError: The files can't be written, or another run is writing them.
    """

    follows_steps = True

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self._folder = folder
        self._files: dict[int, TextIO] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in ranks:
                self._files[rank] = _open_to_append(folder / f"rank-{rank}.jsonl")
        except BlockingIOError as error:
            self.close()
            raise OptionError(
                f"Telemetry: folder {folder}: another run is writing there: expected a folder of its own"
            ) from error
        except OSError as error:
            self.close()
            raise OptionError(f"Telemetry: folder {folder}: {error.strerror}: expected one that can be written") from error

    def take(self, timestamped: TimestampedRecord) -> None:
        """See :meth:`.recorder.Sink.take`.

        Raises:
            OSError: The system refused. The file keeps the earlier lines, and no more are added.
        """
        file = self._files.get(timestamped.record.rank)
        if file is not None:
            try:
                file.write(to_line(timestamped) + "\n")
            except OSError:
                del self._files[timestamped.record.rank]
                raise

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __str__(self) -> str:
        return f"the files in {self._folder}"


def _open_to_append(path: Path) -> TextIO:
    """Open a file for whole lines, each written when it ends. If a killed run left a partial line, that is ended first."""
    file = path.open("a+", buffering=1, encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_size and not _ends_with_a_line(path):
            file.write("\n")
    except OSError:
        file.close()
        raise
    return file


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() == b"\n"
