"""Training: it learns, follows its recipe, writes what it says, and fails with a sentence that helps."""

import itertools
import math
import os
import signal

import accelerate
import numpy as np
import pytest
import tiny_runs
import torch
from safetensors.torch import load_file
from tiny_runs import StoppedError, numbers, stop_at, weights

from attnzoo.algebra.pruning import Prune
from attnzoo.config import OptimizerConfig, TrainConfig
from attnzoo.data import build_data
from attnzoo.models import LanguageModel
from attnzoo.models.block import MLP
from attnzoo.training import CheckpointError, load_run, newest_checkpoint, read_metrics, train
from attnzoo.training import checkpoint as checkpoint_module
from attnzoo.training.optimizer import learning_rate
from attnzoo.training.progress import Bar, Lines, build_display


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text with something to learn in few steps."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{number} and {number + 1} make {2 * number + 1}.\n" for number in range(2000)))
    return path


@pytest.fixture
def config_of(text, tmp_path):
    def make(*overrides, run="run") -> TrainConfig:
        own = [f"output_dir={tmp_path / run}", f"data.source={text}", "data.context_length=24", "batch_size=4"]
        sizes = ["model.intermediate_size=32", "optimizer.lr=1e-3", "eval_tokens=200"]
        return tiny_runs.config_of(tmp_path, run, *own, *sizes, *overrides)

    return make


def test_a_model_learns(config_of):
    config = config_of("steps=80", "batch_size=8", "model.hidden_size=32", "optimizer.lr=1e-2", "checkpoint_every=0")
    rows = [row for row in read_metrics(train(config)) if row["kind"] == "eval"]
    assert rows[0]["loss"] > rows[-1]["loss"] + 0.5
    assert rows[-1]["loss"] < 2.5  # a uniform guess has 5.55, the frequencies of the bytes alone about 3


def test_rows_say_what_happened(config_of):
    seen = []
    config = config_of("log_every=3")
    run_dir = train(config, on_row=seen.append)
    rows = read_metrics(run_dir)
    assert rows == seen
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("train", 3),
        ("eval", 4),
        ("train", 6),
        ("train", 8),
        ("eval", 8),
    ]
    row = rows[2]
    assert set(row) == {"kind", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    assert row["tokens"] == 6 * 4 * 24
    assert row["lr"] == learning_rate(6, 8, config.optimizer)
    assert rows[0]["seconds"] < row["seconds"]


def test_the_rate_warms_up_to_its_peak_and_falls_to_zero_along_a_cosine():
    config = OptimizerConfig(lr=2.0, warmup_steps=10)
    rates = [learning_rate(step, 110, config) for step in range(1, 111)]
    assert rates[:10] == pytest.approx(np.linspace(0.2, 2.0, 10))
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)  # halfway down
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 1e-3
    assert learning_rate(111, 110, config) == pytest.approx(0.0)
    assert learning_rate(1, 5, OptimizerConfig(lr=2.0, warmup_steps=0)) == 2.0
    above = OptimizerConfig(lr=2.0, warmup_steps=10, min_lr=0.5)
    assert [learning_rate(n, 110, above) for n in (5, 10, 61, 111)] == pytest.approx([1.25, 2.0, 1.25, 0.5])
    with pytest.raises(ValueError, match="min_lr: expected at most lr=2, got 3"):
        OptimizerConfig(lr=2.0, min_lr=3.0)


def test_the_first_update_is_adamw_on_the_clipped_gradient(config_of):
    config = config_of("steps=3", "optimizer.clip_norm=0.1", "checkpoint_every=1", "keep_checkpoints=3")
    run_dir = train(config)
    torch.manual_seed(config.seed)
    model = LanguageModel(config.model)
    tokens = torch.from_numpy(build_data(config.data).train.batch(range(4)))
    loss = model(tokens[:, :-1], targets=tokens[:, 1:]).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    lr = config.optimizer.lr / 2
    weight = model.head.weight
    # The first step of Adam is lr * g / (|g| + eps), and weight decay shrinks the weight by lr * 0.1.
    expected = weight * (1 - lr * 0.1) - lr * weight.grad / (weight.grad.abs() + 1e-8)
    row = read_metrics(run_dir)[0]
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    after = load_file(run_dir / "checkpoints" / "step-00000001" / "model.safetensors")["head.weight"]
    torch.testing.assert_close(after, expected.detach(), rtol=0, atol=1e-6)


def test_accumulation_changes_no_more_than_rounding(config_of, monkeypatch):
    whole = numbers(train(config_of(run="whole")))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")  # a launcher's, which the configuration outranks
    parts = numbers(train(config_of("gradient_accumulation=4", run="parts")))
    assert [row["loss"] for row in whole] == pytest.approx([row["loss"] for row in parts], rel=1e-4)
    norms = [[row["grad_norm"] for row in rows if row["kind"] == "train"] for rows in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_training_twice_gives_the_same_bits(config_of):
    one, other = train(config_of(run="one")), train(config_of(run="other"))
    assert numbers(one) == numbers(other)
    assert weights(one) == weights(other)


def test_the_seed_matters(config_of):
    assert numbers(train(config_of(run="one")))[0] != numbers(train(config_of("seed=1", run="other")))[0]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 7])
