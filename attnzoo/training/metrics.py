"""Metrics as JSON lines that always agree with the checkpoint that a run resumes from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any

Row = dict[str, Any]

FILE = "metrics.jsonl"


def read_metrics(run_dir: str | Path) -> list[Row]:
    """The rows of a run, oldest first; a last line that was cut off by a kill is left out.

    Rows are {"kind": "train", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    and {"kind": "eval", "step", "loss"}. `loss` is in nats per token, of that step's batch or of the held-out
    tokens; `seconds` is the time spent in training, over all the times that the run was started.

    Raises:
        FileNotFoundError: there is no run in that folder.
    """
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise FileNotFoundError(f"no run in {str(run_dir)!r}: there is no {FILE}")
    return _whole_rows(path)


class Metrics:
    """Appends rows to a run's file, after forgetting those past `step` (they will come again).

    Raises:
        OSError: the file cannot be written; the error names it.
    """

    def __init__(self, run_dir: Path, step: int):
        self.path = run_dir / FILE
        if self.path.exists():
            kept = [row for row in _whole_rows(self.path) if row["step"] <= step]
            temporary = self.path.with_name(f".{FILE}.tmp")
            temporary.write_text("".join(_line(row) for row in kept), encoding="utf-8")
            os.replace(temporary, self.path)
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


def _whole_rows(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
