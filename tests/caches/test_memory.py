"""A cache that would fill the memory is refused before it does, with the number, and what was there goes on."""

import pytest
import torch
from layers import assert_same, layer, rows

from attnzoo.config import ModelConfig
from attnzoo.forms.caches import device_memory
from attnzoo.models import Generator, LanguageModel

REFUSED = r"expected room for \d+\.\d\d GiB on cpu, got 0\.00 GiB"


@pytest.fixture
def limit(monkeypatch):
    """``limit(n)``: from now on n bytes can be allocated, None for all that there are."""
    known = device_memory.available
    return lambda n: monkeypatch.setattr(device_memory, "available", known if n is None else lambda device: n)


def build(attention="fox", **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40, "intermediate_size": 32}
    return LanguageModel(ModelConfig(attention=attention, attention_options=options, **sizes)).eval()


@pytest.mark.parametrize(("name", "evict"), [
    ("fox", None), ("path_fox", None), ("wall", None), ("fox", 1e-9), ("path_fox", 1e-9),
])  # fmt: skip
@torch.no_grad()
def test_a_cache_that_grows(name, evict, limit):
    attn, x = layer(name, "pro"), rows(2, 330)
    whole, cache = attn.new_cache(), attn.new_cache(evict=evict)
    for each in (whole, cache):
        attn(x[:, :250], cache=each)
    limit(1000)
    with pytest.raises(MemoryError, match=rf"cache of \d+ tokens.*: {REFUSED}"):
        attn(x[:, 250:], cache=cache)
    limit(None)
    assert_same(attn(x[:, 250:], cache=cache), attn(x[:, 250:], cache=whole))


def test_a_generator_is_refused_whole_and_its_copies_of_weights_too(limit):
    model = build()
    limit(100_000)
    with pytest.raises(
        MemoryError, match=rf"caches of 3 sequences of 5000 tokens \(with \d\.\d\d GiB for a step\): {REFUSED}"
    ):
        Generator(model, 3, 5000)
    limit(5_000)
    with pytest.raises(MemoryError, match=f"weights one above the other: {REFUSED}"):
        Generator(model, 1, 8, fuse=True)


def test_a_generator_whose_keys_grow_goes_on_when_there_is_room_again(limit):
    model = build("path_fox", block="pro")
    prompt = torch.randint(0, 40, (60,), generator=torch.Generator().manual_seed(0))
    generator = Generator(model, 1, 300, evict=1e-300)  # nothing goes
    number = generator.add(prompt, 72, temperature=0)
    limit(1000)
    with pytest.raises(MemoryError, match=REFUSED):  # it waits for its pages
        generator.step()
    assert (len(generator.waiting), generator.rows) == (1, [None])
    limit(None)
    generator.step()
    limit(1000)
    with pytest.raises(MemoryError, match=REFUSED):  # a page begins
        generator.run()
    limit(None)
    generator.run()
    assert generator.requests[number].tokens == model.generate(prompt[None], 72, temperature=0)[0, 60:].tolist()
