"""What ends a run early saves it or says at which step and rate it went wrong; what cannot begin is refused at once."""

import errno
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import tiny_runs
import torch
from tiny_runs import outcome, write_text

from attnzoo.config import ModelConfig, OptimizerConfig, TrainConfig
from attnzoo.experiments.compare import CompareConfig, plan, run_comparison
from attnzoo.models import LanguageModel
from attnzoo.training import loop, newest_checkpoint, read_metrics, train
from attnzoo.training.folder import make_folder
from attnzoo.training.steps import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    write_text(folder)
    return folder


@pytest.fixture
def config_of(folder, tmp_path):
    def make(*overrides, run="run") -> TrainConfig:
        few = ("steps=6", "checkpoint_every=0", "eval_every=0", f"output_dir={tmp_path / run}")
        return tiny_runs.config_of(folder, run, *few, *overrides)

    return make


def test_a_terminal_that_hangs_up_saves_the_step_under_way(config_of):
    reference = train(config_of(run="reference"))
    config = config_of()
    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        train(config, on_row=lambda row: os.kill(os.getpid(), signal.SIGHUP) if row["step"] == 3 else None)
    assert signal.getsignal(signal.SIGHUP) == before
    assert newest_checkpoint(config.output_dir).name in ("step-00000003", "step-00000004")
    assert outcome(train(config)) == outcome(reference)


def test_a_signal_that_is_ignored_stays_ignored(config_of):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train(config_of(), on_row=lambda row: os.kill(os.getpid(), signal.SIGHUP))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_who_goes_away_saves_the_step_under_way(config_of, monkeypatch):
    class Pipe:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

        flush = write

    config = config_of("progress=lines")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Pipe())
        with pytest.raises(KeyboardInterrupt, match="stopped after step"):
            train(config)
    assert newest_checkpoint(config.output_dir) is not None
    assert outcome(train(config)) == outcome(train(config_of(run="reference")))


@pytest.mark.parametrize(("name", "rate"), [("deltanet", 1e30), ("path_fox", 3e38), ("fox", 3e38)])
def test_a_run_that_diverges_names_its_step_and_rate(config_of, name, rate):
    config = config_of(f"model.attention={name}", f"optimizer={{lr: {rate}, warmup_steps: 0, clip_norm: 1e30}}")
    with pytest.raises(FloatingPointError, match=r"at step \d \(learning rate [\de+.]+\); there is no checkpoint"):
        train(config)


def test_a_gate_that_a_form_refuses_while_evaluating_names_the_step(config_of, monkeypatch):
    plain = LanguageModel.forward

    def refused(self, *args, **kwargs):
        if not self.training:
            raise ValueError("gate.w: expected unit vectors")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(LanguageModel, "forward", refused)
    with pytest.raises(FloatingPointError, match=r"gate.w: expected unit vectors at step 6 \(learning rate"):
        train(config_of())


def test_what_the_first_step_refuses_is_no_divergence(config_of, monkeypatch):
    def refused(self, *args, **kwargs):
        raise ValueError("options that do not fit together")

    monkeypatch.setattr(LanguageModel, "forward", refused)
    with pytest.raises(ValueError, match="^options that do not fit together$"):
        train(config_of())


def test_weights_that_are_not_finite_are_not_saved(config_of, monkeypatch):
    plain = Run.step

    def spoiled(self, step):
        result = plain(self, step)
        if step == 4:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] = math.inf
        return result

    monkeypatch.setattr(Run, "step", spoiled)
    config = config_of("checkpoint_every=2")
    with pytest.raises(
        FloatingPointError, match=r"a weight is not finite .* at step 4 .*step-00000002, is from before"
    ):
        train(config)
    assert newest_checkpoint(config.output_dir).name == "step-00000002"


def test_half_precision_without_a_gpu_is_refused_and_not_ignored(config_of):
    with pytest.raises(ValueError, match="mixed_precision=fp16 needs a GPU"):
        train(config_of("mixed_precision=fp16"))


