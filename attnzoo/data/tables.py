"""Documents in the rows of tables: texts in Parquet and lines of JSON, also packed, and tokens in Zarr arrays.

Parquet, Zarr and `.zst` need packages of their own (`pip install 'attnzoo[tables]'`), which are imported where met.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from attnzoo.data.archives import DECOMPRESS
from attnzoo.data.windows import Tokens
from attnzoo.errors import unknown
from attnzoo.files import parse_json

Part = TypeVar("Part")


def texts_of_rows(file: Path, field: str, zero: bool = True) -> Iterator[str]:
    """The texts of a table's rows, in order and as they are; empty ones and blank lines are left out.

    Args:
        file: `.parquet`, `.jsonl` or `.ndjson`, the latter two perhaps with `.zst`, `.gz`, `.xz` or `.bz2` behind it.
        field: name of the column, or of the key at the top level of each line.
        zero: whether a text may have a zero byte.

    Raises:
        ValueError: another kind of file, a row that cannot be read, no such field in it, or one that is no text.
        ModuleNotFoundError: the package that reads such files is not installed.
    """
    kinds = [suffix.lower() for suffix in file.suffixes]
    if kinds[-1:] == [".parquet"]:
        found = _of_parquet(file, field)
    elif {".jsonl", ".ndjson"} & {*kinds[-2:]}:
        found = _of_lines(file, field)
    else:
        raise ValueError(f"text_field: expected .parquet, .jsonl or .ndjson files, got {str(file)!r}")
    for number, text in enumerate(found, 1):
        if not isinstance(text, str):
            raise ValueError(f"{str(file)!r}, row {number}: {field}: expected a text, got {text!r}")
        if not zero and "\0" in text:
            raise ValueError(f"{str(file)!r}, row {number}: {field} has a zero byte, which would end a document")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{str(file)!r}, row {number}: {field} is no text in UTF-8: {error}") from error
        if text:
            yield text


def _of_parquet(file: Path, field: str) -> Iterator[Any]:
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not readable as Parquet: {error}") from error
    if field not in table.schema_arrow.names:
        raise unknown("text_field", field, table.schema_arrow.names, of=repr(str(file)))
    for batch in _whole(file, table.iter_batches(columns=[field])):
        yield from batch.column(0).to_pylist()


def _of_lines(file: Path, field: str) -> Iterator[Any]:
    unpack = {**DECOMPRESS, ".zst": _lines_of_zstandard}.get(file.suffix.lower(), lambda packed: packed)
    with open(file, "rb") as packed:
        for number, line in enumerate(_whole(file, unpack(packed)), 1):
            if not line.strip():  # a blank line holds no text, but is counted
                yield ""
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{str(file)!r}, line {number}: expected JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{str(file)!r}, line {number}: expected a JSON object, got {line[:60]!r}")
            if field not in row:
                raise unknown("text_field", field, row, of=f"line {number} of {str(file)!r}")
            yield row[field]


def _whole(file: Path, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts of a packed file.

    Raises:
        ValueError: it is damaged or ends too early.
    """
    try:
        yield from parts
    except Exception as error:  # each format has its own
        raise ValueError(f"{str(file)!r} is damaged or not whole: {error}") from error


def _lines_of_zstandard(packed: Any) -> Iterator[bytes]:
    """The lines of frames; zstandard's own streams take a frame that ends too early for a whole one."""
    import zstandard

    frame, line = zstandard.ZstdDecompressor().decompressobj(), list[bytes]()
    while piece := packed.read(2**16):
        while piece:
            frame = zstandard.ZstdDecompressor().decompressobj() if frame.eof else frame
            first, *others = frame.decompress(piece).split(b"\n")
            piece = frame.unused_data
            line.append(first)
            for other in others:
                yield b"".join(line)
                line = [other]
    if not frame.eof:
        raise EOFError("the last frame is not complete")
    if any(line):
        yield b"".join(line)


def is_token_array(path: Path) -> bool:
    """Whether a folder is a Zarr array, as of LongCrawl64."""
    return any((path / name).is_file() for name in (".zarray", "zarr.json"))


def token_rows(path: Path) -> Iterator[Tokens]:
    """The rows of a Zarr array of tokens `[documents, tokens]`, each int64 `[tokens]`.

    Raises:
        ValueError: an array of another shape or dtype.
        ModuleNotFoundError: zarr is not installed.
    """
    import zarr

    array = zarr.open_array(path, mode="r")
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{str(path)!r}: expected integers [documents, tokens], got {array.dtype} of {array.shape}")
    for first in range(0, array.shape[0], array.chunks[0]):
        yield from np.asarray(array[first : first + array.chunks[0]], dtype=np.int64)
