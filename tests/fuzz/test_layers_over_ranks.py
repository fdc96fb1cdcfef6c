"""Random layers on ranks that share random texts: rows and gradients are those that one process gives."""

import copy
from itertools import pairwise

import torch
from ranks import on_ranks
from test_layers import GOOD, D, H, make

from attnzoo import Prune, list_variants
from attnzoo.parallel import Fragments, context_parallel

EXACT = Prune(1e-25)  # what is certified below it is nothing beside any rounding


def layer(rng):
    """A layer of random options, and what it was made of."""
    while True:
        name = rng.choice([*list_variants("linear"), *list_variants("softmax")])
        options = {key: rng.choice(GOOD[key]) for key in rng.sample(list(GOOD), rng.choice([0, 2, 4, 6]))}
        try:
            attn = make(rng, name, options)
        except (ValueError, TypeError):
            continue
        if attn.prune or ((attn.variant.prunable or attn.variant.truncates) and rng.random() < 0.5):
            attn.prune = EXACT
        return attn, f"{name} {options}"


def table(rng):
    """Fragments of any size on two to four ranks, and documents that end anywhere."""
    ranks = rng.choice([2, 3, 4])
    T = rng.choice([ranks, ranks + 1, 9, 40])
    cuts = rng.sample(range(1, T), min(T - 1, rng.choice([ranks - 1, ranks, 7])))
    owners = [number % ranks for number in range(len(cuts) + 1)]
    rng.shuffle(owners)
    spans = pairwise([0, *sorted(cuts), T])
    ends = sorted(rng.sample(range(1, T), min(T - 1, rng.choice([0, 0, 1, 3]))))
    return Fragments.of([(*span, rank) for span, rank in zip(spans, owners, strict=True)], ranks, [0, *ends, T])


def results(attn, x, cotangent, **given):
    """Outputs, and the gradients of x and of all weights."""
    x = x.clone().requires_grad_()
    y = attn(x, **given)
    leaves = [x, *(p for p in attn.parameters() if p.requires_grad)]
    return y.detach(), *torch.autograd.grad(y, leaves, cotangent, allow_unused=True, materialize_grads=True)


def test_random_layers_over_random_fragments_give_what_one_process_gives(fuzz):
    for rng in fuzz(4):
        (attn, story), fragments = layer(rng), table(rng)
        ways = ["auto", "gather"] + ["heads"] * (H % fragments.ranks == 0) + ["pruned"] * (attn.prune is not None)
        way = rng.choice(ways)
        x, cotangent = torch.randn(2, 1, fragments.tokens, D).double()
        y, dx, *of_weights = results(attn, x, cotangent, cu_seqlens=torch.tensor(fragments.borders))

        def rank(number, attn=attn, fragments=fragments, way=way, x=x, cotangent=cotangent):
            with context_parallel(fragments, way):
                return results(copy.deepcopy(attn), fragments.shard(x), fragments.shard(cotangent))

        found = on_ranks(fragments.ranks, rank)
        order = torch.cat([fragments.index(number) for number in range(fragments.ranks)]).argsort()
        got = [torch.cat([one[i] for one in found], 1)[:, order] for i in (0, 1)]
        got += [sum(parts) for parts in zip(*(one[2:] for one in found), strict=True)]
        most = max(float(one.abs().max()) for one in (dx, *of_weights) if one.numel())
        for one, wanted, size in zip(got, (y, dx, *of_weights), [1.0, *[most] * (1 + len(of_weights))], strict=True):
            error = (one - wanted).abs().max() if one.numel() else 0.0
            assert error <= 1e-8 * max(1.0, size, float(y.abs().max())), (story, fragments, way, error)
