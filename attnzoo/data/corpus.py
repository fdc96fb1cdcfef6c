"""A corpus of documents from source trees, archives, compressed files, and texts inside JSON."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from attnzoo.data.archives import (
    DECOMPRESS,
    Budget,
    LeftOutError,
    Opened,
    check,
    left_out,
    lines,
    members,
    unpacked,
    whole_text,
)
from attnzoo.data.config import check_pattern
from attnzoo.data.markup import plain
from attnzoo.data.texts import files_in, is_hidden, text_of, whole_name
from attnzoo.data.tokenizer import Tokenized, check_options, tokenize
from attnzoo.errors import did_you_mean, no_data
from attnzoo.files import check_free, parse_json, part_of, scratch_folder

LINES = (".jsonl", ".ndjson")  # formats with a JSON document per line


@dataclass
class Corpus:
    """The result of :func:`collect`.

    Args:
        documents: number of documents written.
        left_out: names of the documents that were left out, by reason.
    """

    documents: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)


def tokenize_corpus(
    paths: Sequence[Path],
    folder: Path,
    *,
    patterns: Sequence[str] = ("*",),
    json_field: str | None = None,
    min_bytes: int = 1,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    end: str | None = None,
    heldout_fraction: float = 0.05,
) -> tuple[Corpus, Tokenized]:
    """:func:`collect` documents and write them as a folder of tokens.

    The texts are on the disk meanwhile, beside `folder`.

    Args:
        paths: files, folders and archives.
        folder: what to write; it must not exist, or be empty.
        patterns: see :func:`collect`, as the next two.
        json_field: see there.
        min_bytes: see there.
        vocab_size: see :func:`attnzoo.data.tokenizer.tokenize`, as the rest.
        tokenizer: see there.
        end: see there.
        heldout_fraction: see there.

    Raises:
        FileExistsError: `folder` is not empty.
        FileNotFoundError, ValueError: see both.
    """
    check_free(folder)
    check_options(vocab_size, tokenizer, heldout_fraction)
    with scratch_folder(part_of(folder.with_name(f"{folder.name}.texts"))) as texts:
        corpus = collect(paths, texts, patterns=patterns, json_field=json_field, min_bytes=min_bytes)
        done = tokenize(
            [texts], folder, vocab_size=vocab_size, tokenizer=tokenizer, end=end, heldout_fraction=heldout_fraction
        )
        return corpus, done


def collect(
    paths: Sequence[Path],
    folder: Path,
    *,
    patterns: Sequence[str] = ("*",),
    json_field: str | None = None,
    min_bytes: int = 1,
) -> Corpus:
    """Write the documents of files, folders and archives as a folder of UTF-8 texts, each under its own name.

    Archives (tar in any compression, zip and what is zip inside, such as wheels and jars) are read at any depth of
    folders, not within one another; what is in .gz, .xz or .bz2 is unpacked. Each file is a document. Left out,
    and counted by reason, are texts that are not UTF-8 or hold a zero byte, shorter ones or ones larger than 2^30
    bytes, those that equal one taken before, hidden files, and what cannot be read: of a damaged archive the rest, and
    all beyond 200 times its own size and 2^30 bytes.

    Args:
        paths: what to read.
        folder: an existing, empty folder for the texts.
        patterns: a file is read if one of them matches the end of its path, such as `*.c`, `drivers/*.c`.
        json_field: of `.json` files, and of each line of `.jsonl` and `.ndjson` files as a document of its own, only
            the texts under this name, at any depth, in order and without HTML's tags.
        min_bytes: least size of a document, in UTF-8.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: two paths of one name, no text under `json_field`, or no document at all.
    """
    for pattern in patterns:
        check_pattern(pattern)
    _check_names(paths)
    corpus, taken = Corpus(), set[bytes]()
    under = None if json_field is None else _Field(json_field)
    for name, found in _documents(paths, patterns, under):
        try:
            if isinstance(found, LeftOutError):
                raise found
            text = _checked(found, min_bytes)
            seen = hashlib.blake2b(text, digest_size=16).digest()
            if seen in taken:
                raise LeftOutError("the same as another")
            _write(folder, name, text)
        except LeftOutError as error:
            why = f" ({error.detail})" if error.detail else ""
            corpus.left_out.setdefault(error.reason, []).append(f"{_shown(name)}{why}")
            continue
        taken.add(seen)
        corpus.documents += 1
    if under is not None:
        under.check()
    if not corpus.documents:
        reasons = ", ".join(f"{len(names)} {reason} ({names[0]})" for reason, names in corpus.left_out.items())
        matching = f"no file matches {' or '.join(map(repr, patterns))}"
        raise ValueError(f"no documents in {', '.join(repr(str(path)) for path in paths)}: {reasons or matching}")
    return corpus


def _shown(name: str) -> str:
    """A name made safe for a terminal and shortened."""
    name = name if len(name) <= 200 else f"{name[:100]}...{name[-60:]}"
    return name if name.isprintable() else repr(name)


def _check_names(paths: Sequence[Path]) -> None:
    """Raise where documents of two paths would have the same name."""
    named: dict[str, Path] = {}
    for path in paths if len(paths) > 1 else []:
        if named.setdefault(path.resolve().name, path) is not path:
            raise ValueError(f"{str(named[path.resolve().name])!r} and {str(path)!r}: two documents would be called so")


def _write(folder: Path, name: str, text: bytes) -> None:
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(text)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise LeftOutError("called as another, or as a folder of others") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise LeftOutError("with too long a name") from None


def _checked(text: str, min_bytes: int) -> bytes:
    """The text as a document in UTF-8.

    Raises:
        LeftOutError: it is too short or long, has a zero byte, or cannot be encoded.
    """
    if not text:
        raise LeftOutError("empty")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair
        raise LeftOutError("not UTF-8") from None
    check(encoded)
    if len(encoded) < min_bytes:
        raise LeftOutError(f"shorter than {min_bytes:,} bytes")
    return encoded


class _Field:
    """A reader of the texts under a name in JSON, which also collects the names that occur.

    Args:
        name: the name of the texts.
    """

    def __init__(self, name: str):
        self.name, self.documents, self.damaged, self.found, self.others = name, 0, 0, 0, dict[str, None]()

    def texts(self, content: bytes | bytearray) -> str:
        """The texts of one JSON document, joined, without HTML tags.

        Raises:
            LeftOutError: the content is no JSON.
        """
        try:
            found = [plain(text) for text in self._under(parse_json(text_of(content)))]
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            self.damaged += 1
            raise LeftOutError("not readable as JSON", error) from error
        self.documents += 1
        self.found += len(found)
        return "\n".join(found)

    def _under(self, value: Any) -> Iterator[str]:
        """Yield the texts under the name, at any depth and in order, each a text or a list of texts."""
        if isinstance(value, dict):
            if len(self.others) < 1000:
                self.others |= dict.fromkeys(value)
            for key, inner in value.items():
                for found in inner if key == self.name and isinstance(inner, list) else [inner]:
                    if key == self.name and isinstance(found, str):
                        yield found
                    else:
                        yield from self._under(found)
        elif isinstance(value, list):
            for inner in value:
                yield from self._under(inner)

    def check(self) -> None:
        """Raise where the name has read nothing.

        Raises:
            ValueError: no file was JSON, or none had a text of that name.
        """
        if not self.documents + self.damaged:
            raise ValueError(f"json_field={self.name!r}: expected files called .json, .jsonl or .ndjson, got none")
        if self.documents and not self.found:
            said = f"json_field={self.name!r}: expected a text under that name in JSON, got none in {self.documents:,} "
            raise ValueError(f"{said}documents{did_you_mean(self.name, self.others)}")


def _documents(
    paths: Sequence[Path], patterns: Sequence[str], under: _Field | None
) -> Iterator[tuple[str, str | LeftOutError]]:
    """Yield every document's name with its text or the error for which it is left out; archives by their members."""
    for path in paths:
        if not path.exists():
            raise no_data(path)
        files = sorted(files_in(path)) if path.is_dir() else [path]
        root = path if path.is_dir() else path.parent
        place = path.resolve().name.lstrip(".") + "/" if len(paths) > 1 and path.is_dir() else ""
        for file in files:
            budget = Budget(file.stat().st_size)
            for path_inside, opened in members(file, file.relative_to(root).as_posix(), budget):
                packed = PurePosixPath(path_inside).suffix
                name = path_inside.removesuffix(packed) if packed.lower() in DECOMPRESS else path_inside
                if isinstance(opened, LeftOutError):
                    yield whole_name(f"{place}{path_inside}"), opened
                elif not any(PurePosixPath(f"{place}{name}").match(pattern) for pattern in patterns):
                    continue
                elif is_hidden(name):
                    yield whole_name(f"{place}{name}"), LeftOutError("hidden")
                else:
                    for document, found in _read(name, partial(_unpacked, opened, packed, budget), under):
                        as_packed = document == name and isinstance(found, LeftOutError)
                        yield whole_name(f"{place}{path_inside if as_packed else document}"), found


def _unpacked(opened: Opened, packed: str, budget: Budget) -> Any:
    return unpacked(opened(), packed, budget)


def _read(name: str, opened: Opened, under: _Field | None) -> Iterator[tuple[str, str | LeftOutError]]:
    """Yield the documents of a stream: one, or one per line of JSON."""
    kind = PurePosixPath(name).suffix.lower()
    if under is None or kind not in LINES:
        text = under.texts if under and kind == ".json" else text_of
        yield name, _told(lambda: text(whole_text(opened())))
        return
    try:
        for number, line in enumerate(lines(opened()), 1):
            if isinstance(line, LeftOutError):
                yield f"{name}/{number:08d}", line
            else:  # a blank line is an empty document, and counted as such
                yield f"{name}/{number:08d}", _told(partial(under.texts, line)) if line.strip() else ""
    except Exception as error:  # see _told
        yield name, left_out(error)


def _told(read: Callable[[], str]) -> str | LeftOutError:
    """The text that ``read`` returns, or the error for which it is left out."""
    try:
        return read()
    except UnicodeDecodeError:
        return LeftOutError("not UTF-8")
    except Exception as error:  # damaged files raise many kinds of errors
        return left_out(error)
