"""What files and archives hold, however hostile: nothing is read without a bound, and what cannot be read is told."""

from __future__ import annotations

import bz2
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
TIMES = 200  # its own size, beyond LARGEST, is what a packed file may come to
DEEPEST = 100  # folders in a name
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
    """Why a document is not taken, or the rest of an archive is not read.

    Args:
        reason: by which it is counted.
        detail: more about this one.
    """

    def __init__(self, reason: str, detail: object = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, " ".join(str(detail).split())


Opened = Callable[[], Any]  # a stream of bytes
Member = tuple[str, Opened | LeftOutError]


def members(file: Path, name: str, budget: Budget) -> Iterator[Member]:
    """What a file holds: names, and functions that open them until the next is asked for, or why nothing is opened.

    Raises:
        OSError: the disk's, not the archive's.
    """
    try:
        if file.name.lower().endswith(TARS):
            yield from _of_tar(file, name, budget)
        elif file.name.lower().endswith(ZIPS):
            yield from _of_zip(file, name, budget)
        else:
            with ExitStack() as stack:
                yield name, lambda: stack.enter_context(open(file, "rb"))
    except Exception as error:  # of many kinds, as damage brings them out of tarfile and zipfile
        yield name, left_out(error)


def left_out(error: Exception) -> LeftOutError:
    """An error in reading as a reason.

    Raises:
        OSError: the disk's, not the archive's.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    if isinstance(error, LeftOutError):
        return error
    return LeftOutError("cannot be read", str(error) or type(error).__name__)


class Budget:
    """What may still be unpacked from a file of so many bytes, which is how one that never ends is broken off."""

    def __init__(self, size: int):
        self.left = LARGEST + TIMES * size

    def spend(self, content: bytes) -> bytes:
        self.left -= len(content)
        if self.left < 0:
            raise LeftOutError("cannot be read", f"it unpacks to more than {TIMES} times its size")
        return content


class Counted:
    """A stream whose bytes are counted."""

    def __init__(self, stream: Any, budget: Budget):
        self.stream, self.budget = stream, budget

    def read(self, size: int = CHUNK) -> bytes:
        return self.budget.spend(self.stream.read(size))

    def readline(self, size: int = CHUNK) -> bytes:
        return self.budget.spend(self.stream.readline(size))


def unpacked(stream: Any, suffix: str, budget: Budget) -> Any:
    """A stream without the packing of its name's suffix, if that is one."""
    unpack = DECOMPRESS.get(suffix.lower())
    return Counted(unpack(stream), budget) if unpack else stream


def whole(stream: Any) -> bytearray:
    """The content of a stream that holds text.

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
    """The lines of a stream that holds text, without their ends; why not, where one is too long or has a zero byte."""
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
    """Refuse what can be no document.

    Raises:
        LeftOutError: it has a zero byte, or is larger than `LARGEST`.
    """
    if zero and b"\0" in content:
        raise LeftOutError("with a zero byte")
    if len(content) > LARGEST:
        raise LeftOutError(f"larger than {LARGEST:,} bytes")


class _Header(tarfile.TarInfo):
    """A header that is damaged is an error, where tarfile takes it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
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
        # A stream is never read backwards, as a file with a member of a negative size would be, again and again.
        with tarfile.open(fileobj=unpacked(raw, suffix, budget), mode="r|", tarinfo=_Header) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # else all are kept
                # The size of a sparse one is not what it takes in the archive.
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
            if not entry.filename.endswith("/"):  # not is_dir, which needs a name
                yield _inside(name, entry.filename, partial(_entry, archive, entry, budget))


def _same(stream: Any) -> Any:
    return stream


def _entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, budget: Budget) -> Counted:
    return Counted(archive.open(entry), budget)


def _inside(archive: str, member: str, opened: Opened) -> Member:
    """The name of a document in an archive, which can lie nowhere but beneath the archive's own name."""
    parts = [part for part in PurePosixPath(member.replace("\\", "/")).parts if part not in ("/", "..")]
    name = f"{archive}/{'/'.join(parts)}"
    if not parts:
        return f"{archive}/{member}", LeftOutError("without a name")
    if "\0" in name:
        return name, LeftOutError("with a zero byte in its name")
    if len(parts) > DEEPEST:
        return f"{archive}/{parts[0]}/...", LeftOutError(f"in more than {DEEPEST} folders")
    return name, opened
