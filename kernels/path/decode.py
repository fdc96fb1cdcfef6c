"""The cache of PaTH: keys kept as they meet the next query, ``(R_{j+1} ... R_t)^T k_j``. No Triton here.

Cached keys are float32. Every step rounds them again, and the roundings of a 16-bit cache would add up:
after n steps about 2^-9 sqrt(n) of a bfloat16 key (tests/kernels/test_path_decode.py measures it).
"""

from __future__ import annotations

from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from attnzoo.algebra.transitions import cut, heads_first
from attnzoo.algebra.values import as_given, reads_values, records
from attnzoo.kernels.common.argument_checks import MOST, check_numbers, check_tensors, check_values
from attnzoo.kernels.common.call_checks import kernels_unavailable
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.path.chunk import CHUNK, chunk_of
from attnzoo.kernels.path.operands import PathStep
from attnzoo.precision import wide_dtype

SLAB = 4096  # tokens carried at a time, which bounds the memory of a prefill


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise ValueError where a gradient would be expected of a cached step."""
    if records(*tensors):
        raise ValueError("a cached step has no gradient: expected torch.no_grad() or inputs that require none")


def _existing(x: Tensor, valid: Tensor) -> Tensor:
    """x [B, T, ...] with zeros at the tokens that do not exist, which may hold anything."""
    return x.masked_fill(~valid.view(*valid.shape, *[1] * (x.ndim - 2)), 0.0)


def _checked(step: PathStep, options: AttentionOptions) -> PathStep:
    """The step, checked, with these options; factors and channels' gates of tokens that do not exist are 0."""
    q, k, w, beta, keys, values, gates, valid, sink, log_diag, *_ = step
    given = step._asdict()
    del given["options"]
    check_tensors(given, needed=("q", "k", "w", "beta", "keys", "values"))
    if q.ndim != 4 or keys.ndim != 4 or values.ndim != 4:
        got = {"q": q.ndim, "keys": keys.ndim, "values": values.ndim}
        raise ValueError(f"q, keys, values: expected 4 dimensions each, got {got}")
    B, N, H, K = q.shape
    S, G = keys.shape[1:3]
    n = w.shape[3:4] if w.ndim == 5 else ()
    if N == 0:
        raise ValueError(f"q: expected at least one new token, got {tuple(q.shape)}")
    if S == 0 or G == 0 or H % G:
        raise ValueError(f"keys: expected [B, S >= 1, G, K] with G a divisor of H={H}, got {tuple(keys.shape)}")
    if keys.dtype != torch.float32:
        raise ValueError(f"keys: expected float32 (roundings of every step add up), got {keys.dtype}")
    shapes = {
        "k": (B, N, G, K), "w": (B, N, G, *n, K), "beta": (B, N, G, *n), "keys": (B, S, G, K),
        "values": (B, S + N, G, values.shape[3]), "gates": (B, S + N, H), "valid": (B, S + N), "sink": (H,),
        "log_diag": (B, N, G, K),
    }  # fmt: skip
    for name, shape in shapes.items():
        x = given[name]
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected {shape} beside q {tuple(q.shape)}, got {tuple(x.shape)}")
        if x is not None and name != "valid" and not x.is_floating_point():
            raise ValueError(f"{name}: expected a floating dtype, got {x.dtype}")
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"valid: expected bool, got {valid.dtype}")
    check_numbers(options)
    for name, x in {x.dtype: (name, x) for name, x in (("values", values), ("k", k), ("q", q))}.values():
        why = kernels_unavailable(x, values, multiple=1, most=MOST)
        if why:
            raise ValueError(f"{name}: {why}")
    if valid is not None:
        there = valid[:, S:]
        w, beta = _existing(w, there), _existing(beta, there)
        log_diag = None if log_diag is None else _existing(log_diag, there)
    if reads_values(q):
        check_values(q, w=w, beta=beta, sink=sink, log_diag=log_diag)
        known = gates if gates is None or valid is None else _existing(gates, valid)
        if known is not None and not bool((known <= 0).all()):
            raise ValueError("gates: expected natural logs <= 0, got a positive entry or nan")
    refuse_gradients(*step[:10])
    return step._replace(w=w, beta=beta, log_diag=log_diag, options=options.of_op(K))


