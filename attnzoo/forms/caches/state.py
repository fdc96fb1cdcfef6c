"""The two kinds of state: what each side remembers of past tokens, and buffers in which a cache grows uncopied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.values import reads_values, records
from attnzoo.forms.caches.device_memory import check_memory, size_of

BUFFER = 256  # tokens: buffers hold multiples of so many


class State(Protocol):
    """The state that a call returns for the next: :class:`RecurrentState`, :class:`KVCache` or a cache in pages.

    Attributes:
        in_pages: whether its keys lie in the pages of a pool, some of which may be evicted.
        grows: whether it gets longer with the tokens.
    """

    in_pages: ClassVar[bool]
    grows: ClassVar[bool]

    def __len__(self) -> int:
        """The number of tokens it has seen, padding included."""

    def reorder(self, index: Tensor) -> State:
        """The rows ``index`` of the batch, in that order; see :func:`check_rows`."""

    def crop(self, tokens: int) -> State:
        """The state after the first ``tokens`` tokens; a ``ValueError`` where those cannot be had back."""

    def detach(self) -> State:
        """A copy without the history of gradients."""

    def to(self, device: torch.device | str) -> State:
        """A copy on another device, with the same dtypes."""


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """The linear side's state: one matrix per head, however many tokens there were.

    Args:
        matrix: ``S^T``, ``[B, H, K, V]``, in float32 (float64 for float64 inputs).
        tokens: how many it has seen, padding included.
        disposable: whether the call that continues it may write to ``matrix``, which nobody reads again.
    """

    matrix: Tensor
    tokens: int = 0
    disposable: bool = False
    in_pages: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    def __len__(self) -> int:
        return self.tokens

    def reorder(self, index: Tensor) -> RecurrentState:
        """The rows ``index`` of the batch, in that order; see :func:`check_rows`."""
        check_rows(index, self.matrix)
        return replace(self, matrix=self.matrix[index])

    def crop(self, tokens: int) -> RecurrentState:
        """The state after the first ``tokens`` tokens, which only the whole state still is.

        Raises:
            ValueError: any other number: a sum does not give single tokens back.
        """
        whole(tokens)
        if tokens != len(self):
            raise ValueError(f"tokens: expected all {len(self)} (a recurrent state forgets none), got {tokens}")
        return self

    def detach(self) -> RecurrentState:
        """A copy without the history of gradients."""
        return replace(self, matrix=self.matrix.detach())

    def to(self, device: torch.device | str) -> RecurrentState:
        """A copy on another device, with the same dtypes."""
        return replace(self, matrix=self.matrix.to(device))


@dataclass(frozen=True, eq=False)
class KVCache:
    """The softmax side's state: keys and values of S past tokens.

    Args:
        k: keys ``[B, S, G, K]``, carried to the last token by the matrix transitions (``[B, S, H, K]`` where the
            transition is per query head), in the dtype of the computation: rounding them at every step would add up.
            RoPE keeps them in the frame of the first token instead.
        v: values ``[B, S, G, V]``.
        log_decay: gates as they were given, ``[B, S, H]``, or None.
        valid: ``[B, S]`` bool, or None when every token is.
        phase: RoPE's total angle so far in float64, broadcastable to ``[B, 1, H, K/2]``, or None.
        angle: RoPE's angle ``[K/2]`` where the last tokens all had the same, or None.
        carried: whether ``k`` has been multiplied by the transitions of later tokens.
        sums: the sums of ``log_decay`` that the kernel of FoX has added up (``attnzoo.kernels.fox.GateSums``), or None.
    """

    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    valid: Tensor | None = None
    phase: Tensor | None = None
    angle: Tensor | None = None
    carried: bool = False
    sums: Any = None
    in_pages: ClassVar[bool] = False
    grows: ClassVar[bool] = True
    evict: ClassVar[None] = None

    def __len__(self) -> int:
        return self.k.shape[1]

    def reorder(self, index: Tensor) -> KVCache:
        """The rows ``index`` of the batch, in that order; see :func:`check_rows`."""
        check_rows(index, self.k)
        B = self.k.shape[0]
        rows = self._map(lambda x: x[index])
        shared = self.phase is None or self.phase.shape[0] != B
        phase = self.phase if shared else cast(Tensor, self.phase)[index]
        return replace(rows, phase=phase, sums=None if self.sums is None else self.sums.reorder(index))

    def crop(self, tokens: int) -> KVCache:
        """The cache as it was after the first ``tokens`` tokens.

        Raises:
            ValueError: more than there are, fewer than 0, or keys that cannot be taken back: carried ones (PaTH, Wall),
                and RoPE's where its angle varied.
        """
        whole(tokens)
        S = len(self)
        if not 0 <= tokens <= S:
            raise ValueError(f"tokens: expected 0 to {S}, got {tokens}")
        if tokens == S:
            return self
        if self.carried:
            raise ValueError(f"tokens: expected all {S} (later tokens have changed the cached keys), got {tokens}")
        phase = self._phase(tokens)
        if self.phase is not None and (phase is None or not torch.allclose(cast(Tensor, self._phase(S)), self.phase)):
            raise ValueError(f"tokens: expected all {S} (the angles of single tokens are not kept), got {tokens}")
        return replace(self._map(lambda x: x[:, :tokens]), phase=phase)

    def _phase(self, tokens: int) -> Tensor | None:
        """The total angle of the first ``tokens`` tokens if they all had ``angle``."""
        if self.angle is None:
            return None
        there = self.valid
        count = self.angle.new_full((1,), tokens) if there is None else there[:, :tokens].sum(1)
        return count.double()[:, None, None, None] * self.angle.double()

    def detach(self) -> KVCache:
        """A copy without the history of gradients."""
        phase, angle = (None if x is None else x.detach() for x in (self.phase, self.angle))
        return replace(self._map(Tensor.detach), phase=phase, angle=angle)

    def to(self, device: torch.device | str) -> KVCache:
        """The cache on another device; dtypes stay."""
        phase, angle = (None if x is None else x.to(device) for x in (self.phase, self.angle))
        return replace(self._map(lambda x: x.to(device)), phase=phase, angle=angle)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> KVCache:
        """This cache with ``fn`` applied to each tensor of an entry per token; it no longer lies in growing buffers."""
        parts = {name: getattr(self, name) for name in ("k", "v", "log_decay", "valid")}
        changed = {name: None if x is None else fn(x) for name, x in parts.items()}
        return KVCache(**changed, phase=self.phase, angle=self.angle, carried=self.carried)  # type: ignore[arg-type]


@dataclass(eq=False)
class Buffers:
    """Tensors ``[B, capacity, ...]`` that begin with a cache's own.

    Args:
        tensors: by the names of :class:`KVCache`'s fields.
        used: tokens of the longest cache in them; only that one may be appended to in place.
    """

    tensors: dict[str, Tensor]
    used: int

    @property
    def capacity(self) -> int:
        return next(iter(self.tensors.values())).shape[1]

    def fits(self, past: Mapping[str, Tensor], new: Mapping[str, Tensor], S: int) -> bool:
        """Whether ``new`` can be written behind the ``S`` tokens of ``past``."""
        T = next(iter(new.values())).shape[1]
        if self.used != S or self.capacity < S + T or self.tensors.keys() != past.keys():
            return False
        writable = torch.is_inference_mode_enabled() or not any(x.is_inference() for x in self.tensors.values())
        return writable and all(
            x.shape[2:] == past[name].shape[2:] and x.dtype == torch.promote_types(past[name].dtype, new[name].dtype)
            for name, x in self.tensors.items()
        )


@dataclass(frozen=True, eq=False)
class GrowingCache(KVCache):
    """A :class:`KVCache` some of whose tensors are views of :class:`Buffers`: appending to it copies nothing."""

    buffers: Buffers | None = None


def check_copy(state: KVCache | None, tokens: int) -> None:
    """Refuse a copy of the cache with ``tokens`` more that would fill the memory; it looks once in BUFFER tokens.

    Raises:
        MemoryError: there is less.
    """
    S = 0 if state is None else len(state)
    if state is None or not S or (S + tokens) // BUFFER == S // BUFFER:
        return
    needed = (size_of(state.k) + size_of(state.v)) // S * (S + tokens)
    check_memory(needed, state.v.device, f"cache of {S + tokens} tokens, carried on as a copy")


def append_in_place(
    state: KVCache, past: Mapping[str, Tensor], new: Mapping[str, Tensor], carried: Tensor | None = None
) -> tuple[dict[str, Tensor], Buffers]:
    """``past``, which are tensors of ``state``, followed by ``new`` along time (dim 1), and the buffers they are in.

    Written behind ``past`` where it stands, if nothing has been written there, else into larger copies. ``state``
    stays as it was. Not differentiable.

    Args:
        state: that they are of.
        past: by name, ``[B, S, ...]``.
        new: by the same names, ``[B, T, ...]``.
        carried: keys ``[B, S, ...]`` that the caller copies into as large a buffer; they count among what must fit.

    Raises:
        MemoryError: the copies would fill the memory.
    """
    S, T = len(state), next(iter(new.values())).shape[1]
    buffers = state.buffers if isinstance(state, GrowingCache) else None
    if buffers is None or not buffers.fits(past, new, S):
        size = -(-(S + T + S // 4) // BUFFER) * BUFFER
        kept = [*past.values(), *(() if carried is None else (carried,))]
        needed = sum(size_of(x) // max(1, S) * size for x in kept)
        check_memory(needed, state.v.device, f"cache of {S + T} tokens, with room for {size}")
        buffers = Buffers({}, S)
        for name, x in past.items():
            dtype = torch.promote_types(x.dtype, new[name].dtype)
            buffers.tensors[name] = x.new_empty(x.shape[0], size, *x.shape[2:], dtype=dtype)
            buffers.tensors[name][:, :S] = x
    for name, x in new.items():
        buffers.tensors[name][:, S : S + T] = x
    buffers.used = S + T
    return {name: x[:, : buffers.used] for name, x in buffers.tensors.items()}, buffers


def append(past: Tensor | None, new: Tensor | None) -> Tensor | None:
    """``past`` followed by ``new`` along time, ``[B, tokens, ...]``, differentiable."""
    if past is None or new is None or not past.shape[1]:
        return new
    return torch.cat([past, new], 1)


def append_valid(cache: KVCache | None, valid: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask ``[B, S + T]`` of the cached and the new tokens that exist; None when all do. ``like``: the new keys."""
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


