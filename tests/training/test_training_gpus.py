"""Two GPUs of one host train what one trains, with a copy of the model each or a part of it."""

import shutil
import subprocess
import sys

import pytest
import tiny_runs
import torch
from tiny_processes import environment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]
SMALL = (
    "data.context_length=512",
    "model={hidden_size: 256, num_layers: 4, num_heads: 4, attention: [path_fox, fox, gla, mamba2]}",
    "batch_size=8",
    "gradient_accumulation=2",
    "steps=8",
    "optimizer.lr=1e-3",  # at 1e-2 these models leap, and another order of sums is another run
    "checkpoint_every=4",
    "eval_tokens=4096",
    "device=auto",
)


def train(gpus, folder, run, *overrides):
    """The losses of a run on ``gpus``, so many of them or these in their order."""
    from attnzoo.config import to_yaml
    from attnzoo.training import read_metrics

    path = folder / f"{run}.yaml"
    path.write_text(to_yaml(tiny_runs.config_of(folder, run, *SMALL, *overrides)))
    order = range(gpus) if isinstance(gpus, int) else gpus
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(len(order))]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "attnzoo.cli", "train", str(path)],
        # without multicast over NVLink, which not every machine that has NVLink offers
        env={**environment(), "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": ",".join(map(str, order))},
        capture_output=True,
        text=True,
        timeout=280,  # flash-linear-attention, where it is installed, measures its tiles first
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(folder / run)
    speed = max(row["tokens_per_second"] for row in rows if row["kind"] == "train")
    print(f"{run} ({len(order)} GPUs): {speed:,.0f} tokens/s")
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    (folder / "text.txt").write_text("".join(f"{number} and one is {number + 1}.\n" for number in range(9000)))
    return folder


@pytest.mark.parametrize(("precision", "same"), [("none", 10), ("bf16", 3)])
def test_two_gpus_train_what_one_trains(folder, precision, same):
    """The same losses for ``same`` of ten rows: other orders of sums are rounded otherwise, and training spreads it."""
    given = f"mixed_precision={precision}"
    one = train(1, folder, f"one-{precision}", given)
    assert one[-1] < 0.9 * one[0]
    for run, *overrides in (("copies", "sharding=none"), ("parts", "sharding=fsdp")):
        two = train(2, folder, f"{run}-{precision}", given, *overrides)
        assert two[0] == pytest.approx(one[0], rel=1e-5)  # before the weights differ at all
        assert two[:same] == pytest.approx(one[:same], rel=1e-2 if precision == "bf16" else 1e-3)
        assert two[-1] < 0.9 * two[0]


def test_parts_of_a_model_go_on_as_other_parts_on_other_gpus(folder):
    """From a checkpoint of two parts on one GPU, then on two in another order, and on four where they are."""
    overrides = ["sharding=fsdp", "recompute=true", "model.tie_embeddings=true"]
    two = train(2, folder, "shared", *overrides)
    assert two == pytest.approx(train(1, folder, "alone", *overrides[1:]), rel=1e-3)
    chain = [[0], [1, 0], [3, 1, 0, 2]] if torch.cuda.device_count() >= 4 else [[0], [1, 0]]
    began = "shared"
    for gpus in chain:
        run = f"shared-{len(gpus)}"
        shutil.copytree(folder / began, folder / run)
        shutil.rmtree(folder / run / "checkpoints" / "step-00000008")
        assert train(gpus, folder, run, *overrides) == pytest.approx(two, rel=1e-3)
        began = run


def test_parts_of_a_compiled_model_train_the_same(folder):
    one = train(1, folder, "plain")
    assert train(2, folder, "compiled", "sharding=fsdp", "compile=true") == pytest.approx(one, rel=1e-3)
