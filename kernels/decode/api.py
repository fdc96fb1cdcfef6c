"""The public functions of steps over pages: check a call, choose the kernels or the dense reference, and call them."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.validation import check_scale
from attnzoo.algebra.values import as_given, reads_values, records
from attnzoo.kernels.common.arguments import check_shapes, check_tensors, check_values, check_window
from attnzoo.kernels.common.checks import Impl, kernels_unavailable, pick_implementation
from attnzoo.kernels.common.device import multiprocessors
from attnzoo.kernels.common.named_op import traced
from attnzoo.kernels.decode.plan import MOST_ROWS, Call, plan, workspace

from .reference import append_reference, paged_reference


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    first: Tensor,
    length: Tensor,
    *,
    decay: Tensor | None = None,
    page_sum: Tensor | None = None,
    since: Tensor | None = None,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    prune: Prune | None = None,
    k_norm: Tensor | None = None,
    n_log: Tensor | None = None,
    logit_bound: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Causal softmax attention of the last T tokens of each sequence over keys that lie in pages of a pool.

        o_t = sum_{j <= t} softmax_j(scale q_t . k_j + c_t - c_j) v_j,     c = running sum of log decays

    Key j of a sequence is in its page ``n = j // PAGE``: with key head g it is ``k[table[b, g, n], j % PAGE]``. Every
    size is read on the device, so that a call in a CUDA graph stays right while sequences grow within the table.
    Nothing is read twice, and heads of any length share the GPU evenly. No gradient.

    Args:
        q: [B, T, H, K], 1 <= T <= 16. bfloat16, float16 or float32; head dims are multiples of 8 up to 256 in the
            Triton implementation. RoPE's queries come rotated, as its keys are.
        k: [P, PAGE, K], v: [P, PAGE, V], contiguous; PAGE is a power of 2 from 16 on.
        table: [B, G, N] int32, the page of each PAGE tokens, -1 where there is none; G divides H.
        first: [B, G] int32, the first page that still counts.
        length: [B] int32, the tokens of each sequence, the T new ones among them. A row without any key is 0.
        decay: [P, PAGE, R] float32, sum of the log decays within the page, up to and with each token, for the R = H / G
            query heads of the page's group; with it
        page_sum: [B, H, N] float64, the sum of those of all tokens before the page.
        since: [B, H, T] int32, the first key that each row may see (closed gates), or None.
        log_decay: [H] constant log decay of each head (ALiBi: minus the slope) instead of ``decay``, or None.
        scale: of the logits; default K ** -0.5.
        window: each row sees itself and the window - 1 keys before it.
        sink: [H] logits that take part in the softmax without a value.
        prune: skip the first pages of a key head whose total weight is certified to be at most ``prune.eps`` in each of
            its rows (the bound ``"tail"``). Needs gates, and of what ``paged_append`` keeps (nothing else reads these):
        k_norm: [B, G, N] float32, at least the length of each page's longest key; and with ``decay``
        n_log: [B, H, N] float64, ``log sum_l exp(-c_l)`` over the tokens up to the end of each page.
        logit_bound: [H] float32 known bound of |scale q . k|; the smaller of it and what the norms say counts.
        impl: "triton", "reference" (dense PyTorch), or "auto": Triton on CUDA tensors it supports.

    Returns:
        [B, T, H, V] in q's dtype.

    Raises:
        ValueError: a shape, dtype, device or option is wrong; the message says what was expected.
        TypeError: something that is no tensor, or no number.
        ImportError: ``impl="triton"`` without Triton.

    Source: split keys as in Dao et al., "Flash-Decoding", 2023; pages as in Kwon et al., "PagedAttention", 2023; equal
    shares as in Osama et al., "Stream-K", 2023.
    """
    optional = {"decay": decay, "page_sum": page_sum, "since": since, "log_decay": log_decay, "sink": sink}
    optional |= {"k_norm": k_norm, "n_log": n_log, "logit_bound": logit_bound}
    check_pages(q, {"k": k, "v": v, "table": table, "length": length}, {"first": first, **optional}, "first")
    B, T, H, K = q.shape
    G, N = table.shape[1:]
    check_tokens("q", T)
    if H % G:
        raise ValueError(f"q: expected H a multiple of the key heads G={G}, got H={H}")
    if k.shape[2] != K or q.dtype != k.dtype:
        raise ValueError(f"k: expected {q.dtype} [P, PAGE, K={K}] as in q, got {k.dtype} {tuple(k.shape)}")
    if (decay is None) != (page_sum is None) or (decay is not None and log_decay is not None):
        raise ValueError("decay: expected decay and page_sum, or log_decay, or none of the three")
    int32, float32 = torch.int32, torch.float32
    check_shapes({
        "first": (first, (B, G), int32), "since": (since, (B, H, T), int32), "log_decay": (log_decay, (H,), float32),
        "decay": (decay, (*k.shape[:2], H // G), of_gates(k)), "page_sum": (page_sum, (B, H, N), torch.float64),
        "sink": (sink, (H,), None), "k_norm": (k_norm, (B, G, N), float32), "n_log": (n_log, (B, H, N), torch.float64),
        "logit_bound": (logit_bound, (H,), float32),
    })  # fmt: skip
    check_prune(prune, decay, log_decay, k_norm, n_log, logit_bound)
    if prune is None:
        k_norm = n_log = None
    check_window(window)
    check_scale(scale)
    check_values(q, log_decay=log_decay, sink=sink, logit_bound=logit_bound)
    check_table(table, k.shape[1], length)
    why = triton_unavailable(q, v) or refuse_gradients(q, k, v, decay, log_decay, sink)
    if pick_implementation("decode_attention", impl, why) == "reference":
        with as_given(q):
            return paged_reference(
                q, k, v, table, first, length, decay=decay, page_sum=page_sum, since=since, log_decay=log_decay,
                scale=scale, window=window, sink=sink, prune=prune, k_norm=k_norm, n_log=n_log, logit_bound=logit_bound,
            )  # fmt: skip
    infer = _op().paged_infer_op if traced(q) else _op().paged_infer
    q = q if q.stride(3) == 1 else q.contiguous()
    scale = K**-0.5 if scale is None else float(scale)
    o: Tensor = infer(
        q, k, v, table, first, length, decay, page_sum, since, log_decay, sink, k_norm, n_log, logit_bound, scale,
        window or 0, 0.0 if prune is None else prune.log_eps,
    )  # fmt: skip
    return o


@torch.no_grad()
def paged_append(
    k: Tensor,
    v: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    length: Tensor,
    k_norm: Tensor,
    log_decay: Tensor | None = None,
    decay: Tensor | None = None,
    page_sum: Tensor | None = None,
    total: Tensor | None = None,
    since: Tensor | None = None,
    n_log: Tensor | None = None,
    closed: Tensor | None = None,
    count: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | None:
    """Write T new tokens of each sequence into its pages, in place, and carry on what is kept of gates and keys.

    The table must have their pages; what has none there (-1) is not written. One launch, no host synchronisation.

    Args:
        k: [B, T, G, K], v: [B, T, G, V], the new tokens, T <= 16.
        keys: [P, PAGE, K], values: [P, PAGE, V], the pool, contiguous; changed.
        table: [B, G, N] int32, the page of each PAGE tokens.
        length: [B] int32, tokens so far; changed.
        k_norm: [B, G, N] float32, at least the length of each page's longest key; changed.
        log_decay: [B, T, H] float32 log decays of the new tokens, <= 0, or None. With them, all of the following, which
            change; a closed gate (at most -1e4) adds nothing to the sums:
        decay: [P, PAGE, R] float32 and page_sum: [B, H, N] float64, as ``paged_attention`` reads them.
        total: [B, H] float64, the sum of all log decays.
        since: [B, H] int32, the last token with a closed gate, 0 if there is none.
        n_log: [B, H, N] float64, ``log sum_l exp(-c_l)`` over the tokens up to the end of each page.
        closed: [B, H, N] int64, in bit i whether the page's token i has a closed gate; pages have at most 64 tokens.
        count: [B] int32, how many of the T tokens each sequence gets: its last ones. None: all.
        impl: as in ``paged_attention``.

    Returns:
        With ``log_decay`` the first key that each row may see, [B, H, T] int32: ``since`` of ``paged_attention``. The
        entries of tokens that a sequence does not get are 0. Without gates None.

    Raises:
        ValueError, TypeError, ImportError: as ``paged_attention``.
    """
    sums = {"decay": decay, "page_sum": page_sum, "total": total, "since": since, "n_log": n_log, "closed": closed}
    pool = {"k": keys, "v": values, "table": table, "length": length}
    check_pages(k, pool, {"k_norm": k_norm, "log_decay": log_decay, "count": count, **sums}, "k_norm", "keys", "values")
    (B, T, G), N, V = k.shape[:3], table.shape[2], values.shape[2]
    check_tokens("k", T)
    check_sums(sums, log_decay, "log_decay")
    H = G if decay is None else G * decay.shape[2]
    check_shapes({
        "k": (k, (B, T, table.shape[1], keys.shape[2]), keys.dtype), "v": (v, (B, T, G, V), keys.dtype),
        "k_norm": (k_norm, (B, G, N), torch.float32), "log_decay": (log_decay, (B, T, H), of_gates(keys)),
        **shapes_of_sums(sums, (B, H, N), (*keys.shape[:2], H // G), of_gates(keys)),
        "count": (count, (B,), torch.int32),
    }, strided=("k", "v", "log_decay"))  # fmt: skip
    check_values(k, log_decay=log_decay)
    check_table(table, keys.shape[1], length, count, T)
    given = (k, v, log_decay, count, keys, values, table, length, k_norm, decay, page_sum, total, since, n_log, closed)
    if pick_implementation("decode_append", impl, triton_unavailable(k, v)) == "reference":
        seen = append_reference(*given)
    else:
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
        write = _op().paged_write_op if traced(k) else _op().paged_write
        seen = write(k, v, *given[2:])
    return None if log_decay is None else seen


def paged_workspace(
    keys: Tensor, values: Tensor, table: Tensor, heads: int, device: torch.device, T: int = 1, carried: int = 0
) -> int:
    """Bytes that a step takes besides its output, at the most.

    Args:
        keys, values, table: as ``paged_append`` takes them, on any device.
        heads: H.
        device: where the step runs; a GPU's kernels split the keys, and the reference elsewhere copies them.
        T: tokens of the step.
        carried: pages of a group of ``paged_path_step``, or 0 for other steps.
    """
    (B, G, N), (_, page, K), V = table.shape, keys.shape, values.shape[2]
    if device.type != "cuda":
        wide = max(4, keys.dtype.itemsize)
        return B * heads * N * page * (K + V + T) * wide
    call = Call(T, heads // G, page, K, V, keys.dtype, carried)
    return workspace(call, plan(call, multiprocessors(device)), B * G, N)


def check_pages(
    x: Tensor, pool: Mapping[str, Tensor], others: Mapping[str, Tensor | None], needed: str, k: str = "k", v: str = "v",
    mixed: bool = False,
) -> None:  # fmt: skip
    """The tensors that all functions have: new rows x [B, T, heads, K], and the pool under their names for it.

    mixed: values may have another dtype than keys.
    """
    named = {{"k": k, "v": v}.get(name, name): y for name, y in pool.items()}
    check_tensors({"q": x, **named, **others}, needed=("q", *named, needed))
    if x.ndim != 4:
        raise ValueError(f"{'q' if k == 'k' else 'k'}: expected [B, T, heads, dim], got shape {tuple(x.shape)}")
    keys, values, table = pool["k"], pool["v"], pool["table"]
    page = keys.shape[1] if keys.ndim == 3 else 0
    if page < 16 or page & (page - 1) or 0 in keys.shape:
        raise ValueError(f"{k}: expected [P, PAGE, K], PAGE a power of 2 from 16 on, got {tuple(keys.shape)}")
    if table.ndim != 3 or table.shape[0] != x.shape[0] or 0 in table.shape:
        raise ValueError(f"table: expected [B={x.shape[0]}, G, N], got {tuple(table.shape)}")
    check_shapes({
        k: (keys, tuple(keys.shape), None),
        v: (values, (*keys.shape[:2], values.shape[-1]), None if mixed else keys.dtype),
        "table": (table, tuple(table.shape), torch.int32), "length": (pool["length"], x.shape[:1], torch.int32),
    })  # fmt: skip


def check_table(table: Tensor, page: int, length: Tensor, count: Tensor | None = None, T: int = 0) -> None:
    """The table has an entry for every token, the T new ones of a step too; read as other values are, but in no capture
    of a graph, which cannot wait for a GPU."""
    if reads_values(length) and not (length.is_cuda and torch.cuda.is_current_stream_capturing()):
        most = int((length + (T if count is None else count.clamp(max=T))).max())
        if most > table.shape[2] * page:
            got = f"{table.shape[2]} entries for pages of {page} tokens"
            raise ValueError(f"table: expected an entry for each page of {most} tokens, got {got}")


def check_tokens(name: str, T: int) -> None:
    """A step has so many."""
    if not 1 <= T <= MOST_ROWS:
        raise ValueError(f"{name}: expected 1 to {MOST_ROWS} tokens, got T={T}")


def check_sums(sums: Mapping[str, Tensor | None], gate: object, name: str) -> None:
    """What is kept of gates is there where there is a gate, and only there."""
    for each, x in sums.items():
        if (x is None) != (gate is None):
            raise ValueError(f"{each}: expected {'None without' if gate is None else 'a tensor with'} {name}")
    decay = sums["decay"]
    if decay is not None and decay.shape[1] > 64:
        raise ValueError(
            f"decay: expected pages of at most 64 tokens (closed has a bit for each), got {decay.shape[1]}"
        )


def shapes_of_sums(
    sums: Mapping[str, Tensor | None], shape: tuple[int, int, int], page: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype]]:
    """What is kept of gates, for `check_shapes`: ``shape`` is [B, H, N], ``page`` and ``dtype`` are those of decay."""
    int32, int64, float64 = torch.int32, torch.int64, torch.float64
    of = {
        "decay": (page, dtype), "page_sum": (shape, float64), "total": (shape[:2], float64),
        "since": (shape[:2], int32), "n_log": (shape, float64), "closed": (shape, int64),
    }  # fmt: skip
    return {name: (x, *of[name]) for name, x in sums.items()}


def check_prune(
    prune: Prune | None, decay: Tensor | None, log_decay: Tensor | None, k_norm: Tensor | None, n_log: Tensor | None,
    logit_bound: Tensor | None,
) -> None:  # fmt: skip
    """What pruning over pages needs is there, and a bound only for it."""
    if prune is None:
        if logit_bound is not None:
            raise ValueError("logit_bound: expected None without prune (nothing else reads it), got a tensor")
        return
    if not isinstance(prune, Prune):
        raise ValueError(f"prune: expected attnzoo.Prune() or None, got {type(prune).__name__}")
    if prune.bound != "tail":
        raise ValueError(f"prune: expected bound='tail' over pages, got {prune.bound!r}")
    if decay is None and log_decay is None:
        raise ValueError("prune: expected decay or log_decay (nothing decays without one), got neither")
    if k_norm is None:
        raise ValueError("k_norm: expected the lengths of each page's longest key with prune, got None")
    if decay is not None and n_log is None:
        raise ValueError("n_log: expected the sums that prune needs beside decay, got None")


def of_gates(k: Tensor) -> torch.dtype:
    """Dtype of log decays and of their sums within a page: float64 for float64 keys, which the reference takes."""
    return torch.float64 if k.dtype == torch.float64 else torch.float32


def _op() -> ModuleType:
    """The module that needs Triton."""
    from . import op

    return op


def refuse_gradients(*tensors: Tensor | None) -> str:
    """Why the kernels cannot serve a call of which a gradient would be expected, or ""."""
    if records(*tensors):
        return "a step over pages has no gradient in the kernels: expected torch.no_grad()"
    return ""


def triton_unavailable(q: Tensor, v: Tensor) -> str:
    """Why the Triton kernels cannot take these tensors, or "" if they can."""
    return kernels_unavailable(q, v, multiple=8, most=256)