def grown(state: KVCache, new: KVCache, *readers: Tensor | None) -> KVCache:
    """``state`` followed by the tokens of ``new``; the phase and angle of ``new`` are those of both.

    Where they or ``readers``, which are computed with them, record a gradient, they are concatenated: the backward pass
    reads them as they are now. Otherwise they are appended in place.
    """
    past, now = growing(state, new, ("k", "v"))
    if records(*past.values(), *now.values(), *readers):
        both = {name: torch.cat([past[name], now[name]], 1) for name in past}
        return replace(new, **both)  # type: ignore[arg-type]
    parts, buffers = append_in_place(state, past, now)
    return GrowingCache(
        parts["k"], parts["v"], parts.get("log_decay"), parts.get("valid"), new.phase, new.angle, buffers=buffers
    )


def check_rows(index: object, like: Tensor) -> None:
    """``index`` names rows of ``like [B, ...]``.

    Raises:
        TypeError: not an int32 or int64 tensor: a mask says which rows there are, and not in which order.
        ValueError: not one axis, another device, or (where values are read) numbers outside of 0 to B - 1.
    """
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        got = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index: expected an int32 or int64 tensor of row numbers, got {got}")
    if index.ndim != 1:
        raise ValueError(f"index: expected one axis of row numbers, got shape {tuple(index.shape)}")
    if index.device != like.device:
        raise ValueError(f"index: expected the device of the rows, {like.device}, got {index.device}")
    B = like.shape[0]
    if reads_values(index) and bool(((index < 0) | (index >= B)).any()):
        raise ValueError(f"index: expected row numbers from 0 to {B - 1}, got {index.tolist()}")


