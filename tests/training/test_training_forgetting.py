"""Training runs whose layers learn what they may forget: phases, losses, resumption, networks alone."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import StoppedError, config_of, numbers, outcome, stop_at, write_text
from torch._dynamo.utils import counters

from attnzoo.config import ForgettingConfig, ModelConfig
from attnzoo.forgetting.rules import Forgetting
from attnzoo.models import LanguageModel
from attnzoo.trained.exchange import export_run
from attnzoo.trained.model import of_folder
from attnzoo.training import load_run, read_metrics, train
from attnzoo.training.forgetting import extra_loss, networks, phase, set_phase, with_forgetting

FORGETS = (
    "model.attention=[mamba2,{name: fox, options: {forgetting: {window: 2, width: 4}}}]",
    "model.num_layers=2",
    "forgetting={distill_steps: 2, anneal_steps: 4}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a finished run, `run`, of a hybrid that forgets."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    train(config_of(folder, "run", *FORGETS))
    return folder


def test_phases_go_from_the_schedule_to_the_layers_options():
    """Section 2.5: lambda on a line, tau geometrically, the teacher's weight to 0."""
    config, options = ForgettingConfig(10, 10, 0.1, 4.0, 2.0), Forgetting(blend=0.9, temperature=64.0)
    first, half, last = (phase(step, config, options) for step in (10, 15, 20))
    assert (first.blend, first.temperature, first.distillation) == (0.1, 4.0, 2.0)
    assert (half.blend, half.temperature, half.distillation) == pytest.approx((0.5, 16.0, 1.0))
    assert (last.blend, last.temperature, last.distillation) == pytest.approx((0.9, 64.0, 0.0))
    assert phase(99, config, options) == last
    assert phase(11, ForgettingConfig(10, 0), options).distillation == 0


@pytest.mark.parametrize("order", ["shallow_first", "deep_first"])
def test_layers_take_their_turns(order):
    """Section 2.3's lambda per layer."""
    config, options = ForgettingConfig(0, 100, order=order), Forgetting()
    blends = [phase(50, config, options, layer, 3).blend for layer in range(3)]
    assert blends == sorted(blends, reverse=order == "shallow_first")
    assert (max(blends), min(blends)) == pytest.approx((1.0, 0.1))
    assert {phase(100, config, options, layer, 3) for layer in range(3)} == {phase(100, config, options)}