def test_a_stopped_run_goes_on_to_the_same_bits(config_of, stop):
    reference = train(config_of(run="reference"))
    config = config_of()
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(stop))
    seen = []
    train(config, on_row=seen.append)
    assert seen[0]["step"] == (stop - 1) // 2 * 2 + 1  # after the last checkpoint: it did go on, not start again
    assert numbers(config.output_dir) == numbers(reference)
    assert weights(config.output_dir) == weights(reference)


def test_a_stopped_run_goes_on_in_other_parts(config_of):
    whole = numbers(train(config_of("batch_size=6", run="whole")))
    with pytest.raises(StoppedError):
        train(config_of("batch_size=6", "gradient_accumulation=3", "checkpoint_every=1"), on_row=stop_at(4))
    parts = numbers(train(config_of("batch_size=6", "gradient_accumulation=2")))
    assert [row["loss"] for row in parts] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
    norms = [[row["grad_norm"] for row in rows if row["kind"] == "train"] for rows in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_random_states_are_restored(config_of, monkeypatch):
    plain = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x: torch.dropout(plain(self, x), 0.2, self.training))
    reference = train(config_of(run="reference"))
    config = config_of()
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(5))
    train(config)
    assert numbers(config.output_dir) == numbers(reference)


def test_a_finished_run_is_left_as_it_is(config_of):
    run_dir = train(config_of())
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*.*") if path.name != "config.yaml"}
    seen = []
    train(config_of(), on_row=seen.append)
    assert seen == []
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_only_the_newest_checkpoints_are_kept(config_of):
    run_dir = train(config_of("keep_checkpoints=2", "steps=7"))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-00000006", "step-00000007"]


def test_load_run_gives_the_trained_model_and_its_config(config_of, caplog):
    config = config_of("model.tie_embeddings=true", "eval_tokens=100000")
    run_dir = train(config)
    assert "shared tensor" not in caplog.text  # a tied weight is no news
    random = torch.get_rng_state()
    model, loaded = load_run(run_dir)
    assert torch.equal(torch.get_rng_state(), random)  # no first weights were drawn
    assert loaded == config
    assert not model.training
    heldout = torch.from_numpy(np.array(build_data(config.data).heldout, dtype=np.int64))
    rows = (
        heldout[: (len(heldout) - 1) // 24 * 24].view(-1, 24),
        heldout[1:][: (len(heldout) - 1) // 24 * 24].view(-1, 24),
    )
    with torch.no_grad():
        loss = model(rows[0], targets=rows[1]).loss.item()
    assert read_metrics(run_dir)[-1]["loss"] == pytest.approx(loss, rel=1e-5)


def test_tensorboard_shows_each_step_once_after_a_resumption(config_of):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of("tensorboard=true", "checkpoint_every=4")
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(7))
    run_dir = train(config)
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    losses = [row["loss"] for row in read_metrics(run_dir) if row["kind"] == "train"]
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("eval/loss")] == [4, 8]


def test_a_hybrid_trains_and_loads(config_of):
    run_dir = train(config_of("model.attention=[mamba2,fox]", "model.num_layers=2"))
    model, _ = load_run(run_dir)
    assert len(model.blocks) == 2
    assert math.isfinite(read_metrics(run_dir)[-1]["loss"])


def test_a_compiled_run_saves_what_a_plain_one_loads(config_of, monkeypatch):
    config = config_of("eval_every=0", "steps=4")
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
        with pytest.raises(StoppedError):
            train(config, on_row=stop_at(3))
    names = set(LanguageModel(config.model).state_dict())
    assert set(load_file(newest_checkpoint(config.output_dir) / "model.safetensors")) == names
    load_run(config.output_dir)
    train(config)
    assert newest_checkpoint(config.output_dir).name == "step-00000004"


@pytest.mark.parametrize("progress", ["bar", "lines", "quiet"])
def test_progress_is_shown_as_asked(config_of, capsys, progress):
    train(config_of(f"progress={progress}"))
    shown = capsys.readouterr().err
    assert ("tokens/s" in shown) == (progress != "quiet")
    assert ("held-out" in shown) == (progress != "quiet")
    assert ("8/8" in shown) == (progress != "quiet")
    assert len(shown.splitlines()) < 16


def test_lines_begin_with_the_step_from_which_a_run_goes_on(config_of, capsys):
    with pytest.raises(StoppedError):
        train(config_of("progress=lines"), on_row=stop_at(5))
    assert "goes on" not in capsys.readouterr().err
    train(config_of("progress=lines"))
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "run: step 4/8, from whose checkpoint it goes on"


def test_progress_is_a_bar_on_a_terminal_alone(config_of, monkeypatch):
    assert isinstance(build_display(config_of("progress=auto"), 0), Lines)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(build_display(config_of("progress=auto"), 0), Bar)