def whole(tokens: object) -> None:
    """``tokens`` is a number of tokens.

    Raises:
        TypeError: it is not.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"tokens: expected a whole number, got {tokens!r}")


def check_state(side: str, state: object, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> None:
    """The state fits the inputs; one of a third party's own type is left to it.

    Raises:
        TypeError: a bare tensor, or the state of the other side.
        ValueError: a state of another batch, other heads, other channels or another device, or one that a variant with
            other gates has left.
    """
    (B, _, H, K), G, V = q.shape, k.shape[2], v.shape[3]
    if side == "other":  # the class is known to the forms alone, and the sizes to the readout
        rows = getattr(state, "matrix", getattr(state, "k", None))
        if rows is not None and rows.shape[0] != B:
            raise ValueError(f"state: expected one of {B} rows, as q has, got {rows.shape[0]}")
        return
    wanted, other = (RecurrentState, KVCache) if side == "linear" else (KVCache, RecurrentState)
    if isinstance(state, (Tensor, other)):
        raise TypeError(f"state: expected attnzoo.{wanted.__name__}, got {type(state).__name__}")
    if isinstance(state, RecurrentState):
        _check("matrix", state.matrix, q, ((B, H, K, V),), "[B, H, K, V]")
    elif isinstance(state, KVCache):
        S = len(state) if isinstance(state.k, Tensor) and state.k.ndim > 1 else 0
        _check("k", state.k, q, ((B, S, G, K), (B, S, H, K)), "[B, S, G, K]")
        _check("v", state.v, q, ((B, S, G, V),), "[B, S, G, V]")
        if state.log_decay is not None:
            _check("log_decay", state.log_decay, q, ((B, S, H),), "[B, S, H]")
        if state.valid is not None:
            _check("valid", state.valid, q, ((B, S),), "[B, S]")
        if S and (state.log_decay is None) != (gate.log_decay is None):
            needs, has = ("none", "some") if gate.log_decay is None else ("those of all cached tokens", "none")
            raise ValueError(f"state.log_decay: expected {needs}, as the gate is, got {has} (of another variant?)")
        if state.phase is not None and gate.angle is None:
            raise ValueError("state.phase: expected None (the gate has no angle), got one (of another variant?)")


def _check(name: str, x: object, q: Tensor, allowed: tuple[tuple[int, ...], ...], axes: str) -> None:
    """One tensor of a state: its kind, shape and device."""
    kind = "bool" if name == "valid" else "floating"
    if not isinstance(x, Tensor) or not (x.dtype == torch.bool if kind == "bool" else x.is_floating_point()):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"state.{name}: expected a {kind} tensor {axes}, got {got}")
    if tuple(x.shape) not in allowed:
        raise ValueError(f"state.{name}: expected {axes} = {allowed[0]}, got {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"state.{name}: expected the device of q, {q.device}, got {x.device}")
