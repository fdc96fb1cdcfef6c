"""Processes that share a model out among them train what one process trains, and read each other's checkpoints."""

import signal

import pytest
from test_training_processes import cut_back, launch, numbers

FSDP = "sharding=fsdp"
# Clipping shortens every gradient, so that its norm must be that of all parts together.
TIED = "|".join([FSDP, "model.tie_embeddings=true", "recompute=true", "optimizer.clip_norm=0.1"])
BF16 = "mixed_precision=bf16"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "text.txt").write_text("".join(f"{number} and one is {number + 1}.\n" for number in range(900)))
    (folder / "config.yaml").write_text(
        f"""
        steps: 6
        batch_size: 8
        gradient_accumulation: 2
        log_every: 1
        eval_every: 3
        eval_tokens: 168   # seven windows, which two processes cannot share evenly
        checkpoint_every: 4
        keep_checkpoints: 3
        progress: quiet
        device: cpu
        tensorboard: false
        model: {{hidden_size: 16, intermediate_size: 32, num_layers: 2, num_heads: 2, attention: [path_fox, mamba2]}}
        data: {{source: {folder / "text.txt"}, context_length: 24}}
        optimizer: {{warmup_steps: 2, lr: 0.01, weight_decay: 1.0}}
        """
    )
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def train_alone(config_file):
    from attnzoo.config import load_config
    from attnzoo.training import train

    def run(name, *overrides):
        return train(load_config(config_file, [f"output_dir={config_file.parent / name}", *overrides]))

    return run


@pytest.fixture(scope="module")
def runs(config_file, train_alone):
    """A folder with runs of one process (`one`, `one-tied`, `one-bf16`), runs of two that share the model, and runs that
    two went on with after step 4: `whole-parts` from a model that was whole, `parts-whole` from one process's parts
    with a model that is whole."""
    folder = config_file.parent
    train_alone("one")
    train_alone("one-tied", *TIED.split("|")[1:])
    train_alone("one-bf16", BF16)
    train_alone("one-parts", FSDP)
    cut_back(folder / "one", folder / "whole-parts")
    cut_back(folder / "one-parts", folder / "parts-whole")
    two = {
        "two": FSDP, "tied": TIED, "bf16": f"{FSDP}|{BF16}", "whole-parts": FSDP, "parts-whole": "sharding=none",
        "killed": FSDP,
    }  # fmt: skip
    runs = [f"{folder / name}|{overrides}" for name, overrides in two.items()]
    done = launch(2, str(config_file), *runs, runs[-1])
    assert done.returncode == 0, done.stderr
    ends = sorted(int(line.split()[0]) for line in done.stdout.splitlines())
    assert ends == [-signal.SIGKILL] + [0] * 12 + [1], done.stdout + done.stderr
    return folder


def newest(run):
    return run / "checkpoints" / "step-00000006"


@pytest.mark.parametrize(("two", "one"), [("two", "one"), ("tied", "one-tied")])
def test_processes_that_share_a_model_train_what_one_trains(runs, two, one):
    parts = sorted(path.name for path in (newest(runs / two) / "model").iterdir())
    assert parts == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert not (newest(runs / two) / "model.safetensors").exists()
    assert numbers(runs / two) == pytest.approx(numbers(runs / one), rel=1e-4)


def test_nothing_that_16_bits_do_not_hold_is_gathered_in_them(runs):
    for r in ("bf16", "one-bf16", "one"): print(numbers(runs / r))
    losses = [row[0] for row in (numbers(runs / "bf16"), numbers(runs / "one-bf16"), numbers(runs / "one"))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert abs(losses[1] - losses[2]) > 1e-5 * losses[2]  # the precision shows
    assert numbers(runs / "bf16") == pytest.approx(numbers(runs / "one-bf16"), rel=1e-2)


@pytest.mark.parametrize("run", ["whole-parts", "parts-whole"])
def test_a_run_may_be_sharded_from_a_step_on_and_no_longer(runs, run):
    assert numbers(runs / run, after=4) == pytest.approx(numbers(runs / "one", after=4), rel=1e-4)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_one_process_goes_on_where_two_shared_the_model(runs, train_alone, sharding):
    cut_back(runs / "two", runs / f"two-{sharding}")
    train_alone(f"two-{sharding}", f"sharding={sharding}")
    assert numbers(runs / f"two-{sharding}", after=4) == pytest.approx(numbers(runs / "two", after=4), rel=1e-4)


def test_a_run_of_which_one_process_was_killed_goes_on_to_the_same_bits(runs):
    assert numbers(runs / "killed") == numbers(runs / "two")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        killed, two = (newest(runs / run) / "model" / name for run in ("killed", "two"))
        assert killed.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("run", ["two", "tied"])
def test_one_process_puts_the_model_together(runs, run):
    import torch

    from attnzoo.training import load_run

    model, other = load_run(runs / run)[0], load_run(runs / {"two": "one", "tied": "one-tied"}[run])[0]
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, other(tokens).logits, atol=1e-4)


def test_a_sharded_run_is_exported_and_started_from(runs, train_alone, tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    import attnzoo  # noqa: F401  # registers the model's class
    from attnzoo.training import load_run
    from attnzoo.training.exchange import export_run, start_from

    model = load_run(runs / "two")[0]
    exported = transformers.AutoModelForCausalLM.from_pretrained(export_run(runs / "two", tmp_path / "model"))
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, model(tokens).logits)
        fresh = type(model)(model.config)
        start_from(fresh, str(runs / "two"))
        assert torch.equal(fresh(tokens).logits, model(tokens).logits)


def test_a_damaged_part_is_named_and_the_checkpoint_before_it_taken(runs, caplog):
    import shutil

    from attnzoo.training import load_run
    from attnzoo.training.checkpoint import identity, usable_checkpoint

    shutil.copytree(runs / "two", runs / "damaged")
    assert identity(newest(runs / "damaged")) == identity(newest(runs / "two")) != identity(newest(runs / "tied"))
    path = newest(runs / "damaged") / "model" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    load_run(runs / "damaged")
    assert usable_checkpoint(runs / "damaged").name == "step-00000004"
    assert "__1_0.distcp is damaged" in caplog.text


def test_what_does_not_work_with_parts_is_refused(config_file):
    from attnzoo.config import load_config

    with pytest.raises(ValueError, match="mixed_precision=fp16 .* sharding=fsdp"):
        load_config(config_file, [FSDP, "mixed_precision=fp16"])
    with pytest.raises(ValueError, match="sharding.*'fsdp'"):
        load_config(config_file, ["sharding=fsdp2"])
