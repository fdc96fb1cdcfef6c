"""Training with weights and optimizer state in bfloat16: what is rounded, what is not, and what leaves a run."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import StoppedError, config_of, outcome, stop_at, write_text

from attnzoo.data import build_data
from attnzoo.experiments.compare import EvaluateConfig, PlannedRun, measure
from attnzoo.trained.continuation import load_text_model
from attnzoo.training import CheckpointError, load_run, newest_checkpoint, read_metrics, train
from attnzoo.training.model import new_model
from attnzoo.training.start import start_from

PURE = "mixed_precision=pure_bf16"
LAYERS = (
    "model.num_layers=4",
    "model.attention=[fox, path_fox, {name: alibi, options: {learnable_slopes: true}}, mamba2]",
)
PRECISE = {
    "blocks.0.attention.gate.forget_proj.bias",
    "blocks.1.attention.gate.members.0.beta_proj.bias",
    "blocks.1.attention.gate.members.1.forget_proj.bias",
    "blocks.2.attention.gate.log_slope",
    *(f"blocks.3.attention.{name}" for name in ("skip", "gate.log_a", "gate.dt_bias")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bfloat16")
    write_text(path)
    train(config_of(path, "run", PURE, *LAYERS))
    return path


def test_a_model_learns(folder):
    options = ("steps=60", "model.hidden_size=32", "eval_every=0", "checkpoint_every=0")
    assert read_metrics(train(config_of(folder, "learns", PURE, *options)))[-1]["loss"] < 2  # a uniform guess has 5.55


def test_everything_but_what_layers_keep_precise_is_bfloat16_in_a_checkpoint(folder):
    checkpoint = newest_checkpoint(folder / "run")
    model, config = load_run(folder / "run")
    saved = load_file(checkpoint / "model.safetensors")
    for tensors in (saved, dict(model.named_parameters()), dict(new_model(config).named_parameters())):
        assert {name for name, x in tensors.items() if x.dtype == torch.float32} == PRECISE
        assert {x.dtype for x in tensors.values()} == {torch.float32, torch.bfloat16}
    states = torch.load(checkpoint / "optimizer.bin", weights_only=True)["state"].values()
    of_float32 = [s for s in states if s["exp_avg"].dtype == s["exp_avg_sq"].dtype == torch.float32]
    of_bfloat16 = [s for s in states if s["exp_avg"].dtype == s["exp_avg_sq"].dtype == torch.bfloat16]
    assert (len(of_float32), len(of_float32) + len(of_bfloat16)) == (len(PRECISE), len(saved))


def test_what_is_precise_is_not_rounded_between_updates(folder):
    saved = load_file(newest_checkpoint(folder / "run") / "model.safetensors")
    for name in PRECISE:
        assert (saved[name] != saved[name].bfloat16()).any(), name


def test_a_stopped_run_goes_on_to_the_same_bits(folder):
    config = config_of(folder, "stopped", PURE, *LAYERS)
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(5))
    assert outcome(train(config)) == outcome(folder / "run")


def test_recomputed_and_compiled_blocks_give_the_same_gradients(folder):
    config, tokens = config_of(folder, "none", PURE), torch.arange(26).view(2, 13)

    def gradients(recompute, compiled):
        torch.manual_seed(0)
        model = new_model(config)
        model.recompute = recompute
        if compiled:
            model.blocks[0].compile(backend="eager")
        model(tokens, tokens).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients(False, False)
    assert {x.dtype for x in plain} == {torch.bfloat16, torch.float32}
    for name, other in {"recomputed": gradients(True, False), "compiled": gradients(True, True)}.items():
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(plain, other, strict=True)), name


@pytest.mark.parametrize(("precision", "moves"), [("bf16", True), ("pure_bf16", False)])
def test_an_update_below_half_a_step_rounds_away_without_float32_weights(precision, moves, folder):
    """Near 1, where the scales of norms start, bfloat16 has steps of 1/256 and 1/128."""
    run = train(config_of(folder, precision, f"mixed_precision={precision}", "optimizer.lr=5e-4", "steps=4"))
    assert bool((load_run(run)[0].norm.weight != 1).any()) == moves


def test_a_run_is_measured_and_writes_as_it_was_trained(folder):
    config = load_run(folder / "run")[1]
    data = build_data(config.data)
    evaluate = EvaluateConfig(length_factor=1, tokens=100)
    measured = measure(PlannedRun("fox", "FoX", "fox", config), evaluate, data, "").losses
    assert float(measured.mean()) == pytest.approx(read_metrics(folder / "run")[-1]["loss"], rel=1e-3)
    assert load_text_model(folder / "run", "cpu").model.head.weight.dtype == torch.bfloat16


def test_it_starts_from_float32_weights_which_are_rounded_once(folder, caplog):
    """Of a run that has not ended, which is said."""
    with pytest.raises(StoppedError):
        train(config_of(folder, "whole", *LAYERS, "steps=4", "checkpoint_every=2"), on_row=stop_at(3))
    whole = load_run(folder / "whole")[0].state_dict()
    config = config_of(folder, "started", PURE, *LAYERS)
    model = new_model(config)
    start_from(model, str(folder / "whole"), config.data)
    assert f"start_from: the run in {str(folder / 'whole')!r} is at step 2 of 4" in caplog.messages
    for name, x in model.state_dict().items():
        assert torch.equal(x, whole[name].to(x.dtype)), name
        assert (x.dtype == torch.float32) == (name in PRECISE)


def test_a_run_does_not_change_to_it_on_the_way(folder):
    with pytest.raises(CheckpointError, match="mixed_precision was 'pure_bf16' and is 'bf16' now"):
        train(config_of(folder, "run", "mixed_precision=bf16", *LAYERS))


def test_parts_of_a_shared_model_are_refused(folder):
    with pytest.raises(ValueError, match="mixed_precision=pure_bf16 .* sharding=fsdp .* take bf16"):
        config_of(folder, "run", PURE, "sharding=fsdp")
