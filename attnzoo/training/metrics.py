"""Metrics as JSON lines that always agree with the checkpoint that a run resumes from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from math import isfinite
from pathlib import Path
from typing import IO, Any

from attnzoo.errors import no_run
from attnzoo.files import damaged_name, parse_json, write_whole

Row = dict[str, Any]

FILE = "metrics.jsonl"
NUMBERS = {
    "train": ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"),
    "eval": ("step", "loss"),
}
logger = logging.getLogger(__name__)


def read_metrics(run_dir: str | Path) -> list[Row]:
    """The rows of a run, oldest first; a last line cut off by a kill is left out.

    Lines that are no rows are left out too, and a line of the log gives their numbers.

    Rows are {"kind": "train", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"} and {"kind":
    "eval", "step", "loss"}. `loss` is in nats per token, of that step's batch or of the held-out tokens; `seconds` is
    the time spent in training, over all the times that the run was started. A train row also has "blocks_kept" where a
    layer prunes, "forgetting_kept" (the expected share of its tokens that a row still sees), "forgetting_budget",
    "forgetting_distillation", "forgetting_blend" and "forgetting_temperature" with One-Pass Forgetting, and "mfu" and
    "mfu_dense" on a GPU whose peak is known (`attnzoo.training.throughput` says how they are counted).

    Raises:
        FileNotFoundError: no run in that folder.
    """
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise no_run(run_dir, FILE)
    rows, wrong = _rows(path)
    if wrong:
        logger.warning(_complaint(path, wrong))
    return rows


def rows_until(run_dir: Path, step: int, digest: str) -> list[Row]:
    """The rows up to a checkpoint's step; a line of the log says if they have changed since it was saved.

    Args:
        run_dir: the run's folder.
        step: the checkpoint's step.
        digest: `Progress.metrics` of the checkpoint.
    """
    path = run_dir / FILE
    rows, wrong = _rows(path) if path.is_file() else ([], [])
    rows = [row for row in rows if row["step"] <= step]
    if wrong or digest not in ("", _digest(rows).hexdigest()):
        logger.warning(_complaint(path, wrong))
    return rows


def set_rows_aside(run_dir: Path) -> None:
    """Rename the metrics file of a run that reached no checkpoint, before a new run begins in its folder; logged."""
    path = run_dir / FILE
    if path.is_file() and path.stat().st_size:
        aside = path.with_name(f"without-checkpoint-{FILE}")
        aside = aside if not aside.exists() else damaged_name(aside)
        os.replace(path, aside)
        logger.warning("%s: the run before had other settings and no checkpoint; its rows are in %s", path, aside.name)


class Metrics:
    """A writer that appends rows to a run's file, after removing rows past `step`, which will be written again.

    Where lines of the file are no rows, or its rows up to `step` have changed since the checkpoint was saved, the old
    file is copied first, and a line of the log says so.

    Raises:
        OSError: the file cannot be written; the error names it.
    """

    def __init__(self, run_dir: Path, step: int, digest: str = ""):
        self.path = run_dir / FILE
        kept: list[Row] = []
        if self.path.exists():
            rows, wrong = _rows(self.path)
            kept = [row for row in rows if row["step"] <= step]
            if wrong or digest not in ("", _digest(kept).hexdigest()):
                copy = damaged_name(self.path)
                shutil.copy2(self.path, copy)
                logger.warning("%s; the file as it was is kept as %s", _complaint(self.path, wrong), copy.name)
            write_whole(self.path, "".join(map(_line, kept)))
        elif step:
            logger.warning("%s is missing: its rows begin anew after step %d", self.path, step)
        self._digest = _digest(kept)
        self._file: IO[bytes] = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def append(self, row: Row) -> None:
        line = _line(row).encode()
        self._digest.update(line)
        try:
            self._file.write(line)
        except OSError as error:
            raise OSError(error.errno, f"could not write metrics: {error.strerror}", str(self.path)) from error

    def sync(self) -> str:
        """Flush the rows to the disk; return their digest."""
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _rows(path: Path) -> tuple[list[Row], list[int]]:
    """The rows of a file, and the numbers of the lines that are no rows."""
    *lines, torn = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    wrong = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            if not all(isinstance(row[name], float | int) and isfinite(row[name]) for name in NUMBERS[row["kind"]]):
                raise TypeError("not a number")
        except (ValueError, TypeError, KeyError):
            wrong.append(number)
        else:
            rows.append(row)
    return rows, wrong


def _digest(rows: list[Row]) -> hashlib._Hash:
    return hashlib.sha256("".join(map(_line, rows)).encode())


def _complaint(path: Path, wrong: list[int]) -> str:
    if not wrong:
        return f"{path}: rows are missing or not as they were written"
    many = len(wrong) > 1
    listed = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
    return f"{path}: line{'s' if many else ''} {listed} {'are no rows' if many else 'is no row'} and left out"