@pytest.mark.parametrize("name", ["hidden_size", "num_layers", "num_heads", "vocab_size", "intermediate_size"])
def test_sizes_that_no_tensor_has_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name}: expected a whole number below 2\^31.*, got 1000"):
        ModelConfig(**{name: 10**30})


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_numbers_that_must_be_finite_are(name):
    with pytest.raises(ValueError, match=f"{name}: expected a finite number, got inf"):
        OptimizerConfig(**{name: math.inf})
    OptimizerConfig(clip_norm=math.inf)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("output_dir", "", "output_dir must name a folder"),
        ("output_dir", "~/run", "~ does not stand for a home folder"),
        ("batch_size", 10**30, "batch_size: expected a number below 2147483648"),
        ("seed", 2**32, "seed: expected a number below 4294967296"),
    ],
)
def test_fields_that_no_run_can_use_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{field: value})


def test_an_unusable_folder_is_found_before_data_and_model_are_built(config_of, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "build_data", lambda config: pytest.fail("read data first"))
    (tmp_path / "file").write_text("not a folder")
    for run in ("file", "file/run"):
        with pytest.raises(NotADirectoryError, match=r"output_dir=.*file' is not a folder"):
            train(config_of(run=run))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"output_dir=.*may not be written to"):
        train(config_of(run="new/run"))
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_after_all_is_named_as_the_option():
    with pytest.raises(OSError, match=r"output_dir: .*: '/proc/no/run'"):  # root may write to /proc, by its mode
        make_folder(Path("/proc/no/run"))


@pytest.mark.parametrize("label", ["", "..", "/", ".", "../other", ".hidden", "- -", "report.html", "../../x"])
def test_a_label_that_names_no_folder_inside_is_refused(label):
    with pytest.raises(ValueError, match=r"variants: label .* gives the run's folder its name"):
        plan(CompareConfig(variants=[{"name": "nope", "label": label}]))


def test_labels_of_any_other_kind_name_their_folder():
    entries = [{"name": "nope", "label": label} for label in (0, "a/b", "été $x$", "v1.5")]
    keys = [run.key for run in plan(CompareConfig(variants=entries, output_dir="out"))]
    assert keys == ["0", "a-b", "été-x", "v1.5"]
    for output_dir in ("", "~/run"):
        with pytest.raises(ValueError, match="output_dir"):
            plan(CompareConfig(variants=["nope"], output_dir=output_dir))


def test_a_comparison_that_cannot_be_written_is_refused_before_it_trains(config_of, tmp_path, monkeypatch):
    from attnzoo.experiments import compare

    monkeypatch.setattr(compare, "build_data", lambda config: pytest.fail("read data first"))
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    config = CompareConfig(variants=["nope"], output_dir=str(tmp_path / "out"), train=config_of())
    with pytest.raises(ValueError, match=r"output_dir: expected a file, got the folder"):
        run_comparison(config, None)
    (tmp_path / "out" / "report.html").rmdir()
    (tmp_path / "out" / "nope").write_text("a file")
    with pytest.raises(NotADirectoryError, match=r"nope' is not a folder"):
        run_comparison(config, None)
    config.variants = ["fox", {"name": "nope", "label": "long" * 99}]
    with pytest.raises(OSError, match=r"output_dir=.*: File name too long"):
        run_comparison(config, None)


def test_a_signal_in_the_last_step_is_not_lost(config_of):
    config = config_of()

    def once(row):
        if (row["step"], row["kind"]) == (6, "train"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 6, the last: the run in .* is finished"):
        train(config, on_row=once)
    assert outcome(train(config)) == outcome(train(config_of(run="reference")))


def test_a_clock_that_stands_still_ends_no_run(config_of, monkeypatch):
    reference = train(config_of("eval_every=2", run="reference"))
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 17.0)
        stood = train(config_of("eval_every=2"))
    assert outcome(stood) == outcome(reference)
    assert {row["tokens_per_second"] for row in read_metrics(stood) if row["kind"] == "train"} == {0}


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_a_full_disk_under_tensorboard_is_one_error_that_names_it(writes, config_of, monkeypatch, capfd):
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter

    done, flush = [], writer.flush

    def full(self):
        done.append(0)
        if len(done) > writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(self)

    config = config_of("tensorboard=true", "steps=30")
    monkeypatch.setattr(writer, "flush", full)
    with pytest.raises(OSError, match=rf"tensorboard=true: No space left on device: '{config.output_dir}/tensorboard'"):
        train(config)
    assert "Traceback" not in capfd.readouterr().err
