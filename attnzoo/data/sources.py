"""Reading tokens and splitting off what is held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnzoo.data.config import DataConfig
from attnzoo.data.windows import Tokens, TokenWindows
from attnzoo.errors import nearest
from attnzoo.files import remembered_digest

DOCUMENT_END = 0  # a byte that text does not contain
BYTES = 256
LONG = 2**20  # tokens of a piece
SHARDS = (".npy", ".bin")

# Tests and their data, generated tables, installed packages, and what differs between builds of one Python.
STDLIB_EXCLUDED = frozenset(
    [
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    ]
)


@dataclass(frozen=True)
class Data:
    """Tokens ready for training.

    Args:
        vocab_size: tokens are below it.
        train: windows by index.
        heldout: 1-D array of tokens that training never sees.
        fingerprint: changes when the tokens or their split do.
        earlier_fingerprint: the one that versions before gave, which read only the ends of long pieces.
    """

    vocab_size: int
    train: TokenWindows
    heldout: Tokens
    fingerprint: str
    earlier_fingerprint: str = ""


@dataclass(frozen=True)
class _Piece:
    name: str  # the path relative to the source, by which the split is decided
    tokens: Tokens


def build_data(config: DataConfig) -> Data:
    """The training windows and the held-out tokens of a source.

    Raises:
        FileNotFoundError: the source does not exist.
        PermissionError: a folder in it cannot be read.
        ValueError: it holds no data, too little for one context, tokens that are no valid shard, or held-out tokens
            outside the vocabulary.
    """
    pieces = _read(config.source, config)
    if config.heldout_source is None:
        train, heldout = _split(pieces, config)
    else:
        train, heldout = pieces, _read(config.heldout_source, config)
    pretokenised = _is_pretokenised(config.source)
    if config.pattern != "*" and (pretokenised or config.source == "stdlib" or Path(config.source).is_file()):
        raise ValueError(
            f"data.pattern={config.pattern!r} says which files of a folder of texts are read, and "
            f"{config.source!r} is no such folder"
        )
    if pretokenised and config.vocab_size is None:
        raise ValueError(f"data.vocab_size is needed for the pre-tokenised {config.source!r}")
    vocab_size = config.vocab_size or BYTES
    if not pretokenised and vocab_size < BYTES:
        raise ValueError(f"data.vocab_size={vocab_size}: text is read byte by byte and needs {BYTES}")

    windows = TokenWindows(
        [piece.tokens for piece in train] if pretokenised else [_join(train)],
        config.context_length,
        vocab_size,
        config.seed,
        name=f"the training split of {config.source!r}",
    )
    held = _join(heldout)
    if len(held) <= config.context_length:
        raise ValueError(
            f"the held-out split of {config.source!r} has {len(held)} tokens: "
            f"a context of {config.context_length} needs at least {config.context_length + 1}"
        )
    _check_range(f"the held-out split of {config.heldout_source or config.source!r}", held, vocab_size)
    return Data(vocab_size, windows, held, _fingerprint(train, heldout), _fingerprint(train, heldout, whole=False))


def encode(text: str) -> list[int]:
    """Text as the byte tokens that text sources give."""
    return list(text.encode("utf-8"))


def decode(tokens: Iterable[int]) -> str:
    """Byte tokens as text; what is not valid UTF-8 shows as replacement characters."""
    return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


def _read(source: str, config: DataConfig) -> list[_Piece]:
    if source == "stdlib":
        return _read_stdlib()
    path = Path(source)
    if not path.exists():
        hint = "; did you mean 'stdlib'?" if nearest(source, ["stdlib"]) else ""
        raise FileNotFoundError(f"no data: there is no file or folder {source!r}{hint}")
    if _is_pretokenised(source):
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SHARDS)
        if not files:
            return _no_data(source, "the folder has no .npy or .bin file")
        return [_Piece(file.name, _read_shard(file, config.dtype)) for file in files]
    if path.is_file():
        return [_Piece(path.name, _document(path))] if path.stat().st_size else _no_data(source, "the file is empty")
    _check_readable(path)
    files = [file for file in path.rglob(config.pattern) if file.is_file() and file.stat().st_size]
    names = {file.relative_to(path).as_posix(): file for file in files}
    shown = sorted(name for name in names if not any(part.startswith(".") for part in name.split("/")))
    if not shown:
        return _no_data(source, f"the folder has no file that is not empty and matches {config.pattern!r}")
    return [_Piece(name, _document(names[name])) for name in shown]


def _check_readable(folder: Path) -> None:
    """A search for files passes over folders that it may not read, and would train on less without a word."""

    def refuse(error: OSError) -> None:
        raise type(error)(error.errno, "this folder of the data cannot be read", error.filename) from error

    for _, inside, _ in os.walk(folder, onerror=refuse):
        inside[:] = [name for name in inside if not name.startswith(".")]


def _check_range(name: str, tokens: Tokens, vocab_size: int) -> None:
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    for start in range(0, len(tokens), 2**24):
        part = tokens[start : start + 2**24]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name}: tokens from {low} to {high}, outside the vocabulary of {vocab_size}")


def _read_stdlib() -> list[_Piece]:
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(root).as_posix() for file in root.rglob("*.py")]
    kept = sorted(name for name in names if not _excluded_from_stdlib(name))
    pieces = [_Piece(name, _document(root / name)) for name in kept]
    return pieces or _no_data("stdlib", f"this Python keeps no source files in {str(root)!r}")


def _excluded_from_stdlib(name: str) -> bool:
    return not STDLIB_EXCLUDED.isdisjoint(name.split("/")) or name.startswith("_sysconfigdata")


def _no_data(source: str, why: str) -> list[_Piece]:
    raise ValueError(f"no data in {source!r}: {why}")


def _is_pretokenised(source: str) -> bool:
    path = Path(source)
    if source == "stdlib":
        return False
    return path.suffix in SHARDS or (path.is_dir() and any(file.suffix in SHARDS for file in path.iterdir()))


def _document(path: Path) -> npt.NDArray[np.uint8]:
    return np.frombuffer(path.read_bytes() + bytes([DOCUMENT_END]), dtype=np.uint8)


def _read_shard(path: Path, dtype: str) -> Tokens:
    if path.stat().st_size == 0:
        raise ValueError(f"no data in {str(path)!r}: the file is empty")
    if path.suffix == ".bin":
        if path.stat().st_size % np.dtype(dtype).itemsize:
            raise ValueError(f"{str(path)!r} is not a whole number of {dtype} tokens: {path.stat().st_size} bytes")
        return np.memmap(path, dtype=dtype, mode="r")
    try:
        shard = np.lib.format.open_memmap(path, mode="r")  # np.load would also open archives
    except OSError:
        raise
    except Exception as error:  # of many kinds, since the header is read as Python
        raise ValueError(f"{str(path)!r} is not a .npy file of integers: {error}") from error
    if shard.ndim != 1 or not np.issubdtype(shard.dtype, np.integer):
        raise ValueError(f"{str(path)!r}: expected a 1-D integer array, got {shard.dtype} of shape {shard.shape}")
    if shard.offset + shard.nbytes != path.stat().st_size:
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size} bytes where its header says {shard.offset + shard.nbytes}"
        )
    return shard


def _split(pieces: Sequence[_Piece], config: DataConfig) -> tuple[list[_Piece], list[_Piece]]:
    """By a hash of the file's name, so that a file keeps its side when others come; a single file gives its
    end.
    """
    if len(pieces) == 1:
        piece = pieces[0]
        cut = len(piece.tokens) - int(len(piece.tokens) * config.heldout_fraction)
        return [_Piece(piece.name, piece.tokens[:cut])], [_Piece(piece.name, piece.tokens[cut:])]
    ranked = sorted(pieces, key=lambda piece: _hash(piece.name))
    count = sum(_hash(piece.name) < config.heldout_fraction for piece in ranked)
    held = {piece.name for piece in ranked[: min(max(count, 1), len(ranked) - 1)]}
    return [piece for piece in pieces if piece.name not in held], [piece for piece in pieces if piece.name in held]


def _hash(name: str) -> float:
    """Of [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big") / 2**48


def _join(pieces: Sequence[_Piece]) -> Tokens:
    return pieces[0].tokens if len(pieces) == 1 else np.concatenate([piece.tokens for piece in pieces])


def _fingerprint(train: Sequence[_Piece], heldout: Sequence[_Piece], whole: bool = True) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for side in (train, heldout):
        digest.update(f"{len(side)}\n".encode())
        for piece in side:
            tokens = piece.tokens
            digest.update(f"{piece.name} {tokens.dtype} {len(tokens)}\n".encode())
            if len(tokens) <= LONG:
                digest.update(tokens.tobytes())
            elif whole:
                digest.update(_digest_of_long(tokens))
            else:
                digest.update(tokens[:4096].tobytes() + tokens[-4096:].tobytes())
    return digest.hexdigest()


def _digest_of_long(tokens: Tokens) -> bytes:
    """Of every token; of a memory map its file's, which is read once and remembered while the file stays as it is."""
    file = getattr(tokens, "filename", None)
    if isinstance(tokens, np.memmap) and file is not None:
        return bytes.fromhex(remembered_digest(Path(file)))
    return hashlib.sha256(np.ascontiguousarray(tokens).data).digest()
