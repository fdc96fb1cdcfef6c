"""The public functions of steps over pages: check a call, choose the kernels or the dense reference, and call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.values import as_given, reads_values, records
from attnzoo.kernels.common.argument_checks import check_numbers, check_shapes, check_tensors, check_values
from attnzoo.kernels.common.call_checks import Impl, kernels_unavailable, pick_implementation
from attnzoo.kernels.common.device import multiprocessors
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.decode.operands import PagedInference, PageWrite
from attnzoo.kernels.decode.plan import MOST_ROWS, DecodeCall, plan, workspace
from attnzoo.kernels.decode.state import PagedState
from attnzoo.precision import wide_dtype

from .reference import append_reference, paged_reference

Shapes = dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype | None]]
NO_OPTIONS = AttentionOptions()


def paged_attention(
    q: Tensor,
    state: PagedState,
    *,
    first_visible: Tensor | None = None,
    log_decay: Tensor | None = None,
    options: AttentionOptions = NO_OPTIONS,
    impl: Impl = "auto",
) -> Tensor:
    """Causal softmax attention of the last T tokens of each sequence over keys that lie in pages of a pool.

        o_t = sum_{j <= t} softmax_j(scale q_t . k_j + c_t - c_j) v_j,     c = running sum of log decays

    Every size is read on the device, so that a call in a CUDA graph stays right while sequences grow within the table.
    Nothing is read twice, and heads of any length share the GPU evenly. No gradient.

    Args:
        q: [B, T, H, K], 1 <= T <= 16. bfloat16, float16 or float32; head dims are multiples of 8 up to 256 in the
            Triton implementation. RoPE's queries come rotated, as its keys are.
        state: the keys; lengths count the T new tokens. A row without any key is 0.
        first_visible: [B, H, T] int32, the first key that closed gates let each row see, or None.
        log_decay: [H] constant log decay of each head (ALiBi: minus the slope) instead of gates in ``state``, or None.
        options: scale, of the logits, default K ** -0.5; window, each row sees itself and the window - 1 keys before
            it; sink, [H] logits that take part in the softmax without a value; prune, skip the first pages of a key
            head whose total weight is certified to be at most ``prune.eps`` in each of its rows (the bound ``"tail"``),
            which needs gates and ``k_norm``; logit_bound, [H] float32 known bound of |scale q . k|, of which and what
            the norms say the smaller counts.
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
    (keys, values, k_norm, exponents), (table, first, length), gates = state
    sink, logit_bound = options.sink, options.logit_bound
    others = {"first_visible": first_visible, "log_decay": log_decay, "sink": sink, "logit_bound": logit_bound}
    check_pages("q", q, state, others)
    B, T, H, K = q.shape
    G, N = table.shape[1:]
    check_tokens("q", T)
    if H % G:
        raise ValueError(f"q: expected H a multiple of the key heads G={G}, got H={H}")
    if keys.shape[2] != K or (exponents is None and q.dtype != keys.dtype):
        raise ValueError(f"keys: expected {q.dtype} [P, PAGE, K={K}] as in q, got {keys.dtype} {tuple(keys.shape)}")
    if gates is not None and log_decay is not None:
        raise ValueError("log_decay: expected None with gates of each token, got a tensor")
    shapes: Shapes = {
        "first": (first, (B, G), torch.int32), "first_visible": (first_visible, (B, H, T), torch.int32),
        "log_decay": (log_decay, (H,), torch.float32), "k_norm": (k_norm, (B, G, N), torch.float32),
        **shapes_of_options(options, H),
    }  # fmt: skip
    if gates is not None:
        read = shapes_of_gates(state, H)
        shapes |= {name: read[name] for name in ("decay", "page_sum", "n_log")}
    check_shapes(shapes)
    check_page_options(options, state, log_decay)
    check_values(q, log_decay=log_decay, sink=sink, logit_bound=logit_bound)
    check_table(table, keys.shape[1], length)
    why = triton_unavailable(q, values) or gradients_refused(q, keys, values, log_decay, sink)
    if pick_implementation("decode_attention", impl, why) == "reference":
        with as_given(q):
            return paged_reference(q, state, first_visible=first_visible, log_decay=log_decay, options=options)
    q = q if q.stride(3) == 1 else q.contiguous()
    given = PagedInference(q, state, first_visible, log_decay, sink, options.of_op(K))
    o: Tensor = _op().paged_infer_op.without_gradient(given, q).o
    return o


