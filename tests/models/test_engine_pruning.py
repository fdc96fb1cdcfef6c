"""Steps of a generator that prune: what they skip weighs at most eps, and is not read."""

import copy
import math

import pytest
import torch
from generated import alone, build, filled
from layers import layer, rows

from attnzoo.algebra.pruning import Prune
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.caches.pages import inplace
from attnzoo.forms.caches.pages.pool import PAGE
from attnzoo.kernels.decode import reference
from attnzoo.models import Generator

EPS, LENGTHS = 1e-3, (700, 330, 0, 64)
CASES = {
    "norms": ("fox", {}),
    "known-bound": ("fox", {"qk_norm": "rms", "qk_norm_shared": True}),
    "window-sinks": ("fox", {"window": 600, "sinks": True, "qk_norm": "l2"}),
    "alibi-paper": ("alibi", {"acp": Prune(EPS, "paper")}),
    "rotated": ("fox_rope", {}),
}


def forget_within_tokens(attn):
    """Three heads forget within some tokens, one within thousands, which shares its keys with one of them."""
    for gate in attn.gate.modules():
        if hasattr(gate, "forget_proj"):
            gate.forget_proj.weight.data *= 0.03
            gate.forget_proj.bias.data.copy_(torch.tensor([2.0, 3.0, 9.0, 2.0]))


def steps(attn, fixed, tokens, seen):
    """Two steps of so many tokens each, on a copy: what the memory gives."""
    fixed, batch, found = copy.deepcopy(fixed), BatchRows.idle(1), []
    batch = fixed.rows = fixed.memory.rows
    batch.tokens = tokens
    for name in ("step", "whole_step"):
        run = getattr(fixed.memory, name)
        setattr(fixed.memory, name, lambda *given, run=run: found.append(run(*given)) or found[-1])
    for number in range(2):
        there = [row for row, n in enumerate(batch.lengths) if n]
        fixed.ready(there)
        attn(rows(len(batch.lengths), tokens, seed=20 + number), cache=fixed)
        if tokens > 1:
            fixed.keep(batch.active * tokens)
        batch.length += batch.active * tokens
        batch.lengths = batch.length.tolist()
    return torch.cat(found, 1)[there]


@pytest.fixture(autouse=True)
def small_things_are_looked_through_too(monkeypatch):
    monkeypatch.setattr(inplace, "LONG", 0)
    monkeypatch.setattr(inplace, "LARGE", 0)


@pytest.fixture
def looks(monkeypatch):
    """For each look for what may go: the first pages, those that are read, and the mass before these."""
    found, whole = [], reference._first_pages

    def look(logits, sums, pos, q_norm, pages, *rest):
        begin, first = whole(logits, sums, pos, q_norm, pages, *rest), pages[2]
        R = logits.shape[1] // begin.shape[1]
        gone = torch.arange(logits.shape[-1]) < PAGE * begin.repeat_interleave(R, 1)[..., None, None]
        found.append((first.clone(), begin, logits.softmax(-1).nan_to_num().masked_fill(~gone, 0.0).sum(-1)))
        return begin

    monkeypatch.setattr(reference, "_first_pages", look)
    return found


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_step_skips_pages_that_weigh_at_most_eps(case, tokens, looks):
    name, options = CASES[case]
    attn = layer(name, **{"acp": Prune(EPS), **options})
    forget_within_tokens(attn)
    fixed, _ = filled(attn, LENGTHS, 740)
    found = steps(attn, fixed, tokens, looks)
    assert len(looks) == 2
    for first, begin, dropped in looks:
        assert dropped.amax() <= EPS
        assert ((begin - first)[0] > 3).any() or ((begin - first)[0] > 0).all()
        assert (begin == first)[2:].all()  # those without keys, and with a single page
    attn.prune = None
    fixed.bound = None
    whole = steps(attn, fixed, tokens, looks)
    assert len(looks) == 2
    assert not torch.equal(found, whole)
    assert (found - whole).abs().max() <= 2 * EPS * fixed.memory.pool.v.abs().max()


@torch.no_grad()
def test_a_key_that_is_long_enough_is_read_however_old_it_is(looks):
    attn = layer("fox", acp=Prune(EPS))
    forget_within_tokens(attn)
    fixed, _ = filled(attn, LENGTHS, 740)
    steps(attn, fixed, 1, looks)
    pool = fixed.memory.pool
    ids = pool.table[0, 0, 0].long()
    pool.k[ids] *= 1e4
    pool.k_norm[0, 0, 0] *= 1e4
    steps(attn, fixed, 1, looks)
    assert looks[0][1][0, 0] > 0
    assert looks[2][1][0, 0] == 0


@torch.no_grad()
def test_what_is_read_faster_than_looked_through_is_read(looks, monkeypatch):
    attn = layer("fox", acp=True)
    fixed, _ = filled(attn, (100, 0), 140)
    pool = copy.deepcopy(fixed).memory.pool  # without free pages
    for name, least in (("LONG", pool.table.shape[2]), ("LARGE", pool.k.nbytes + pool.v.nbytes)):
        for value, asked in ((least, 2), (least + 1, 0), (0, 2)):
            monkeypatch.setattr(inplace, name, value)
            looks.clear()
            steps(attn, fixed, 1, looks)
            assert len(looks) == asked


@torch.no_grad()
@pytest.mark.parametrize("begun", [False, True], ids=["", "begun"])
def test_the_bound_of_logits_is_that_of_the_weights_when_a_sequence_joins(begun):
    """Also where its cache is older than they are: the other sequences are pruned by it, too."""
    attn = layer("fox", acp=True, qk_norm="rms")
    fixed, _ = filled(attn, (3, 0), 43)
    place, before = fixed.bound.data_ptr(), fixed.bound.clone()
    cache = attn.new_cache()
    if begun:
        attn(rows(1, 5), cache=cache)
    attn.k_norm.weight *= 3
    attn(rows(1, 5), cache=cache)
    fixed.admit(1, cache, 20)
    torch.testing.assert_close(fixed.bound, 3 * before)
    assert fixed.bound.data_ptr() == place


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_does_not_read_the_pages_that_it_skips():
    """What the first pages of a head hold that forgets within tokens may then be anything."""
    model = build(attention="fox", attention_options={"block": "pro", "acp": True}, hidden_size=128, num_heads=4)
    for attn in model.attentions():
        forget_within_tokens(attn)
    model.cuda()
    prompt = torch.randint(40, (700,), device="cuda")
    found = []
    for poisoned in (False, True):
        generator = Generator(model, 2, 900)
        numbers = [generator.add(prompt, 150, temperature=0), generator.add(prompt[:3], 20, temperature=0)]
        generator.admit()
        for cache in generator.batch.caches:
            pool = cache.memory.pool
            assert pool.table[0, 3, 0] >= 0
            pool.k[pool.table[0, 3, :3].long()] = math.nan if poisoned else 0.0
        tokens = generator.run()
        found.append([tokens[number] for number in numbers])
        assert len(generator.batch.graphs) == 1
    assert found[0] == found[1]
    assert found[0] == [alone(model, prompt, 150), alone(model, prompt[:3], 20)]
