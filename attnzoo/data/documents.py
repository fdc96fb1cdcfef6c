"""The documents that are written as tokens, each in the training or the held-out split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from attnzoo.data.order import drawn
from attnzoo.data.tables import is_token_array, texts_of_rows, token_rows
from attnzoo.data.texts import held_out_names, is_held_out, stdlib_files, text_files, text_of, whole_name
from attnzoo.data.windows import Tokens
from attnzoo.errors import no_data

Row = TypeVar("Row")


@dataclass
class Documents:
    """The documents of files: each file is one, or each row of it; of a single file the end is held out.

    Args:
        files: by name.
        fraction: share that is held out.
        text_field: see :func:`attnzoo.data.tokenizer.tokenize`.
        arrays: whether the files are Zarr arrays of tokens.
        may_hold_zero: whether a text may have a zero byte.
        read: the number of texts that were read, and their bytes in UTF-8.
    """

    files: Mapping[str, Path]
    fraction: float
    text_field: str | None
    arrays: bool
    may_hold_zero: bool
    read: tuple[int, int] = (0, 0)

    @staticmethod
    def of(
        paths: Sequence[Path], pattern: str, fraction: float, text_field: str | None, *, may_hold_zero: bool
    ) -> Documents:
        """The documents of paths; for arguments see :func:`attnzoo.data.tokenizer.tokenize`.

        Raises:
            FileNotFoundError, ValueError: see there.
        """
        arrays = {path.resolve().name: path for path in paths if is_token_array(path)}
        if arrays and (len(arrays) < len(paths) or text_field is not None):
            raise ValueError(f"{str(paths[0])!r}: expected Zarr arrays with different names alone, and no text_field")
        return Documents(arrays or _named(paths, pattern), fraction, text_field, bool(arrays), may_hold_zero)

    @property
    def rows(self) -> bool:
        """Whether each row of a file is a document."""
        return self.arrays or self.text_field is not None

    def texts(self, side: int) -> Iterator[str]:
        """Yield the texts of the training split (0) or the held-out one (1)."""
        for text in self._texts(side):
            self.read = self.read[0] + 1, self.read[1] + len(text.encode())
            yield text

    def _texts(self, side: int) -> Iterator[str]:
        if self.text_field is not None:
            name = self.text_field
            yield from self._of_rows(side, lambda file: texts_of_rows(file, name, self.may_hold_zero))
        elif len(self.files) > 1:
            held = held_out_names(self.files, self.fraction)
            yield from (self._text(file) for name, file in self.files.items() if (name in held) == bool(side))
        else:
            text = self._text(*self.files.values())
            most = int(len(text) * (1 - self.fraction))
            at = text.rfind("\n", max(0, 2 * most - len(text)), most) + 1 or most  # at most twice the share
            yield text[at:] if side else text[:at]

    def rows_of_tokens(self, side: int) -> Iterator[Tokens]:
        """Yield the rows of the arrays that belong to a split."""
        return self._of_rows(side, token_rows)

    def _of_rows(self, side: int, read: Callable[[Path], Iterable[Row]]) -> Iterator[Row]:
        for name, file in self.files.items():
            for number, row in enumerate(read(file)):
                if is_held_out(f"{name}/{number}", self.fraction) == bool(side):
                    yield row

    def _text(self, file: Path) -> str:
        content = file.read_bytes()
        if not self.may_hold_zero and b"\0" in content:
            raise ValueError(f"{str(file)!r} has a zero byte at {content.index(0)}, which would end a document")
        try:
            return text_of(content)
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(file)!r} is not UTF-8 at byte {error.start}; a pattern can leave it out") from error


def rolled(documents: Iterable[Tokens], length: int, key: str) -> Iterator[Tokens]:
    """Yield the documents in sequences of `length` tokens, each rolled by a number of tokens that depends on the key.

    What is left over behind the last whole sequence of a document is left out.
    """
    for number, document in enumerate(documents):
        for start in range(0, len(document) - length + 1, length):
            yield np.roll(document[start : start + length], drawn(f"{key} {number} {start}") % length)


def _named(paths: Sequence[Path], pattern: str) -> dict[str, Path]:
    """The files by name, relative to their folder; with several folders the names begin with the folder's."""
    named: dict[str, Path] = {}
    read: dict[Path, str] = {}
    for path in paths:
        if not path.exists() and str(path) != "stdlib":
            raise no_data(path)
        if path.is_file() and not path.stat().st_size:
            raise ValueError(f"no data in {str(path)!r}: the file is empty")
        if path.is_dir():
            found = text_files(path, pattern)
        else:
            found = {whole_name(path.name): path} if path.exists() else stdlib_files()
        for name, file in found.items():
            name = f"{path.resolve().name}/{name}" if len(paths) > 1 and path.is_dir() else name
            if name in named:
                raise ValueError(f"{str(named[name])!r} and {str(file)!r} would both be called {name!r}")
            other = read.setdefault(file.resolve(), name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} are one file: held out under one, it could be trained on")
            named[name] = file
    return named
