"""The keyword options of the reference forms, declared once for each side, and the checks of their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.transitions import Transition
from attnzoo.algebra.validation import check_dense, check_flag, check_rising, check_scale, check_window
from attnzoo.algebra.values import reads_values
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.precision import wide_dtype

READS_LESS = ("prune", "logit_bound", "cu_seqlens")  # options that a step which reads every key has no use for


class Options(Mapping[str, Any]):
    """The keyword options of a call as one object; as a mapping it has those by name that ask for something."""

    __match_args__: ClassVar[tuple[str, ...]] = ()

    def given(self) -> dict[str, Any]:
        """The options that are not at their defaults, None or False."""
        names = self.__match_args__
        return {name: x for name in names if (x := getattr(self, name)) is not None and x is not False}

    def __getitem__(self, name: str) -> Any:
        return self.given()[name]

    def __contains__(self, name: object) -> bool:
        x = getattr(self, name) if name in self.__match_args__ else None
        return x is not None and x is not False

    def __iter__(self) -> Iterator[str]:
        return iter(self.given())

    def __len__(self) -> int:
        return len(self.given())


@dataclass(frozen=True, eq=False)
class LinearOptions(Options):
    """Keyword options of the forms of the linear side.

    Args:
        scale: of the queries; default ``1/sqrt(K)``.
        valid: ``[B, T]`` bool; a token where it is false leaves the state as it is, whatever its q, k, v, gate and
            write are, NaN among them. Its own output is finite and means nothing.
        cu_seqlens: borders ``[N + 1]`` int32 or int64 of sequences packed into one row (B = 1), which know nothing of
            each other. Not for ``extend``.
        write: ``[B, T, G]`` or ``[B, T, H]``, how strongly a token writes: ``v_t`` becomes ``write_t v_t``.
        delta_rule: the delta rule proper, ``S_t = S_{t-1} A_t + beta_t v_t k_t^T`` with ``w = k``: beta is the write
            strength as well, and ``gate.w`` must hold k itself. For gates with w and beta.
        prune: leave out what states carry from chunk to chunk where the gates certify that its weights ``exp(d_tj)``
            sum to at most ``prune.eps`` in every row, and in gradients in every column. Needs a scalar decay.
    """

    scale: float | None = None
    valid: Tensor | None = None
    cu_seqlens: Tensor | None = None
    write: Tensor | None = None
    delta_rule: bool = False
    prune: Prune | None = None


@dataclass(frozen=True, eq=False)
class SoftmaxOptions(Options):
    """Keyword options of the forms of the softmax side.

    Args:
        scale: of the scores; default ``1/sqrt(K)``.
        prune: skip blocks of keys whose weight is certified to be at most ``prune.eps`` in every row. Needs a scalar
            decay.
        logit_bound: ``[H]``, no ``|s_tj|`` may exceed it; ``prune`` certifies by it besides the measured norms.
        window: each row sees itself and the ``window - 1`` tokens before it; padding is not counted.
        sink: ``[H]`` logits that take part in the softmax without a value and without a decay.
        valid: ``[B, T]`` bool; a token where it is false is never attended to and moves nothing, whatever its q, k, v
            and gate are, NaN among them. Its own output is finite and means nothing.
        cu_seqlens: borders ``[N + 1]`` int32 or int64 of sequences packed into one row (B = 1), which know nothing of
            each other. Not for ``extend``.
        return_lse: give ``(o, lse)`` in place of o: the natural log of the sum of exponentials that o was divided by,
            the sink among them, ``[B, T, H]`` in float32 (float64 for float64 inputs). Differentiable.
        softcap: ``softcap tanh(s_tj / softcap)`` takes the place of the scaled score ``s_tj`` (Gemma Team, "Gemma 2",
            2024, section 2). The decay ``d_tj`` is added afterwards: a closed gate still hides all before it, and every
            weight still falls with its decay.
        keep_carries: save what the kernels of PaTH carry for the backward pass, which then need not carry it again.
    """

    scale: float | None = None
    prune: Prune | None = None
    logit_bound: Tensor | None = None
    window: int | None = None
    sink: Tensor | None = None
    valid: Tensor | None = None
    cu_seqlens: Tensor | None = None
    return_lse: bool = False
    softcap: float | None = None
    keep_carries: bool = False

    def of_kernels(self, *but: str) -> dict[str, Any]:
        """The options that the functions of ``attnzoo.kernels`` take by keyword, but for these."""
        return {name: getattr(self, name) for name in AttentionOptions._fields if name not in but}


NOTHING_ASKED = SoftmaxOptions()


def check_linear(options: LinearOptions, q: Tensor, k: Tensor, gate: Gate) -> None:
    """Raise where options of the linear side do not fit the inputs.

    Raises:
        TypeError: an option of the wrong kind.
        ValueError: a wrong shape, device or value.
    """
    check_borders(options.cu_seqlens, q)
    if isinstance(options.prune, Prune) and options.prune.bound != "tail":
        raise ValueError(f"prune: expected bound='tail' (a state's weights are summed), got {options.prune!r}")
    B, T, H, G = *q.shape[:3], k.shape[2]
    write = options.write
    check_flag("delta_rule", options.delta_rule)
    if write is not None:
        if options.delta_rule:
            raise ValueError("write: expected None with delta_rule (beta is what is written with), got a tensor")
        check_dense("write", write, "[B, T, G] or [B, T, H] or None")
        if write.shape not in ((B, T, G), (B, T, H)) or not write.is_floating_point():
            got = f"{write.dtype} {tuple(write.shape)}"
            raise ValueError(f"write: expected a floating tensor [B, T, G] = {(B, T, G)} or {(B, T, H)}, got {got}")
        _check_device("write", write, q)
    if options.delta_rule:
        if gate.w is None or gate.beta is None:
            raise ValueError(f"delta_rule: expected False (it needs a gate with w and beta), got Gate{gate.parts}")
        if gate.factors is not None:
            how = "a token that writes with each of its factors is as many tokens: attnzoo.forms.factors.sub_tokens"
            raise ValueError(f"gate.w: expected [B, T, G, K] with delta_rule ({how}), got {tuple(gate.w.shape)}")
        if reads_values(q):
            other = (gate.w.to(k.dtype) != k).any(-1).logical_and(gate.beta != 0)
            if options.valid is not None:
                other = other.logical_and(options.valid[..., None])
            if bool(other.any()):
                raise ValueError("gate.w: expected k itself with delta_rule (it erases along the key it writes)")


def check_softmax(options: SoftmaxOptions, q: Tensor, gate: Gate) -> None:
    """Raise where options of the softmax side do not fit the inputs.

    Raises:
        TypeError: an option of the wrong kind.
        ValueError: ``prune`` without a scalar decay, a ``logit_bound`` that nothing reads, or a wrong shape or value.
    """
    check_borders(options.cu_seqlens, q)
    prune, H = options.prune, q.shape[2]
    if options.logit_bound is not None and prune is None:
        got = type(options.logit_bound).__name__
        raise ValueError(f"logit_bound: expected None without prune (nothing else reads it), got {got}")
    check_window(options.window)
    check_scale(options.softcap, "softcap")
    for name, per_head in (("sink", options.sink), ("logit_bound", options.logit_bound)):
        if per_head is None:
            continue
        check_dense(name, per_head, "[H] or None")
        if per_head.shape != (H,) or not per_head.is_floating_point():
            got = f"{per_head.dtype} {tuple(per_head.shape)}"
            raise ValueError(f"{name}: expected a floating tensor of shape [H={H}], got {got}")
        _check_device(name, per_head, q)
    check_flag("return_lse", options.return_lse)
    if reads_values(q):
        if options.sink is not None and not bool((options.sink < torch.inf).all()):
            raise ValueError(f"sink: expected logits below infinity, got {options.sink.tolist()}")
        if options.logit_bound is not None and not bool((options.logit_bound >= 0).all()):
            raise ValueError(f"logit_bound: expected bounds of 0 or more, got {options.logit_bound.tolist()}")


def check_prune(prune: Prune | None, gate: Gate, transition: Transition) -> None:
    """``prune`` is None, or a :class:`Prune` with what it is certified by.

    Raises:
        TypeError: another object.
        ValueError: no scalar decay, or a transition that may make vectors longer.
    """
    if prune is not None and not isinstance(prune, Prune):
        raise TypeError(f"prune: expected attnzoo.Prune(eps=...) or None, got {prune!r}")
    if prune is not None and gate.log_decay is None:
        raise ValueError("prune: expected None (nothing decays without log_decay), got " + repr(prune))
    if prune is not None and (transition.expands or gate.expands):
        raise ValueError(f"prune: expected None ({type(transition).__name__} makes vectors longer), got {prune!r}")


def check_borders(cu_seqlens: Tensor | None, q: Tensor) -> None:
    """The borders of packed sequences fit ``q [B, T, ...]``.

    Raises:
        TypeError: not an int32 or int64 tensor.
        ValueError: not one axis, several rows, another device, or borders that do not rise from 0 to T.
    """
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: expected an int32 or int64 tensor [N + 1], got {got}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens: expected one axis [N + 1] with N >= 1, got shape {tuple(cu_seqlens.shape)}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected one row (B = 1) of packed sequences, got B = {q.shape[0]}")
    _check_device("cu_seqlens", cu_seqlens, q)
    if reads_values(q):
        check_rising(cu_seqlens, q.shape[1])


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}")


def existing(valid: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Each of ``rows [B, T, ...]`` with zeros at the tokens that do not exist: NaN times a weight of 0 would be NaN."""
    absent = ~valid
    return tuple(x.masked_fill(absent.reshape(*absent.shape, *(1,) * (x.ndim - 2)), 0.0) for x in rows)


def separated(gate: Gate, q: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Gate:
    """The gate with an identity transition at absent tokens, and closed where a packed sequence begins.

    A closed log decay forgets everything before it, so it separates the sequences of any variant.

    Args:
        gate: of the variant.
        q: ``[B, T, H, K]``, for its shape and dtype.
        valid: ``[B, T]`` bool or None.
        cu_seqlens: ``[N + 1]`` borders or None.
    """
    if valid is not None:
        gate = gate.per_token(q).neutral_where(~valid)
    if cu_seqlens is None:
        return gate
    B, T, H, _ = q.shape
    g = gate.per_token(q).log_decay
    if g is None:
        g = q.new_zeros(B, T, H, dtype=wide_dtype(q.dtype))
    begins = torch.zeros(T + 1, dtype=torch.bool, device=q.device).index_fill(0, cu_seqlens.long(), True)[:T]
    return replace(gate, log_decay=g.masked_fill(begins[:, None], -torch.inf))
