"""The data of a run: reading of sources, and their training and held-out splits."""

from __future__ import annotations

import hashlib
import logging
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnzoo.data.config import TASK, DataConfig
from attnzoo.data.numbers import read_numbers
from attnzoo.data.shards import is_shards, read_shards
from attnzoo.data.tasks import TASKS, Examples, build_task
from attnzoo.data.texts import held_out_names, stdlib_files, text_files
from attnzoo.data.windows import Joined, Mixture, Starts, Tokens, TokenWindows, Windows
from attnzoo.errors import did_you_mean_path
from attnzoo.files import digest, remembered_digest

logger = logging.getLogger(__name__)

DOCUMENT_END = 0  # a byte that no text contains
BYTES = 256
LONG = 2**20  # tokens of a piece
SHARDS = (".npy", ".bin")


@dataclass(frozen=True)
class Data:
    """Tokens ready for training.

    Args:
        vocab_size: tokens are below it.
        train: windows by index, or rows of a task.
        heldout: 1-D tokens that training never sees, an array or :class:`Joined` memory maps; or rows of a task.
        fingerprint: a digest of the tokens and their split.
        heldout_documents: starts of the documents of `heldout`, rising; None where documents are joined.
    """

    vocab_size: int
    train: Windows | Examples
    heldout: Tokens | Joined | Examples
    fingerprint: str
    heldout_documents: Starts | None = None


@dataclass(frozen=True)
class _Piece:
    name: str  # the path relative to the source, by which the split is decided
    tokens: Tokens
    file: Path
    starts: Starts | None = None  # starts of its documents, then its length; None: one document
    digest: str = ""  # digest of tokens that are already checked, so that they need not be read
    first: int = 0  # index of the first token in its file


@dataclass(frozen=True)
class _Source:
    name: str
    pieces: list[_Piece]
    text: bool = True
    vocab_size: int | None = None
    heldout: list[_Piece] | None = None  # None: some of the pieces are held out
    tokenizer: str = ""
    knows_documents: bool = True

    @property
    def everything(self) -> list[_Piece]:
        return [*self.pieces, *(self.heldout or [])]


def build_data(config: DataConfig) -> Data:
    """The training windows and the held-out tokens of a source, or of several, or the rows of a task.

    Raises:
        FileNotFoundError: a source does not exist.
        PermissionError: a folder in it cannot be read.
        ValueError: no data, too little for one context, a text with a zero byte, tokens that are no valid shard, or
            held-out tokens outside the vocabulary, or that another source trains on; or several sources are not of one
            kind; or there is no such task.
    """
    if config.task is not None:
        return _task_data(config, config.task)
    sources = [_read(entry.source, config) for entry in config.weighted]
    elsewhere = None if config.heldout_source is None else _read(config.heldout_source, config)
    for source in sources:
        if config.pattern != "*" and not (source.text and Path(source.name).is_dir()):
            raise ValueError(
                f"data.pattern={config.pattern!r} says which files of a folder of texts are read, and "
                f"{source.name!r} is no such folder"
            )
    together = [*sources, elsewhere] if elsewhere else sources
    _check_read(together, config)
    vocab_size = _vocabulary(sources, config)
    _check_alike(together)
    packed = config.documents == "packed"
    for source in together:
        if packed and not source.knows_documents:
            raise ValueError(
                "data.documents='packed' needs to know where documents start, as text and a folder of `attnzoo "
                f"tokenize` say; {source.name!r} does not"
            )

    splits = [(source.everything, []) if elsewhere else _split(source, config) for source in sources]
    trained = zip(sources, splits, strict=True)
    windows = [_windows(source, train, vocab_size, packed, config) for source, (train, _) in trained]
    held = elsewhere.everything if elsewhere else [piece for _, heldout in splits for piece in heldout]
    _check_apart([piece for train, _ in splits for piece in train], held)
    tokens = _join(held)
    if len(tokens) <= config.context_length:
        raise ValueError(
            f"the held-out split of {config.title!r} has {len(tokens)} tokens: "
            f"data.context_length={config.context_length} needs at least {config.context_length + 1}"
        )
    larger = elsewhere is not None and (elsewhere.vocab_size or 0) > vocab_size
    for piece in held:
        if larger or not piece.digest:
            _check_range(f"the held-out split of {config.heldout_source or config.title!r}", piece.tokens, vocab_size)
    sides = [*(train for train, _ in splits), held]
    return Data(
        vocab_size,
        windows[0] if len(windows) == 1 else Mixture(windows, [entry.weight for entry in config.weighted]),
        tokens,
        _fingerprint(sides, sources[0].text),
        _join_starts(held) if packed else None,
    )


