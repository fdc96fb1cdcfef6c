"""Tensors go where those that were given are, whatever torch's default device is ("meta" stands for a GPU here)."""

import pytest
import torch
from generated import forgetful, that_forgets
from layers import TINY, assert_same, rows
from layers import forgetful as layer

from attnzoo import get, list_variants
from attnzoo.models import Generator
from attnzoo.models.generation.proposals import look_up
from attnzoo.testing import Case


@pytest.mark.parametrize("name", list_variants())
def test_forms_ask_the_inputs(name):
    inputs, cuts = Case(name, B=1, T=9, block=4).inputs(), torch.tensor([0, 2, 2, 9])
    for form in ("recurrent", "parallel", "chunk"):
        if form in get(name).forms:
            expected = get(name).forms[form](*inputs, cu_seqlens=cuts)
            with torch.device("meta"):
                assert torch.equal(get(name).forms[form](*inputs, cu_seqlens=cuts), expected)


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_caches_in_pages_ask_the_inputs(name):
    attn, x = layer(name), rows(2, 150)
    expected = attn(x)[1:]
    with torch.device("meta"):
        cache = attn.new_cache(evict=TINY)
        attn(x[:, :140], cache=cache)
        cache.reorder(torch.tensor([1], device="cpu"))
        assert len(cache.state.crop(139)) == 139
        got = attn(x[1:, 140:], cache=cache)
    assert_same(got, expected[:, 140:])


def test_generators_ask_the_model():
    model, prompt = that_forgets(["rope", "fox"]), torch.tensor([1, 2, 1, 2, 1])
    limits = {"budget": 9, "evict": 1e-30}
    expected = model.generate(prompt[None], 9, temperature=0, **limits)[0, 5:].tolist()
    with torch.device("meta"):
        generator = Generator(model, 1, 40, **limits)
        number = generator.add([1, 2, 1, 2, 1], 9, temperature=0)
        assert generator.run(look_up())[number] == expected
    model = forgetful()
    expected = model.generate(prompt[None], 9, temperature=0)[0, 5:].tolist()
    with torch.device("meta"):
        generator = Generator(model, 1, 40, evict=1e-30)
        number = generator.add([1, 2, 1, 2, 1], 9, temperature=0)
        assert generator.run()[number] == expected
