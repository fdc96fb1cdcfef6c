"""Folders of tokens: files of tokens and the starts of their documents, read as memory maps.

`shards.json` names them and appears last:

    {"version": 1, "dtype": "uint16" or "uint32", "vocab_size": N, "fingerprint": "...",
     "splits": {"train": [{"file": "train-00000.bin", "tokens": n, "documents": m, ".bin": "...", ".idx": "..."}],
                "held_out": [...]}}

A `.bin` file is little-endian tokens and nothing else; the `.idx` file beside it has the int64 starts of its documents
and, as the last of its m + 1 numbers, the number of tokens. The SHA-256 of the two stand under their suffixes, so that
the fingerprint, which is of everything, can be compared with what the index says without reading them; versions before
wrote none. `tokenizer.json` (of tokenizers) may stand beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from attnzoo.data.windows import Tokens
from attnzoo.errors import unknown
from attnzoo.files import digest, json_object, remembered_digest, whole_folder

INDEX, TOKENIZER = "shards.json", "tokenizer.json"
SPLITS = ("train", "held_out")
SUFFIXES = (".bin", ".idx")
DTYPES = ("uint16", "uint32")
VERSION = 1
PIECE = 2**20  # borders read at a time
SHARD_TOKENS = 2**28  # tokens from which on a file is full


@dataclass(frozen=True)
class Shard:
    """One file of tokens.

    Args:
        path: of the `.bin` file.
        dtype: of its tokens, `uint16` or `uint32`.
        count: tokens.
        documents: number of documents.
        digests: SHA-256 of the `.bin` and the `.idx` file; empty in folders of earlier versions.
    """

    path: Path
    dtype: str
    count: int
    documents: int
    digests: tuple[str, ...] = ()

    @property
    def tokens(self) -> Tokens:
        """The tokens `[count]`, as a memory map."""
        return np.memmap(self.path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r", shape=(self.count,))

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The borders of the documents, `[documents + 1]`, as a memory map: each start, and the end of the last."""
        return np.memmap(self.path.with_suffix(".idx"), dtype="<i8", mode="r", shape=(self.documents + 1,))


@dataclass(frozen=True)
class TokenShards:
    """A folder of tokens; making it reads no tokens.

    Args:
        folder: the folder's path.
        vocab_size: tokens are below it.
        fingerprint: digest of all tokens, borders and the split, made when they were written.
        train: files of the training split.
        held_out: files of the held-out split, perhaps none.
    """

    folder: Path
    vocab_size: int
    fingerprint: str
    train: tuple[Shard, ...]
    held_out: tuple[Shard, ...]

    @property
    def tokenizer(self) -> Path | None:
        """The file of the tokenizer, or None."""
        path = self.folder / TOKENIZER
        return path if path.is_file() else None

    def check(self) -> None:
        """Compare all files with the fingerprint; an unchanged file is read once per process.

        Raises:
            ValueError: the tokens have changed since they were written.
        """
        splits = {"train": self.train, "held_out": self.held_out}
        now = {name: tuple(_with_digests(shard, remembered_digest) for shard in splits[name]) for name in SPLITS}
        if _fingerprint(self.vocab_size, now) != self.fingerprint:
            raise ValueError(f"{str(self.folder)!r}: the tokens are not those of which {INDEX} holds the fingerprint")

    def check_newer(self) -> None:
        """Call :meth:`check` where a file has been written or changed since `shards.json` was; else nothing is read.

        The time of writing can be set back, as `cp -p` does, so that the time of the last change counts too. Neither
        shows damage by the disk itself: :meth:`check` does.

        Raises:
            ValueError: the tokens have changed since they were written.
        """
        index = (self.folder / INDEX).stat()
        paths = [
            path for shard in (*self.train, *self.held_out) for path in (shard.path, shard.path.with_suffix(".idx"))
        ]
        for now in (path.stat() for path in paths):
            if now.st_mtime_ns > index.st_mtime_ns or now.st_ctime_ns > index.st_ctime_ns:
                return self.check()


def is_shards(folder: str | Path) -> bool:
    """Whether ``folder`` is a folder of tokens as :func:`write_shards` writes it."""
    return (Path(folder) / INDEX).is_file()


def read_shards(folder: str | Path) -> TokenShards:
    """A folder of tokens, whose files are checked by their sizes; no tokens are read.

    Raises:
        FileNotFoundError: no `shards.json`, or a file that it names is missing.
        ValueError: `shards.json` is malformed, or a file's size differs from it.
    """
    folder = Path(folder)
    if not is_shards(folder):
        raise FileNotFoundError(f"no tokens in {str(folder)!r}: there is no {INDEX} (`attnzoo tokenize` writes it)")
    index = folder / INDEX
    try:
        found = json_object(index.read_bytes(), "it")
        if found.get("version") != VERSION:
            raise ValueError(f"expected an object of version {VERSION}, got {found.get('version')!r}")
        if found["dtype"] not in DTYPES:
            raise unknown("dtype", found["dtype"], DTYPES)
        if not isinstance(found["vocab_size"], int) or not isinstance(found["fingerprint"], str):
            raise ValueError("expected a number vocab_size and a text fingerprint")
        splits = {name: tuple(_shards(folder, found["dtype"], found["splits"][name])) for name in SPLITS}
        shards = [shard for name in SPLITS for shard in splits[name]]
        if all(shard.digests for shard in shards) and _fingerprint(found["vocab_size"], splits) != found["fingerprint"]:
            raise ValueError("what it says is not what its fingerprint was made of")
    except KeyError as error:
        raise ValueError(f"{str(index)!r}: {error.args[0]} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(index)!r}: {error}") from error
    for shard in shards:
        _check_sizes(shard)
    return TokenShards(folder, found["vocab_size"], found["fingerprint"], **splits)


