"""Random models, calls of them and generation: right, or refused by name; a refused call changes nothing."""

import copy
import dataclasses
import math

import torch
from rule import answer

from attnzoo import list_variants
from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel

SIZES = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "vocab_size": 11}
FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]
GOOD = {
    "attention": ["fox", ["mamba2", "path"], [{"name": "rope", "repeat": 2}], ("gla", "fox")], "num_layers": [1, 2, 4],
    "num_heads": [1, 2, 4], "hidden_size": [8, 16], "intermediate_size": [None, 0, 8], "vocab_size": [1, 11],
    "attention_options": [{}, {"block": "pro"}, {"window": 3}, {"acp": {"eps": 1e-6}}, {"acp": True}, {"conv_size": 2}],
    "tie_embeddings": [True, False], "norm_eps": [1e-5, 1], "initializer_range": [0.1, 1],
    "norm": ["after", "both"], "norm_kind": ["rms", "layer"], "mlp_activation": ["gelu", "gelu_tanh", "relu2"],
    "mlp_gated": [True, False], "mlp_bias": [True, False], "embedding_scale": [0.5, 4], "learned_positions": [4, 9],
    "logit_softcap": [None, 2.0], "mlp_mix": [True, False], "embedding_norm": [True, False],
}  # fmt: skip
ODD = [
    None, True, False, "no", "", "fox", "foks", -1, 0, 1, 3, 2.5, 1e-45, math.inf, math.nan, 10**30, [], [[]],
    ["fox", 3], {}, {"name": "fox"}, {"name": ["fox"]}, {"nmae": "fox"}, {"fox": 1}, {1: 2}, [None],
    {"name": "fox", "repeat": 0}, {"name": "fox", "options": 3}, {"acp": {"esp": 1}}, {"acp": {"eps": "x"}},
    {"hidden_size": 8}, {"gate": None},
    torch.ones(2), object, b"fox",
]  # fmt: skip


def test_random_sizes_make_a_model_or_are_refused_by_name(fuzz):
    made = 0
    for rng in fuzz(20):
        keys = rng.choices(FIELDS, k=rng.choice([1, 1, 2]))
        options = {
            key: rng.choice(GOOD[key]) if key in GOOD and rng.random() < 0.5 else rng.choice(ODD) for key in keys
        }
        inner = [key for value in options.values() if isinstance(value, dict) for key in value if isinstance(key, str)]
        names = [*options, *inner, "attention", "window", "acp", "eps", "name", "num_heads", "hidden_size"]
        work = lambda options=options: LanguageModel(ModelConfig(**{**SIZES, "num_layers": 2, **options}))  # noqa: E731
        model = answer(work, names, options)
        if model is None:
            continue
        made += 1
        tokens = torch.randint(model.config.vocab_size, (2, min(4, model.config.learned_positions or 4)))
        output = answer(lambda model=model, tokens=tokens: model(tokens, targets=tokens), [], options)
        assert output.logits.shape == (*tokens.shape, model.config.vocab_size)
        assert output.logits.isfinite().all(), options
        assert output.loss.isfinite(), options
    assert made > fuzz.done // 4 or fuzz.done == 1


