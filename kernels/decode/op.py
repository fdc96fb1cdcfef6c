"""Attention over pages and the append of new tokens as two custom ops, and whole steps, which no compiler sees."""

from __future__ import annotations

from torch import Tensor

from attnzoo.kernels.common.device import machine, multiprocessors, on_device_of
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.plans import announce
from attnzoo.kernels.decode.operands import PagedInference, PagedOutput, PagesWritten, PageWrite
from attnzoo.kernels.decode.parts import TokenParts
from attnzoo.kernels.decode.plan import DecodeCall, DecodePlan, plan
from attnzoo.kernels.decode.portable.append import append_tokens
from attnzoo.kernels.decode.portable.attention import paged_forward
from attnzoo.kernels.decode.portable.crop import crop_pages
from attnzoo.kernels.decode.portable.page_shares import FAR, Shares
from attnzoo.kernels.decode.portable.path_pages import CarriedPages, walk_and_carry
from attnzoo.kernels.decode.portable.tokens import write_tokens
from attnzoo.kernels.decode.state import GateState, PagedState


def _plan(q: Tensor, state: PagedState, carried: int = 0) -> DecodePlan:
    """The plan of a step, announced."""
    (keys, values, _, exponents), G = state.pages, state.table.table.shape[1]
    dtype = keys.dtype if exponents is None else q.dtype  # that tiles of 8 bits are held in
    call = DecodeCall(q.shape[1], q.shape[2] // G, keys.shape[1], q.shape[3], values.shape[2], dtype, carried)
    chosen = plan(call, multiprocessors(q.device))
    announce("decode", chosen, machine(q.device))
    return chosen


def _infer(x: PagedInference) -> PagedOutput:
    chosen = _plan(x.q, x.state)
    with on_device_of(x.q):
        return PagedOutput(paged_forward(x, chosen))


def _infer_fake(x: PagedInference) -> PagedOutput:
    return PagedOutput(x.q.new_empty((*x.q.shape[:3], x.state.pages.values.shape[2])))


def _write(x: PageWrite) -> PagesWritten:
    with on_device_of(x.k):
        return PagesWritten(append_tokens(x))


def _write_fake(x: PageWrite) -> PagesWritten:
    if x.log_decay is None:
        return PagesWritten(None)
    B, T, H = x.log_decay.shape
    return PagesWritten(x.state.table.length.new_empty((B, H, T)))


paged_infer_op = NamedOp("attnzoo::paged_infer", PagedInference, PagedOutput, _infer, _infer_fake)
CHANGED = ("keys", "values", "length", "k_norm", "exponents", *GateState._fields)
paged_write_op = NamedOp("attnzoo::paged_write", PageWrite, PagesWritten, _write, _write_fake, CHANGED)


def page_step(
    tokens: tuple[Tensor, Tensor, Tensor], state: PagedState, past: Tensor, count: Tensor, parts: TokenParts,
    sink: Tensor | None, options: OpOptions,
) -> Tensor:  # fmt: skip
    """``step.paged_step`` in kernels; tokens: q, k and v."""
    q, chosen = tokens[0], _plan(tokens[0], state)
    with on_device_of(q):
        shares = Shares.empty(state.table.first, chosen.extra)
        rows, visible = write_tokens(tokens, state, past, count, parts, shares, options.window or FAR)
        return paged_forward(
            PagedInference(rows, state, visible, None, sink, options), chosen, shares=shares, finish=parts.finish
        )


def crop(state: PagedState, length: Tensor) -> None:
    """``api.paged_crop`` in kernels."""
    with on_device_of(length):
        crop_pages(state, length)


def path_page_step(
    q: Tensor, v: Tensor, carried: CarriedPages, sink: Tensor | None, options: OpOptions, carry: bool
) -> Tensor:
    """``path_pages.paged_path_step`` in kernels."""
    state, tokens = carried.state, carried.tokens
    chosen = _plan(q, state, carried.group)
    with on_device_of(q):
        visible = append_tokens(PageWrite(tokens.k, v, tokens.log_decay, tokens.counts, state))
        walked = walk_and_carry(carried, q, options.window or FAR, chosen.BT, carry)
        return paged_forward(PagedInference(q, state, visible, None, sink, options), chosen, walked)


def path_carry(carried: CarriedPages) -> None:
    """Carry the open pages of a step to its token, in place: ``path_pages.paged_path_carry`` by kernels."""
    with on_device_of(carried.state.table.table):
        walk_and_carry(carried, None, FAR, 16)


__all__ = ["crop", "page_step", "paged_infer_op", "paged_write_op", "path_carry", "path_page_step"]
