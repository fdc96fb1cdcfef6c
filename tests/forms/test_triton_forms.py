"""The kernels as forms: their options, padding and caches, against the oracle and the reference forms."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_pool import KernelPool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo import get, list_variants, oracle
from attnzoo.errors import UnavailableError
from attnzoo.forms.backends.fox_path import on_packed
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.caches.pages.eviction import Eviction
from attnzoo.forms.caches.pages.inplace import PagedMemory
from attnzoo.forms.caches.path_pages import pool as path_pages
from attnzoo.forms.protocol import Call
from attnzoo.kernels.fox import GateSums
from attnzoo.samples import random_inputs
from attnzoo.testing import Case, Inputs, in_float64, relative_error, take

TRITON = [name for name in list_variants("softmax") if "triton" in get(name).forms]
CLOSE = 2e-5  # float32


def inputs_of(name: str, B: int = 1, T: int = 26) -> Inputs:
    return Case(name, B=B, T=T, H=2, G=1, K=16, V=16, regime="open", shared_angle=True).inputs(torch.float32)


def piece(inputs: Inputs, start: int, stop: int) -> Inputs:
    return take(inputs, tokens=slice(start, stop))


def stepped(name: str, inputs: Inputs, cuts: list[int], valid: Tensor | None, **options: Any) -> tuple[Tensor, Any]:
    """Outputs beside log-sum-exps over all pieces, and the last state, by the kernels."""
    state, outputs = None, []
    for start, stop in itertools.pairwise(cuts):
        given = options if valid is None else {**options, "valid": valid[:, start:stop]}
        call = Call(*piece(inputs, start, stop), state, True, given)
        assert get(name).refuses("triton", call) == ""
        (o, lse), state = get(name).extend(*piece(inputs, start, stop), state, form="triton", return_lse=True, **given)
        outputs.append(torch.cat([o, lse[..., None]], -1))
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("name", TRITON)
@torch.no_grad()
def test_kernels_take_windows_and_sinks_and_give_the_lse(name: str) -> None:
    inputs, sink = inputs_of(name), torch.linspace(-1, 1, 2)
    options: dict[str, Any] = {"window": 9, "sink": sink, "softcap": 1.2, "return_lse": True}
    expected = oracle.softmax(*in_float64(inputs), **options)
    got = get(name).forms["triton"](*inputs, **options)
    assert max(map(relative_error, got, expected)) <= CLOSE
    steps, _ = stepped(name, inputs, [0, 22, 23, 26], None, window=9, sink=sink, softcap=1.2)
    assert relative_error(steps[..., :-1], expected[0]) <= CLOSE
    assert relative_error(steps[..., -1], expected[1]) <= CLOSE


@pytest.mark.parametrize("name", TRITON)
@torch.no_grad()
def test_cached_steps_over_padding_stay_on_the_kernels(name: str) -> None:
    """Left, right and no padding in one prefill, and rows that rest in a step: as the reference does it."""
    inputs, cuts, sink = inputs_of(name, B=3, T=22), [0, 18, 19, 22], torch.linspace(-1, 1, 2)
    valid = torch.ones(3, 22, dtype=torch.bool)
    valid[0, :11], valid[1, 14:18], valid[2, 18] = False, False, False
    got, state = stepped(name, inputs, cuts, valid, sink=sink)
    (o, lse), _ = get(name).extend(*in_float64(inputs), valid=valid, sink=sink.double(), return_lse=True)
    assert relative_error(got[valid], torch.cat([o, lse[..., None]], -1)[valid]) <= CLOSE
    assert len(state) == 22


@pytest.mark.parametrize("name", ["wall", "gated_wall"])
@torch.no_grad()
def test_pieces_of_any_length_go_on_from_a_cache_of_wall(name: str) -> None:
    """Grouped heads, padding, a sink, closed gates, keys that nothing is left of; with a window, few tokens."""
    inputs, sink = inputs_of(name, B=2, T=48), torch.linspace(-1, 1, 2)
    inputs[3].log_diag[1, 30, 0, :3] = -torch.inf  # type: ignore[index]
    if inputs[3].log_decay is not None:
        inputs[3].log_decay[1, 30] = -torch.inf
    valid = torch.ones(2, 48, dtype=torch.bool)
    valid[0, :22], valid[1, 40:44] = False, False
    for there in (None, valid):
        got, state = stepped(name, inputs, [0, 20, 23, 24, 48], there, sink=sink, softcap=1.2)
        options: dict[str, Any] = {"sink": sink.double(), "softcap": 1.2, "return_lse": True}
        expected, last = get(name).extend(*in_float64(inputs), valid=there, **options)
        wanted, seen = torch.cat([expected[0], expected[1][..., None]], -1), valid | (there is None)
        assert got.isfinite().all()
        assert relative_error(got[seen], wanted[seen]) <= CLOSE
        assert relative_error(state.k[seen], last.k[seen]) <= CLOSE
    call = Call(*piece(inputs, 24, 48), state, True, {"window": 9})
    refused = get(name).refuses("triton", call)
    assert refused == "with a window a cache of Wall takes at most 16 new tokens, got 24"


@torch.no_grad()
def test_path_with_decays_goes_on_where_another_form_ended() -> None:
    """Over padding, in a chunk and in single tokens; grouped heads, whose keys each query head carries by itself."""
    name = "gated_path_wall"
    inputs, variant, state = inputs_of(name, B=2, T=24), get(name), None
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[0, :3], valid[1, 19] = False, False
    expected, last = variant.extend(*in_float64(inputs), valid=valid)
    pieces = ((0, 12, "triton"), (12, 13, "reference"), (13, 14, "triton"), (14, 23, "triton"), (23, 24, "triton"))
    for start, stop, form in pieces:
        now, there = piece(inputs, start, stop), valid[:, start:stop]
        assert variant.refuses(form, Call(*now, state, True, {"valid": there})) == ""
        o, state = variant.extend(*now, state, form=form, valid=there)
        assert relative_error(o[there], expected[:, start:stop][there]) <= CLOSE
    assert state is not None
    assert relative_error(state.k, last.k) <= CLOSE
    assert state.v.shape == inputs[2].shape


@torch.no_grad()
def test_path_with_decays_steps_in_place() -> None:
    """Rows that joined after different numbers of tokens."""
    q, k, v, gate = random_inputs("path_wall", 2, 14, 2, 2, 16, 16, regime="mixed", dtype=torch.float32)
    variant, rows, memory, steps = get("path_wall"), BatchRows.idle(2), None, [7, 11]
    expected = oracle.softmax(*in_float64((q, k, v, gate)))
    for row, t in enumerate(steps):
        one = slice(row, row + 1)
        part = gate.map(lambda x, one=one: x[one]).slice(0, t)  # type: ignore[misc]
        _, state = variant.extend(q[one, :t], k[one, :t], v[one, :t], part, form="triton")
        memory = memory or variant.form_set.kernels["triton"].in_place(state, rows, 20, "cpu")
        memory.admit(row, state, 20)
        rows.begin(row, t)
    for n in range(2):
        at = torch.arange(2), torch.tensor(steps) + n
        now = gate.map(lambda x, at=at: x[at][:, None])  # type: ignore[misc]
        o = memory.step(Call(*(x[at][:, None] for x in (q, k, v)), now, None, True), None)
        assert relative_error(o[:, 0], expected[at]) <= CLOSE
        rows.length += 1


class Waits(TorchDispatchMode):
    """Counts operations whose result's shape or value Python must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, by_mask = torch.ops.aten, False
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            by_mask = any(x is not None and x.dtype == torch.bool for x in args[1])
        self.count += by_mask or func.overloadpacket in (aten.nonzero, aten._local_scalar_dense)
        return func(*args, **kwargs or {})


