"""Which tokens a run sees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from attnzoo.errors import at_least, one_of


@dataclass
class DataConfig:
    """Where the tokens come from, and how they are cut.

    Args:
        source: `stdlib` (the Python standard library's own source), a text file, a folder of text files, or
            pre-tokenised `.npy` / `.bin` files (one, or a folder of them). Text is read byte by byte: the vocabulary is
            256, and a zero byte ends each document.
        context_length: tokens per training sequence.
        heldout_fraction: share of the text that training never sees, by file; of a single file, its end.
        heldout_source: held-out tokens from here instead; then all of `source` is trained on.
        pattern: which files of a text folder, at any depth: a relative path that may have `*`. A command line needs
            quotes around it, `'data.pattern="*.md"'`.
        vocab_size: needed for pre-tokenised files.
        dtype: of `.bin` files.
        seed: of the order in which the text is seen.

    Raises:
        ValueError: a number out of range or an unknown dtype.
    """

    source: str = "stdlib"
    context_length: int = 256
    heldout_fraction: float = 0.05
    heldout_source: str | None = None
    pattern: str = "*"
    vocab_size: int | None = None
    dtype: str = "uint16"
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "context_length")
        at_least(self, 0, "seed")
        if not 0 < self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction must be between 0 and 1, got {self.heldout_fraction}")
        for name in ("source", "heldout_source"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must be a file, a folder or 'stdlib', got an empty text")
        parts = PurePath(self.pattern).parts
        if not parts or PurePath(self.pattern).is_absolute() or ".." in parts:
            raise ValueError(f"pattern must be a relative path without '..', such as *.md, got {self.pattern!r}")
        one_of(self, "dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
        if self.vocab_size is not None:
            at_least(self, 1, "vocab_size")
