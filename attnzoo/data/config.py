"""Which tokens a run sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath

from attnzoo.errors import above, at_least, finite, one_of


@dataclass
class WeightedSource:
    """One of several sources.

    Args:
        source: as in `DataConfig`.
        weight: how often a row comes from it; only the ratios of the sources' weights matter.

    Raises:
        ValueError: no source, or a weight that is not a number above 0.
    """

    source: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("source must be a file, a folder or 'stdlib', got an empty text")
        above(self, 0.0, "weight")
        finite(self, "weight")


@dataclass
class DataConfig:
    """Where the tokens come from, and how they are cut.

    Args:
        source: `stdlib` (the Python standard library's own source), a text file, a folder of text files, a folder that
            `attnzoo tokenize` wrote, or pre-tokenised `.npy` / `.bin` files (one, or a folder of them). Text is read
            byte by byte: the vocabulary is 256, and a zero byte ends each document. Files of tokens are memory-mapped.
        sources: several sources with their weights, instead of `source`.
        documents: `joined` (a row goes on from one document into the next) or `packed` (no token of a document sees, or
            is asked for, one of another; rows are as full). Not for `.npy` and `.bin` files, which hold no borders.
        context_length: tokens per training sequence.
        heldout_fraction: share of the text that training never sees, by file; of a single file, its end. A folder of
            `attnzoo tokenize` that has a held-out split keeps its own.
        heldout_source: held-out tokens from here instead; then all of `source` is trained on.
        pattern: which files of a text folder, at any depth: a relative path that may have `*`. A command line needs
            quotes around it, `'data.pattern="*.md"'`.
        vocab_size: needed for `.npy` and `.bin` files.
        dtype: of `.bin` files.
        seed: of the order in which the text is seen.

    Raises:
        ValueError: a number out of range, an unknown word, or both `source` and `sources`.
    """

    source: str = "stdlib"
    sources: list[WeightedSource] = field(default_factory=list)
    documents: str = "joined"
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
        if self.sources and self.source != "stdlib":
            raise ValueError(f"sources: expected none beside source={self.source!r}, which is then another of them")
        one_of(self, "documents", ["joined", "packed"])
        one_of(self, "dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
        if self.vocab_size is not None:
            at_least(self, 1, "vocab_size")

    @property
    def weighted(self) -> list[WeightedSource]:
        """All sources, be they one or several."""
        return self.sources or [WeightedSource(self.source)]

    @property
    def title(self) -> str:
        """The sources in words."""
        if not self.sources:
            return self.source
        return ", ".join(f"{entry.source} (weight {entry.weight:g})" for entry in self.sources)
