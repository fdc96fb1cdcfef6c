"""Metrics as JSON lines that always agree with the checkpoint that a run resumes from."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from attnzoo.files import damaged_name, write_whole

Row = dict[str, Any]

FILE = "metrics.jsonl"
NUMBERS = {
    "train": ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"),
    "eval": ("step", "loss"),
}
logger = logging.getLogger(__name__)


def read_metrics(run_dir: str | Path) -> list[Row]:
    """The rows of a run, oldest first; a last line that was cut off by a kill is left out.

    Lines that are no rows are left out too, and a line of the log gives their numbers.

    Rows are {"kind": "train", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    and {"kind": "eval", "step", "loss"}. `loss` is in nats per token, of that step's batch or of the held-out
    tokens; `seconds` is the time spent in training, over all the times that the run was started.

    Raises:
        FileNotFoundError: there is no run in that folder.
    """
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise FileNotFoundError(f"no run in {str(run_dir)!r}: there is no {FILE}")
    rows, wrong = _rows(path)
    if wrong:
        logger.warning(_complaint(path, wrong))
    return rows


class Metrics:
    """Appends rows to a run's file, after forgetting those past `step` (they will come again).

    Where the file has lines that are no rows, a copy of it is kept, and a line of the log says so.

    Raises:
        OSError: the file cannot be written; the error names it.
    """

    def __init__(self, run_dir: Path, step: int):
        self.path = run_dir / FILE
        if self.path.exists():
            rows, wrong = _rows(self.path)
            if wrong:
                copy = damaged_name(self.path)
                shutil.copy2(self.path, copy)
                logger.warning("%s; the file as it was is kept as %s", _complaint(self.path, wrong), copy.name)
            write_whole(self.path, "".join(_line(row) for row in rows if row["step"] <= step))
        elif step:
            logger.warning("%s is missing: its rows begin anew after step %d", self.path, step)
        self._file: IO[bytes] = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def append(self, row: Row) -> None:
        try:
            self._file.write(_line(row).encode())
        except OSError as error:
            raise OSError(error.errno, f"could not write metrics: {error.strerror}", str(self.path)) from error

    def sync(self) -> None:
        """Make the rows so far outlast a power cut."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _rows(path: Path) -> tuple[list[Row], list[int]]:
    """The rows of a file, and the numbers of the lines that are none."""
    *lines, torn = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    wrong = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not all(isinstance(row[name], float | int) for name in NUMBERS[row["kind"]]):
                raise TypeError("not a number")
        except (ValueError, TypeError, KeyError):
            wrong.append(number)
        else:
            rows.append(row)
    return rows, wrong


def _complaint(path: Path, wrong: list[int]) -> str:
    many = len(wrong) > 1
    listed = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
    return f"{path}: line{'s' if many else ''} {listed} {'are no rows' if many else 'is no row'} and left out"
