"""The configuration of a run's data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from attnzoo.errors import above, at_least, finite, one_of

TASK = "task:"  # prefix of a synthetic task's name


def check_pattern(pattern: str) -> None:
    """Raise where a pattern cannot select files of a folder.

    Raises:
        ValueError: the pattern is empty, absolute or leads out of the folder.
    """
    parts = PurePath(pattern).parts
    if not parts or PurePath(pattern).is_absolute() or ".." in parts:
        raise ValueError(f"pattern: expected a relative path without '..', such as *.md, got {pattern!r}")


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
            raise ValueError("source: expected a file, a folder or 'stdlib', got an empty text")
        above(self, 0.0, "weight")
        finite(self, "weight")


@dataclass
class DataConfig:
    """The configuration of a run's data: the sources of tokens, and how they are cut into sequences.

    Args:
        source: `stdlib` (the Python standard library's own source), a text file, a folder of text files, a folder that
            `attnzoo tokenize` wrote, pre-tokenised `.npy` / `.bin` files (one, or a folder of them), or a synthetic
            task, such as `task:flip_flop`, or `task:FILE.py` for one of your own. Text is read byte by byte: the
            vocabulary is 256, and a zero byte, which no text may hold, ends each document. Files that attnzoo has
            written into a folder of texts, such as runs, are not read. Files of tokens are memory-mapped; rows of a
            task are drawn on demand.
        task_options: options of a task, such as `{p_ignore: 0.98}`.
        sources: several sources with their weights, instead of `source`.
        documents: `joined` (a row continues from one document into the next) or `packed` (no token sees or predicts a
            token of another document; rows are as full). Not for `.npy` and `.bin` files, which hold no borders.
        context_length: tokens per training sequence.
        heldout_fraction: share of the text that training never sees, by file; of a single file, its end. A folder of
            `attnzoo tokenize` that has a held-out split keeps its own.
        heldout_source: another source of held-out tokens; then all of `source` is trained on.
        pattern: which files of a text folder, at any depth: a relative path that may have `*`. A command line needs
            quotes around it, `'data.pattern="*.md"'`.
        vocab_size: needed for `.npy` and `.bin` files.
        dtype: the dtype of `.bin` files, which are plain numbers or have llm.c's header.
        seed: seed of the order of the windows.

    Raises:
        ValueError: a number out of range, an unknown word, or both `source` and `sources`.
    """

    source: str = "stdlib"
    task_options: dict[str, Any] = field(default_factory=dict)
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
            raise ValueError(f"heldout_fraction: expected a number between 0 and 1, got {self.heldout_fraction}")
        for name in ("source", "heldout_source"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}: expected a file, a folder or 'stdlib', got an empty text")
        check_pattern(self.pattern)
        if self.sources and self.source != "stdlib":
            raise ValueError(f"sources: expected none beside source={self.source!r}, which is then another of them")
        self._check_task()
        one_of(self, "documents", ["joined", "packed"])
        one_of(self, "dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
        if self.vocab_size is not None:
            at_least(self, 1, "vocab_size")

    def _check_task(self) -> None:
        """Raise for settings that a task does not read, and for a task among several sources."""
        if self.task is None and self.task_options:
            raise ValueError(f"task_options: expected a source that begins with {TASK!r}, got {self.title!r}")
        others = [entry.source for entry in self.sources] + [self.heldout_source or ""]
        if any(other.startswith(TASK) for other in others):
            raise ValueError(f"{TASK} is for data.source alone, not for sources or heldout_source")
        if self.task is not None:
            alone = DataConfig()
            for name in ("documents", "heldout_source", "pattern", "heldout_fraction", "dtype"):
                if getattr(self, name) != getattr(alone, name):
                    raise ValueError(f"{name}={getattr(self, name)!r}: a task such as {self.source!r} does not read it")

    @property
    def task(self) -> str | None:
        """The name of the source's synthetic task, or None."""
        return self.source.removeprefix(TASK) if self.source.startswith(TASK) else None

    @property
    def weighted(self) -> list[WeightedSource]:
        """The sources with weights, also where there is one."""
        return self.sources or [WeightedSource(self.source)]

    @property
    def title(self) -> str:
        """The sources in words."""
        if not self.sources:
            return self.source
        return ", ".join(f"{entry.source} (weight {entry.weight:g})" for entry in self.sources)