def build(rng):
    options = {"block": rng.choice([None, "pro", "gated", "llama"])}
    names = rng.sample(list_variants(), rng.choice([1, 2, 3]))
    model = LanguageModel(ModelConfig(attention=names, attention_options=options, num_layers=len(names), **SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.double().eval(), [f"{names} {options}"]


def close(got, expected, story):
    assert got.shape == expected.shape, story
    assert not got.numel() or (got - expected).abs().max() <= 1e-8 * expected.abs().max().clamp(min=1), story


def bad_call(rng, model, tokens, cache):
    """A call that must be refused, and names of which its refusal must have one."""
    B, T = tokens.shape
    twin = copy.deepcopy(model)
    other = twin.new_cache()
    if cache[0].tokens:
        twin(torch.zeros(B, cache[0].tokens, dtype=torch.int64), cache=other)
    deep = [layer for layer in cache if layer.seen is not None]
    name = rng.choice(["input_ids", "targets", "attention_mask", "cu_seqlens", "cache"])
    bad = rng.choice({
        "input_ids": [
            tokens + 11, tokens - 11, tokens.double(), tokens[0], tokens[:, :0], tokens.tolist(), None, tokens.bool(),
            tokens[None], tokens.to(torch.uint8),
        ],
        "targets": [
            tokens + 11, tokens * 0 - 100, tokens[:, :0], [1], tokens.double(), 3, tokens * 0 - 1,
            tokens[:, :1].expand(B, T + 1),
        ],
        "attention_mask": [
            torch.zeros(B, T), torch.full((B, T), -10000), [[1]], torch.ones(B, T + 99).bool(), torch.ones(T).bool(),
        ],
        "cu_seqlens": [
            torch.tensor([0, T + 1]), torch.tensor([0.0, T]), torch.tensor([T]), [0, T], torch.tensor([1, T]),
        ],
        "cache": [
            other, cache[:-1], [*cache, other[0]], [None] * len(cache), {}, 3, other[0],
            cache[::-1] if len(cache) > 1 else (), [*other[:-1], cache[-1]] if deep and len(cache) > 1 else [7],
        ],
    }[name])  # fmt: skip
    first, options = (bad, {}) if name == "input_ids" else (tokens, {name: bad})
    if rng.random() < 0.2:  # the last layer refuses, when the others have moved
        name, first, options = "cache", tokens, {"cache": [*cache[:-1], other[-1]]}
    names = [name, "x:", "cache"] if name == "cu_seqlens" else [name]
    if len(tokens) > 1 and deep and rng.random() < 0.2:
        name, names, first, options = "rows", ["cache"], torch.cat([tokens, tokens]), {}
    return (lambda: model(first, **{"cache": cache, **options})), names, f"bad {name}: {options or first}"[:200]


@torch.no_grad()
def test_random_calls_of_a_model_give_what_one_plain_call_gives(fuzz):
    for rng in fuzz(6):
        model, story = build(rng)
        cache, said = model.new_cache(), None
        for _ in range(rng.choice([3, 5, 8])):
            B, T = rng.choice([1, 2, 3]) if said is None else len(said), rng.choice([1, 1, 3, 9])
            tokens = torch.randint(11, (B, T))
            kind = rng.choice(["good", "good", "mask", "reorder", "copy", "bad", "bad"])
            if kind in ("good", "mask"):
                mask = torch.rand(B, T) < (1.0 if kind == "good" else 0.7)
                story.append(f"{kind} {B, T}")
                given = {"attention_mask": mask.long()} if kind == "mask" else {"targets": tokens}
                logits = model(tokens.to(rng.choice([torch.int32, torch.int64])), cache=cache, **given).logits
                said = said or [torch.zeros(0, dtype=torch.int64)] * B
                for b, row in enumerate(tokens):
                    n, said[b] = len(said[b]), torch.cat([said[b], row[mask[b]]])
                    if len(said[b]) > n:
                        close(logits[b, mask[b]], model(said[b][None]).logits[0, n:], story)
            elif kind == "reorder" and said is not None:
                index = torch.tensor([rng.randrange(B) for _ in range(rng.choice([1, 2, 3]))])
                for layer in cache:
                    layer.reorder(index)
                said = [said[i] for i in index.tolist()]
                story.append(f"reorder {index.tolist()}")
            elif kind == "copy":
                cache = copy.deepcopy(cache)
            elif kind == "bad":
                call, names, what = bad_call(rng, model, tokens, cache)
                story.append(what)
                assert answer(lambda call=call: (call(), "no refusal")[1], names, story) is None, story


def test_random_generation_is_that_of_plain_calls_or_refused_by_name(fuzz):
    for rng in fuzz(8):
        model, story = build(rng)
        model.train(rng.random() < 0.5)
        tokens = torch.randint(11, (rng.choice([1, 2]), rng.choice([1, 4])))
        options = {"max_new_tokens": rng.choice([0, 1, 5])}
        values = {
            "max_new_tokens": [3, 2.0, -1, True, None, "3", math.nan], "generator": [None, torch.Generator(), 3, "cpu"],
            "temperature": [0, 0.0, 1e-30, 1e-45, -1, math.nan, math.inf, 1, 5, 3e38, None, "1", True, torch.ones(2)],
            "top_k": [None, 1, 5, 11, 12, 0, -1, 2.0, True, math.inf],
            "input_ids": [tokens[:, :0], tokens + 11, None, [[1]]],
        }  # fmt: skip
        for key in rng.choices(list(values), k=rng.choice([0, 1, 2])):
            options[key] = rng.choice(values[key])
        prompt = options.pop("input_ids", tokens)
        state, training = torch.get_rng_state(), model.training
        work = lambda model=model, prompt=prompt, options=options: model.generate(prompt, **options)  # noqa: E731
        out = answer(work, [*options, "input_ids"], (story, options, prompt))
        assert model.training == training
        if out is None:
            assert torch.equal(torch.get_rng_state(), state), (story, options)
            continue
        assert out.shape == (len(tokens), tokens.shape[1] + options["max_new_tokens"])
        assert torch.equal(out[:, : tokens.shape[1]], tokens)
        assert out.min() >= 0
        assert out.max() < 11
        if options.get("temperature", 1) == 0 or options.get("top_k") == 1:
            with torch.no_grad():
                for t in range(tokens.shape[1], out.shape[1]):
                    logits = model(out[:, :t]).logits[:, -1].float()
                    picked = logits.gather(1, out[:, t : t + 1])[:, 0]
                    assert (picked >= logits.amax(-1) - 1e-5).all(), (story, options)
