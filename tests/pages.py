"""The documentation's pages and the blocks of code on them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = {"node_modules", "source"}  # below docs, once it is built
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(markdown: str) -> list[tuple[str, str | None]]:
    """The Python blocks, each with the text that stands right below it (None: something else does)."""
    found = list(FENCE.finditer(markdown))
    pairs = []
    for block, below in zip(found, [*found, None][1:], strict=True):
        if block[1] == "python":
            shown = below is not None and below[1] == "text" and not markdown[block.end() : below.start()].strip()
            pairs.append((block[2], below[2] if shown and below is not None else None))
    return pairs