@overload
def path_extend(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, keys: Tensor, values: Tensor, *gates: Any,
    return_lse: Literal[False] = False, **options: Any,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def path_extend(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, keys: Tensor, values: Tensor, *gates: Any,
    return_lse: Literal[True], **options: Any,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
def path_extend(  # type: ignore[misc]  # the gates and options above are these
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, keys: Tensor, values: Tensor, gates: Tensor | None = None,
    valid: Tensor | None = None, scale: float | None = None, *, log_diag: Tensor | None = None,
    window: int | None = None, sink: Tensor | None = None, return_lse: bool = False, softcap: float | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Continue PaTH or PaTH-FoX from cached keys, with one new token or many: one pass over the cache per CHUNK tokens.

    Each cached key is read once, multiplied by the factors of the new tokens, used and written to the cache that is
    returned; the one that is given stays as it is. Runs on Triton, without a gradient.

    Args:
        q: [B, N, H, K], the new tokens.
        k: [B, N, G, K] their keys.
        w: [B, N, G, K] vectors of length 1 or less; [B, N, G, n, K] for n factors per token.
        beta: [B, N, G] in [0, 2], or [B, N, G, n].
        keys: [B, S, G, K] float32, S >= 1 cached keys as the last cached token left them (``carry_keys``).
        values: [B, S + N, G, V], cached and new.
        gates: [B, S + N, H] log gates of the cached and the new tokens, or None.
        log_diag: [B, N, G, K] log gates of the channels, or None; then there is a key head for each query head.
        valid: [B, S + N] bool, the tokens that exist, or None for all. The others are seen by no row, and their
            factors and gates count for nothing. A row that sees no key is 0 (its log-sum-exp that of the sink).
        scale: of the scores; default K ** -0.5.
        window: each row sees itself and the window - 1 tokens before it that exist. Keys that no later row will
            see may be left out of ``keys``, ``values``, ``gates`` and ``valid``, from the first on.
        sink: [H] logits that take part in the softmax without a value.
        return_lse: also return the log-sum-exp of each row's logits, the sink's included.
        softcap: as ``path_attention``.

    Returns:
        o [B, N, H, V] in the dtype of ``values``, the keys as the last new token leaves them [B, S + N, G, K] float32,
        and with ``return_lse`` [B, N, H] float32.

    Raises:
        ValueError: a shape, dtype, device or option is wrong, a value is (read on a CPU, on a GPU only with
            ATTNZOO_VALIDATE=1), or an input requires a gradient while gradients are recorded.

    Source: Yang et al., "PaTH Attention", 2025, section 3.4.
    """
    options = AttentionOptions(scale, window=window, softcap=softcap)
    step = _checked(PathStep(q, k, w, beta, keys, values, gates, valid, sink, log_diag), options)
    from attnzoo.kernels.path.portable.decode import path_advance_op

    S, outputs, sums = keys.shape[1], [], []
    if q.shape[1] <= CHUNK:
        o, lse, keys = path_advance_op.without_gradient(step, q)
        return (o, keys, lse) if return_lse else (o, keys)
    for start in range(0, q.shape[1], CHUNK):
        stop = min(start + CHUNK, q.shape[1])
        now, seen = slice(start, stop), slice(0, S + stop)
        part = step._replace(
            q=q[:, now], k=k[:, now], w=step.w[:, now], beta=step.beta[:, now], keys=keys, values=values[:, seen],
            gates=None if gates is None else gates[:, seen], valid=None if valid is None else valid[:, seen],
            log_diag=None if step.log_diag is None else step.log_diag[:, now],
        )  # fmt: skip
        o, lse, keys = path_advance_op.without_gradient(part, q)
        outputs.append(o)
        sums.append(lse)
    o, lse = torch.cat(outputs, 1), torch.cat(sums, 1)
    return (o, keys, lse) if return_lse else (o, keys)


def path_step(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, keys: Tensor, values: Tensor, gates: Tensor | None = None,
    valid: Tensor | None = None, scale: float | None = None, *, log_diag: Tensor | None = None,
    window: int | None = None, sink: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """``path_extend`` by one token, which changes ``keys`` where they stand; may be captured in a CUDA graph.

    Args:
        q, k, w, beta, values, gates, valid, scale, log_diag, window, sink, softcap: as ``path_extend``, with N = 1.
        keys: [B, S + 1, G, K] float32, contiguous: the cached keys and a place for the new one.

    Returns:
        o [B, 1, H, V] in the dtype of ``values``.

    Raises:
        ValueError: as ``path_extend``; or more than 64 query heads of a key head (32 with head dims above 64).
    """
    check_tensors({"keys": keys}, needed=("keys",))
    options = AttentionOptions(scale, window=window, softcap=softcap)
    step = _checked(PathStep(q, k, w, beta, keys[:, :-1], values, gates, valid, sink, log_diag), options)
    from attnzoo.kernels.path.portable.decode import advance_into, in_place

    if q.shape[1] != 1 or not keys.is_contiguous() or not in_place(q.shape[2], k.shape[2], q.shape[3], values.shape[3]):
        got = f"{tuple(q.shape)} beside {k.shape[2]} key heads, keys with strides {keys.stride()}"
        raise ValueError(f"q, keys: expected one token of few heads per key head, and contiguous keys, got {got}")
    return advance_into(keys, step)[0]


def carry_keys(
    k: Tensor, w: Tensor, beta: Tensor, valid: Tensor | None = None, *, log_diag: Tensor | None = None
) -> Tensor:
    """``(R_{j+1} ... R_T)^T k_j`` for every token j, in float32 or better: the cache after a prefill.

    Args:
        k: [B, T, G, K].
        w: [B, T, G, K] vectors of length 1 or less, or [B, T, G, n, K].
        beta: [B, T, G] in [0, 2], or [B, T, G, n].
        valid: [B, T] bool, the tokens that exist, or None for all. The factors of the others count for nothing.
        log_diag: [B, T, G, K] log gates of the channels, or None.

    Returns:
        [B, T, G, K]. Differentiable.

    Raises:
        ValueError: a shape, dtype or device is wrong, or a value is (read on a CPU, on a GPU only with
            ATTNZOO_VALIDATE=1).
    """
    given: dict[str, Tensor | None] = {"q": k, "k": k, "w": w, "beta": beta, "valid": valid, "log_diag": log_diag}
    check_tensors(given, needed=("k", "w", "beta"))
    if k.ndim != 4 or 0 in k.shape[1:]:
        raise ValueError(f"k: expected [B, T, G, K] with at least one token, head and channel, got {tuple(k.shape)}")
    n = w.shape[3:4] if w.ndim == 5 else ()
    shapes = {
        "w": (*k.shape[:3], *n, k.shape[3]),
        "beta": (*k.shape[:3], *n),
        "valid": k.shape[:2],
        "log_diag": k.shape,
    }
    for name, shape in shapes.items():
        x = given[name]
        if x is not None and tuple(x.shape) != tuple(shape):
            raise ValueError(f"{name}: expected {tuple(shape)} beside k {tuple(k.shape)}, got {tuple(x.shape)}")
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"valid: expected bool, got {valid.dtype}")
    if valid is not None:
        w, beta = _existing(w, valid), _existing(beta, valid)
        log_diag = None if log_diag is None else _existing(log_diag, valid)
    check_values(k, w=w, beta=beta, log_diag=log_diag)
    with as_given(k):
        return _carry_keys(k, w, beta, log_diag)


def _carry_keys(k: Tensor, w: Tensor, beta: Tensor, log_diag: Tensor | None) -> Tensor:
    T, G, K = k.shape[1:]
    dtype = wide_dtype(k.dtype)
    after = torch.eye(K, dtype=dtype, device=k.device).expand(k.shape[0], G, 1, K, K)  # transposed product to the right
    slabs = []
    for start in reversed(range(0, T, SLAB)):
        now = slice(start, start + SLAB)
        kh, wh, bh = (cut(heads_first(x[:, now], G, dtype), CHUNK) for x in (k, w, beta))  # [B, G, blocks, CHUNK, ...]
        decay = None if log_diag is None else cut(heads_first(log_diag[:, now], G, dtype), CHUNK)
        block = chunk_of(kh[..., :1, :] if decay is None else kh, kh, wh, bh, decay)
        products = cast(Tensor, block.total)  # of each block; then of all blocks of the slab from it on
        step = 1
        while step < products.shape[2]:
            products = torch.cat([products[:, :, step:] @ products[:, :, :-step], products[:, :, -step:]], 2)
            step *= 2
        products = after @ products
        carried = block.k @ torch.cat([products[:, :, 1:], after], 2).mT
        slabs.append(carried.flatten(2, 3)[:, :, : min(SLAB, T - start)])
        after = products[:, :, :1]
    return torch.cat(slabs[::-1], 2).transpose(1, 2).contiguous()
