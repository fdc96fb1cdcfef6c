"""Steps that the public functions of attention share: their type, autocast, the share of keys by the reference."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast, get_args, overload

import torch
from torch import Tensor

from attnzoo.errors import unknown
from attnzoo.kernels.common.argument_checks import check_tensors
from attnzoo.kernels.common.call_checks import share_kept
from attnzoo.kernels.common.dense_reference import summed_gates
from attnzoo.kernels.common.options import AttentionOptions

Layout = Literal["bthd", "bhtd"]
WITH_HEADS = ("v", "log_decay", "log_diag", "w", "beta", "receivers")  # beside q and k: [B, T, heads, ...]


class AttentionFunction(Protocol):
    """A function that returns o, and with ``return_lse`` the rows' log-sum-exp as well."""

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Any
    ) -> Tensor: ...


R = TypeVar("R")


def attention(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> AttentionFunction:
    """The function with a layout (:func:`with_layout`), typed by ``return_lse``."""
    return cast(AttentionFunction, with_layout(function))


def with_layout(function: Callable[..., R]) -> Callable[..., R]:
    """The function with a ``layout``: ``"bhtd"`` where heads come before tokens in all but a state.

    A call that says neither layout nor implementation is told where its heads and tokens look exchanged.
    """
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(q: Any, k: Any, *more: Any, layout: Layout | None = None, **options: Any) -> Any:
        if layout == "bhtd":
            options |= zip(names[2:], more, strict=False)
            turned = {name: _turned(options[name]) for name in WITH_HEADS if name in options}
            made: Any = function(_turned(q), _turned(k), **{**options, **turned})
            return (_turned(made[0]), *made[1:]) if "state" in names else _turned(made)
        if layout not in (None, "bthd"):
            raise unknown("layout", layout, get_args(Layout))
        if layout is None and options.get("impl", "auto") == "auto":
            _look_at_layout(q, k)
        return function(q, k, *more, **options)

    return cast(Callable[..., R], call)


def with_lse(both: Callable[..., tuple[Tensor, Tensor]]) -> AttentionFunction:
    """A function of the same arguments that returns o, and with ``return_lse`` what ``both`` does."""

    @functools.wraps(both)
    def call(*given: Any, return_lse: bool = False, **options: Any) -> Any:
        o, lse = both(*given, **options)
        return (o, lse) if return_lse else o

    return cast(AttentionFunction, call)


def _turned(x: Any) -> Any:
    """Heads and tokens of x, or of each of several, exchanged; what has no two of them as it is."""
    if isinstance(x, tuple | list):
        return tuple(map(_turned, x))
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim > 2 else x


def _look_at_layout(q: Any, k: Any) -> None:
    if isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4 and not torch.compiler.is_compiling():
        T, H = q.shape[1:3]
        if H > T > 1 and k.shape[1] == T:
            warnings.warn(
                f"q: {H} heads of {T} tokens in {tuple(q.shape)}, which is [B, T, H, K]; where heads come first, pass "
                "layout='bhtd', and layout='bthd' where they do not",
                stacklevel=3,
            )


def returned(made: Any, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Output o of an op, with ``return_lse`` also the rows' log-sum-exp."""
    return (made.o, made.row_lse) if return_lse else made.o


def cast_for_autocast(
    q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor | None], needed: Sequence[str] = ()
) -> tuple[Any, ...]:
    """q, k and v in autocast's dtype, and then the gates in float32; all as they are where autocast is off.

    Args:
        gates: by name.
        needed: those that may not be None.
    """
    if not isinstance(q, Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, k, v, *gates.values()
    check_tensors({"q": q, "k": k, "v": v, **gates}, needed=("q", "k", "v", *needed))
    dtype = torch.get_autocast_dtype(q.device.type)
    return *(x.to(dtype) for x in (q, k, v)), *(None if x is None else x.float() for x in gates.values())


def reference_share(
    q: Tensor, k: Tensor, log_decay: Tensor, options: AttentionOptions, starts: Callable[..., Tensor]
) -> Tensor:
    """``share_kept`` of a family's dense reference, whose ``prune_starts_reference`` gives the pruned starts."""
    c, first_visible = summed_gates(log_decay, q, k.shape[1], options.window, options.cu_seqlens)
    start = None if options.prune is None else starts(q, k, c, first_visible, options)
    return share_kept(first_visible, start, q, k.shape[1])
