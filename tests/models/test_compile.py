"""``torch.compile(..., fullgraph=True)`` of models and layers: no break, the same numbers, both directions."""

from functools import cached_property, partial

import pytest
import torch
from packaging.version import Version
from torch._dynamo.utils import counters
from torch._dynamo.variables import SymNodeVariable

import attnzoo.layer.dispatch
from attnzoo import build_attention, get
from attnzoo.config import ModelConfig
from attnzoo.forms.backends import fla
from attnzoo.forms.protocol import Call
from attnzoo.kernels.common.device import machine, multiprocessors
from attnzoo.layer.dispatch import IMPLS, chosen
from attnzoo.models import LanguageModel
from attnzoo.registry.variant import Variant
from attnzoo.samples import random_inputs

# every gate projection and every option of a layer, in few models
CONV = {"conv_size": 3, "feature_map": "silu", "qk_norm": "l2"}
MODELS = {
    "additive": [
        "nope",
        {"name": "alibi", "options": {"learnable_slopes": True, "window": 3}},
        {"name": "fox", "options": {"block": "pro", "acp": True, "sinks": True}},
        {"name": "fox", "options": {"gate": "independent", "num_kv_heads": 1, "value_dim": 4}},
    ],
    "additive, other gates": [
        {"name": "fox", "options": {"gate": "fixed", "output_norm": "group", "output_gate": "swish"}},
        {"name": "fox", "options": {"gate": "softplus", **CONV, "feature_map": "relu"}},
        "rope",
    ],
    "diagonal": ["linear_attention", "retnet", "mamba2", "gla", "complex_linear", "wall"],
    "erasing": ["deltanet", {"name": "gated_deltanet", "options": {"block": "pro"}}],
    "turning": ["path", "path_fox"],
}


def model(attention):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    return LanguageModel(ModelConfig(attention=attention, num_layers=len(attention), **sizes))


def loss_and_gradients(run, model, tokens):
    loss = run(tokens, targets=tokens).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_compiles(attention, backend, lengths, dynamic=None, device="cpu", rtol=1e-4):
    torch._dynamo.reset()
    plain = model(attention).to(device)
    compiled = torch.compile(plain, fullgraph=True, backend=backend, dynamic=dynamic)
    for T in lengths:
        tokens = torch.randint(20, (2, T), device=device)
        expected = loss_and_gradients(plain, plain, tokens)
        for got, want in zip(loss_and_gradients(compiled, plain, tokens), expected, strict=True):
            assert (got - want).norm() <= rtol * want.norm() + 1e-6


@pytest.fixture
def said(monkeypatch):
    """What Dynamo warns of: of every ``functools.cache`` that it meets."""
    said = []
    monkeypatch.setattr(torch._dynamo.utils, "warn_once", lambda message, *rest: said.append(message))
    return said


@pytest.fixture
def worded(monkeypatch):
    """The places where sizes that Dynamo takes for symbols are put into words, which some of its releases refuse."""
    worded, translator = set(), torch._dynamo.symbolic_convert.InstructionTranslatorBase
    formatted = translator._format_value

    def watched(self, *given):
        if isinstance(self.stack[-1].realize(), SymNodeVariable):
            worded.add(f"{self.f_code.co_filename}:{self.lineno}")
        return formatted(self, *given)

    monkeypatch.setattr(translator, "_format_value", watched)
    return worded


def test_no_size_is_put_into_words_while_a_form_of_a_gpu_is_chosen(worded, monkeypatch):
    monkeypatch.setattr(attnzoo.layer.dispatch, "on_gpu", lambda x: True)
    for name in ("fox", "gated_deltanet"):
        torch._dynamo.reset()
        run = partial(lambda variant, *inputs: (inputs[0] + 1, chosen(variant, "auto", Call(*inputs))), get(name))
        choice = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
        q, k, v, gate = random_inputs(name, 2, 70, dtype=torch.float32)
        for x in (q, k, v):
            torch._dynamo.mark_static(x, [2, 3])
        assert choice(q, k, v, gate)[1] in IMPLS
    assert not worded


@pytest.mark.parametrize("name", MODELS)
def test_a_model_compiles_whole_and_compiling_says_nothing(name, said):
    assert_compiles(MODELS[name], "eager", [5])
    assert not said


