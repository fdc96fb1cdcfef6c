"""Documents out of what packages hold: source trees, archives, compressed files, and descriptions inside JSON."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any

from attnzoo.data.config import check_pattern
from attnzoo.data.texts import files_in, is_hidden, whole_name
from attnzoo.data.tokenizer import Tokenized, check_options, tokenize
from attnzoo.files import check_free, part_of, scratch_folder

DECOMPRESS = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}
TARS = (".tar", ".tgz", ".txz", ".tbz2", *(f".tar{packed}" for packed in (*DECOMPRESS, ".zst")))
DAMAGE = (  # what readers of archives raise
    OSError, EOFError, RuntimeError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile,
)  # fmt: skip
BLOCKS = frozenset(["br", "dd", "div", "dl", "dt", "h1", "h2", "h3", "h4", "li", "ol", "p", "pre", "tr", "ul"])


@dataclass
class Corpus:
    """What :func:`collect` wrote.

    Args:
        documents: how many.
        left_out: names of those that were not taken, by the reason.
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

    The texts stand on the disk meanwhile, beside `folder`.

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
        FileExistsError: there is something in `folder`.
        FileNotFoundError, ValueError: see both.
    """
    check_free(folder)
    check_options(vocab_size, tokenizer, heldout_fraction)
    with scratch_folder(part_of(folder.with_name(f"{folder.name}.texts"))) as texts:
        corpus = collect(paths, texts, patterns=patterns, json_field=json_field, min_bytes=min_bytes)
        done = tokenize(
            [texts],
            folder,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            end=end,
            heldout_fraction=heldout_fraction,
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
    and counted by reason, are texts that are not UTF-8 or hold a zero byte, shorter ones, those that equal one taken
    before, and hidden files.

    Args:
        paths: what to read.
        folder: where the texts go; it exists and is empty.
        patterns: a file is read if one of them matches the end of its path, such as `*.c`, `drivers/*.c`.
        json_field: of `.json` files, only the texts under this name, at any depth, in order and without HTML's tags.
        min_bytes: a document has at least that many, in UTF-8.

    Raises:
        FileNotFoundError: a path is not there.
        ValueError: an archive that cannot be read, JSON that is none, two files of one name, or no document at all.
    """
    for pattern in patterns:
        check_pattern(pattern)
    corpus, taken = Corpus(), set[bytes]()
    for name, content in _files(paths, patterns):
        text, reason = _text(name, content, json_field, min_bytes)
        seen = hashlib.blake2b(text, digest_size=16).digest()
        if not reason and seen in taken:
            reason = "the same as another"
        if reason:
            corpus.left_out.setdefault(reason, []).append(name)
            continue
        taken.add(seen)
        _write(folder, name, text)
        corpus.documents += 1
    if not corpus.documents:
        reasons = ", ".join(f"{len(names)} {reason}" for reason, names in corpus.left_out.items())
        matching = f"no file matches {' or '.join(map(repr, patterns))}"
        raise ValueError(f"no documents in {', '.join(repr(str(path)) for path in paths)}: {reasons or matching}")
    return corpus


def _write(folder: Path, name: str, text: bytes) -> None:
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(text)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise ValueError(f"{name!r}: two documents would be called so, or lie in one another") from None


def _text(name: str, content: bytes | None, json_field: str | None, min_bytes: int) -> tuple[bytes, str]:
    """The document in UTF-8, and why it is left out, or ""."""
    if content is None:
        return b"", "hidden"
    zero = "with a zero byte"
    if b"\0" in content:
        return b"", zero
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return b"", "not UTF-8"
    if json_field is not None and name.endswith(".json"):
        try:
            text = "\n".join(_plain(found) for found in _under(json.loads(text), json_field))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name!r} is not readable as JSON: {error}") from error
    if "\0" in text:  # which JSON may escape, like half of a surrogate pair
        return b"", zero
    if not text:
        return b"", "empty"
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return b"", "not UTF-8"
    return encoded, f"shorter than {min_bytes:,} bytes" if len(encoded) < min_bytes else ""


def _under(value: Any, name: str) -> Iterator[str]:
    """The texts under a name, at any depth, in order: one, or a list of them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            for found in inner if key == name and isinstance(inner, list) else [inner]:
                if key == name and isinstance(found, str):
                    yield found
                else:
                    yield from _under(found, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _under(inner, name)


class _Plain(HTMLParser):
    """The text of HTML, a new line where a block begins or ends."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        self.found.append(data)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in BLOCKS:
            self.found.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.handle_starttag(tag, None)


def _plain(html: str) -> str:
    parser = _Plain()
    parser.feed(html)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.found).split("\n"))
    return "\n".join(line for line in lines if line)


def _files(paths: Sequence[Path], patterns: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
    """Every file that is to be read, by the name of its document, archives by what they hold; None for a hidden one."""
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no data: there is no file or folder {str(path)!r}")
        files = sorted(files_in(path)) if path.is_dir() else [path]
        root = path if path.is_dir() else path.parent
        place = path.resolve().name.lstrip(".") if len(paths) > 1 and path.is_dir() else ""
        for file in files:
            with _reading(file):
                for name, read in _opened(file, file.relative_to(root).as_posix()):
                    packed = PurePosixPath(name).suffix
                    unpack = DECOMPRESS.get(packed.lower(), bytes)
                    name = name if unpack is bytes else name.removesuffix(packed)
                    whole = f"{place}/{name}" if place else name
                    if not any(PurePosixPath(whole).match(pattern) for pattern in patterns):
                        continue
                    content = None if is_hidden(name) else unpack(read())
                    yield whole_name(whole), content


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's, not the archive's
        raise ValueError(f"{str(file)!r} cannot be read: {error}") from error


def _opened(file: Path, name: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """What a file holds, as names and functions that read."""
    if file.name.lower().endswith(TARS):
        with tarfile.open(file) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield _inside(name, member.name), content.read
    elif file.suffix.lower() in (".zip", ".whl", ".jar"):
        with zipfile.ZipFile(file) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    yield _inside(name, entry.filename), partial(packed.read, entry)
    else:
        yield name, file.read_bytes


def _inside(archive: str, member: str) -> str:
    """The name of a document in an archive, which can lie nowhere but beneath the archive's own name."""
    parts = [part for part in PurePosixPath(member.replace("\\", "/")).parts if part not in ("/", "..")]
    return f"{archive}/{'/'.join(parts)}"
