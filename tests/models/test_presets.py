"""Models of published sizes: their counts, their recipes, and the baselines' layers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from attnzoo import build_attention, get, list_variants
from attnzoo.cli import app
from attnzoo.config import TrainConfig, load_config
from attnzoo.experiments.builtin import find_config
from attnzoo.layer.gates.base import Sizes
from attnzoo.layer.gates.hgrn2 import BoundedForgetGate
from attnzoo.layer.stream import Stream
from attnzoo.models import presets
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.swap import Unfilled
from attnzoo.registry.table import PRODUCTS
from attnzoo.training.throughput import Operations

# Parameters without the input embedding: table 6 of Lin et al., 2025 (FoX), and the authors' classes.
PUBLISHED = {
    "fox-pro-760m": 759_441_984, "transformer-pro-760m": 757_675_008, "fox-llama-760m": 757_632_576,
    "transformer-llama-760m": 756_747_264, "deltanet-760m": 757_635_072, "mamba2-760m": 780_113_664,
    "hgrn2-760m": 756_820_992,
    "fox-llama-360m": 360_188_288, "transformer-llama-360m": 359_794_688, "deltanet-360m": 360_289_280,
    "mamba2-360m": 368_314_880, "hgrn2-360m": 359_843_840,
    "fox-llama-125m": 123_661_968, "transformer-llama-125m": 123_551_232, "deltanet-125m": 123_718_656,
    "mamba2-125m": 128_965_824, "hgrn2-125m": 123_569_664,
}  # fmt: skip
A_SCALE_PER_HEAD = {  # where QK-norm's weights are not shared by the heads
    "fox-pro-760m": 759_512_640, "transformer-pro-760m": 757_742_592, "fox-pro-360m": 367_339_904,
    "transformer-pro-360m": 366_946_304, "fox-pro-125m": 123_910_800, "transformer-pro-125m": 123_800_064,
}  # fmt: skip


RWKV7 = [("125m", 768, 12, 64, 32, 128), ("360m", 1024, 24, 64, 64, 160), ("760m", 1536, 24, 96, 64, 192)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    assert presets.parameters(name)["without_embedding"] == PUBLISHED[name]


@pytest.mark.parametrize(("size", "D", "L", "w", "v", "g"), RWKV7)
def test_counts_of_rwkv_7_are_those_of_its_maps(size, D, L, w, v, g):
    """Of ranks w, v and g; as many as flash-linear-attention's class has with the ranks of its layer's defaults."""
    mixtures, maps, vectors = 7 * D, 4 * D * D + 8 * D * D, 3 * D + 2 * D + 4 * D  # with the norms of a layer
    layer = mixtures + maps + vectors + 2 * (2 * D * w + D) + 2 * D * g
    expected = L * layer + (L - 1) * (2 * D * v + D) + 4 * D + 50257 * D
    assert presets.parameters(f"rwkv7-{size}")["without_embedding"] == expected


@pytest.mark.parametrize("name", A_SCALE_PER_HEAD)
def test_counts_with_a_scale_per_head(name):
    with torch.device("meta"), Unfilled():
        model = presets.build(
            name, attention_options={**presets.preset(name).model.attention_options, "qk_norm_shared": False}
        )
    count = sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel()
    assert count == A_SCALE_PER_HEAD[name]


def test_every_variant_comes_in_every_size_and_block():
    for variant in list_variants():
        for size in ("125m", "360m", "760m"):
            assert {f"{variant}-pro-{size}", f"{variant}-llama-{size}", f"{variant}-{size}"} <= set(presets.names())


def of_a_product(name):
    return any(name.startswith(f"{side}-") for pair in PRODUCTS for side in (pair.linear, pair.softmax))


@pytest.mark.parametrize(
    "name", [name for name in presets.names() if name.endswith("-pro-125m" if of_a_product(name) else "-125m")]
)
def test_every_preset_is_a_run(name):
    config = load_config(find_config(name, "train"))
    assert isinstance(config, TrainConfig)
    assert config.model == presets.preset(name).model
    recipe = presets.preset(name).recipe
    assert config.steps * config.batch_size * config.data.context_length == recipe.tokens
    with torch.device("meta"), Unfilled():
        assert presets.build(name, num_layers=2, vocab_size=8)


@pytest.mark.parametrize(
    ("name", "lr"),
    [
        ("fox-pro-760m", 2e-3), ("transformer-pro-760m", 1e-3), ("fox-llama-760m", 1e-3), ("gla-760m", 1e-3),
        ("transformer-llama-760m", 5e-4), ("mamba2-760m", 2e-3), ("hgrn2-760m", 2e-3), ("deltanet-760m", 1e-3),
        ("fox-pro-360m", 2e-3), ("transformer-llama-125m", 2e-3),
    ],
)  # fmt: skip
def test_learning_rates_are_those_of_the_paper(name, lr):
    assert presets.preset(name).recipe.lr == lr


def test_a_preset_is_trained_as_the_paper_says():
    config = load_config(find_config("transformer-pro-360m", "train"), ["data.source=text"])
    assert (config.batch_size, config.data.context_length, config.steps) == (32, 16384, 14336)
    assert config.optimizer.warmup_steps * config.batch_size * config.data.context_length == 256 * 2**20
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.95)
    assert (config.optimizer.weight_decay, config.optimizer.clip_norm) == (0.1, 1.0)
    assert config.model.attention_options == {"theta": 500_000.0, "block": "pro", "qk_norm_shared": True}
    assert config.output_dir == "runs/transformer-pro-360m"


def test_a_preset_is_shown_with_its_counts():
    from click.testing import CliRunner

    ran = CliRunner().invoke(app, ["show", "--preset", "fox-pro-760m"])
    assert ran.exit_code == 0
    for word in ("1,536", "3,584", "836,636,736", "759,441,984", "92,160 steps", "arXiv:2503.02130", "block=pro"):
        assert word in ran.output
    listed = CliRunner().invoke(app, ["list", "--presets"]).output
    assert all(name in listed for name in presets.names())


def test_a_built_preset_runs():
    torch.manual_seed(0)
    for name in ("samba-125m", "window_transformer-pro-125m"):
        model = presets.build(name, num_layers=2, vocab_size=11)
        assert model(torch.randint(11, (1, 5))).logits.shape == (1, 5, 11)


def test_a_preset_is_trained_from_the_command_line(tmp_path, caplog):
    from click.testing import CliRunner

    (tmp_path / "text.txt").write_text("a preset is a configuration like any other\n" * 40)
    tiny = ["hidden_size=16", "num_heads=2", "num_layers=1", "intermediate_size=16"]
    run = ["steps=2", "batch_size=2", "gradient_accumulation=2", "eval_tokens=64", "device=cpu", "tensorboard=false"]
    rest = [f"data.source={tmp_path}", "data.context_length=32", "optimizer.warmup_steps=1", "progress=quiet"]
    given = [
        *(f"model.{size}" for size in tiny),
        *run,
        *rest,
        "data.heldout_fraction=0.3",
        f"output_dir={tmp_path}/run",
    ]
    ran = CliRunner().invoke(app, ["train", "path_fox-pro-125m", *given])
    assert ran.exit_code == 0, ran.exception
    assert (tmp_path / "run").is_dir()
    assert "qk_norm_shared: true" in (tmp_path / "run" / "config.yaml").read_text()
    assert "model.vocab_size=50257, of which the data has 256: 1 million parameters stay idle" in caplog.text


# The baselines, and what they reduce to


def bounded(layers: int = 3) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(
        attention="gla", attention_options={"block": "hgrn2"}, hidden_size=16, num_heads=2, num_layers=layers,
        vocab_size=11, intermediate_size=0,
    )  # fmt: skip
    model = LanguageModel(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def hgrn2_by_hand(attn: torch.nn.Module, x: Tensor, low: Tensor) -> Tensor:
    """Qin et al., 2024, eq. 6-7: ``S_t = Diag(f_t) S_{t-1} + (1 - f_t) i_t^T``, ``o_t = S_t^T silu(q_t)``, then RMS."""
    q, z, i = (p(x).unflatten(-1, (2, -1)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    f = low.view(2, -1) + (1 - low.view(2, -1)) * z.sigmoid()
    S, out = x.new_zeros(len(x), 2, 8, 8), []
    for t in range(x.shape[1]):
        S = f[:, t, :, :, None] * S + (1 - f[:, t])[..., None] * i[:, t, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", S, torch.nn.functional.silu(q[:, t])) * 8**-0.5)
    o = torch.stack(out, 1).flatten(2)
    return attn.o_proj(torch.nn.functional.rms_norm(o, (16,), attn.output_norm.weight.flatten(), 1e-6))


def test_hgrn2_is_gla_with_keys_one_minus_f_and_rising_bounds():
    model, x = bounded(), torch.randn(2, 13, 16, dtype=torch.float64)
    shares = model.lower_bounds.logits.softmax(0)
    bounds = [torch.zeros(16).double(), shares[1], shares[1] + shares[2]]
    for block, low in zip(model.blocks, bounds, strict=True):
        attn = block.attention
        assert torch.allclose(attn(x), hgrn2_by_hand(attn, x, low))
        p = attn.project(x)
        assert torch.allclose(p.k, 1 - p.gate.log_diag.exp())
        o = get("gla").forms["recurrent"](p.q, p.k, p.v, p.gate)
        assert torch.allclose(attn(x), attn.o_proj(attn.output_norm(o).flatten(2)))


@pytest.mark.parametrize("low", [0.0, 2**-20, 0.25, 1 - 2**-10, 1.0])
def test_hgrn2_gates_and_their_gradients_are_exact_for_any_logit(low: float) -> None:
    gate = BoundedForgetGate(Sizes(16, 2, 2, 8))
    gate.shared, gate.place = (lambda: torch.full((1, 16), low),), torch.tensor([0])
    z = torch.linspace(-70, 70, 320).view(1, 10, 2, 16)[..., :8].clone().requires_grad_()
    g = gate(torch.zeros(1, 10, 16), z, Stream(None, None, (1, 10), z.device))[0].log_diag
    (grad,) = torch.autograd.grad(g.sum(), z)
    one, x = min(low, 1 - 2.0**-23), z.detach().double()
    f, rest = one + (1 - one) * x.sigmoid(), (1 - one) * (-x).sigmoid()  # f and 1 - f
    torch.testing.assert_close(g.double(), torch.where(f < 0.5, f.log(), torch.log1p(-rest)), rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.double(), rest * x.sigmoid() / f, rtol=1e-4, atol=0)


def test_layers_without_lower_bounds_share_none():
    options = {"block": "hgrn2", "lower_bounds": False}
    assert LanguageModel(ModelConfig("gla", options, 16, 2, 2)).lower_bounds is None


def test_lower_bounds_start_even_and_learn():
    model = bounded()
    model.reset_parameters()
    even = torch.arange(3).double()[:, None].expand(3, 16) / 3
    assert torch.allclose(model.lower_bounds(), even)
    model(torch.randint(11, (1, 9)), targets=torch.randint(11, (1, 9))).loss.backward()
    assert model.lower_bounds.logits.grad.abs().max() > 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("how", ["reset", "load", "assign"])
def test_a_model_from_the_meta_device_knows_which_bound_is_whose(how):
    normal, tokens = bounded().float(), torch.randint(11, (1, 9))
    with torch.device("meta"):
        meta = LanguageModel(normal.config)
    if how != "assign":
        meta.to_empty(device="cpu")
        for block in meta.blocks:
            block.attention.gate.place.fill_(-7)  # what an empty tensor may hold
    if how == "reset":
        for model in (normal, meta):
            torch.manual_seed(0)
            model.reset_parameters()
    else:
        meta.load_state_dict(normal.state_dict(), assign=how == "assign")
    assert torch.equal(meta(tokens).logits, normal(tokens).logits)


def test_copies_and_casts_of_a_model_keep_its_bounds_to_themselves():
    model = bounded()
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.lower_bounds.logits)
    for layer in range(3):
        assert other.blocks[layer].attention.gate.shared[0] is other.lower_bounds
        assert model.blocks[layer].attention.gate.shared[0] is model.lower_bounds
    assert model.to(torch.bfloat16).lower_bounds.logits.dtype == torch.float32
    tokens = torch.randint(11, (1, 7))
    other.load_state_dict(bounded().state_dict())
    assert torch.equal(other.double()(tokens).logits, bounded()(tokens).logits)


def test_a_model_made_without_memory_has_its_bounds_too():
    model, tokens = bounded(), torch.randint(11, (1, 7))
    with torch.device("meta"):
        made = LanguageModel(model.config)
    made.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(made(tokens).logits, model(tokens).logits)


def test_steps_of_hgrn2_equal_its_whole():
    model, tokens = bounded(), torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    steps = [model(part, cache=cache).logits for part in tokens.split([5, 1, 1, 5], 1)]
    assert torch.allclose(torch.cat(steps, 1), model(tokens).logits)


def test_extreme_logits_close_and_open_the_bounded_gate():
    attn = bounded(2).blocks[1].attention
    stream = Stream(None, None, (1, 1), torch.device("cpu"))
    z = torch.tensor([-1e4, -200.0, -60.0, 60.0, 1e4]).double()[None, :, None, None].repeat(1, 1, 2, 8).requires_grad_()
    gate, _ = attn.gate(torch.zeros(1, 5, 16), z, stream)
    low = attn.gate.shared[0]()[1].view(2, 8)
    f = gate.log_diag.exp()
    assert (gate.log_diag <= 0).all()
    assert torch.allclose(f[0, 2], low)
    assert torch.allclose(f[0, 3:], torch.ones(()).double())
    gate.log_diag[0, 2:].sum().backward()
    assert z.grad.isfinite().all()


def test_the_dual_of_hgrn2_is_wall_with_its_gate():
    attn, dual = (build_attention(name, block="hgrn2", hidden_size=16, num_heads=2) for name in ("gla", "wall"))
    dual.load_state_dict(attn.state_dict())
    x = torch.randn(1, 6, 16)
    assert torch.equal(attn.project(x).gate.log_diag, dual.project(x).gate.log_diag)


def test_mamba2_is_the_scalar_gate_with_steps_in_the_values():
    """The core of the block is the zoo's form ``mamba2``, where ``dt x`` is written and all heads share one q and k; it
    is GLA with equal channels too."""
    torch.manual_seed(0)
    attn, x = (
        build_attention("mamba2", hidden_size=16, num_heads=4, head_dim=8).double(),
        torch.randn(1, 9, 16).double(),
    )
    p = attn.project(x)
    assert torch.equal(p.k, p.k[:, :, :1].expand_as(p.k))
    S, out = torch.zeros(1, 4, 8, 8).double(), []
    for t in range(9):
        dt = p.write[:, t, :, None, None]
        S = (-attn.gate.log_a.exp()[:, None, None] * dt).exp() * S + dt * p.k[:, t, :, :, None] * p.v[:, t, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", S, p.q[:, t]))
    expected = torch.stack(out, 1)
    assert torch.allclose(get("mamba2").forms["chunk"](p.q, p.k, p.v, p.gate, scale=1.0, write=p.write), expected)
    from attnzoo import Gate

    channels = Gate(log_diag=p.gate.log_decay[..., None].expand(-1, -1, -1, 8))
    assert torch.allclose(get("gla").forms["chunk"](p.q, p.k, p.v, channels, scale=1.0, write=p.write), expected)


def test_the_bounds_serve_gates_of_one_width_and_heads_of_their_own():
    with pytest.raises(ValueError, match="num_kv_heads: expected num_heads = 4 .*got 2"):
        build_attention("gla", block="hgrn2", hidden_size=16, num_heads=4, num_kv_heads=2)
    mixed = [{"name": "gla"}, {"name": "gla", "options": {"head_dim": 4}}]
    with pytest.raises(ValueError, match=r"expected one width of all gates with lower bounds, got \[8, 16\]"):
        LanguageModel(ModelConfig(mixed, {"block": "hgrn2"}, hidden_size=16, num_heads=2, num_layers=2))
    with pytest.raises(ValueError, match="gate: 'fox' needs the parts"):
        build_attention("fox", block="hgrn2")


def test_blocks_without_an_mlp():
    model = LanguageModel(ModelConfig("fox", hidden_size=16, num_heads=2, num_layers=1, intermediate_size=0))
    assert model.blocks[0].mlp is None
    assert not any("mlp" in name for name in model.state_dict())
    assert math.isfinite(model(torch.randint(11, (1, 5)), targets=torch.randint(11, (1, 5))).loss.item())
    with pytest.raises(ValueError, match="intermediate_size: expected at least 0, got -1"):
        ModelConfig(intermediate_size=-1)


@pytest.mark.parametrize(
    ("name", "tokens", "lr", "context", "rows"),
    [
        ("fox-pro-760m-16b", 15 * 2**30, 1e-3, 16384, 32), ("transformer-llama-760m-16b", 15 * 2**30, 1e-3, 16384, 32),
        ("samba-760m-16b", 15 * 2**30, 1e-3, 16384, 32), ("fox-pro-340m", 14 * 2**30, 3e-4, 2048, 256),
    ],
)  # fmt: skip
def test_other_trainings_of_a_size_have_its_widths(name, tokens, lr, context, rows):
    found = presets.preset(name)
    recipe = found.recipe
    assert (recipe.tokens, recipe.lr, recipe.context_length, recipe.sequences) == (tokens, lr, context, rows)
    like = presets.preset(name.replace("-16b", "").replace("340m", "360m")).model
    assert vars(found.model) | {"vocab_size": 0} == vars(like) | {"vocab_size": 0}
    if "340m" in name:
        assert found.model.vocab_size == 32000
        schedule = (recipe.warmup_tokens, recipe.min_lr, recipe.weight_decay, recipe.clip_norm)
        assert schedule == (512 * 2**20, 3e-5, 0.01, 1.0)
        assert presets.preset("transformer-llama-340m").model.attention_options["theta"] == 10_000
        assert presets.preset("transformer-llama-360m").model.attention_options["theta"] == 500_000
        assert 335e6 < presets.parameters(name)["without_embedding"] < 350e6


@pytest.mark.parametrize(
    ("length", "batch", "parts"), [(4096, 128, 32), (8192, 64, 32), (65536, 8, 8), (5000, 105, 105)]
)
def test_another_context_keeps_the_tokens_of_the_recipe(length, batch, parts, caplog):
    settings = find_config("fox-pro-125m", "train")
    config, plain = load_config(settings, [f"data.context_length={length}"]), load_config(settings)
    assert (config.batch_size, config.gradient_accumulation) == (batch, parts)
    assert (config.steps, config.optimizer) == (plain.steps, plain.optimizer)
    assert config.batch_size * length == pytest.approx(2**19, rel=0.01)
    assert [r.message for r in caplog.records] == [
        f"data.context_length={length}: batch_size={batch}, for the {batch * length:,} tokens a step of the recipe"
    ]


def test_a_batch_that_is_typed_stays():
    settings = find_config("fox-pro-125m", "train")
    for typed in ("batch_size=32", "steps=600"):
        assert load_config(settings, ["data.context_length=4096", typed]).batch_size == 32
    assert load_config(settings, ["data.context_length=4096", "gradient_accumulation=8"]).gradient_accumulation == 8


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("fox-pro", 2.72e9), ("transformer-pro", 2.72e9), ("fox-llama", 2.72e9), ("transformer-llama", 2.72e9),
        ("mamba2", 1.65e9), ("hgrn2", 1.54e9), ("deltanet", 1.54e9),
    ],
)  # fmt: skip
def test_operations_per_token_are_those_of_table_6(name, printed):
    """Of recurrences it counts convolutions and gates too, 1% at most."""
    operations = Operations(presets.outline(f"{name}-760m")).forward_per_token(16384)
    assert operations == pytest.approx(printed, rel=0.012)
