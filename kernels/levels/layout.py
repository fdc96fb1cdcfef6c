r"""The algebra of PaTH's transitions: every score as a plain dot product, by a binary tree over blocks of tokens.

With :math:`R_t = I - \beta_t w_t w_t^\top` a score is :math:`k_j^\top R_{j+1} \cdots R_i q_i`. Blocks of 64 tokens are
the leaves of a tree; a node of size h holds the product N of its factors in time order. Two tokens of different blocks
meet in one lowest node: j in its left child, i in its right child, both of size :math:`h = 64 \cdot 2^s`. With

.. math:: q^s_i = R_{\text{first of its child}} \cdots R_i\, q_i \qquad
          k^s_j = (R_{j+1} \cdots R_{\text{last of its child}})^\top k_j

the score is :math:`k^s_j \cdot q^s_i`. So the keys before a row are one range per set bit s of its block index, each
read against its own :math:`q^s_i`; inside a block the UT transform gives the scores (Yang et al., "PaTH Attention",
2025, section 3).

A level s >= 1 keeps the rows that it needs packed: query i at row ``i - (u + 1) h`` and key j at row ``j - u h`` of
node ``u = i // 2h``. Level 0 (neighbouring blocks) needs no carrying.

Here: what the parts are called and where they lie. The kernels in path/portable/{blocks,tree,carry}.py compute
them; tests/kernels/path_definitions.py writes them out in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.launching import head_block

BLOCK = 64  # tokens of a leaf
UNIT = 128  # rows that share a first key where there is pruning; the child size of level 1


class Leaves(NamedTuple):
    """Outputs of block_level.

    Attributes:
        diag: [B, nC, H, C, C] float32, unscaled scores within a block; undefined above the diagonal.
        q: [B, T, H, K] queries carried back to the start of their block.
        k: [B, T, G, K] keys carried to the end of their block.
        m: a tree (``tree.new_tree``) whose leaves are the products of the blocks' factors.
    """

    diag: Tensor
    q: Tensor
    k: Tensor
    m: Tensor


class Kept(NamedTuple):
    """Outputs of block_level for block_level_backward: float32 and w, or 16 bits where q and k are bf16.

    Attributes:
        v: [B, nC, G, C, C], inverses of the blocks' I + diag(beta) tril(W W^T, -1); float16.
        x: [B, nC, G, C, C], X = V diag(beta); two pieces of bf16, a plane apart.
        w: [B, T, G, K]; bf16.
    """

    v: Tensor
    x: Tensor
    w: Tensor


class Levels(NamedTuple):
    """Levels 1 .. n, packed: q [n, B, Tq, H, K], k [n, B, Tk, G, K]; rows past a level's own are undefined."""

    q: Tensor
    k: Tensor


class QueryGradientTiles(NamedTuple):
    """Gradients of the levels' queries as Hopper's one pass has added them up: in float32, unscaled.

    Attributes:
        x: [n, B, H, Tq rounded up to UNIT, K rounded up], each 64 rows in the order of ``common/tile_order.py``.
        scale: what they must be multiplied by.
        warps: that its products ran on.
    """

    x: Tensor
    scale: float
    warps: int


class Carried(NamedTuple):
    """Outputs of carry: the levels, and the tree with the products of all nodes, scale by scale."""

    levels: Levels
    nodes: Tensor


class Wanted(NamedTuple):
    """Which gradients a backward pass is asked for."""

    q: bool
    k: bool
    v: bool
    w: bool
    beta: bool
    log_decay: bool
    sink: bool
    log_diag: bool = False

    @property
    def transitions(self) -> bool:
        return self.w or self.beta or self.log_diag

    @property
    def queries(self) -> bool:
        """Whether gradients of the carried queries are needed."""
        return self.q or self.transitions

    @property
    def keys(self) -> bool:
        """Whether gradients of the carried keys are needed."""
        return self.k or self.transitions


EVERYTHING = Wanted(*(True,) * 7)


@dataclass(frozen=True)
class Level:
    """One level of T tokens: its child size and how many rows it packs."""

    h: int
    T: int

    @property
    def nodes(self) -> int:
        """Nodes with a right child that is not empty (their left child is full)."""
        return (self.T + self.h - 1) // (2 * self.h)

    @property
    def queries(self) -> int:
        return self.T // (2 * self.h) * self.h + max(0, self.T % (2 * self.h) - self.h)

    @property
    def keys(self) -> int:
        return self.nodes * self.h


def level_count(T: int) -> int:
    """Number of levels from 1 on."""
    return max(0, (T - 1) // UNIT).bit_length()


def levels_of(T: int) -> list[Level]:
    """Levels 1 .. n of T tokens."""
    return [Level(BLOCK << s, T) for s in range(1, level_count(T) + 1)]


def clear_tails(levels: Levels, T: int) -> None:
    """Zeros in the rows after a level's own: one pass reads its last tile whole, and there may be NaN."""
    for i, level in enumerate(levels_of(T)):
        if level.queries % BLOCK:
            levels.q[i, :, level.queries : -(-level.queries // BLOCK) * BLOCK].zero_()


def level_rows(T: int) -> tuple[int, int]:
    """Rows (Tq, Tk) that hold each of the levels of T tokens."""
    return max((x.queries for x in levels_of(T)), default=0), max((x.keys for x in levels_of(T)), default=0)


def tree_offset(units: int, scale: int) -> int:
    """The offset at which the nodes of a scale begin in a tree buffer."""
    return sum(tree_nodes(units, s) for s in range(scale))


def tree_nodes(units: int, scale: int) -> int:
    """Nodes of a scale, the last of which may lack its right part."""
    return -(-units >> scale)


def tree_scales(units: int) -> int:
    """Scales whose nodes carry anything: below those of the root's children, whose rows meet in the topmost level."""
    return max(1, (units - 1).bit_length() - 1)


def tree_block(K: int) -> int:
    """Width of the transition kernels' tiles for a head dim.

    At least 64: ptxas 12.8 (in Triton 3.6 and 3.7) compiles products of narrower tiles on Hopper to wrong addresses
    (docs/benchmarks/log/path.md has the smallest kernel that shows it).
    """
    return max(64, head_block(K))
