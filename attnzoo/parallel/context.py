"""The fragments that the layers of a block of code go by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, get_args

from attnzoo.errors import unknown
from attnzoo.kernels.common.untraced import untraced
from attnzoo.parallel.attention import Transport
from attnzoo.parallel.fragments import Fragments


class Context(NamedTuple):
    """Fragments of the rows of a call, and how ranks tell each other of them."""

    fragments: Fragments
    transport: Transport


CURRENT: ContextVar[Context | None] = ContextVar("attnzoo.parallel", default=None)
"""The context that layers run in, or None."""
ENTERED: list[Context] = []
"""The contexts of all threads: compiled code can ask a list whether there is any, and no ContextVar."""


@untraced
def entered() -> Context | None:
    """The context of this thread's block, or None."""
    return CURRENT.get()


@contextmanager
def context_parallel(fragments: Fragments, transport: Transport = "auto") -> Iterator[None]:
    """Layers in this block take this rank's rows of sequences that ranks share, and give the same rows.

    Every rank calls the same layers in the same order, forward and backward. The gradient of a parameter is the sum of
    those of all ranks.

    Args:
        fragments: of the rows; ``fragments.shard`` makes a rank's from whole ones.
        transport: of keys and values on the softmax side. ``"gather"``: all of them to all ranks. ``"heads"``: each
            rank gets all tokens of its share of the heads, on the linear side too, by any form; with ``prune`` they are
            dealt by what it keeps of them. ``"pruned"``: of the keys before a fragment those that ``prune`` certifies
            as needed. ``"auto"``: heads where a layer's form
            takes whole sequences alone, or else gather; it is logged with the reason. A linear side sends its states,
            whatever is said but ``"heads"``.

    Raises:
        TypeError: no Fragments.
        ValueError: an unknown transport.
    """
    if not isinstance(fragments, Fragments):
        raise TypeError(f"fragments: expected attnzoo.parallel.Fragments, got {type(fragments).__name__}")
    if transport not in get_args(Transport):
        raise unknown("transport", transport, get_args(Transport))
    context = Context(fragments, transport)
    token = CURRENT.set(context)
    ENTERED.append(context)
    try:
        yield
    finally:
        ENTERED.remove(context)
        CURRENT.reset(token)
