"""What metrics say of speed: operations are counted as said, and the share of blocks is the pruning's own."""

import logging

import numpy as np
import pytest
import tiny_runs
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnzoo.config import ModelConfig
from attnzoo.kernels.fox import kept_fraction
from attnzoo.models import LanguageModel
from attnzoo.models.presets import build
from attnzoo.training import loop, read_metrics, throughput, train
from attnzoo.training.batches import rows_of
from attnzoo.training.throughput import Operations, blocks_kept, peak_here, peak_of


def model_of(attention, T=None, **options):
    torch.manual_seed(0)
    return LanguageModel(
        ModelConfig(
            attention=attention, attention_options=options, hidden_size=32, intermediate_size=48, num_layers=2,
            num_heads=2,
        )
    )  # fmt: skip


def zeros(B, T, begins=None):
    return rows_of(np.zeros((B, T + 1), dtype=np.int64), begins)


def test_a_published_model_has_six_operations_per_parameter_and_those_of_its_attention():
    with torch.device("meta"):
        model = build("fox-pro-760m")
    N, D, L, T = 759e6, 1536, 24, 16384  # parameters as the paper's table 6 has them, which counts no embedding
    per_token = Operations(model).per_step([zeros(1, T)]) / T
    assert per_token == pytest.approx(6 * N + 6 * D * L * (T + 1), rel=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_products_of_weights_are_those_that_a_counter_sees(tied):
    """One token sees itself alone, so that nearly all are products of weights."""
    config = ModelConfig("nope", hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, tie_embeddings=tied)
    model = LanguageModel(config)
    rows = zeros(5, 1)
    with FlopCounterMode(display=False) as counter:
        model(rows.inputs, targets=rows.targets, with_logits=False).loss.backward()
    counted = counter.get_flop_counts()["Global"].items()
    products = sum(n for op, n in counted if "bmm" not in str(op) and "attention" not in str(op))  # torch 2.15 has both
    norms = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    attention = 3 * 2 * 2 * (16 + 16) * 2 * 5  # layers, heads, K + V, tokens
    assert Operations(model).per_step([rows]) == products + 6 * norms * 5 + attention


@pytest.mark.parametrize("value_dim", [16, 24])
def test_a_recurrence_writes_and_reads_its_state_once_a_token(value_dim):
    fixed = Operations(model_of("linear_attention", value_dim=value_dim))
    tokens = 6 * fixed.parameters + 3 * 2 * 2 * (4 * 16 * value_dim)
    for T in (8, 64):
        assert fixed.per_step([zeros(2, T), zeros(2, T)]) == tokens * 4 * T
    twice = Operations(model_of("deltanet", value_dim=value_dim, num_householder=2))
    tokens = 6 * twice.parameters + 3 * 2 * 2 * (6 * 16 * value_dim)
    assert twice.per_step([zeros(1, 8)]) == tokens * 8
    every = Operations(model_of("nope", value_dim=value_dim))
    pairs = 3 * 2 * 2 * 2 * (16 + value_dim)  # layers, heads, a product of K and one of V
    assert every.per_step([zeros(2, 8)]) == 6 * every.parameters * 16 + pairs * 2 * 8 * 9 // 2


@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_pairs_are_those_of_the_mask(window):
    begins = [np.array([3, 4]), np.array([20]), np.array([], dtype=np.int64)]
    for rows in (zeros(3, 20), zeros(3, 20, begins)):
        number = torch.repeat_interleave(torch.arange(len(rows.lengths)), torch.from_numpy(rows.lengths))
        i = torch.arange(60)
        seen = (i[:, None] >= i) & (number[:, None] == number) & (i[:, None] - i < (window or 999))
        assert rows.pairs(window) == int(seen.sum())


def test_pruned_blocks_are_not_counted_as_done():
    model = model_of("fox", window=9)
    rows = [zeros(1, 40)]
    whole, half = Operations(model).per_step(rows), Operations(model).per_step(rows, {1: 0.5})
    assert whole - half == 3 * 2 * 2 * (16 + 16) * rows[0].pairs(9) // 2


@pytest.mark.parametrize("attention", ["fox", "path_fox", "alibi"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_share_of_blocks_is_what_pruning_leaves_of_the_rest(attention, packed):
    model = model_of([attention, "mamba2"], acp=False).double()
    rows = zeros(1, 640, [np.array([5, 400])] if packed else None)
    assert blocks_kept(model, rows) == {}
    shares = []
    for bias in (9.0, -1.0):
        model = model_of([{"name": attention, "options": {"acp": {"eps": 1e-3}}}, "mamba2"])
        gate = model.blocks[0].attention.gate
        with torch.no_grad():
            for name, parameter in gate.named_parameters():
                if name.endswith("bias"):
                    parameter.fill_(bias)
        shares.append(blocks_kept(model, rows)[0])
        assert list(blocks_kept(model, rows)) == [0]
        assert not model.blocks[0].attention._forward_hooks
    if attention == "alibi":
        assert shares[0] == shares[1] < 1
    else:
        assert shares[1] < 0.6 < shares[0] <= 1


@pytest.mark.parametrize("linear", ["retnet", "mamba2", "mamba3"])
def test_a_linear_layer_that_prunes_has_no_blocks(linear):
    """Its memories are shortened; FoX's certificate says nothing of them."""
    assert blocks_kept(model_of([{"name": linear, "options": {"acp": True}}, "gla"]), zeros(1, 40)) == {}
    assert list(blocks_kept(model_of([linear, "fox"], acp=True), zeros(1, 40))) == [1]


def test_the_share_of_blocks_is_the_kernels_own():
    model = model_of("fox", acp=True)
    rows = rows_of(np.random.default_rng(0).integers(0, 256, (1, 513)), None)
    states = []
    model.hidden(rows.inputs, states=states)
    for number, share in blocks_kept(model, rows).items():
        block = model.blocks[number]
        core = block.attention.project(block.attention_norm(states[number]))
        bound = block.attention.logit_bound()
        kept = kept_fraction(
            core.q,
            core.k,
            log_decay=core.gate.log_decay,
            prune=block.attention.prune,
            logit_bound=bound,
            impl="reference",
        )
        assert share == pytest.approx(float(kept.mean()), rel=1e-6)


def test_gpus_are_known_by_the_words_of_their_names():
    assert peak_of("NVIDIA H100 80GB HBM3") == peak_of("NVIDIA H200") == 989.4e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA A10") == 125e12
    assert peak_of("NVIDIA L4") == 121e12
    for name in ("NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100", ""):
        assert peak_of(name) is None


def test_an_unknown_gpu_is_said_and_a_cpu_is_not(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert peak_here(torch.device("cpu"), 1) is None
    assert not caplog.records
    assert peak_here(torch.device("cuda"), 1) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "'Some GPU' is not known: the metrics have no MFU" in caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert peak_here(torch.device("cuda"), 3) == 3 * 121e12


def test_rows_of_the_metrics_say_what_is_kept_and_used_at_log_steps_alone(tmp_path, monkeypatch):
    tiny_runs.write_text(tmp_path)
    measured = []
    monkeypatch.setattr("attnzoo.training.steps.peak_here", lambda device, processes: 1e9)
    monkeypatch.setattr(
        "attnzoo.training.steps.blocks_kept",
        lambda model, rows: measured.append(rows) or throughput.blocks_kept(model, rows),
    )
    config = tiny_runs.config_of(tmp_path, "run", "log_every=4", "model.attention_options={acp: true}")
    rows = [row for row in read_metrics(train(config)) if row["kind"] == "train"]
    assert len(measured) == len(rows) == 2
    for row in rows:
        assert row["blocks_kept"] == 1.0  # a context of one block
        dense = Operations(LanguageModel(config.model)).per_step([zeros(2, 16)]) / 32 * row["tokens_per_second"] / 1e9
        assert row["mfu"] == row["mfu_dense"] == pytest.approx(dense)


def test_watching_pruning_changes_no_number_that_is_trained(tmp_path):
    tiny_runs.write_text(tmp_path)
    runs = [
        train(tiny_runs.config_of(tmp_path, str(every), f"log_every={every}", "model.attention_options={acp: true}"))
        for every in (1, 8)
    ]
    assert tiny_runs.weights(runs[0]) == tiny_runs.weights(runs[1])


def test_tokens_per_second_are_those_since_the_row_before(tmp_path, monkeypatch):
    """Checkpoints and evaluations between two rows start no new count."""
    tiny_runs.write_text(tmp_path)
    seconds = iter(range(1000))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(seconds)))
    run = train(tiny_runs.config_of(tmp_path, "run", "log_every=4", "checkpoint_every=3", "eval_every=0"))
    speeds = [row["tokens_per_second"] for row in read_metrics(run) if row["kind"] == "train"]
    assert speeds == [4 * 32 / 2, 4 * 32 / 2]  # the clock is read before and after: a second for each stretch of steps