def _task_data(config: DataConfig, name: str) -> Data:
    """The training and held-out rows of a task; the fingerprint is of the first rows."""
    task = build_task(name, config.task_options)
    vocab_size = config.vocab_size or len(task.words)
    if vocab_size < len(task.words):
        raise ValueError(f"data.vocab_size={vocab_size}: the task {name!r} has {len(task.words)} tokens")
    train, heldout = (Examples(task, config.context_length, config.seed, held_out=side) for side in (False, True))
    try:
        rows = [np.stack(side.batch(range(4))) for side in (train, heldout)]
    except ValueError as error:
        raise ValueError(f"data.context_length={config.context_length}: the task {name!r}: {error}") from error
    digest = hashlib.blake2b(b"".join(side.tobytes() for side in rows), digest_size=16)
    return Data(vocab_size, train, heldout, digest.hexdigest())


def _windows(
    source: _Source, pieces: Sequence[_Piece], vocab_size: int, packed: bool, config: DataConfig
) -> TokenWindows:
    shards = [[piece] for piece in pieces] if not source.text else [pieces]
    tokens = [np.asarray(_join(shard)) if source.text else shard[0].tokens for shard in shards]
    name = f"the training split of {source.name!r}"
    _say_short(name, [len(shard) for shard in tokens], config.context_length)
    return TokenWindows(
        tokens,
        config.context_length,
        vocab_size,
        config.seed,
        name=name,
        starts=[_join_starts(shard) for shard in shards] if packed else None,
        table=source.text,
    )


def _say_short(name: str, lengths: Sequence[int], context_length: int) -> None:
    """Log files of tokens that are left out as shorter than a row, since rows do not cross files."""
    short = [length for length in lengths if length <= context_length]
    if short:
        text = "%s: %d of %d files, %d of %d tokens, are left out: a row of data.context_length=%d needs one more each"
        logger.warning(text, name, len(short), len(lengths), sum(short), sum(lengths), context_length)


def _check_read(sources: Sequence[_Source], config: DataConfig) -> None:
    """Raise for settings that none of the sources reads."""
    if config.heldout_source is not None and config.heldout_fraction != DataConfig.heldout_fraction:
        raise ValueError(
            f"data.heldout_fraction={config.heldout_fraction}: all of data.heldout_source={config.heldout_source!r} is "
            "held out, and nothing else"
        )
    raw = (piece.file.suffix == ".bin" for source in sources if not source.knows_documents for piece in source.pieces)
    if config.dtype != DataConfig.dtype and not any(raw):
        raise ValueError(f"data.dtype={config.dtype!r} is of .bin files, and {config.title!r} has none")


def _vocabulary(sources: Sequence[_Source], config: DataConfig) -> int:
    given = config.vocab_size
    for source in sources:
        if source.vocab_size is None and given is None:
            texts = "; its other files are read with a data.pattern of theirs" if Path(source.name).is_dir() else ""
            raise ValueError(f"data.vocab_size is needed for the pre-tokenised {source.name!r}{texts}")
        if given is not None and given < (source.vocab_size or 0):
            kind = "text is read byte by byte" if source.text else f"{source.name!r} is of a larger vocabulary"
            raise ValueError(f"data.vocab_size={given}: {kind} and needs {source.vocab_size}")
    return given or max(source.vocab_size or 0 for source in sources)


def _check_alike(sources: Sequence[_Source]) -> None:
    """Raise where the sources are not all bytes, or all tokens of one tokenizer."""
    first = sources[0]
    for source in sources[1:]:
        if source.text != first.text:
            text, tokens = (first.name, source.name) if first.text else (source.name, first.name)
            raise ValueError(
                f"data: expected sources of one kind; {text!r} is read byte by byte, {tokens!r} has tokens"
            )
    known = [source for source in sources if source.tokenizer]
    for source in known[1:]:
        if source.tokenizer != known[0].tokenizer:
            raise ValueError(f"data: expected sources of one tokenizer; {known[0].name!r} and {source.name!r} have two")