def test_packing_waits_for_a_gpu_once() -> None:
    rows = [torch.randn(3, 5, 2, 4, requires_grad=True) for _ in range(4)]
    valid = torch.tensor([[True] * 5, [False, True, True, False, True], [False] * 4 + [True]])

    def attend(a: Tensor, b: Tensor, c: Tensor, d: Tensor, borders: Tensor) -> tuple[Tensor, Tensor]:
        return a * b, c + d

    with Waits() as waits:
        product, total = on_packed(attend, valid, *rows)
        (product.square() + total).sum().backward()
    assert waits.count == 1
    mask = valid[..., None, None]
    assert torch.equal(product, rows[0] * rows[1] * mask)
    assert torch.equal(total, (rows[2] + rows[3]) * mask)
    assert torch.equal(rows[2].grad, mask.expand(3, 5, 2, 4).float())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["nope", "path"])
def test_a_batch_of_padding_alone_gives_zeros_and_no_gradient(name: str) -> None:
    q, k, v, gate = inputs_of(name, B=2, T=3)
    q = q.fill_(torch.nan).requires_grad_()
    valid = torch.zeros(2, 3, dtype=torch.bool)
    o, lse = get(name).forms["triton"](q, k, v, gate, valid=valid, return_lse=True)
    (o.sum() + lse.sum()).backward()
    assert o.shape == v.expand(-1, -1, 2, -1).shape
    assert not any(x.any() for x in (o, lse, q.grad))