def test_what_a_layer_asks_of_its_variant_takes_no_lock():
    """Before Python 3.12 `functools.cached_property` enters one at the first call, and Dynamo leaves the graph."""
    assert not [name for name, value in vars(Variant).items() if isinstance(value, cached_property)]


def test_the_hugging_face_class_compiles_whole_without_a_cache():
    pytest.importorskip("transformers")
    from hf_models import HYBRID, build

    torch.compiler.reset()
    theirs = build(HYBRID).eval()
    tokens = torch.randint(1, theirs.config.vocab_size, (2, 9))
    compiled = torch.compile(theirs, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(tokens, use_cache=False).logits, theirs(tokens, use_cache=False).logits, rtol=0, atol=0
        )
    compiled.train()(tokens, labels=tokens).loss.backward()


def test_a_model_compiles_whole_for_lengths_that_vary(worded):
    assert_compiles(["linear_attention", "fox", "rope"], "eager", [5, 7], dynamic=True)
    assert not worded


def test_a_model_compiles_whole_to_machine_code():
    """In this process, and without vectors: each of the two dozen kernels compiles in half the time, and nobody asks
    the compiler six times which vectors it knows."""
    plain = {"compile_threads": 1, "cpp.simdlen": 1, "cpp.vec_isa_ok": True}
    with torch._inductor.config.patch(plain):
        assert_compiles(["fox"], "inductor", [5])


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_compiles_whole_on_a_gpu(name, dynamic):
    if name == "diagonal" and dynamic and Version(torch.__version__) < Version("2.13"):
        pytest.skip("torch 2.11 cannot trace a checkpoint whose lengths are symbols (Wall's row blocks)")
    assert_compiles(MODELS[name], "inductor", [65, 97] if dynamic else [65], dynamic, "cuda", 2e-2)


@pytest.mark.parametrize("name", ["fox", "mamba2", "path"])
def test_other_lengths_of_packed_sequences_take_the_same_graph(name):
    """Only how many there are, and how many tokens in all, is known to the graph."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    plain = build_attention(name, hidden_size=16, num_heads=2, kv_shift=True, rotary=1e4)
    compiled = torch.compile(plain, fullgraph=True, backend="eager")
    x = torch.randn(1, 9, 16)
    for lengths in ([4, 5], [1, 8], [0, 9]):
        borders = torch.tensor([0, *lengths]).cumsum(0)
        torch.testing.assert_close(compiled(x, cu_seqlens=borders), plain(x, cu_seqlens=borders))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("options", [{}, {"block": "hgrn2"}])
def test_blocks_of_one_kind_share_a_graph(options):
    """However deep a model is: past eight graphs torch runs a block as it is written."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "vocab_size": 20, "num_layers": 3}
    plain = LanguageModel(ModelConfig(attention="gla", attention_options=options, **sizes))
    tokens = torch.randint(20, (2, 5))
    expected = loss_and_gradients(plain, plain, tokens)
    for block in plain.blocks:
        block.compile(backend="eager")
    for got, want in zip(loss_and_gradients(plain, plain, tokens), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert counters["stats"]["unique_graphs"] == 1


def test_padding_compiles_whole_where_the_batch_has_varied():
    """Its size is then a symbol of the graph, and that of a mask that is new is a number."""
    torch._dynamo.reset()
    plain = build_attention("nope", hidden_size=16, num_heads=2)
    x, mask = torch.randn(3, 5, 16), torch.ones(3, 5, dtype=torch.bool)
    mask[0, :2] = False
    torch._dynamo.maybe_mark_dynamic(x, 0)
    compiled = torch.compile(plain, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, attention_mask=mask), plain(x, attention_mask=mask))


@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_kernels_serve_lengths_that_vary_with_one_graph(name, worded):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    plain = build_attention(name, hidden_size=16, num_heads=1, acp=True, impl="triton")
    compiled = torch.compile(plain, fullgraph=True, backend="eager", dynamic=True)
    for T in (9, 20):
        x = torch.randn(1, T, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), plain(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert not worded


def test_what_is_known_of_a_machine_is_in_the_graph_and_compiling_says_nothing(said):
    torch._dynamo.reset()
    there = torch.compile(
        lambda x: (machine(x.device), multiprocessors(x.device), fla._broken()),
        fullgraph=True, backend="eager",
    )  # fmt: skip
    device = torch.device("cpu")
    assert there(torch.ones(2)) == (machine(device), multiprocessors(device), fla._broken())
    assert not said