@torch.no_grad()
def paged_append(
    k: Tensor,
    v: Tensor,
    state: PagedState,
    *,
    log_decay: Tensor | None = None,
    count: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | None:
    """Write T new tokens of each sequence into its pages, in place, and carry on what is kept of gates and keys.

    The table must have their pages; what has none there (-1) is not written. One launch, no host synchronisation.

    Args:
        k: [B, T, G, K], v: [B, T, G, V], the new tokens, T <= 16, in the dtype of the pages, or of any where these
            have 8 bits.
        state: as before these tokens; changed, but for the table and the first pages.
        log_decay: [B, T, H] float32 log decays of the new tokens, <= 0, where the state has gates.
        count: [B] int32, how many of the T tokens each sequence gets: its last ones. None: all.
        impl: as in ``paged_attention``.

    Returns:
        With ``log_decay`` the first key that each row may see, [B, H, T] int32: ``first_visible`` of
        ``paged_attention``. The entries of tokens that a sequence does not get are 0. Without gates None.

    Raises:
        ValueError, TypeError, ImportError: as ``paged_attention``.
    """
    (keys, values, k_norm, exponents), (table, _, length), gates = state
    dtype = keys.dtype if exponents is None else None
    check_pages("k", k, state, {"log_decay": log_decay, "count": count}, needed=("k_norm",))
    (B, T, G), N, V = k.shape[:3], table.shape[2], values.shape[2]
    check_tokens("k", T)
    check_gates(state, log_decay, "log_decay")
    H = G if gates is None else G * gates.decay.shape[2]
    check_shapes({
        "k": (k, (B, T, table.shape[1], keys.shape[2]), dtype), "v": (v, (B, T, G, V), dtype),
        "k_norm": (k_norm, (B, G, N), torch.float32), "log_decay": (log_decay, (B, T, H), wide_dtype(keys.dtype)),
        **shapes_of_gates(state, H), "count": (count, (B,), torch.int32),
    }, strided=("k", "v", "log_decay"))  # fmt: skip
    check_values(k, log_decay=log_decay)
    check_table(table, keys.shape[1], length, count, T)
    if pick_implementation("decode_append", impl, triton_unavailable(k, v)) == "reference":
        return append_reference(k, v, log_decay, count, state)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    visible: Tensor | None = _op().paged_write_op.without_gradient(PageWrite(k, v, log_decay, count, state), k)[0]
    return visible


@torch.no_grad()
def paged_crop(state: PagedState, length: Tensor) -> None:
    """Take back the tokens beyond the first ``length[b]`` of each sequence, in place: what is kept of keys and gates.

    The table stays. One launch and a copy of the lengths, no host synchronisation; runs on Triton.

    Args:
        state: as after them.
        length: [B] int32 or int64, at most the lengths in ``state``.

    Raises:
        ValueError, TypeError, ImportError: as ``paged_attention``; or :func:`crop_unavailable` says why not.
    """
    (keys, _, k_norm, _), (table, _, before), gates = state
    check_tensors({"length": length, "k_norm": k_norm})
    (B, G, N), R = table.shape, 1 if gates is None else gates.decay.shape[2]
    counted = torch.int32 if length.dtype == torch.int32 else torch.int64
    check_shapes({
        "length": (length, (B,), counted), "k_norm": (k_norm, (B, G, N), torch.float32),
        **shapes_of_gates(state, G * R),
    })  # fmt: skip
    if why := crop_unavailable(state):
        raise ValueError(f"paged_crop: {why}")
    _op().crop(state, length)


def crop_unavailable(state: PagedState) -> str:
    """Why the kernel cannot take tokens of these pages back, or "" if it can."""
    keys, _, _, exponents = state.pages
    like = keys if exponents is None else keys[:0].half()
    return triton_unavailable(like, like)


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
    call = DecodeCall(T, heads // G, page, K, V, keys.dtype, carried)
    return workspace(call, plan(call, multiprocessors(device)), B * G, N)


def check_pages(
    name: str, x: Tensor, state: PagedState, others: Mapping[str, Tensor | None], needed: tuple[str, ...] = (),
    mixed: bool = False,
) -> None:  # fmt: skip
    """Types, devices and shapes that do not depend on the function: new rows x [B, T, heads, dim], ``name``, and pages.

    Args:
        mixed: values may have another dtype than keys.
    """
    (keys, values, k_norm, exponents), table, gates = state
    sums = {} if gates is None else gates._asdict()
    required = {"keys": keys, "values": values, **table._asdict(), **sums}
    check_tensors(
        {"q": x, **required, "k_norm": k_norm, "exponents": exponents, **others}, needed=("q", *required, *needed)
    )
    if x.ndim != 4:
        raise ValueError(f"{name}: expected [B, T, heads, dim], got shape {tuple(x.shape)}")
    page = keys.shape[1] if keys.ndim == 3 else 0
    if page < 16 or page & (page - 1) or 0 in keys.shape:
        raise ValueError(f"keys: expected [P, PAGE, K], PAGE a power of 2 from 16 on, got {tuple(keys.shape)}")
    entries = table.table
    if entries.ndim != 3 or entries.shape[0] != x.shape[0] or 0 in entries.shape:
        raise ValueError(f"table: expected [B={x.shape[0]}, G, N], got {tuple(entries.shape)}")
    check_shapes({
        "keys": (keys, tuple(keys.shape), None if exponents is None else torch.uint8),
        "exponents": (exponents, (*keys.shape[:2], 2), torch.int8),
        "values": (values, (*keys.shape[:2], values.shape[-1]), None if mixed else keys.dtype),
        "table": (entries, tuple(entries.shape), torch.int32), "length": (table.length, x.shape[:1], torch.int32),
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


def check_gates(state: PagedState, gate: object, name: str) -> None:
    """Raise unless the state has sums of gates exactly where the call has a gate."""
    gates = state.gates
    if (gates is None) != (gate is None):
        wanted, got = ("None without", "GateState") if gate is None else ("GateState with", "None")
        raise ValueError(f"gates: expected {wanted} {name}, got {got}")
    if gates is not None and gates.decay.shape[1] > 64:
        raise ValueError(
            f"decay: expected pages of at most 64 tokens (closed has a bit for each), got {gates.decay.shape[1]}"
        )


def shapes_of_gates(state: PagedState, H: int) -> Shapes:
    """Sums of the gates of H heads, for ``check_shapes``."""
    if state.gates is None:
        return {}
    keys, (B, G, N), gates = state.pages.keys, state.table.table.shape, state.gates
    int32, int64, float64 = torch.int32, torch.int64, torch.float64
    return {
        "decay": (gates.decay, (*keys.shape[:2], H // G), wide_dtype(keys.dtype)),
        "page_sum": (gates.page_sum, (B, H, N), float64), "total": (gates.total, (B, H), float64),
        "since": (gates.since, (B, H), int32), "n_log": (gates.n_log, (B, H, N), float64),
        "closed": (gates.closed, (B, H, N), int64),
    }  # fmt: skip


def shapes_of_options(options: AttentionOptions, H: int) -> Shapes:
    """Tensors among the options of H heads, for ``check_shapes``."""
    return {"sink": (options.sink, (H,), None), "logit_bound": (options.logit_bound, (H,), torch.float32)}


def check_page_options(options: AttentionOptions, state: PagedState, log_decay: object = None) -> None:
    """Options that are no tensors; what pruning over pages needs is there, and a bound only for it."""
    check_numbers(options)
    if options.cu_seqlens is not None:
        raise ValueError("cu_seqlens: expected None over pages (each row is a sequence), got a tensor")
    prune = options.prune
    if prune is None:
        if options.logit_bound is not None:
            raise ValueError("logit_bound: expected None without prune (nothing else reads it), got a tensor")
        return
    if not isinstance(prune, Prune):
        raise ValueError(f"prune: expected attnzoo.Prune() or None, got {type(prune).__name__}")
    if prune.bound != "tail":
        raise ValueError(f"prune: expected bound='tail' over pages, got {prune.bound!r}")
    if state.gates is None and log_decay is None:
        raise ValueError("prune: expected gates or log_decay (nothing decays without one), got neither")
    if state.pages.k_norm is None:
        raise ValueError("k_norm: expected the lengths of each page's longest key with prune, got None")


def _op() -> Any:
    """The module that needs Triton."""
    from . import op

    return op


def gradients_refused(*tensors: Tensor | None) -> str:
    """Why the kernels cannot serve a call of which a gradient would be expected, or ""."""
    if records(*tensors):
        return "a step over pages has no gradient in the kernels: expected torch.no_grad()"
    return ""


def triton_unavailable(q: Tensor, v: Tensor) -> str:
    """Why the Triton kernels cannot take these tensors, or "" if they can."""
    return kernels_unavailable(q, v, multiple=8, most=256)
