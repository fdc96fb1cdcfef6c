"""Documents packed into rows train what separate documents train, in every division of a step, and go on exactly."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from tiny_runs import StoppedError, numbers, outcome, stop_at
from torch import nn
from torch.nn.functional import cross_entropy

from attnzoo.config import DataConfig, ModelConfig, WeightedSource
from attnzoo.data import build_data
from attnzoo.data.shards import write_shards
from attnzoo.models import LanguageModel
from attnzoo.models.loss import IGNORED
from attnzoo.training import CheckpointError, read_metrics, train
from attnzoo.training.batches import rows_of
from attnzoo.training.context import Sharing
from attnzoo.training.sharding import TrainState
from attnzoo.training.steps import Run


def documents(seed, count=60):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 60, int(rng.integers(1, 25))) for _ in range(count)]


@pytest.fixture
def folders(tmp_path):
    for name, seed in [("one", 0), ("two", 1)]:
        write_shards(tmp_path / name, 60, documents(seed), documents(seed + 10), shard_tokens=200)
    return tmp_path


@pytest.fixture
def config_of(folders):
    tiny_runs.write_text(folders)
    sources = f"data.sources=[{{source: {folders / 'one'}, weight: 2}}, {{source: {folders / 'two'}}}]"

    def make(*overrides, run="run"):
        own = [sources, "data.source=stdlib", "data.documents=packed", "batch_size=4", "optimizer.lr=1e-3"]
        return tiny_runs.config_of(folders, run, *own, *overrides)

    return make


@pytest.mark.parametrize("attention", ["fox", ["mamba2", "path_fox"]])
def test_packed_rows_have_the_losses_and_gradients_of_separate_documents(attention):
    config = ModelConfig(
        attention=attention, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, vocab_size=60
    )
    model = LanguageModel(config).double()
    windows = np.random.default_rng(0).integers(0, 60, (3, 13))
    begins = [np.array([1, 5, 6, 12]), np.array([], dtype=np.int64), np.array([4])]
    rows = rows_of(windows, begins)
    model(rows.inputs, targets=rows.targets, cu_seqlens=rows.cu_seqlens).loss.backward()
    packed = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for window, inside in zip(windows, begins, strict=True):
        for piece in np.split(window, inside):
            if len(piece) > 1:
                tokens = torch.from_numpy(piece)[None]
                logits = model(tokens[:, :-1]).logits
                total = total + cross_entropy(logits[0], tokens[0, 1:], reduction="sum")
                count += len(piece) - 1
    (total / count).backward()
    assert count == rows.counted == int((rows.targets != IGNORED).sum())
    for one, other in zip(packed, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-7)  # the loss is of float32 logits


def part_of(config, data, process, processes, step, part):
    place = SimpleNamespace(num_processes=processes, process_index=process, device=torch.device("cpu"))
    rows = config.batch_size // (processes * config.gradient_accumulation)
    state = TrainState(place, nn.Identity(), None, sharded=False)
    return Run(config, state, data, rows, Sharing(processes, process))._part(step, part)


@pytest.mark.parametrize("packed", [False, True])
def test_the_parts_of_all_processes_are_the_step_of_one(config_of, packed):
    config = config_of("batch_size=12", f"data.documents={'packed' if packed else 'joined'}")
    data = build_data(config.data)
    for step in (1, 2, 30):
        whole = part_of(config, data, 0, 1, step, 0)
        for processes in (2, 3):
            config.gradient_accumulation = 2
            parts = [part_of(config, data, p, processes, step, n) for n in range(2) for p in range(processes)]
            config.gradient_accumulation = 1
            for name in ("inputs", "targets"):
                found = torch.cat([getattr(part, name).flatten() for part in parts])
                assert torch.equal(found, getattr(whole, name).flatten())
            assert sum(part.counted for part in parts) == whole.counted
            if packed:
                ends = np.cumsum([0, *(part.inputs.numel() for part in parts)])
                borders = [part.cu_seqlens[:-1] + int(end) for part, end in zip(parts, ends, strict=False)]
                assert torch.equal(torch.cat(borders), whole.cu_seqlens[:-1])


def test_parts_with_unequal_documents_count_by_their_targets(config_of):
    whole = numbers(train(config_of("batch_size=8", run="whole")))
    parts = numbers(train(config_of("batch_size=8", "gradient_accumulation=8", run="parts")))
    for name in ("loss", "grad_norm"):
        values = [[row[name] for row in rows if name in row] for rows in (whole, parts)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)


@pytest.mark.parametrize("window", [12, "null"])
def test_what_layers_that_forget_are_taught_counts_by_the_pairs_of_each_part(config_of, window):
    layer = f"{{name: fox, options: {{window: {window}, forgetting: {{window: 3, width: 4}}}}}}"
    given = ("batch_size=8", f"model.attention=[{layer}]", "forgetting={distill_steps: 99, distillation: 100}")
    whole = numbers(train(config_of(*given, run="whole")))
    parts = numbers(train(config_of(*given, "gradient_accumulation=8", run="parts")))
    for name in ("loss", "grad_norm"):
        values = [[row[name] for row in rows if name in row] for rows in (whole, parts)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_a_stopped_run_on_several_sources_goes_on_to_the_same_bits(config_of):
    reference = train(config_of(run="reference"))
    with pytest.raises(StoppedError):
        train(config_of(), on_row=stop_at(5))
    assert outcome(train(config_of())) == outcome(reference)


def test_packed_held_out_text_is_measured_by_documents(config_of, folders):
    """Every held-out token counts but the first of its document, whatever the rows are."""
    config = config_of("steps=3", "eval_tokens=100000")
    losses = {}
    for rows in (1, 2):
        config.gradient_accumulation, config.output_dir = 4 // rows, str(folders / f"rows{rows}")
        losses[rows] = [row["loss"] for row in numbers(train(config)) if row["kind"] == "eval"]
    assert losses[1] == pytest.approx(losses[2], rel=1e-5)
    joined = config_of("steps=3", "eval_tokens=100000", "data.documents=joined", run="joined")
    assert [row["loss"] for row in numbers(train(joined)) if row["kind"] == "eval"] != pytest.approx(
        losses[1], rel=1e-4
    )


def test_another_content_of_a_source_is_refused(config_of, folders, tmp_path):
    train(config_of())
    (folders / "two").rename(tmp_path / "away")
    write_shards(folders / "two", 60, documents(5), documents(11), shard_tokens=200)
    with pytest.raises(
        CheckpointError, match=r"trained on other data: '.*one \(weight 2\), .*two.*' has changed since"
    ):
        train(config_of())


def test_other_weights_are_another_run(config_of, folders):
    train(config_of())
    changed = config_of()
    changed.data = DataConfig(
        sources=[WeightedSource(str(folders / "one"), 3), *changed.data.sources[1:]],
        documents="packed",
        context_length=changed.data.context_length,
    )
    with pytest.raises(CheckpointError, match=r"data\.sources was .*'weight': 2.* and is .*'weight': 3"):
        train(changed)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("compile=true", "mixed_precision=bf16")])
def test_packed_documents_train_on_a_gpu(config_of, options):
    from attnzoo.training.throughput import peak_of

    own = ["device=auto", "steps=30", "batch_size=8", "eval_every=0", "model.hidden_size=64", "optimizer.lr=0.01"]
    run = train(config_of(*own, "model.attention_options={acp: true}", *options))
    rows = [row for row in read_metrics(run) if row["kind"] == "train"]
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert all(row["blocks_kept"] == 1.0 for row in rows)  # one block
    if peak_of(torch.cuda.get_device_name()) is not None:
        assert all(0 < row["mfu"] == row["mfu_dense"] < 1 for row in rows)


def test_a_step_in_which_nothing_is_asked_changes_nothing(tmp_path):
    """A row of empty documents, each an end token alone, has no next token."""
    long, empty = [np.arange(1, 33)] * 4, [np.zeros(1, int)] * 64
    write_shards(tmp_path / "tokens", 50, [*long, *empty], long)
    run = train(tiny_runs.config_of(
        tmp_path, "run", f"data.source={tmp_path / 'tokens'}", "data.documents=packed", "batch_size=1", "steps=24",
        "model.vocab_size=50", "eval_every=24",
    ))  # fmt: skip
    losses = [row["loss"] for row in read_metrics(run) if row["kind"] == "train"]
    assert 0.0 in losses
    assert min(loss for loss in losses if loss) > 0.1


def test_a_held_out_split_that_asks_nothing_is_refused(tmp_path):
    write_shards(tmp_path / "tokens", 50, [np.arange(1, 33)] * 8, [np.zeros(1, int)] * 64)
    own = (f"data.source={tmp_path / 'tokens'}", "data.documents=packed", "model.vocab_size=50")
    with pytest.raises(ValueError, match=r"held-out split of .*: expected documents of two tokens or more .* got none"):
        train(tiny_runs.config_of(tmp_path, "run", *own))
