"""Hypothesis strategies: shapes, gate regimes and seeds, never every float."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from attnzoo.registry import get
from attnzoo.samples import Regime
from attnzoo.testing.case import Case

BLOCKS = (1, 2, 4, 8, 16, 5, None)
REGIMES: Sequence[Regime] = ("open", "mixed", "closing", "zero", "closed")  # the plainest first: failures shrink to it


@st.composite
def cases(
    draw: st.DrawFn, name: str, min_t: int = 1, max_t: int = 40, shape: Sequence[int] | None = None,
    cuts: bool = False, absent: bool = False,
) -> Case:  # fmt: skip
    """Cases of a variant, mostly of small blocks and few tokens; sometimes of the real block sizes.

    Args:
        name: of the variant.
        min_t: fewest tokens.
        max_t: most tokens.
        shape: B, T, H and K of all cases, or None to draw them.
        cuts: whether the sequence is cut, at least once where it can be.
        absent: whether some tokens do not exist.
    """
    if shape is None:
        T = draw(st.integers(min_t, max_t), label="T")
        G = draw(st.sampled_from((1, 2, 3)), label="G")
        B, H = draw(st.integers(1, 2), label="B"), G * draw(st.sampled_from((1, 2, 3)), label="H/G")
        K = draw(st.sampled_from((2, 4, 6, 10)), label="K")
    else:
        B, T, H, K = shape
        G = draw(st.sampled_from([n for n in range(1, H + 1) if H % n == 0]), label="G")
    inner = st.sets(st.integers(1, T - 1), min_size=1) if T > 1 else st.just(set())
    return Case(
        name, B, T, H, G, K,
        V=draw(st.sampled_from((1, 3, 5, 8, 11)), label="V"),
        regime=draw(st.sampled_from(REGIMES), label="regime"),
        seed=draw(st.integers(0, 2**16), label="seed"),
        scale=draw(st.sampled_from((None, 1.0, 0.3)), label="scale"),
        block=draw(st.sampled_from(BLOCKS), label="block"),
        shared_angle=draw(st.booleans(), label="shared angle") if "angle" in get(name).requires else False,
        cuts=tuple(sorted(draw(inner, label="cuts"))) if cuts else (),
        absent=tuple(sorted(draw(st.sets(st.integers(0, T - 1), max_size=T - 1), label="absent"))) if absent else (),
    )  # fmt: skip


def cut_points(T: int) -> st.SearchStrategy[list[int]]:
    """Cuts of T tokens into segments, ``[0, ..., T]``."""
    return st.sets(st.integers(0, T)).map(lambda inner: sorted(inner | {0, T}))
