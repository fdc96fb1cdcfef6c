"""What the softmax side remembers of past tokens, and buffers in which that grows without being copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROOM = 256  # buffers hold multiples of this many tokens


@dataclass(frozen=True, eq=False)
class KVCache:
    """What the softmax side remembers of S past tokens.

    Args:
        k: keys ``[B, S, G, K]``, carried to the last token by the matrix transitions (``[B, S, H, K]`` where the
            transition is per query head), in the dtype of the computation: rounding them at every step would add up.
            RoPE keeps them in the frame of the first token instead.
        v: values ``[B, S, G, V]``.
        log_decay: gates as they were given, ``[B, S, H]``, or None.
        valid: ``[B, S]`` bool, or None when every token is.
        phase: RoPE's total angle so far in float64, broadcastable to ``[B, 1, H, K/2]``, or None.
    """

    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    valid: Tensor | None = None
    phase: Tensor | None = None

    def __len__(self) -> int:
        return self.k.shape[1]

    def reorder(self, index: Tensor) -> KVCache:
        """The rows ``index`` of the batch, in that order."""

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[index]

        shared = self.phase is None or self.phase.shape[0] != self.k.shape[0]
        return KVCache(
            self.k[index],
            self.v[index],
            pick(self.log_decay),
            pick(self.valid),
            self.phase if shared else pick(self.phase),
        )


@dataclass(eq=False)
class Room:
    """Buffers ``[B, capacity, ...]`` that begin with a cache's tensors.

    Args:
        buffers: by the names of :class:`KVCache`'s fields.
        used: tokens of the longest cache in them; only that one may be appended to in place.
    """

    buffers: dict[str, Tensor]
    used: int

    @property
    def capacity(self) -> int:
        return next(iter(self.buffers.values())).shape[1]

    def fits(self, past: Mapping[str, Tensor], new: Mapping[str, Tensor], S: int) -> bool:
        """Whether ``new`` can be written behind the ``S`` tokens of ``past``."""
        T = next(iter(new.values())).shape[1]
        if self.used != S or self.capacity < S + T or self.buffers.keys() != past.keys():
            return False
        writable = torch.is_inference_mode_enabled() or not any(x.is_inference() for x in self.buffers.values())
        return writable and all(
            x.shape[2:] == past[name].shape[2:] and x.dtype == torch.promote_types(past[name].dtype, new[name].dtype)
            for name, x in self.buffers.items()
        )


@dataclass(frozen=True, eq=False)
class GrowingCache(KVCache):
    """A :class:`KVCache` some of whose tensors are views of a :class:`Room`: appending to it copies nothing."""

    room: Room | None = None


def append_in_place(
    state: KVCache, past: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Room]:
    """``past``, which are tensors of ``state``, followed by ``new`` along time (dim 1), and the buffers they are in.

    Written behind ``past`` where it stands, if nothing has been written there, else into larger copies. ``state``
    stays as it was. Not differentiable.
    """
    S, T = len(state), next(iter(new.values())).shape[1]
    room = state.room if isinstance(state, GrowingCache) else None
    if room is None or not room.fits(past, new, S):
        size = -(-(S + T + S // 4) // ROOM) * ROOM
        room = Room({}, S)
        for name, x in past.items():
            dtype = torch.promote_types(x.dtype, new[name].dtype)
            room.buffers[name] = x.new_empty(x.shape[0], size, *x.shape[2:], dtype=dtype)
            room.buffers[name][:, :S] = x
    for name, x in new.items():
        room.buffers[name][:, S : S + T] = x
    room.used = S + T
    return {name: x[:, : room.used] for name, x in room.buffers.items()}, room


def append(past: Tensor | None, new: Tensor | None) -> Tensor | None:
    """``past`` followed by ``new`` along time (dim 1), differentiable."""
    if past is None or new is None or not past.shape[1]:
        return new
    return torch.cat([past, new], 1)


def append_valid(cache: KVCache | None, valid: Tensor | None, like: Tensor) -> Tensor | None:
    """Which of the cached and the new tokens exist; None when all do. ``like`` is the new keys."""
    if cache is None:
        return valid
    if cache.valid is None and valid is None:
        return None
    return torch.cat([given(cache.valid, like, len(cache)), given(valid, like, like.shape[1])], 1)


def given(valid: Tensor | None, like: Tensor, tokens: int) -> Tensor:
    """``valid``, or that all of ``tokens`` exist: ``[B, tokens]`` bool."""
    return like.new_ones(like.shape[0], tokens, dtype=torch.bool) if valid is None else valid


def growing(state: KVCache, new: KVCache, names: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors ``names`` of both, and their gates and validity if there are any: what grows with the tokens."""
    names += ("log_decay",) * (new.log_decay is not None)
    past, now = ({name: getattr(cache, name) for name in names} for cache in (state, new))
    if state.valid is not None or new.valid is not None:
        past["valid"], now["valid"] = (given(cache.valid, cache.v, cache.v.shape[1]) for cache in (state, new))
    return past, now


def grown(state: KVCache, new: KVCache) -> KVCache:
    """``state`` followed by the tokens of ``new``; ``new.phase`` is the phase of both.

    Tensors that record a gradient are concatenated, others appended in place.
    """
    past, now = growing(state, new, ("k", "v"))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*past.values(), *now.values())):
        return KVCache(**{name: torch.cat([past[name], now[name]], 1) for name in past}, phase=new.phase)
    parts, room = append_in_place(state, past, now)
    return GrowingCache(**parts, phase=new.phase, room=room)
