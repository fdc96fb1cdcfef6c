"""Atomic writing of files and folders, and digests of files."""

import errno
import fcntl
import functools
import hashlib
import importlib.machinery
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
from types import CodeType, ModuleType
from typing import Any

logger = logging.getLogger(__name__)
PART = ".part"
MARK = "made-by-attnzoo"  # marks folders that this module may remove
_being_run: list[str] = []  # digests of the Python files that are being run, the innermost last


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: into a temporary folder beside it, flushed to the disk, and renamed.

    Concurrent writers wait for each other.

    Raises:
        FileExistsError: the temporary folder's name is taken by something that attnzoo did not make.
        OSError: it cannot be written; the old file stays, and no temporary folder is left.
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
    """A context with a temporary folder to fill, which is flushed to the disk and renamed to `folder` on success.

    Where `folder` is a link, the link's target is replaced.

    Raises:
        FileExistsError: `folder` is not empty, another process is filling it, or the temporary folder's name is taken
            by something that attnzoo did not make.
        OSError: it cannot be made; no temporary folder is left.
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
    """The path, beside a file or folder, of the temporary folder in which it is made."""
    return path.with_name(f".{path.name}{PART}")


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A context with an empty folder inside `folder` for this process alone; both are removed afterwards.

    Leftovers of a killed process are removed at the next use. Only a `folder` with the file `made-by-attnzoo` in it is
    removed, and no link is followed. The folder inside may be renamed away.

    Raises:
        FileExistsError: another process uses it, or `folder` lacks the mark.
        OSError: it cannot be made.
    """
    with _scratch(folder, wait=False):
        inner = scratch_content(folder)
        inner.mkdir()
        yield inner


def scratch_content(folder: Path) -> Path:
    """The path of the folder that :func:`scratch_folder` of `folder` yields."""
    return folder / folder.name.removeprefix(".").removesuffix(PART)


@contextmanager
def _scratch(folder: Path, *, wait: bool) -> Iterator[Path]:
    """A context with `folder`, new and empty but for the mark, whose lock shows that it is in use."""
    made, lock = _marked(folder, wait)
    try:
        _empty(made)
        yield folder
    finally:
        with suppress(OSError):
            _empty(made)
            os.unlink(MARK, dir_fd=made)  # the mark goes last, as without it the folder could not be removed later
            os.rmdir(folder)
        os.close(lock)
        os.close(made)


def _marked(folder: Path, wait: bool) -> tuple[int, int]:
    """Descriptors of a marked folder, made if it does not exist, and of its locked mark."""
    taken = f"expected no {str(folder)!r}, where files are made before they take their place; attnzoo has not made "
    taken += "what is there and leaves it alone: rename it"
    while True:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            own = True
        except FileExistsError:
            own = False
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
            except FileNotFoundError:  # another process has just removed it
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
    """Add the path to an error that names none, as for a full disk."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


def check_free(folder: Path) -> None:
    """Raise where a folder is not empty.

    Raises:
        FileExistsError: `folder` is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"expected a folder that is empty or does not exist, got {str(folder)!r}")


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: Any) -> str:
    """The SHA-256 of a value's JSON, in hexadecimal: what is written with it and changed afterwards is noticed."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: invalid JSON, or JSON that is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def json_object(content: bytes, name: str | Path) -> dict[str, Any]:
    """The keys and values of a JSON file.

    Raises:
        ValueError: other content; the message has ``name``, the file's name.
    """
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{name} is not readable as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name}: expected a JSON object, got {type(found).__name__}")
    return found


def damaged_name(path: Path, prefix: str = "damaged-") -> Path:
    """A free path beside a damaged file or folder for keeping it: a prefix, its name, and a number if needed."""
    first = f"{prefix}{path.name}"
    names = itertools.chain([first], (f"{first}-{n}" for n in itertools.count(2)))
    return next(target for target in map(path.with_name, names) if not os.path.lexists(target))


def cache_folder() -> Path:
    """The folder of what may be made again, `$XDG_CACHE_HOME/attnzoo` or `~/.cache/attnzoo`, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnzoo"


def keep_hypothesis_out_of_here() -> None:
    """Have Hypothesis, before its first example, keep its notes in the cache folder and not in the working folder."""
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(cache_folder() / "hypothesis"))


def remembered_digest(path: Path) -> str:
    """The `digest` of a large file, which is read again only when its size, times or path have changed.

    Digests are cached in `digests.json` of the `cache_folder` while their files exist; where that cannot be written,
    the file is read every time.
    """
    status = path.stat()
    now = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    cache = cache_folder() / "digests.json"
    try:
        known = parse_json(cache.read_bytes())
        found, seal = known[now[0]]
        if seal == json_digest([now, found]):
            return str(found)
    except KeyError:
        pass
    except (OSError, ValueError, TypeError):
        known = {}
    found = digest(path)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        there = {name: kept for name, kept in known.items() if os.path.exists(name)}
        write_whole(cache, json.dumps({**there, now[0]: [found, json_digest([now, found])]}))
    except (OSError, TypeError):
        logger.info("%s cannot be written: %s will be read again each time", cache, path)
    return found


def check_folder(folder: Path, name: str = "output_dir") -> None:
    """Raise where a folder could not be written to; nothing is made.

    Args:
        folder: the folder, which need not exist yet.
        name: name of the setting or option.

    Raises:
        NotADirectoryError, PermissionError: an existing part of the path is no folder, or not writable.
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
    """The end of an error about a name that is no Python file: what is expected, or why a path ending in .py is
    none."""
    return "a Python file" + (", of which there is none of that path from here" if name.endswith(".py") else "")


def given_by(path: Path, name: str) -> Any:
    """The value of the variable `name` after :func:`run_file`; None where the file defines none."""
    return getattr(run_file(path), name, None)


def digest_being_run() -> str:
    """The digest of the innermost Python file that :func:`run_file` is running; empty outside of one."""
    return _being_run[-1] if _being_run else ""


def run_file(path: Path) -> ModuleType:
    """The module that a Python file makes when it is run, which it is once while its text stays, as what it registers
    would be another thing the second time. It finds the modules beside it, and others find it by its name if that is
    free.

    Raises:
        ValueError: the file is none of Python or fails; the error says at which of its lines.
    """
    if path.suffix != ".py":
        raise ValueError(f"{path}: expected a Python file")
    return _run_file(path.resolve(), digest(path))


@functools.cache
def _run_file(path: Path, digest: str) -> ModuleType:
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    other = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    called = path.stem if other is None or other.origin == str(path) else f"attnzoo_{path.stem}"
    spec = importlib.util.spec_from_file_location(called, path, loader=_Uncached(called, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve annotations in sys.modules
    _being_run.append(digest)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script's own end would be that of the command
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{path}{'' if line is None else f', line {line}'}: {kind}{said}") from error
    finally:
        _being_run.pop()
    return module


class _Uncached(importlib.machinery.SourceFileLoader):
    """A loader that reads the text itself: Python takes a file for unchanged that has its old size and was changed
    within the second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)
