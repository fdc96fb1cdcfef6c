"""Documents in files and archives, also hostile ones: every read is bounded, and unreadable parts are reported."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

LARGEST = 2**30  # bytes of a document
TIMES = 200  # a packed file may unpack to LARGEST plus so many times its size
DEEPEST = 100  # most nested folders in a name
CHUNK = 2**20
DECOMPRESS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda packed: gzip.GzipFile(fileobj=packed),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ": ".xz", b"BZh": ".bz2"}
TARS = (".tar", ".tgz", ".txz", ".tbz2", *(f".tar{packed}" for packed in (*DECOMPRESS, ".zst")))
ZIPS = (".zip", ".whl", ".jar")


class LeftOutError(Exception):
    """A document is left out, or the rest of an archive is not read.

    Args:
        reason: the reason, by which such documents are counted.
        detail: details on this document.
    """

    def __init__(self, reason: str, detail: object = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, " ".join(str(detail).split())


Opened = Callable[[], Any]  # a function that opens a stream of bytes
Member = tuple[str, Opened | LeftOutError]


def members(file: Path, name: str, budget: Budget) -> Iterator[Member]:
    """The documents of a file: each a name with a function that opens it, valid until the next is taken, or an error.

    Raises:
        OSError: an error of the disk, not of the archive.
    """
    try:
        if file.name.lower().endswith(TARS):
            yield from _of_tar(file, name, budget)
        elif file.name.lower().endswith(ZIPS):
            yield from _of_zip(file, name, budget)
        else:
            with ExitStack() as stack:
                yield name, lambda: stack.enter_context(open(file, "rb"))
    except Exception as error:  # damaged archives raise many kinds from tarfile and zipfile
        yield name, left_out(error)


def left_out(error: Exception) -> LeftOutError:
    """An error while reading as a :class:`LeftOutError`.

    Raises:
        OSError: an error of the disk, not of the archive.
    """
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # of a damaged place
        raise error
    if isinstance(error, LeftOutError):
        return error
    return LeftOutError("cannot be read", str(error) or type(error).__name__)


class Budget:
    """The bytes that may still be unpacked from a file, by which endless archives are stopped."""

    def __init__(self, size: int):
        self.left = LARGEST + TIMES * size

    def spend(self, content: bytes) -> bytes:
        self.left -= len(content)
        if self.left < 0:
            raise LeftOutError("cannot be read", f"it unpacks to more than {TIMES} times its size")
        return content


class Counted:
    """A stream whose bytes are counted against a budget."""

    def __init__(self, stream: Any, budget: Budget):
        self.stream, self.budget = stream, budget

    def read(self, size: int = CHUNK) -> bytes:
        return self.budget.spend(self.stream.read(size))

    def readline(self, size: int = CHUNK) -> bytes:
        return self.budget.spend(self.stream.readline(size))


def unpacked(stream: Any, suffix: str, budget: Budget) -> Any:
    """The stream decompressed by its name's suffix, or as it is without such a suffix."""
    unpack = DECOMPRESS.get(suffix.lower())
    return Counted(unpack(stream), budget) if unpack else stream


def whole_text(stream: Any) -> bytearray:
    """The whole content of a stream of text.

    Raises:
        LeftOutError: it has a zero byte, or is larger than `LARGEST`.
    """
    content = bytearray()
    while chunk := stream.read(CHUNK):
        check(chunk)
        content += chunk
        check(content, zero=False)
    return content


def lines(stream: Any) -> Iterator[bytes | LeftOutError]:
    """The lines of a stream of text, without line ends; an error in place of a line that is too long or has a zero
    byte."""
    while line := stream.readline(LARGEST + 1):
        try:
            check(line)
        except LeftOutError as reason:
            while line and not line.endswith(b"\n"):
                line = stream.readline(CHUNK)
            yield reason
        else:
            yield line.rstrip(b"\r\n")


def check(content: bytes | bytearray, zero: bool = True) -> None:
    """Raise where ``content`` cannot be a document.

    Raises:
        LeftOutError: it has a zero byte, or is larger than `LARGEST`.
    """
    if zero and b"\0" in content:
        raise LeftOutError("with a zero byte")
    if len(content) > LARGEST:
        raise LeftOutError(f"larger than {LARGEST:,} bytes")


class _Header(tarfile.TarInfo):
    """A tar header that raises where it is damaged; tarfile would take it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError("the archive ends without the zeros that end one") from error
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from error


def _of_tar(file: Path, name: str, budget: Budget) -> Iterator[Member]:
    with open(file, "rb") as raw:
        start = raw.read(6)
        raw.seek(0)
        if start.startswith(b"\x28\xb5\x2f\xfd"):
            raise ValueError("it is packed by zstandard: unpack it before")
        suffix = next((suffix for magic, suffix in MAGIC.items() if start.startswith(magic)), "")
        size = file.stat().st_size
        # A member of negative size would move a stream backwards, without end.
        with tarfile.open(fileobj=unpacked(raw, suffix, budget), mode="r|", tarinfo=_Header) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # else all are kept
                # A sparse member's size is not its size in the archive.
                if not member.issparse() and not 0 <= member.size <= (budget.left if suffix else size):
                    ends = f"it unpacks to more than {TIMES} times its size" if suffix else "the archive ends before"
                    raise ValueError(f"{member.name!r} would have {member.size:,} bytes, and {ends}")
                if member.isfile():
                    stream: Any = archive.extractfile(member)
                    stream = Counted(stream, budget) if member.issparse() else stream
                    yield _inside(name, member.name, partial(_same, stream))


def _of_zip(file: Path, name: str, budget: Budget) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not entry.filename.endswith("/"):  # is_dir fails for an empty name
                yield _inside(name, entry.filename, partial(_entry, archive, entry, budget))


def _same(stream: Any) -> Any:
    return stream


def _entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, budget: Budget) -> Counted:
    return Counted(archive.open(entry), budget)


def _inside(archive: str, member: str, opened: Opened) -> Member:
    """A member of an archive under a name that lies beneath the archive's own name."""
    parts = [part for part in PurePosixPath(member.replace("\\", "/")).parts if part not in ("/", "..")]
    name = f"{archive}/{'/'.join(parts)}"
    if not parts:
        return f"{archive}/{member}", LeftOutError("without a name")
    if "\0" in name:
        return name, LeftOutError("with a zero byte in its name")
    if len(parts) > DEEPEST:
        return f"{archive}/{parts[0]}/...", LeftOutError(f"in more than {DEEPEST} folders")
    return name, opened