@pytest.mark.parametrize("name", [name for name in list_variants() if "triton" in get(name).forms])
def test_no_kernel_serves_a_batch_of_no_sequence(name: str) -> None:
    inputs = random_inputs(name, 0, 1, 2, 1, 16, 16, dtype=torch.float32)
    assert "at least one sequence" in get(name).refuses("triton", Call(*inputs, None, True))
    with pytest.raises((ValueError, UnavailableError), match="at least one sequence"):
        get(name).forms["triton"](*inputs)


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_a_mask_of_ones_changes_nothing_on_the_kernels(name: str) -> None:
    inputs, cuts = inputs_of(name, T=20), [0, 19, 20]
    ones = torch.ones(1, 20, dtype=torch.bool)
    masked, _ = stepped(name, inputs, cuts, ones)
    plain, _ = stepped(name, inputs, cuts, None)
    assert relative_error(masked, plain) <= CLOSE


@torch.no_grad()
def test_gates_are_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step appends its own gates to the sums in the cache; the prefill needs none; both ways of going on hold."""
    scans: list[int] = []
    of = GateSums.of
    monkeypatch.setattr(GateSums, "of", staticmethod(lambda g, k=None: scans.append(g.shape[1]) or of(g, k)))
    inputs = inputs_of("fox", B=2, T=70)
    expected = oracle.softmax(*in_float64(inputs))
    got, state = stepped("fox", inputs, [0, 60, 61, 62, 63, 66, 70], None)
    assert relative_error(got[..., :-1], expected) <= CLOSE
    assert scans == [61]
    assert len(state.sums) == 70
    picked = state.reorder(torch.tensor([1, 0]))
    assert len(picked.sums) == 70
    swapped = inputs[0].flip(0), inputs[1].flip(0), inputs[2].flip(0), inputs[3].map(lambda x: x.flip(0))
    step = [get("fox").extend(*piece(x, 0, 1), s, form="triton")[0] for x, s in ((inputs, state), (swapped, picked))]
    assert torch.equal(step[0].flip(0), step[1])
    assert scans == [61]
    assert state.crop(50).sums is None
    again, _ = get("fox").extend(*piece(inputs, 50, 70), state.crop(50), form="triton")
    assert relative_error(again, expected[:, 50:]) <= CLOSE


def test_a_cached_step_with_a_gradient_adds_up_its_gates_itself() -> None:
    inputs = inputs_of("fox", T=20)
    leaf = inputs[2].clone().requires_grad_()
    _, state = get("fox").extend(*piece(inputs, 0, 19), form="triton")
    o, after = get("fox").extend(*piece((*inputs[:2], leaf, inputs[3]), 19, 20), state, form="triton")
    wanted = get("fox").extend(*piece((*inputs[:2], leaf, inputs[3]), 19, 20), state)[0]
    assert after.sums is None
    got, expected = (torch.autograd.grad(x.square().sum(), leaf)[0] for x in (o, wanted))
    assert relative_error(got, expected) <= CLOSE


@pytest.mark.parametrize("steps", [[0, 12, 13, 14, 20], [0, 12, 20]], ids=["steps", "chunks"])
@pytest.mark.parametrize("name", ["nope", "fox", "path_fox"])
def test_a_window_over_a_cache_with_padding_counts_what_exists(name: str, steps: list[int]) -> None:
    inputs = inputs_of(name, B=2, T=20)
    valid = torch.rand(2, 20, generator=torch.Generator().manual_seed(3)) < 0.6
    valid[:, -1], valid[1, :6] = True, False
    want = get(name).extend(*in_float64(inputs), window=4, valid=valid)[0]
    state, found = None, []
    with torch.no_grad():
        for start, stop in itertools.pairwise(steps):
            o, state = get(name).extend(
                *piece(inputs, start, stop), state, form="triton", window=4, valid=valid[:, start:stop]
            )
            found.append(o)
    got = torch.cat(found, 1)[valid]
    assert relative_error(got, want[valid]) <= CLOSE
    whole = get(name).extend(*in_float64(inputs), valid=valid)[0]
    assert not torch.allclose(whole[valid], want[valid])


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_what_the_kernels_refuse_is_said_both_ways(name: str) -> None:
    inputs, variant = inputs_of(name, T=20), get(name)
    valid = torch.ones(1, 20, dtype=torch.bool)
    with torch.no_grad():
        _, state = variant.extend(*piece(inputs, 0, 19), form="triton", valid=valid[:, :19])
        step = piece(inputs, 19, 20)
    both = {"valid": valid, "cu_seqlens": torch.tensor([0, 20])}
    assert "takes valid or cu_seqlens, not both" in variant.refuses("triton", Call(*inputs, options=both))
    with pytest.raises(ValueError, match="valid: expected None with cu_seqlens"):
        variant.forms["triton"](*inputs, **both)
    leaf = step[0].clone().requires_grad_()
    recorded = Call(leaf, *step[1:], state, True, {})
    assert "has no gradient" in variant.refuses("triton", recorded)


@pytest.mark.parametrize("name", ["fox", "rope", "path_fox"])
@torch.no_grad()
def test_the_kernels_step_over_keys_in_pages(name: str) -> None:
    """After a prefill and beside a whole cache; a page begins, and keys have gone (those before a closed gate)."""
    inputs, variant = inputs_of(name, B=2, T=135), get(name)
    if name != "rope":
        inputs[3].log_decay[:, 70] = -torch.inf
    empty = variant.form_set.store.new(*piece(inputs, 0, 1))
    states, pool = [None, replace(empty, evict=Eviction(-20.0, None))], empty.pool
    for start, stop in ((0, 120), (120, 127), (127, 128), (128, 135)):
        now, form = piece(inputs, start, stop), "triton" if start else "reference"
        options = {"sink": torch.tensor([0.5, -0.5])}
        assert variant.refuses(form, Call(*now, states[1], True, options)) == ""
        whole, states[0] = variant.extend(*now, states[0], **options)
        paged, states[1] = variant.extend(*now, states[1], form=form, **options)
        assert relative_error(paged, whole) <= CLOSE
    assert pool.first.any() == (name != "rope")
    refused = variant.refuses("triton", Call(*piece(inputs, 0, 30), states[1], True, {}))
    assert refused == "the triton form reads keys in pages for 1 to 16 tokens at a time"


@pytest.mark.parametrize("name", ["rope", "path_fox"])
@torch.no_grad()
def test_the_kernels_step_over_pages_leaves_out_what_does_not_exist(name: str) -> None:
    """Padding anywhere, also in all tokens of a row, over the border of a page."""
    inputs, variant = inputs_of(name, B=3, T=75), get(name)
    valid = torch.rand(3, 75, generator=torch.Generator().manual_seed(0)) < torch.tensor([[1.0], [0.95], [0.3]])
    valid[2, 69:] = False
    states = [None, variant.form_set.store.new(*piece(inputs, 0, 1))]
    for start, stop in ((0, 62), (62, 69), (69, 74), (74, 75)):
        now, form = piece(inputs, start, stop), "triton" if start else "reference"
        q, k, v, gate = now
        there = valid[:, start:stop]
        k, v = (x.masked_fill(~there[..., None, None], torch.nan) for x in (k, v))
        assert variant.refuses(form, Call(q, k, v, gate, states[1], True, {"valid": there})) == ""
        whole, states[0] = variant.extend(*now, states[0], valid=there)
        paged, states[1] = variant.extend(q, k, v, gate, states[1], form=form, valid=there)
        assert paged.isfinite().all()
        assert relative_error(paged[there], whole[there]) <= CLOSE
    assert states[1].pool.lengths == valid.sum(1).tolist()


@pytest.mark.parametrize("begun", [127, 128], ids=["", "whole groups"])
@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
@torch.no_grad()
def test_the_memory_of_a_gpus_generator_goes_on_from_any_cache_of_path(
    paged: bool, begun: int, small_groups: None
) -> None:
    """Beside an idle row; of three proposals one is taken back."""
    inputs, variant = inputs_of("path_fox", T=137), get("path_fox")
    whole = variant.extend(*piece(inputs, 0, begun))[1]
    state = variant.form_set.store.new(*piece(inputs, 0, 1))
    state = variant.extend(*piece(inputs, 0, begun), state)[1] if paged else whole
    rows = BatchRows.idle(2)
    memory = PagedMemory.like(KernelPool, state, rows, 300, "cpu", variant.form_set.place)
    memory.admit(1, state, 300)
    rows.begin(1, begun)

    def twice(x: Tensor) -> Tensor:
        return x.expand(2, *x.shape[1:])

    start = begun
    for tokens, kept in ((1, 1), (3, 2), (1, 1), (3, 3)):
        rows.tokens = tokens
        memory.ready([1])
        q, k, v, gate = piece(inputs, start, start + tokens)
        q, k, v = (twice(x) for x in (q, k, v))
        o = memory.step(Call(q, k, v, gate.map(twice)), variant.extend)
        if tokens > 1:
            memory.keep(torch.tensor([0, kept]))
        expected, whole = variant.extend(*piece(inputs, start, start + kept), whole)
        assert relative_error(o[1:, :kept], expected) <= CLOSE
        rows.lengths[1] += kept
        rows.length[1] += kept
        start += kept


@torch.no_grad()
def test_tokens_are_taken_back_from_pages_of_carried_keys_after_steps_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rejected ones, over the border of a group of pages, and those of a call that failed."""
    monkeypatch.setattr(path_pages, "GROUP", 1)
    inputs, variant = inputs_of("path_fox", T=140), get("path_fox")
    whole, paged = None, variant.form_set.store.new(*piece(inputs, 0, 1))
    for start, stop, form in ((0, 60, "reference"), (60, 63, "triton"), (63, 66, "triton"), (66, 135, "reference"),
                              (135, 140, "triton")):  # fmt: skip
        rejected = variant.extend(*piece(inputs, 0, 9), paged, form=form)[1]
        if start == 63:
            paged = rejected.crop(start)  # else the call is forgotten
        now = piece(inputs, start, stop)
        expected, whole = variant.extend(*now, whole)
        o, paged = variant.extend(*now, paged, form=form)
        assert relative_error(o, expected) <= CLOSE
    assert paged.pool.factors[0, :, :2].abs().sum((1, 2, 3)).gt(0).all()  # a group has become whole
