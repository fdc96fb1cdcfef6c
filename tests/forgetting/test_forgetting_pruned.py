"""Pruning beside One-Pass Forgetting: what it certifies of the teacher it certifies of the student."""

from __future__ import annotations

import pytest
import torch
from layers import forgetful, rows

from attnzoo import Prune
from attnzoo.forgetting.rules import Forgetting

T = 300


def gradients(attn, x):
    y, terms = attn(x), attn.forget.terms
    loss = y.sin().sum() + terms.budget + terms.distillation
    return y.detach(), terms, torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*attn.parameters()])])


@pytest.mark.parametrize(
    ("name", "network"), [("fox", "key"), ("path_fox", "key"), ("fox", "pair"), ("fox_rope", "decay")]
)
def test_a_pruned_student_is_the_student_within_eps(name, network):
    """Values and gradients; the terms of the loss count all keys."""
    forgetting = Forgetting(network=network, window=2, width=8, temperature=20.0)
    bias = 0.0 if name == "path_fox" else 1.5
    whole, pruned = (forgetful(name, bias, forgetting=forgetting, acp=acp) for acp in (False, Prune(1e-3)))
    (y, terms, grads), (less, same, fewer) = (gradients(attn, rows(1, T)) for attn in (whole, pruned))
    assert 0 < (y - less).abs().max() <= 4e-3 * y.abs().max()
    assert (grads - fewer).norm() <= 4e-3 * grads.norm()
    for term in ("budget", "kept"):
        assert torch.equal(getattr(terms, term), getattr(same, term))
    with torch.no_grad():
        y, less = (attn.eval()(rows(1, T)) for attn in (whole, pruned))
    assert (y - less).abs().max() <= 4e-3 * y.abs().max()


def test_pruning_and_eviction_go_together_where_keys_are_forgotten():
    forgetting = Forgetting(window=2, width=8)
    whole, pruned = (forgetful("fox", 2.0, forgetting=forgetting, acp=acp).eval() for acp in (False, Prune(1e-6)))
    x = rows(2, T)
    with torch.no_grad():
        exact, cache = whole(x), pruned.new_cache(evict=1e-6)
        steps = torch.cat([pruned(x[:, a:b], cache=cache) for a, b in ((0, 290), (290, 296), (296, T))], 1)
    assert (exact - steps)[:, :290].abs().max() > 0  # of the prompt, by pruning alone
    assert (exact - steps).abs().max() <= 1e-5 * exact.abs().max()
    assert int(cache.state.settled().live.min()) < int(cache.state.settled().live.max()) < T
