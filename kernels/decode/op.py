"""Attention over pages and the append of new tokens as two custom ops, with what compilers must know of them."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.kernels.common.device import machine, multiprocessors, on_device_of
from attnzoo.kernels.common.parts import Finish, Norm
from attnzoo.kernels.common.plans import announce
from attnzoo.kernels.decode.parts import Forget, Shift
from attnzoo.kernels.decode.plan import Call, plan
from attnzoo.kernels.decode.portable.append import append
from attnzoo.kernels.decode.portable.attention import paged_forward
from attnzoo.kernels.decode.portable.page_shares import FAR, Shares
from attnzoo.kernels.decode.portable.path_pages import Carried, walk_and_carry
from attnzoo.kernels.decode.portable.tokens import write_tokens


def paged_infer(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: Tensor, length: Tensor, decay: Tensor | None,
    page_sum: Tensor | None, since: Tensor | None, log_decay: Tensor | None, sink: Tensor | None,
    k_norm: Tensor | None, n_log: Tensor | None, logit_bound: Tensor | None, scale: float, window: int, log_eps: float,
) -> Tensor:  # fmt: skip
    """What ``api.paged_attention`` returns; window: 0 for none; k_norm: None without pruning."""
    where = machine(q.device)
    call = Call(q.shape[1], q.shape[2] // table.shape[1], k.shape[1], q.shape[3], v.shape[2], q.dtype)
    chosen = plan(call, multiprocessors(q.device))
    announce("decode", chosen, where)
    with on_device_of(q):
        return paged_forward(
            q, k, v, table, first, length, decay, page_sum, since, log_decay, sink, k_norm, n_log, logit_bound, scale,
            window, log_eps, chosen,
        )  # fmt: skip


paged_infer_op = torch.library.custom_op("attnzoo::paged_infer", paged_infer, mutates_args=())


@paged_infer_op.register_fake
def _infer_fake(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, first: Tensor, length: Tensor, decay: Tensor | None,
    page_sum: Tensor | None, since: Tensor | None, log_decay: Tensor | None, sink: Tensor | None,
    k_norm: Tensor | None, n_log: Tensor | None, logit_bound: Tensor | None, scale: float, window: int, log_eps: float,
) -> Tensor:  # fmt: skip
    return q.new_empty((*q.shape[:3], v.shape[2]))


def paged_write(
    k: Tensor, v: Tensor, log_decay: Tensor | None, count: Tensor | None, keys: Tensor, values: Tensor, table: Tensor,
    length: Tensor, k_norm: Tensor, decay: Tensor | None, page_sum: Tensor | None, total: Tensor | None,
    since: Tensor | None, n_log: Tensor | None, closed: Tensor | None,
) -> Tensor:  # fmt: skip
    """What ``api.paged_append`` does; seen is empty without gates."""
    with on_device_of(k):
        sums = decay, page_sum, total, since, n_log, closed
        return append(k, v, log_decay, count, keys, values, table, length, k_norm, *sums)


CHANGED = ("keys", "values", "length", "k_norm", "decay", "page_sum", "total", "since", "n_log", "closed")
paged_write_op = torch.library.custom_op("attnzoo::paged_write", paged_write, mutates_args=CHANGED)


@paged_write_op.register_fake
def _write_fake(
    k: Tensor, v: Tensor, log_decay: Tensor | None, count: Tensor | None, keys: Tensor, values: Tensor, table: Tensor,
    length: Tensor, k_norm: Tensor, decay: Tensor | None, page_sum: Tensor | None, total: Tensor | None,
    since: Tensor | None, n_log: Tensor | None, closed: Tensor | None,
) -> Tensor:  # fmt: skip
    B, T, H = k.shape[:3] if log_decay is None else log_decay.shape
    return length.new_empty((B, H, T) if log_decay is not None else (0,))


def step(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | Forget | None, shift: Shift | None, norm: Norm | None, past: Tensor,
    count: Tensor, first: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: Tensor, k_norm: Tensor,
    decay: Tensor | None, page_sum: Tensor | None, total: Tensor | None, since: Tensor | None, n_log: Tensor | None,
    closed: Tensor | None, sink: Tensor | None, logit_bound: Tensor | None, scale: float, window: int,
    log_eps: float | None, finish: Finish,
) -> Tensor:  # fmt: skip
    """What ``step.paged_step`` does; window: 0 for none, log_eps: None without pruning."""
    where, G = machine(q.device), table.shape[1]
    call = Call(q.shape[1], q.shape[2] // G, keys.shape[1], q.shape[3], v.shape[3], keys.dtype)
    chosen = plan(call, multiprocessors(q.device))
    announce("decode", chosen, where)
    with on_device_of(q):
        shares = Shares.empty(first, chosen.extra)
        pool = {
            "p_keys": keys, "p_values": values, "p_table": table, "p_length": length, "p_norm": k_norm,
            "p_decay": decay, "p_sum": page_sum, "p_total": total, "p_since": since, "p_tails": n_log,
            "p_closed": closed,
        }  # fmt: skip
        pool = {name: k_norm if x is None else x for name, x in pool.items()}
        rows, seen = write_tokens(q, k, v, gate, shift, norm, past, count, pool, shares, window or FAR)
        norms, tails = (None, None) if log_eps is None else (k_norm, n_log)
        return paged_forward(
            rows, keys, values, table, first, length, decay, page_sum, None if gate is None else seen, None, sink,
            norms, tails, logit_bound, scale, window, log_eps or 0.0, chosen, shares=shares, finish=finish,
        )  # fmt: skip


def path_step(
    q: Tensor, v: Tensor, carried: Carried, log_decay: Tensor | None, values: Tensor, table: Tensor, first: Tensor,
    length: Tensor, k_norm: Tensor, decay: Tensor | None, page_sum: Tensor | None, total: Tensor | None,
    since: Tensor | None, n_log: Tensor | None, closed: Tensor | None, sink: Tensor | None, logit_bound: Tensor | None,
    scale: float, window: int, log_eps: float | None, carry: bool,
) -> Tensor:  # fmt: skip
    """What ``carried.paged_path_step`` does; log_eps: None without pruning."""
    where, keys, G = machine(q.device), carried.keys, table.shape[1]
    call = Call(q.shape[1], q.shape[2] // G, keys.shape[1], q.shape[3], v.shape[3], keys.dtype, carried.group)
    chosen = plan(call, multiprocessors(q.device))
    announce("decode", chosen, where)
    with on_device_of(q):
        sums = decay, page_sum, total, since, n_log, closed
        seen = append(carried.k, v, log_decay, carried.count, keys, values, table, length, k_norm, *sums)
        walked = walk_and_carry(carried, q, table, first, length, k_norm, window or FAR, chosen.BT, carry)
        norms, tails = (None, None) if log_eps is None else (k_norm, n_log)
        return paged_forward(
            q, keys, values, table, first, length, decay, page_sum, None if log_decay is None else seen, None, sink,
            norms, tails, logit_bound, scale, window, log_eps or 0.0, chosen, walked,
        )  # fmt: skip


def path_carry(carried: Carried, table: Tensor, first: Tensor, length: Tensor, k_norm: Tensor) -> None:
    """What ``carried.paged_path_carry`` does."""
    with on_device_of(table):
        walk_and_carry(carried, None, table, first, length, k_norm, FAR, 16)
