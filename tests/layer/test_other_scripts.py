"""A layer inside the scripts of others: what they do to every module leaves gates, norms and convolutions alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnzoo import build_attention, list_variants, param_groups

SIZES = {"hidden_size": 32, "num_heads": 2}
PLAIN = ("q_proj.", "k_proj.", "v_proj.", "o_proj.", "output_gate.")  # linear layers as every model has them


def nanogpt(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, mean=0.0, std=0.7)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, mean=0.0, std=0.7)


def hugging_face(module):
    if isinstance(module, nn.Linear | nn.Conv1d):
        module.weight.data.normal_(mean=0.0, std=0.7)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        module.weight.data.fill_(1.0)


def by_class_name(module):
    if type(module).__name__.find("Linear") != -1:
        nn.init.uniform_(module.weight, -0.7, 0.7)
        if getattr(module, "bias", None) is not None:
            nn.init.constant_(module.bias, 0.0)


def truncated(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.7)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def layers():
    """Every variant as its paper has it, and the options that bring parts of their own."""
    yield from ((name, {}) for name in list_variants())
    yield "fox", {"block": "pro", "gate_bias": 5.0, "sinks": True}
    yield "fox", {"gate": "independent"}
    yield "wall", {"gate": "full_rank", "rotary": 10000.0}
    yield "rope", {"gate": "selective", "phase_gate": True}


@pytest.mark.parametrize("init", [nanogpt, hugging_face, by_class_name, truncated])
def test_initialising_every_linear_layer_leaves_gates_norms_and_convolutions_alone(init):
    for name, options in layers():
        layer = build_attention(name, **SIZES, **options)
        before = {key: value.clone() for key, value in layer.state_dict().items()}
        nn.Sequential(nn.Linear(32, 32), layer).apply(init)
        moved = {key for key, value in layer.state_dict().items() if not torch.equal(value, before[key])}
        assert {"q_proj.weight", "o_proj.weight"} <= moved  # the script did run
        assert {key for key in moved if not key.startswith(PLAIN)} == set(), name


def test_every_module_initialised_by_itself_starts_as_the_layer_does():
    """As after the meta device: each module's own `reset_parameters`, from the outermost inwards."""
    for name, options in layers():
        layer, other = (build_attention(name, **SIZES, **options) for _ in range(2))
        expected = {key: value.double().clone() for key, value in layer.state_dict().items()}
        constant = {key for key, value in other.state_dict().items() if torch.equal(value, expected[key].to(value))}
        for value in layer.state_dict().values():
            value.fill_(0.123)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for key, value in layer.state_dict().items():
            if key.startswith(PLAIN):
                continue
            if key in constant:
                assert torch.equal(value.double(), expected[key]), (name, key)
            else:
                drawn, before = (x.square().mean().sqrt() for x in (value.double(), expected[key]))
                assert 0.2 < drawn / before < 5, (name, key)


def test_gates_of_a_script_start_where_they_were_asked_to():
    for name, options in (("fox", {"gate_bias": 5.0}), ("path_fox", {"gate_bias": 5.0}), ("wall", {})):
        layer = build_attention(name, **SIZES, **options)
        layer.apply(nanogpt)
        gate = layer.project(torch.randn(2, 8, 32)).gate
        log = gate.log_decay if gate.log_decay is not None else gate.log_diag
        assert log.exp().mean() > 0.98


class Script(nn.Module):
    """A model of somebody else, with a layer of each side."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.mixers = nn.ModuleList(
            [build_attention("fox", **SIZES, block="pro", gate_bias=3.0), build_attention("gated_deltanet", **SIZES)]
        )
        self.norm = nn.LayerNorm(32)
        self.checkpointed = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for mixer in self.mixers:
            x = x + (checkpoint(mixer, self.norm(x), use_reentrant=False) if self.checkpointed else mixer(self.norm(x)))
        return self.head(x)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


@pytest.fixture(scope="module")
def script():
    torch.manual_seed(0)
    model = Script()
    model.apply(nanogpt_small)
    return model, torch.randint(32, (4, 24))


def nanogpt_small(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def gradients(model, compute):
    model.zero_grad()
    compute()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def plain(script):
    model, tokens = script
    return gradients(model, lambda: loss_of(model, tokens).backward())


def agree(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_wrapped_for_several_processes_gradients_are_the_plain_ones(script, plain, tmp_path):
    model, tokens = script
    assert not torch.distributed.is_initialized()
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        agree(gradients(model, lambda: loss_of(wrapped, tokens).backward()), plain)
    finally:
        torch.distributed.destroy_process_group()


def test_a_layer_is_traced_whole(script):
    layer = script[0].mixers[0]
    x = torch.randn(2, 24, 32)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_checkpointed_accumulated_and_functional_gradients_are_the_plain_ones(script, plain):
    model, tokens = script
    model.checkpointed = True
    agree(gradients(model, lambda: loss_of(model, tokens).backward()), plain)
    model.checkpointed = False
    agree(gradients(model, lambda: [(loss_of(model, part) / 2).backward() for part in tokens.chunk(2)]), plain)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def functional(parameters, tokens):
        logits = torch.func.functional_call(model, parameters, (tokens,))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())

    agree(torch.func.grad(functional)(parameters, tokens), plain)


def test_a_scaler_under_autocast_steps_and_an_average_of_the_model_follows(script):
    model, tokens = script
    model = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = loss_of(model, tokens).item()
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
    assert loss_of(model, tokens) < before
    assert loss_of(average, tokens) < before
    gate = average.module.mixers[0].gate.forget_proj
    assert gate.bias.dtype == torch.float32
    assert gate.bias.min() > 2.0
    assert not torch.equal(gate.bias, model.mixers[0].gate.forget_proj.bias)


def test_options_that_no_paper_has_are_refused_with_the_reason():
    for option, why in (
        ("dropout", "no paper"),
        ("attn_drop", "no paper"),
        ("is_causal", "every layer is causal"),
        ("bias", "qkv_bias"),
        ("d_model", "hidden_size"),
        ("dtype", "to\\(device, dtype"),
    ):
        with pytest.raises(ValueError, match=f"^{option}: expected no such option .*{why}.*, got True"):
            build_attention("fox", **SIZES, **{option: True})
