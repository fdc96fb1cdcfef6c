"""Files that are whole or as they were before, and what tells whether one has changed."""

import errno
import fcntl
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, flush it to the disk and rename it, so that no reader meets a part of it.

    Of several that write it at once, each waits for the one before it.

    Raises:
        OSError: it cannot be written; what was there before stays, and nothing is left beside it.
    """
    part = path.with_name(f".{path.name}.part")
    with _held(part, folder=False) as descriptor:
        try:
            os.ftruncate(descriptor, 0)
            with open(descriptor, "wb", closefd=False) as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.fsync(descriptor)
            os.replace(part, path)
        except BaseException as error:
            part.unlink(missing_ok=True)
            _name(error, path)
            raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill beside its place; when all went well it is flushed to the disk and renamed to `folder`.

    Raises:
        FileExistsError: there is something in `folder`, or another process is filling it.
        OSError: it cannot be made; nothing is left.
    """
    check_free(folder)
    part = folder.with_name(f".{folder.name}.part")
    with _held(part, folder=True):
        try:
            _empty(part)
            yield part
            for path in (*part.rglob("*"), part):
                sync(path)
            if folder.exists():
                folder.rmdir()
            os.replace(part, folder)
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            _name(error, folder)
            raise


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards; what a kill leaves in it goes when it is asked for again.

    Raises:
        FileExistsError: another process has it.
        OSError: it cannot be made.
    """
    with _held(folder, folder=True):
        try:
            _empty(folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: Path) -> None:
    for left in folder.iterdir():  # by a kill
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _name(error: BaseException, path: Path) -> None:
    """Give an error the path where the system named none, as for a full disk."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


@contextmanager
def _held(part: Path, *, folder: bool) -> Iterator[int]:
    """The descriptor of a file or a folder, made if it is not there, that nobody else who asks for it has meanwhile.

    Raises:
        FileExistsError: somebody else has the folder; a file is waited for.
    """
    while True:
        if folder:
            part.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if folder else 0))
            except BlockingIOError as error:
                raise FileExistsError(f"expected a folder to fill, got {str(part)!r}: another process does") from error
            if _is_at(descriptor, part):  # who had it before may have renamed it
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        FileExistsError: there is something in `folder`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"expected a folder that is empty or does not exist, got {str(folder)!r}")


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_object(content: bytes, name: str | Path) -> dict[str, Any]:
    """The keys and values of a JSON file.

    Raises:
        ValueError: it holds anything else; ``name`` says which file.
    """
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{name} is not readable as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name}: expected a JSON object, got {type(found).__name__}")
    return found


def damaged_name(path: Path) -> Path:
    """Where a damaged file or folder is kept: `damaged-` and its name beside it, with a number when that is taken."""
    names = itertools.chain([f"damaged-{path.name}"], (f"damaged-{path.name}-{n}" for n in itertools.count(2)))
    return next(target for target in map(path.with_name, names) if not target.exists())


def remembered_digest(path: Path) -> str:
    """`digest` of a large file that seldom changes: read again when its size, its times or its place have changed.

    What was read is remembered in `attnzoo/digests.json` in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`),
    as long as the file is there; where that cannot be written, the file is read every time.
    """
    status = path.stat()
    now = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnzoo" / "digests.json"
    try:
        known = json.loads(cache.read_bytes())
        found, seal = known[now[0]]
        if seal == _seal(now, found):
            return str(found)
    except KeyError:
        pass
    except (OSError, ValueError, TypeError):
        known = {}
    found = digest(path)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        there = {name: kept for name, kept in known.items() if os.path.exists(name)}
        write_whole(cache, json.dumps({**there, now[0]: [found, _seal(now, found)]}))
    except (OSError, TypeError):
        logger.info("%s cannot be written: %s will be read again each time", cache, path)
    return found


def _seal(status: list[object], found: str) -> str:
    """Of a file's status and its digest, so that neither changes in the cache unnoticed."""
    return hashlib.sha256(json.dumps([status, found]).encode()).hexdigest()


def check_folder(folder: Path, name: str = "output_dir") -> None:
    """Refuse a folder that nothing could be written to, before anything is computed; makes nothing.

    Args:
        folder: that need not be there yet.
        name: of the setting or option.

    Raises:
        NotADirectoryError, PermissionError: what is there already is no folder, or may not be written to.
        OSError: a name in it is too long.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise NotADirectoryError(f"{name}={str(folder)!r}: {str(there)!r} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{name}={str(folder)!r}: the folder {str(there)!r} may not be written to")
    names = folder.absolute().relative_to(there).parts
    if any(len(os.fsencode(part)) > os.pathconf(there, "PC_NAME_MAX") for part in names):
        raise OSError(f"{name}={str(folder)!r}: {os.strerror(errno.ENAMETOOLONG)}")


def python_file(name: str) -> str:
    """What is expected in place of a name that is no such file, in words; where it is meant as one, why not."""
    return "a Python file" + (", of which there is none of that path from here" if name.endswith(".py") else "")


def given_by(path: Path, name: str) -> Any:
    """What a Python file, which is run, calls `name`; None where it has nothing of that name.

    Raises:
        ValueError: the file fails; the error says at which of its lines.
    """
    spec = importlib.util.spec_from_file_location(f"attnzoo_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for what its annotations mean
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{path}{'' if line is None else f', line {line}'}: {kind}{said}") from error
    return getattr(module, name, None)