def _shards(folder: Path, dtype: str, entries: list[Mapping[str, Any]]) -> Iterator[Shard]:
    for entry in entries:
        name, count, documents = entry["file"], entry["tokens"], entry["documents"]
        if Path(name).name != name or not name.endswith(".bin"):
            raise ValueError(f"file: expected the name of a .bin file of this folder, got {name!r}")
        if not (isinstance(count, int) and isinstance(documents, int) and 1 <= documents <= count):
            raise ValueError(f"{name}: expected 1 <= documents <= tokens, got {documents!r} and {count!r}")
        digests = tuple(str(entry[suffix]) for suffix in SUFFIXES if suffix in entry)
        yield Shard(folder / name, dtype, count, documents, digests if len(digests) == len(SUFFIXES) else ())


def _check_sizes(shard: Shard) -> None:
    expected = {
        shard.path: shard.count * np.dtype(shard.dtype).itemsize,
        shard.path.with_suffix(".idx"): (shard.documents + 1) * 8,
    }
    for path, size in expected.items():
        if path.stat().st_size != size:
            raise ValueError(f"{str(path)!r} has {path.stat().st_size} bytes where {INDEX} says {size}")
    first, last = (int(x) for x in shard.starts[[0, -1]])
    if (first, last) != (0, shard.count):
        raise ValueError(f"{str(path)!r}: expected starts from 0 to {shard.count}, got {first} to {last}")
    starts = shard.starts
    for begin in range(0, shard.documents, PIECE):
        falls = np.flatnonzero(np.diff(starts[begin : begin + PIECE + 1]) <= 0)
        if falls.size:
            at = begin + int(falls[0])
            raise ValueError(f"{str(path)!r}: expected starts that rise, got {starts[at]} and {starts[at + 1]} at {at}")


def write_shards(
    folder: Path,
    vocab_size: int,
    train: Iterable[Tokens],
    held_out: Iterable[Tokens] = (),
    *,
    tokenizer: Mapping[str, bytes] | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenShards:
    """Write documents as a folder of tokens, which appears whole or not at all.

    Args:
        folder: what to write; it must not exist, or be empty.
        vocab_size: tokens are below it; they take 2 bytes up to 65536 of them, else 4.
        train: the documents, each `[tokens]`; read one at a time, and never split over two files.
        held_out: the documents of the held-out split.
        tokenizer: files to write beside them, by name; `tokenizer.json` should be one.
        shard_tokens: the number of tokens from which on a file is full.

    Raises:
        FileExistsError: `folder` is not empty.
        ValueError: an empty document, tokens outside the vocabulary, or no documents to train on.
    """
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size: expected 1 to 2^32, got {vocab_size}")
    dtype = DTYPES[vocab_size > 2**16]
    with whole_folder(folder) as part:
        splits = {
            name: tuple(_write_split(part, name, documents, vocab_size, dtype, shard_tokens))
            for name, documents in zip(SPLITS, (train, held_out), strict=True)
        }
        if not splits["train"]:
            raise ValueError("train: expected at least one document, got none")
        for name, content in (tokenizer or {}).items():
            (part / name).write_bytes(content)
        entries = {
            name: [
                {"file": shard.path.name, "tokens": shard.count, "documents": shard.documents}
                | dict(zip(SUFFIXES, shard.digests, strict=True))
                for shard in shards
            ]
            for name, shards in splits.items()
        }
        fingerprint = _fingerprint(vocab_size, splits)
        index = {
            "version": VERSION, "dtype": dtype, "vocab_size": vocab_size, "fingerprint": fingerprint, "splits": entries,
        }  # fmt: skip
        (part / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return read_shards(folder)


def _write_split(
    folder: Path, name: str, documents: Iterable[Tokens], vocab_size: int, dtype: str, shard_tokens: int
) -> Iterator[Shard]:
    remaining = iter(documents)
    document = next(remaining, None)
    number = 0
    while document is not None:
        path = folder / f"{name}-{number:05d}.bin"
        starts = [0]
        with open(path, "wb") as file:
            while document is not None and starts[-1] < shard_tokens:
                _append(file, document, vocab_size, dtype)
                starts.append(starts[-1] + len(document))
                document = next(remaining, None)
        path.with_suffix(".idx").write_bytes(np.array(starts, dtype="<i8").tobytes())
        yield _with_digests(Shard(path, dtype, starts[-1], len(starts) - 1), digest)
        number += 1


def _append(file: BinaryIO, document: Tokens, vocab_size: int, dtype: str) -> None:
    tokens = np.asarray(document)
    if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"document: expected integers [tokens] with at least one, got {tokens.dtype} of shape {tokens.shape}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"document: tokens from {low} to {high}, outside the vocabulary of {vocab_size}")
    file.write(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())


def _with_digests(shard: Shard, read: Callable[[Path], str]) -> Shard:
    return replace(shard, digests=tuple(read(shard.path.with_suffix(suffix)) for suffix in SUFFIXES))


def _fingerprint(vocab_size: int, splits: Mapping[str, tuple[Shard, ...]]) -> str:
    result = hashlib.blake2b(f"{vocab_size}\n".encode(), digest_size=16)
    for name in SPLITS:
        for shard in splits[name]:
            facts = {**asdict(shard), "path": shard.path.name, "split": name}
            facts |= dict(zip(SUFFIXES, facts.pop("digests"), strict=True))
            result.update(f"{json.dumps(facts, sort_keys=True)}\n".encode())
    return result.hexdigest()
