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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
PART = ".part"
MARK = "made-by-attnzoo"  # in each folder that is made to be removed again


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, flush it to the disk and rename it, so that no reader meets a part of it.

    Of several that write it at once, each waits for the one before it.

    Raises:
        FileExistsError: what stands beside it under the name of the folder that it is made in is somebody else's.
        OSError: it cannot be written; what was there before stays, and nothing is left beside it.
    """
    with _scratch(part_of(path), wait=True) as scratch:
        try:
            with open(scratch / path.name, "xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch / path.name, path)
        except BaseException as error:
            _name(error, path)
            raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill beside its place; when all went well it is flushed to the disk and renamed to `folder`.

    Where `folder` is a link, the folder appears where that leads.

    Raises:
        FileExistsError: there is something in `folder`, another process is filling it, or what stands beside it under
            the name of the folder that it is made in is somebody else's.
        OSError: it cannot be made; nothing is left.
    """
    check_free(folder)
    folder = folder.resolve() if folder.is_symlink() else folder
    with scratch_folder(part_of(folder)) as part:
        try:
            yield part
            for path in (*part.rglob("*"), part):
                sync(path)
            if folder.exists():
                folder.rmdir()
            os.replace(part, folder)
        except BaseException as error:
            _name(error, folder)
            raise


def part_of(path: Path) -> Path:
    """Where a file or a folder is made that then takes its place: beside it."""
    return path.with_name(f".{path.name}{PART}")


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """An empty folder inside `folder`, which nobody else has meanwhile and which is gone afterwards.

    What a kill leaves goes when it is asked for again. Nothing goes that was not made here: `folder` is known by the
    file `made-by-attnzoo` in it, and no link is followed. The folder inside may be renamed away.

    Raises:
        FileExistsError: another process has it, or `folder` was not made here.
        OSError: it cannot be made.
    """
    with _scratch(folder, wait=False):
        inner = scratch_content(folder)
        inner.mkdir()
        yield inner


def scratch_content(folder: Path) -> Path:
    """What :func:`scratch_folder` of `folder` gives."""
    return folder / folder.name.removeprefix(".").removesuffix(PART)


@contextmanager
def _scratch(folder: Path, *, wait: bool) -> Iterator[Path]:
    """`folder`, made here and empty but for the mark, whose lock says that it is in use."""
    made, lock = _marked(folder, wait)
    try:
        _empty(made)
        yield folder
    finally:
        with suppress(OSError):
            _empty(made)
            os.unlink(MARK, dir_fd=made)  # last, as without it the rest would be somebody else's
            os.rmdir(folder)
        os.close(lock)
        os.close(made)


def _marked(folder: Path, wait: bool) -> tuple[int, int]:
    """Descriptors of a folder that is made, or was made here before, and of its mark, which is locked."""
    taken = f"expected no {str(folder)!r}, where files are made before they take their place; attnzoo has not made "
    taken += "what is there and leaves it alone: rename it"
    while True:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            own = True
        except FileExistsError:
            own = False  # yet
        with ExitStack() as stack:
            try:
                made = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                stack.callback(os.close, made)
                names = os.listdir(made)
                own = own or (os.fstat(made).st_uid == os.geteuid() and (not names or MARK in names))
                if not own:
                    raise FileExistsError(taken)
                lock = os.open(MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666, dir_fd=made)
                stack.callback(os.close, lock)
            except FileNotFoundError:  # who had it has just removed it
                continue
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                raise FileExistsError(taken) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise FileExistsError(
                    f"expected a folder to fill, got {str(folder)!r}: another process does"
                ) from error
            with suppress(FileNotFoundError):
                there = folder.lstat(), os.stat(MARK, dir_fd=made, follow_symlinks=False)
                if all(
                    os.path.samestat(os.fstat(opened), now) for opened, now in zip((made, lock), there, strict=True)
                ):
                    stack.pop_all()
                    return made, lock


def _empty(folder: int) -> None:
    """Remove all but the mark from an open folder."""
    for entry in [*os.scandir(folder)]:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.name, dir_fd=folder)
        elif entry.name != MARK:
            os.unlink(entry.name, dir_fd=folder)


def _name(error: BaseException, path: Path) -> None:
    """Give an error the path where the system named none, as for a full disk."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


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


def parse_json(content: str | bytes) -> Any:
    """What JSON holds.

    Raises:
        ValueError: it is none, or its parts lie in one another too deeply to be read.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def json_object(content: bytes, name: str | Path) -> dict[str, Any]:
    """The keys and values of a JSON file.

    Raises:
        ValueError: it holds anything else; ``name`` says which file.
    """
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{name} is not readable as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name}: expected a JSON object, got {type(found).__name__}")
    return found


def damaged_name(path: Path, prefix: str = "damaged-") -> Path:
    """Where a damaged file or folder is kept: a prefix and its name beside it, with a number when that is taken."""
    first = f"{prefix}{path.name}"
    names = itertools.chain([first], (f"{first}-{n}" for n in itertools.count(2)))
    return next(target for target in map(path.with_name, names) if not os.path.lexists(target))


def remembered_digest(path: Path) -> str:
    """`digest` of a large file that seldom changes: read again when its size, its times or its place have changed.

    What was read is remembered in `attnzoo/digests.json` in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`),
    as long as the file is there; where that cannot be written, the file is read every time.
    """
    status = path.stat()
    now = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnzoo" / "digests.json"
    try:
        known = parse_json(cache.read_bytes())
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
