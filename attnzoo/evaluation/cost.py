"""What one token of decoding costs a layer's core, computed from its sizes: keys and values in memory, and operations.

The projections are left out, as they are the same whatever a head holds. An operation is a multiplication or an
addition, and a function of one number counts as one.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnzoo.evaluation.forgetting import blocks_of
from attnzoo.layer.attention import Attention

OF_RETENTION = 6  # of a held key at each step: age, log, product, difference, sigmoid, minimum
BOOKS = 8 + 4 + 2 * 4  # bytes of a key's position, least retention and features of a network of keys


@dataclass(frozen=True)
class Cost:
    """The cost of one token of decoding, in one layer and for one sequence.

    Args:
        held: keys that a key head holds.
        read: keys that a row reads.
        bytes: of what is held.
        operations: of scores, decays, weighted values and the rule.
    """

    held: int
    read: int
    bytes: int
    operations: int


def decoding(layer: Attention, rule: str, tokens: int, budget: int | None = None, itemsize: int = 2) -> Cost:
    """The cost of the token after ``tokens`` others.

    Args:
        layer: of the softmax side.
        rule: one of :data:`attnzoo.evaluation.forgetting.RULES`; ``"retrieval"`` holds all keys and reads some.
        tokens: so far.
        budget: keys that a head may hold, or read; None for all.
        itemsize: bytes of a number of a key or a value; sums of gates have 8.
    """
    config, whole = layer.config, tokens + 1
    H, G, K, V = config.num_heads, config.kv_heads, config.key_dim, config.v_dim
    read = whole if budget is None else min(budget, whole)
    held = whole if rule == "retrieval" else read
    decays = "log_decay" in layer.variant.requires
    memory = held * (G * (K + V) * itemsize + (8 * H if decays else 0))
    operations = read * H * (2 * K + 2 * V + 2 * decays)
    if rule == "retrieval":
        size = blocks_of(read)
        memory += held // size * G * K * itemsize  # the mean keys
        operations += held // size * H * 2 * K
    if rule == "retention" and layer.forget is not None:
        memory += held * G * BOOKS
        width = layer.forget.options.width
        operations += G * (2 * width * (K + V + 2) + 4 * width + OF_RETENTION * held)
    return Cost(held, read, memory, operations)
