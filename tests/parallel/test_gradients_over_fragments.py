"""Gradients over fragments of what a rank reads alone: no rank waits for one that reads something else."""

from dataclasses import replace

import pytest
import torch
from ranks import on_ranks

from attnzoo import Prune, get
from attnzoo.forms.options import LinearOptions
from attnzoo.parallel import Fragments, attention
from attnzoo.parallel.rows import Rows
from attnzoo.samples import random_inputs

T = 23


@pytest.mark.parametrize("name", ["gla", "gated_deltanet"])
@pytest.mark.parametrize(("users", "outputs"), [(1, True), (2, True), (2, False)])
def test_the_last_state_has_a_gradient_whichever_ranks_use_it(name, users, outputs):
    """Beside the outputs, or alone."""
    forms, fragments = get(name).form_set, Fragments.contiguous(T, 2)
    *rows, gate = random_inputs(name, B=1, T=T, H=2, G=2, K=4, V=3, regime="open")

    def gradients(read, rows, used):
        given = [x.clone().requires_grad_() for x in rows]
        o, state = read(given)
        loss = (o.sum() if outputs else 0) + (used * state.matrix.square().sum() if used else 0)
        found = torch.autograd.grad(loss, given, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]

    def of_rank(given):
        here = Rows(*given, gate.map(fragments.shard), LinearOptions())
        return attention.read(forms, "reference", here, fragments, "auto")

    def rank(number):
        return gradients(of_rank, fragments.shard(*rows), int(number < users))

    whole = gradients(lambda given: forms.go_on("reference", *given, gate, None, LinearOptions()), rows, users)
    for want, *parts in zip(whole, *on_ranks(2, rank), strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), want)


READERS = {"outputs": ((1, 0), (1, 0)), "one of both": ((0, 1), (1, 0)), "both, and outputs": ((1, 1), (1, 0))}


def assert_losses_of_any_rank_have_gradients(name, whole, of_rank, reads, everywhere):
    """Of the outputs on this rank and of something else, each where a rank ``reads`` it; all of it ``everywhere``?"""
    *rows, gate = random_inputs(name, B=1, T=T, H=4, G=2, K=4, V=3, regime="open")
    fragments = Fragments.contiguous(T, 2)
    parts = [part for part in gate.parts if getattr(gate, part).ndim > 1]

    def gradients(given, terms):
        given = [x.detach().clone().requires_grad_() for x in given]
        here = replace(gate, **dict(zip(parts, given[3:], strict=True)))
        loss = sum(x.square().sum() for x in terms(*given[:3], here))
        found = torch.autograd.grad(loss, given, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]

    def of_all(*given):
        o, other = whole(*given)
        for number, (reads_o, reads_other) in enumerate(reads):
            yield from [o[:, fragments.index(number)]] * reads_o
            yield from [x if everywhere else x[:, fragments.index(number)] for x in other] * reads_other

    def rank(number):
        def terms(*given):
            o, other = of_rank(fragments, *given)
            return [*[o] * reads[number][0], *[*other] * reads[number][1]]

        return gradients(fragments.shard(*leaves), terms)

    leaves = [*rows, *(getattr(gate, part) for part in parts)]
    for want, *found in zip(gradients(leaves, of_all), *on_ranks(2, rank), strict=True):
        torch.testing.assert_close(torch.cat(found, 1), want, rtol=0, atol=1e-9 * float(want.abs().max()) + 1e-12)


@pytest.mark.covering
@pytest.mark.parametrize("name", ["nope", "fox", "path_fox", "rope", "wall"])
@pytest.mark.parametrize("transport", ["gather", "heads"])
@pytest.mark.parametrize("reads", READERS)
def test_cached_keys_have_gradients_whichever_ranks_read_them(name, transport, reads):
    """And no rank waits for another that reads outputs alone, or keys alone."""
    forms = get(name).form_set

    def kept(o, cache):
        return o, [x for x in (cache.k, cache.v, cache.log_decay) if x is not None and x.requires_grad]

    def whole(*given):
        return kept(*forms.go_on("reference", *given, None, forms.OPTIONS()))

    def of_rank(fragments, *given):
        return kept(*attention.read(forms, "reference", Rows(*given, forms.OPTIONS()), fragments, transport))

    assert_losses_of_any_rank_have_gradients(name, whole, of_rank, READERS[reads], everywhere=True)


@pytest.mark.covering
@pytest.mark.parametrize("name", ["fox", "path_fox", "alibi"])
@pytest.mark.parametrize("transport", ["gather", "heads", "pruned"])
@pytest.mark.parametrize("reads", READERS)
def test_log_sum_exps_have_gradients_whichever_ranks_read_them(name, transport, reads):
    form = get(name).forms["parallel"]
    options = {"prune": Prune(1e-30)} if transport == "pruned" else {}

    def whole(*given):
        o, lse = form(*given, return_lse=True)
        return o, [lse]

    def of_rank(fragments, *given):
        o, lse = form(*given, return_lse=True, fragments=fragments, transport=transport, **options)
        return o, [lse]

    assert_losses_of_any_rank_have_gradients(name, whole, of_rank, READERS[reads], everywhere=False)