def encode(text: str) -> list[int]:
    """The byte tokens of a text, as text sources yield them."""
    return list(text.encode("utf-8"))


def decode(tokens: Iterable[int]) -> str:
    """The text of byte tokens; invalid UTF-8 and tokens above 255 become replacement characters."""
    no_letter = 255  # a byte that UTF-8 never has
    return bytes(min(int(token), no_letter) for token in tokens).decode("utf-8", errors="replace")


def _read(source: str, config: DataConfig) -> _Source:
    if source == "stdlib":
        return _Source(source, _documents(stdlib_files()), vocab_size=BYTES)
    path = Path(source)
    if not path.exists():
        meant = f"{TASK}{source}" if source in TASKS else source
        hint = did_you_mean_path(meant, ["stdlib", *(f"{TASK}{name}" for name in TASKS)])
        raise FileNotFoundError(f"no data: there is no file or folder {source!r}{hint}")
    if path.is_dir() and is_shards(path):
        return _read_folder(source)
    if _holds_numbers(path, config.pattern):
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SHARDS)
        if not files:
            raise _no_data(source, "the folder has no .npy or .bin file")
        _say_below(path, config.heldout_source)
        pieces = [_Piece(file.name, read_numbers(file, config.dtype, config.vocab_size), file) for file in files]
        return _Source(source, pieces, text=False, knows_documents=False)
    return _Source(source, _read_text(path, config), vocab_size=BYTES)


def _say_below(folder: Path, heldout: str | None) -> None:
    """Log files of tokens in folders inside of one, which are not read, but for held-out ones."""
    held = None if heldout is None else Path(heldout).resolve()
    below = [file for suffix in SHARDS if folder.is_dir() for file in folder.glob(f"*/**/*{suffix}")]
    below = sorted(file for file in below if held not in (file.resolve(), *file.resolve().parents))
    if below:
        text = "%r: %d .npy and .bin files in folders inside it are not read, such as %r"
        logger.warning(text, str(folder), len(below), str(below[0].relative_to(folder)))


def _holds_numbers(path: Path, pattern: str) -> bool:
    if not path.is_dir():
        return path.suffix in SHARDS
    return any(file.suffix in SHARDS and file.match(pattern) for file in path.iterdir())


def is_text(source: str, pattern: str = "*", numbers: bool = False) -> bool:
    """Whether a source is read byte by byte.

    Args:
        source: as `DataConfig` takes it, but no task.
        pattern: `DataConfig.pattern`.
        numbers: whether a source that no longer exists may have been `.npy` or `.bin` files: where `data.vocab_size` is
            given, which these need.
    """
    path = Path(source)
    if source == "stdlib":
        return True
    return not is_shards(path) and not _holds_numbers(path, pattern) and (path.exists() or not numbers)


def _read_folder(source: str) -> _Source:
    """The source of a folder of `attnzoo tokenize`."""
    found = read_shards(source)
    found.check_newer()
    train, heldout = (
        [_Piece(shard.path.name, shard.tokens, shard.path, shard.starts, found.fingerprint) for shard in split]
        for split in (found.train, found.held_out)
    )
    tokenizer = digest(found.tokenizer) if found.tokenizer else ""
    return _Source(source, train, False, found.vocab_size, heldout or None, tokenizer)


def _read_text(path: Path, config: DataConfig) -> list[_Piece]:
    if path.is_file():
        if not path.stat().st_size:
            raise _no_data(str(path), "the file is empty")
        return [_Piece(path.name, _document(path), path)]
    return _documents(text_files(path, config.pattern))


def _documents(files: Mapping[str, Path]) -> list[_Piece]:
    return [_Piece(name, _document(file), file) for name, file in files.items()]


def _check_range(name: str, tokens: Tokens, vocab_size: int) -> None:
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    for start in range(0, len(tokens), 2**24):
        part = tokens[start : start + 2**24]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name}: tokens from {low} to {high}, outside the vocabulary of {vocab_size}")


def _no_data(source: str, why: str) -> ValueError:
    return ValueError(f"no data in {source!r}: {why}")