def test_a_pruned_run_goes_on_whether_its_options_are_objects_or_text(config_of):
    config = config_of("model.attention_options={acp: {eps: 1e-3}}")
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(5))
    config.model.attention_options = {"acp": Prune(eps=1e-3)}
    with pytest.raises(CheckpointError, match=r"model\.attention_options\.acp\.bound was None and is 'tail' now"):
        train(config)
    config.model.attention_options = {"acp": {"eps": 1e-3}}
    train(config)
    assert load_run(config.output_dir)[0].blocks[0].attention.prune == Prune(eps=1e-3)


def test_bfloat16_trains(config_of):
    plain = read_metrics(train(config_of(run="plain")))[-1]["loss"]
    mixed = read_metrics(train(config_of("mixed_precision=bf16", run="mixed")))[-1]["loss"]
    assert mixed != plain
    assert mixed == pytest.approx(plain, abs=0.05)
    assert (
        load_run(newest_checkpoint(config_of(run="mixed").output_dir).parents[1])[0].head.weight.dtype == torch.float32
    )


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(config_of, monkeypatch):
    plain = LanguageModel.forward
    calls = []

    def spoiled(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        calls.append(self.training)
        return type(output)(output.logits, output.loss * float("nan")) if calls.count(True) == 5 else output

    monkeypatch.setattr(LanguageModel, "forward", spoiled)
    config = config_of("log_every=2")
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 5 .*step-00000004"):
        train(config)
    model, _ = load_run(config.output_dir)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_full_disk_keeps_the_checkpoint_before(config_of, monkeypatch):
    reference = train(config_of(run="reference"))
    config = config_of()
    saved = []
    save_state = accelerate.Accelerator.save_state

    def fill_the_disk(self, folder, *args, **kwargs):
        saved.append(folder)
        save_state(self, folder, *args, **kwargs)
        if len(saved) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(accelerate.Accelerator, "save_state", fill_the_disk)
        with pytest.raises(CheckpointError, match=r"step 6 .*No space left.*step-00000004 is whole"):
            train(config)
    assert newest_checkpoint(config.output_dir).name == "step-00000004"
    assert not list((newest_checkpoint(config.output_dir).parent).glob(".*"))  # what was half-written is gone
    train(config)
    assert numbers(config.output_dir) == numbers(reference)


def test_metrics_that_cannot_be_written_are_named(config_of, monkeypatch):
    from attnzoo.training.metrics import Metrics

    class Full:
        def write(self, line):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    plain = Metrics.__init__

    def broken(self, *args):
        plain(self, *args)
        self._file.close()
        self._file = Full()

    monkeypatch.setattr(Metrics, "__init__", broken)
    with pytest.raises(OSError, match=r"could not write metrics: No space left.*metrics\.jsonl"):
        train(config_of())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupt_saves_the_step_under_way(config_of, number):
    reference = train(config_of("checkpoint_every=0", run="reference"))
    config = config_of("checkpoint_every=0")

    def interrupt(row):
        if row["step"] == 3:
            os.kill(os.getpid(), number)

    handlers = [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        train(config, on_row=interrupt)
    assert newest_checkpoint(config.output_dir).name in ("step-00000003", "step-00000004")
    assert [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)] == handlers
    train(config)
    assert numbers(config.output_dir) == numbers(reference)
    assert weights(config.output_dir) == weights(reference)


def test_a_second_run_in_one_process_may_differ_in_precision_and_parts(config_of):
    first = numbers(train(config_of(run="first")))
    train(config_of("mixed_precision=bf16", "gradient_accumulation=2", run="between"))
    assert numbers(train(config_of(run="second"))) == first


def test_a_torn_last_line_is_not_read(config_of):
    run_dir = train(config_of())
    rows = read_metrics(run_dir)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert read_metrics(run_dir) == rows


def test_stale_folders_are_removed(tmp_path):
    for name in ["step-00000002", "step-00000004", "step-00000006", ".step-00000008.part", ".step-00000000.part"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for leftover in tmp_path.glob(".step-*"):
        (leftover / "made-by-attnzoo").touch()
    checkpoint_module.remove_stale(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]


def test_what_others_have_among_the_checkpoints_stays_and_ends_no_run(config_of, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    folder = tmp_path / "run" / "checkpoints"
    mine = {".step-mine", ".step-00000004.tmp", ".step-00000002.old", ".step-00000009.part", "step-1", "step-00000002x"}
    for name in mine:
        (folder / name).mkdir(parents=True)
        (folder / name / "notes").touch()
    for name in (links := {".step-x", ".step-00000003.tmp", ".step-00000099.part"}):
        (folder / name).symlink_to(tmp_path / "home")
    (folder / ".step-y").touch()
    train(config_of("checkpoint_every=1", "keep_checkpoints=1", run="run"))
    found = {path.name for path in folder.iterdir()}
    assert {name for name in found if not name.startswith("step-0000") or name in mine} == mine | links | {".step-y"}
    assert all((folder / name / "notes").exists() for name in mine)
    assert (tmp_path / "home" / "thesis.txt").exists()
