"""Angles, slopes, decays and biases of gates are not rounded with a model, nor left empty by a meta initialisation."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from attnzoo import build_attention, list_variants
from attnzoo.config import ModelConfig
from attnzoo.layer.gates import GATES
from attnzoo.layer.weight_decay import spared
from attnzoo.models import LanguageModel

D, H, T = 32, 4, 2048
CASTS = {"to": lambda m: m.to(torch.bfloat16), "half": nn.Module.half, "bfloat16": nn.Module.bfloat16}
# every gate projection, on a variant that takes it
LAYERS = {
    "alibi": ("alibi", {"learnable_slopes": True}), "retention": ("retnet", {}), "forget": ("fox", {}),
    "independent": ("fox", {"gate": "independent"}), "fixed": ("fox", {"gate": "fixed"}),
    "softplus": ("fox", {"gate": "softplus"}), "mamba2": ("mamba2", {}), "low_rank": ("gla", {}),
    "rotary": ("rope", {}), "delta": ("deltanet", {}), "path": ("path", {}), "none": ("nope", {}),
    "hgrn2": ("gla", {"block": "hgrn2"}), "combined": ("path_fox", {}),
    "full_rank": ("wall", {"gate": "full_rank"}), "channel_softplus": ("gla", {"gate": "channel_softplus"}),
    "selective": ("rope", {"gate": "selective", "phase_gate": True}), "mamba3": ("mamba3", {"qk_norm_shared": False}),
    "levels": ("log_linear_mamba2", {}), "forget_back": ("bidirectional_fox", {}), "rwkv7": ("rwkv7", {}),
}  # fmt: skip
every_gate = pytest.mark.parametrize("gate", LAYERS)


def layer(gate, seed=0):
    name, options = LAYERS[gate]
    torch.manual_seed(seed)
    return build_attention(name, hidden_size=D, num_heads=H, **options)


def fixed_numbers(module):
    """What must not be rounded: whatever has no matrix shape, norms of heads and convolutions excepted, and all
    buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: x for name, x in named if x.ndim == 1 and "_conv." not in name}


def test_every_gate_is_among_the_layers():
    assert set(GATES) == set(LAYERS) - {"combined"}


@pytest.mark.parametrize("cast", CASTS)
@every_gate
def test_no_cast_rounds_them(gate, cast):
    attn = layer(gate)
    with torch.no_grad():
        for name, x in fixed_numbers(attn).items():
            if name in attn.state_dict():
                x += 0.001 * (x - 100)  # nothing that 16 bits can hold
    attn(torch.randn(1, 3, D)).sum().backward()  # gradients are cast with their parameters
    before = {name: x.detach().clone() for name, x in fixed_numbers(attn).items()}
    got = CASTS[cast](attn)
    assert got is attn
    assert attn.q_proj.weight.dtype == attn.q_proj.weight.grad.dtype != torch.float32
    for name, x in fixed_numbers(attn).items():
        assert torch.equal(x, before[name]), name
        assert x.grad is None or x.grad.dtype == x.dtype
    other = CASTS[cast](layer(gate, seed=1))
    other.load_state_dict(attn.state_dict())
    x = torch.randn(1, 5, D).to(attn.q_proj.weight.dtype)
    assert torch.equal(other(x), attn(x))
    attn(x).float().sum().backward()


@every_gate
def test_a_layer_made_in_16_bits_has_the_dtypes_of_one_cast_to_them(gate):
    torch.set_default_dtype(torch.bfloat16)  # as transformers does for `from_config(config, dtype=torch.bfloat16)`
    try:
        attn = layer(gate)
    finally:
        torch.set_default_dtype(torch.float32)
    cast = layer(gate).bfloat16()
    for name, x in fixed_numbers(attn).items():
        assert x.dtype == fixed_numbers(cast)[name].dtype, name


@every_gate
def test_a_layer_made_double_is_double_altogether(gate):
    attn = layer(gate).double()
    assert {x.dtype for x in [*attn.parameters(), *attn.buffers()]} == {torch.float64}
    gate_parts = attn.project(torch.randn(1, 3, D).double()).gate
    assert {getattr(gate_parts, part).dtype for part in gate_parts.parts} <= {torch.float64}
    assert {x.dtype for x in layer(gate).double().float().parameters()} <= {torch.float32}