def _document(path: Path) -> npt.NDArray[np.uint8]:
    content, end = path.read_bytes().removeprefix(BOM_UTF8), bytes([DOCUMENT_END])
    if end in content:
        raise ValueError(
            f"{str(path)!r} has a zero byte at {content.index(end)}, which would end a document: it is no text, and "
            "data.pattern can leave it out of a folder"
        )
    return np.frombuffer(content + end, dtype=np.uint8)


def _split(source: _Source, config: DataConfig) -> tuple[list[_Piece], list[_Piece]]:
    """The training and held-out pieces, by a hash of each file's name; of a single file the end is held out."""
    pieces = source.pieces
    if source.heldout is not None:
        return pieces, source.heldout
    if len(pieces) == 1:
        tokens = len(pieces[0].tokens)
        cut = tokens - int(tokens * config.heldout_fraction)
        return [_part(pieces[0], 0, cut)], [_part(pieces[0], cut, tokens)]
    held = held_out_names([piece.name for piece in pieces], config.heldout_fraction)
    return [piece for piece in pieces if piece.name not in held], [piece for piece in pieces if piece.name in held]


def _part(piece: _Piece, first: int, last: int) -> _Piece:
    """The piece's tokens from `first` to before `last`; documents are cut there."""
    if piece.starts is not None:
        inside = piece.starts[(piece.starts > first) & (piece.starts < last)]
        piece = replace(piece, starts=np.array([first, *inside, last], dtype=np.int64) - first)
    return replace(piece, tokens=piece.tokens[first:last], first=piece.first + first)


def _check_apart(trained: Sequence[_Piece], held: Sequence[_Piece]) -> None:
    """Raise where tokens of one file are both held out and trained on, under two names or in two sources."""
    by_file: dict[Path, list[_Piece]] = {}
    for piece in trained:
        by_file.setdefault(piece.file.resolve(), []).append(piece)
    for piece in held:
        for other in by_file.get(piece.file.resolve(), ()):
            if max(piece.first, other.first) < min(piece.first + len(piece.tokens), other.first + len(other.tokens)):
                raise ValueError(
                    f"data: expected held-out files that no source trains on, got {str(piece.file)!r}, of which "
                    f"{str(other.file)!r} has the same tokens; give sources of which none lies in another or is a link"
                )


def _join(pieces: Sequence[_Piece]) -> Tokens | Joined:
    """The tokens of all pieces; memory maps are not read."""
    if len(pieces) == 1:
        return pieces[0].tokens
    parts = [piece.tokens for piece in pieces]
    return Joined(parts) if any(isinstance(part, np.memmap) for part in parts) else np.concatenate(parts)


def _join_starts(pieces: Sequence[_Piece]) -> Starts:
    """The starts of the documents in joined pieces, then the length of all."""
    starts = [np.array([0, len(piece.tokens)]) if piece.starts is None else piece.starts for piece in pieces]
    if len(pieces) == 1:
        return starts[0]
    before = np.cumsum([0, *(len(piece.tokens) for piece in pieces)])
    return np.concatenate([*(own[:-1] + first for own, first in zip(starts, before, strict=False)), before[-1:]])


def _fingerprint(sides: Sequence[Sequence[_Piece]], text: bool) -> str:
    result = hashlib.blake2b(digest_size=16)
    if not text:
        result.update(b"in a computed order\n")
    for side in sides:
        result.update(f"{len(side)}\n".encode())
        for piece in side:
            tokens = piece.tokens
            result.update(f"{piece.name} {tokens.dtype} {len(tokens)}\n".encode())
            if piece.digest:
                result.update(f"{piece.digest}\n".encode())
            elif len(tokens) <= LONG:
                result.update(tokens.tobytes())
            else:
                result.update(_digest_of_long(tokens))
    return result.hexdigest()


def _digest_of_long(tokens: Tokens) -> bytes:
    """The digest of all tokens; that of a memory map is of its file, and cached while the file does not change."""
    file = getattr(tokens, "filename", None)
    if isinstance(tokens, np.memmap) and file is not None:
        return bytes.fromhex(remembered_digest(Path(file)))
    return hashlib.sha256(np.ascontiguousarray(tokens).data).digest()