def test_total_loss_adds_the_weighted_terms_of_all_layers():
    """Section 2.4."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(
        attention="fox", attention_options={"forgetting": {"window": 2}}, hidden_size=16, num_layers=2, num_heads=2
    )).train()  # fmt: skip
    config, found = ForgettingConfig(10, 10, distillation=3.0, budget=0.5), networks(model)
    tokens = torch.randint(256, (2, 12))
    set_phase(found, config, 15)
    loss = model(tokens, targets=tokens).loss
    terms = [network.terms for network in found]
    extra = extra_loss(found, config, 15)
    expected = sum(1.5 * term.distillation + 0.5 * term.budget for term in terms) / 2
    assert torch.isclose(extra.loss, expected)
    (loss + extra.loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    set_phase(found, config, 20)  # on-policy: no teacher is asked
    model(tokens, targets=tokens)
    assert all(network.terms.distillation is None for network in found)
    model.eval()(tokens, targets=tokens)
    assert extra_loss(found, config, 20).row.keys() == {"kept", "budget", "blend", "temperature"}
    for forward in (lambda: None, lambda: model(tokens), torch.no_grad()(lambda: model.train()(tokens))):
        forward()
        with pytest.raises(ValueError, match=r"^found: expected .*after set_phase; network 0 has no loss terms"):
            extra_loss(found, config, 20)
        set_phase(found, config, 20)


def test_a_compiled_block_gives_the_same_losses_and_is_not_compiled_anew_when_lambda_and_tau_move():
    torch._dynamo.reset()
    counters.clear()
    options = {"forgetting": {"window": 2, "width": 4}}
    config, tokens = ForgettingConfig(1, 3), torch.arange(2 * 16).view(2, 16)
    found, graphs = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = LanguageModel(
            ModelConfig(attention="fox", attention_options=options, hidden_size=16, num_layers=1, num_heads=2)
        ).train()
        if compiled:
            model.blocks[0].compile(backend="eager")
        for step in range(5):
            set_phase(networks(model), config, step)
            loss = model(tokens, targets=tokens).loss
            (loss + extra_loss(networks(model), config, step).loss).backward()
            found.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
            graphs.append(counters["stats"]["unique_graphs"])
    for plain, other in zip(found[:5], found[5:], strict=True):
        for one, two in zip(plain, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
    assert 0 < graphs[5] == graphs[-1]


def test_metrics_say_what_is_forgotten(folder):
    rows = [row for row in read_metrics(folder / "run") if row["kind"] == "train"]
    assert [row["forgetting_blend"] for row in rows] == pytest.approx([0.1] * 2 + [0.325, 0.55, 0.775] + [1.0] * 3)
    assert ["forgetting_distillation" in row for row in rows] == [True] * 5 + [False] * 3
    assert all(0 < row["forgetting_kept"] <= 1 for row in rows)


def test_parts_of_unequal_answers_weigh_the_same_in_what_layers_add(folder):
    task = ("data.source=task:flip_flop", "data.task_options.p_ignore=0.5", "batch_size=4")
    whole, parts = (
        numbers(train(config_of(folder, f"parts{n}", *FORGETS, *task, f"gradient_accumulation={n}"))) for n in (1, 4)
    )
    for name in ("loss", "grad_norm"):
        values = [[row[name] for row in rows if name in row] for rows in (whole, parts)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_a_stopped_run_goes_on_to_the_same_bits(folder):
    with pytest.raises(StoppedError):
        train(config_of(folder, "stopped", *FORGETS), on_row=stop_at(5))
    train(config_of(folder, "stopped", *FORGETS))
    assert outcome(folder / "stopped") == outcome(folder / "run")


def test_a_checkpoint_forgets_as_its_step_did(folder):
    checkpoints = sorted((folder / "run" / "checkpoints").iterdir())
    for checkpoint, temperature in zip(checkpoints[-2:], (64.0, 64.0), strict=True):
        [network] = networks(load_run(folder / "run", checkpoint=checkpoint)[0])
        assert network.temperature == pytest.approx(temperature)
    train(config_of(folder, "short", *FORGETS, "steps=4"))
    [network] = networks(load_run(folder / "short")[0])
    assert (network.blend, network.temperature) == pytest.approx((0.55, 16.0))


def test_a_run_and_its_export_forget_alike(folder, tmp_path):
    """In the middle of phase 2 both hold a part of the teacher; without annealing neither does once phase 1 is over."""
    pytest.importorskip("transformers")
    for name, anneal, stands in (("half", 4, (0.55, 16.0)), ("at_once", 0, (1.0, 64.0))):
        settings = f"forgetting={{distill_steps: {3 - anneal // 2}, anneal_steps: {anneal}}}"
        run = train(config_of(folder, name, *FORGETS[:2], settings, "steps=3"))
        for model in (load_run(run)[0], of_folder(export_run(run, tmp_path / name), "cpu")):
            [network] = networks(model)
            assert (network.blend, network.temperature) == pytest.approx(stands)


def test_a_network_alone_learns_beside_frozen_weights(folder):
    plain = config_of(folder, "plain", "model.attention=[mamba2,fox]", "model.num_layers=2")
    train(plain)
    config = with_forgetting(plain, {"window": 2, "width": 4})
    assert [spec.options for spec in config.model.layers()] == [{}, {"forgetting": {"window": 2, "width": 4}}]
    config.forgetting = ForgettingConfig(2, 2, alone=True)
    train(config)
    before, after = load_run(folder / "plain")[0].state_dict(), load_run(config.output_dir)[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fresh = LanguageModel(config.model).state_dict()
    added = [name for name in after if name not in before]
    assert all(".forget." in name for name in added)
    bias = "blocks.1.attention.forget.bias"
    assert bias in added
    assert not torch.equal(after[bias], fresh[bias])


def test_networks_alone_of_a_sharded_run_go_on_to_the_same_bits(folder):
    alone = "forgetting={distill_steps: 2, anneal_steps: 4, alone: true}"
    settings = (*FORGETS[:2], alone, f"start_from={folder / 'run'}", "sharding=fsdp")
    train(config_of(folder, "alone", *settings))
    with pytest.raises(StoppedError):
        train(config_of(folder, "alone-stopped", *settings), on_row=stop_at(5))
    train(config_of(folder, "alone-stopped", *settings))
    assert numbers(folder / "alone-stopped") == numbers(folder / "alone")
    whole, stopped = (load_run(folder / name)[0].state_dict() for name in ("alone", "alone-stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["forgetting.budget=2"], "forgetting: expected its defaults, since no layer of the model forgets"),
        ([*FORGETS, "forgetting.alone=true"], "alone: expected false without start_from"),
        (["forgetting.order=deepfirst"], "did you mean 'deep_first'"),
        (["forgetting.blend=2"], r"blend: expected a number in \[0, 1\]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, overrides, said):
    with pytest.raises(ValueError, match=said):
        train(config_of(folder, "refused", *overrides))


def test_only_the_softmax_side_can_be_made_to_forget():
    with pytest.raises(ValueError, match="a layer of the softmax side, got gla, mamba2"):
        with_forgetting(ModelConfig(attention=["mamba2", "gla"]), Forgetting())


def test_blocks_that_are_computed_again_give_the_same_gradients_and_leave_no_terms():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        options = {"forgetting": {"window": 2, "width": 4}}
        config = ModelConfig(attention="fox", attention_options=options, hidden_size=16, num_layers=2, num_heads=2)
        model, schedule = LanguageModel(config).double(), ForgettingConfig(10, 10)
        model.recompute, found = recompute, networks(model)
        set_phase(found, schedule, 12)
        tokens = torch.arange(160).view(2, 80)
        loss = model(tokens, targets=tokens).loss + extra_loss(found, schedule, 12).loss
        loss.backward()
        assert [network.terms for network in found] == [None, None]
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