@pytest.mark.parametrize("name", ["rope", "complex_linear", "alibi", "retnet"])
def test_a_16_bit_layer_means_the_same_positions(name):
    """Large weights, so that phases and distances decide where a row looks; only the matrices are rounded."""
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=D, num_heads=H)
    with torch.no_grad():
        for p in attn.parameters():
            p.copy_((8 * p).bfloat16())  # so that the cast below changes nothing but fixed numbers
        x = torch.randn(1, T, D).bfloat16()
        rounded = copy.deepcopy(attn).bfloat16().double()(x.double())
        expected = attn.double()(x.double())
    assert (rounded - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("name", list_variants())
def test_a_layer_from_the_meta_device_is_one_initialised_at_once(name):
    options = {"hidden_size": D, "num_heads": H, "block": "pro"} | ({"rotary": 1e4} if name == "fox" else {})
    normal = build_attention(name, **options)
    with torch.device("meta"):
        meta = build_attention(name, **options)
    assert all(x.is_meta for x in [*meta.parameters(), *meta.buffers()])
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for x in [*meta.parameters(), *meta.buffers()]:
            x.fill_(torch.nan)  # what an empty tensor may hold
    for attn in (normal, meta):
        torch.manual_seed(3)
        attn.reset_parameters()
    for (label, got), expected in zip(
        [*meta.named_parameters(), *meta.named_buffers()], [*normal.parameters(), *normal.buffers()], strict=True
    ):
        assert torch.equal(got, expected), label
        assert got.dtype == expected.dtype
    assert spared(meta) == spared(normal)


@every_gate
def test_a_checkpoint_in_16_bits_rounds_nothing_further(gate):
    """Its tensors become those of the layer; what it never rounds has 32 bits all the same, and trains with them."""
    attn = layer(gate)
    given = {name: x.bfloat16() for name, x in attn.state_dict().items()}
    attn.load_state_dict(given, assign=True)
    assert attn.q_proj.weight.dtype == torch.bfloat16
    assert {x.dtype for x in given.values()} == {torch.bfloat16}
    trained = {name for name, x in layer(gate).named_parameters() if x.requires_grad}
    for name, x in fixed_numbers(attn).items():
        assert x.dtype in (torch.float32, torch.float64), name
        assert x.is_leaf, name
        assert x.requires_grad == (name in trained), name
        if name in given:
            assert torch.equal(x, given[name].to(x.dtype)), name
    attn(torch.randn(1, 5, D).bfloat16())


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_from_the_meta_device_loads_a_checkpoint_alone(assign):
    """What the checkpoint does not hold, retention's angle, is there too."""
    normal, x = layer("retention"), torch.randn(1, 7, D)
    with torch.device("meta"):
        meta = layer("retention")
    if not assign:
        meta.to_empty(device="cpu")
        for buffer in meta.buffers():
            buffer.fill_(torch.nan)
    meta.load_state_dict(normal.state_dict(), assign=assign)
    assert torch.equal(meta(x), normal(x))


def test_autocast_does_not_round_the_bias_of_a_gate():
    attn = layer("forget")
    with torch.no_grad():
        attn.gate.forget_proj.weight.zero_()
        attn.gate.forget_proj.bias.copy_(torch.tensor([1.001, 2.002, 3.003, 4.004]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attn.project(torch.randn(1, 2, D)).gate.log_decay
    assert torch.equal(got[0, 1], torch.nn.functional.logsigmoid(attn.gate.forget_proj.bias))


@pytest.mark.parametrize("tie", [False, True])
def test_a_model_from_the_meta_device_is_one_initialised_at_once(tie):
    config = ModelConfig(attention=["mamba2", "rope"], hidden_size=D, num_layers=2, num_heads=H, tie_embeddings=tie)
    normal = LanguageModel(config)
    with torch.device("meta"):
        meta = LanguageModel(config)
    meta.to_empty(device="cpu")
    for model in (normal, meta):
        torch.manual_seed(3)
        model.reset_parameters()
    assert (meta.head.weight is meta.embedding.weight) == tie
    tokens = torch.randint(256, (1, 9))
    assert torch.equal(meta(tokens).logits, normal(tokens).logits)


@pytest.fixture
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["mamba2", "fox", "path_fox", "rope"])
def test_sharded_gates_keep_a_precision_of_their_own(name):
    """A gate is its own FSDP group in float32, in a model that computes in bfloat16; from the meta device."""
    config = ModelConfig(attention=name, hidden_size=D, num_layers=1, num_heads=H)
    plain = LanguageModel(config)
    with torch.device("meta"):
        model = LanguageModel(config)
    attention = model.blocks[0].attention
    exact = MixedPrecisionPolicy(param_dtype=torch.float32)
    fully_shard(attention.gate, mp_policy=exact, reshard_after_forward=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.to_empty(device="cpu")
    seen = []
    attention.gate.register_forward_hook(lambda module, _, output: seen.append((fixed_numbers(module), output[0])))
    tokens = torch.randint(256, (1, 9))
    for either in (plain, model):
        torch.manual_seed(3)
        either.reset_parameters()
        either(tokens, targets=tokens).loss.backward()
    ((numbers, gate),) = seen
    assert {x.dtype for x in numbers.values()} <= {torch.float32}
    assert {getattr(gate, part).dtype for part in gate.parts} == {torch.float32}
    for (label, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (got.grad.full_tensor() - expected.grad).norm() <= 0.1 * expected.grad.norm(), label
