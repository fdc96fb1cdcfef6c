"""Several processes train what one process trains, each with a copy of the model or with a part of it."""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from thinning import in_long
from tiny_processes import environment

# Runs that end well share a pair of children, in which torch plans the sharing of a model once; a run that is stopped
# or killed has a pair of its own. What is imported once serves all of them.
PROGRAM = """
import json, os, signal, sys, torch
from pathlib import Path
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
from attnzoo.config import load_config
from attnzoo.training import extend, train
from tiny_processes import end_of, import_all, start_child

def run(output_dir, *overrides):
    name = Path(output_dir).stem
    pids = Path(output_dir).with_suffix(".pids")
    pids.mkdir(exist_ok=True)
    (pids / os.environ["RANK"]).write_text(str(os.getpid()))

    def stop(row):
        if new and row["step"] == 5:
            running = [int(file.read_text()) for file in pids.iterdir()]
            if killed:
                running.remove(os.getpid())
            for pid in sorted(running, key=os.getpid().__eq__):  # itself last
                os.kill(pid, signal.SIGKILL if killed else signal.SIGTERM)

    killed = name.endswith("-killed")  # one of them, or both stopped
    new = (killed or name == "stopped") and not Path(output_dir).exists()
    if name == "extended":
        config = extend(output_dir, 9, "constant", lr=0.004, warmup_steps=2)
    else:
        config = load_config(sys.argv[1], [f"output_dir={output_dir}", *overrides])
    train(config, on_row=stop)

import_all(load_config(sys.argv[1]))
os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "tests"}
ends = []
for port, words in zip(os.environ["PORTS"].split(), json.loads(sys.argv[2]), strict=True):
    children = []
    for rank in "01":
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        children.append(start_child(lambda: [run(*run_words.split("|")) for run_words in words]))
    ends.append([end_of(child) for child in children])
Path(sys.argv[1]).with_name("ends").write_text(json.dumps(ends))
"""


PACKED = ("data.documents=packed", "batch_size=4")
TASK = ("data.source=task:flip_flop", "data.task_options.p_ignore=0.5", "batch_size=4")
FSDP = "sharding=fsdp"
# Clipping shortens every gradient, so that its norm must be that of all parts together.
TIED = (
    "model.tie_embeddings=true", "recompute=true", "optimizer.clip_norm=0.1", "optimizer.weight_decay=1.0",
    "model.attention=[{name: path_fox, options: {acp: true}},mamba2]",
)  # fmt: skip
BF16 = ("mixed_precision=bf16", "model.attention=[{name: fox, options: {acp: true}},mamba2]")
PURE = ("mixed_precision=pure_bf16", "model.attention=[fox,mamba2]")
MUON = ("optimizer.name=muon",)
SHARED = ("context_parallel=2", "gradient_accumulation=4")
LEARNING = ("teacher=@/one", "model.attention=[rope,mamba2]")  # @ is the folder of all runs
ALIGNED = ("objective=align", *LEARNING, *PACKED)
TAUGHT = ("objective=distil", *LEARNING)
RUNS = (
    "two", "one-two", "extended", "|".join(["packed-two", *PACKED]), "|".join(["task-two", *TASK]),
    f"parts|{FSDP}", "|".join(["parts-tied", FSDP, *TIED]), "|".join(["parts-bf16", FSDP, *BF16]),
    "|".join(["parts-muon", FSDP, *MUON]), "parts-whole", "|".join(["pure-two", *PURE]), "|".join(["shared", *SHARED]),
    *in_long([], ["|".join(["shared-packed", *PACKED, *SHARED])]), "|".join(["shared-task", *TASK, *SHARED]),
    "|".join(["shared-tied", FSDP, *TIED, *SHARED]), "|".join(["aligned-two", *ALIGNED]),
    "|".join(["aligned-shared", *ALIGNED, *SHARED]), "|".join(["taught-parts", *TAUGHT, FSDP]),
)  # fmt: skip
ENDED = {  # how the processes of a run end that they begin, and then go on with
    "stopped": [[-15, -15], [0, 0]],  # SIGTERM, then to the end
    f"parts-killed|{FSDP}": [[-9, 1], [0, 0]],  # SIGKILL of one, which ends the other
    "|".join(["shared-killed", *SHARED]): [[-9, 1], [0, 0]],
}
PAIRS = (RUNS, *((run,) for run in ENDED for _ in range(2)))  # of processes, and the runs of each


def free_ports(count: int) -> str:
    """Below the range from which a system hands out ports by itself, so that nobody takes one before its use."""
    found: set[str] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.add(str(port))
    return " ".join(found)


def run_all(config_file: Path) -> str:
    """Every run in two processes, one run after another, and what they say."""
    (config_file.parent / "program.py").write_text(PROGRAM)
    folder = str(config_file.parent)
    words = json.dumps([[f"{folder}/{run}".replace("@", folder) for run in runs] for runs in PAIRS])
    done = subprocess.run(
        [sys.executable, str(config_file.parent / "program.py"), str(config_file), words],
        env={**environment(), "PORTS": free_ports(len(PAIRS))},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "text").mkdir()
    for name in range(60):
        lines = (f"{number} and one is {number + 1}.\n" for number in range(15 * name, 15 * name + 1 + name % 9))
        (folder / "text" / f"{name}.txt").write_text("".join(lines))
    (folder / "config.yaml").write_text(
        f"""
        output_dir: {folder / "two"}
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
        model: {{hidden_size: 16, intermediate_size: 32, num_layers: 2, num_heads: 2, attention: [fox, mamba2]}}
        data: {{source: {folder / "text"}, context_length: 24}}
        optimizer: {{warmup_steps: 2, lr: 0.01}}
        """
    )
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def runs(config_file):
    """A folder with the run of `one` process, that of `two`, one that two went on with after step 4, `one-two`, one
    whose two processes were `stopped` by SIGTERM after step 5 and started again, and those of one and two processes on
    packed documents and on a task, in parts of one row.

    Two went on in `extended` for longer than the one of `one`, as one did in `one-extended`.

    Two processes shared the model in `parts`, in `parts-killed`, of which one was killed and which went on, in
    `parts-tied`, which one process began with other settings, in `parts-bf16` and in `parts-muon`. They each had a copy
    in `parts-whole`, which began with a sharded checkpoint of one process, and in `pure-two`, with weights in bfloat16.
    """
    from attnzoo.config import load_config
    from attnzoo.training import extend, train

    folder = config_file.parent
    alone = {
        "one": (),
        "packed-one": PACKED,
        "task-one": TASK,
        "one-tied": TIED,
        "one-bf16": BF16,
        "one-muon": MUON,
        "pure-one": PURE,
        "one-parts": (FSDP,),
        "aligned-one": ALIGNED,
        "taught-one": TAUGHT,
    }
    for name, overrides in alone.items():
        own = [override.replace("@", str(folder)) for override in overrides]
        train(load_config(config_file, [f"output_dir={folder / name}", *own]))
    for name in ("extended", "one-extended"):
        shutil.copytree(folder / "one", folder / name)
    train(extend(folder / "one-extended", 9, "constant", lr=0.004, warmup_steps=2))
    for name, began in {
        "one-two": "one",
        "parts-tied": "one-tied",
        "shared-tied": "one-tied",
        "parts-whole": "one-parts",
    }.items():
        cut_back(folder / began, folder / name)
    said = run_all(config_file)
    ends = [sorted(both) for both in json.loads((folder / "ends").read_text())]
    assert ends == [[0, 0], *(both for ended in ENDED.values() for both in ended)], said
    states = (folder / "two" / "checkpoints" / "step-00000006").glob("random_states_*")
    assert len(list(states)) == 2  # there really were two
    return folder


def cut_back(run_dir, to):
    """A copy of a finished run that ends at its checkpoint of step 4."""
    shutil.copytree(run_dir, to)
    shutil.rmtree(to / "checkpoints" / "step-00000006")


def numbers(run_dir, after=0):
    from attnzoo.training import read_metrics

    rows = [row for row in read_metrics(run_dir) if row["step"] > after]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(after + 1, 7))
    return [number for row in rows for number in (row["loss"], row.get("grad_norm", 0.0))]


def test_two_processes_train_what_one_trains(runs):
    assert numbers(runs / "two") == pytest.approx(numbers(runs / "one"), rel=1e-4)


def test_two_processes_train_packed_documents_as_one_does(runs):
    """Other numbers of targets count in the parts of a step, and in one part of the held-out text none."""
    assert numbers(runs / "packed-two") == pytest.approx(numbers(runs / "packed-one"), rel=1e-4)
    assert numbers(runs / "packed-two") != pytest.approx(numbers(runs / "two"), rel=1e-2)


def test_two_processes_train_a_task_as_one_does(runs):
    """Rows have other numbers of answers, and the last held-out row has a process to itself."""
    assert numbers(runs / "task-two") == pytest.approx(numbers(runs / "task-one"), rel=1e-4)


@pytest.mark.parametrize(
    ("run", "one"),
    [("shared", "one"), ("shared-task", "task-one"), ("shared-tied", "one-tied"),
     *in_long([], [("shared-packed", "packed-one")])],  # as aligned-shared is, which has a teacher besides
)  # fmt: skip
def test_two_processes_that_share_each_sequence_train_what_one_does(runs, run, one):
    """Packed documents, a task, a checkpoint of one process, parts of the model for each, recomputed blocks."""
    assert numbers(runs / run) == pytest.approx(numbers(runs / one), rel=1e-4)


@pytest.mark.parametrize(
    ("run", "one"), [("aligned-two", "aligned-one"), ("aligned-shared", "aligned-one"), ("taught-parts", "taught-one")]
)
def test_two_processes_learn_from_a_teacher_what_one_does(runs, run, one):
    """Packed documents, layer by layer; and logits by a model of which each has a part."""
    assert numbers(runs / run) == pytest.approx(numbers(runs / one), rel=1e-4)


def test_a_process_that_waits_for_a_killed_one_ends_and_both_go_on_to_the_same_bits(runs):
    assert numbers(runs / "shared-killed") == numbers(runs / "shared")


def test_two_processes_train_weights_in_bfloat16_as_one_does(runs):
    """To the rounding of what they exchange."""
    one, two = (numbers(runs / run) for run in ("pure-one", "pure-two"))
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert two == pytest.approx(one, rel=1e-2)


@pytest.mark.parametrize("run", ["parts-tied", "parts-bf16"])
def test_processes_that_share_a_model_see_what_it_prunes(runs, run):
    from attnzoo.training import read_metrics

    shares = [row["blocks_kept"] for row in read_metrics(runs / run) if row["kind"] == "train"]
    assert shares == [1.0] * 6  # a context of one block


def test_two_processes_go_on_where_one_stopped(runs):
    assert numbers(runs / "one-two")[:10] == numbers(runs / "one")[:10]  # steps 1 to 4 and an evaluation are kept
    assert numbers(runs / "one-two", after=4) == pytest.approx(numbers(runs / "one", after=4), rel=1e-4)


def test_one_process_goes_on_where_two_stopped(runs, config_file):
    from attnzoo.config import load_config
    from attnzoo.training import load_run, train

    cut_back(runs / "two", runs / "two-one")
    train(load_config(config_file, [f"output_dir={runs / 'two-one'}"]))
    assert numbers(runs / "two-one", after=4) == pytest.approx(numbers(runs / "two", after=4), rel=1e-4)
    load_run(runs / "two-one")


def test_two_processes_extend_a_run_as_one_does(runs):
    from attnzoo.training import read_metrics

    one, two = (read_metrics(runs / run) for run in ("one-extended", "extended"))
    assert [row["step"] for row in two] == [row["step"] for row in one]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)
    assert one[-1]["step"] == 9


def test_two_processes_stopped_by_sigterm_go_on_to_the_same_bits(runs):
    assert numbers(runs / "stopped") == numbers(runs / "two")
    weights = [run / "checkpoints" / "step-00000006" / "model.safetensors" for run in (runs / "stopped", runs / "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def newest(run):
    return run / "checkpoints" / "step-00000006"


def test_processes_that_share_a_model_train_what_one_trains(runs):
    parts = sorted(path.name for path in (newest(runs / "parts") / "model").iterdir())
    assert parts == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert not (newest(runs / "parts") / "model.safetensors").exists()
    assert numbers(runs / "parts") == pytest.approx(numbers(runs / "one"), rel=1e-4)


def test_parts_of_matrices_move_by_muon_as_whole_ones_do(runs):
    assert numbers(runs / "parts-muon") == pytest.approx(numbers(runs / "one-muon"), rel=1e-2)
    assert numbers(runs / "one-muon")[-2] != pytest.approx(numbers(runs / "one")[-2], rel=1e-2)


def test_nothing_that_16_bits_do_not_hold_is_gathered_in_them(runs):
    first, plain, exact = (numbers(runs / run)[0] for run in ("parts-bf16", "one-bf16", "one"))
    assert first == pytest.approx(plain, rel=1e-6)
    assert plain != pytest.approx(exact, rel=4e-6)  # the precision shows
    assert numbers(runs / "parts-bf16") == pytest.approx(numbers(runs / "one-bf16"), rel=1e-2)


@pytest.mark.parametrize(("run", "one"), [("parts-tied", "one-tied"), ("parts-whole", "one")])
def test_a_run_may_be_sharded_from_a_step_on_and_no_longer(runs, run, one):
    assert (newest(runs / run) / "model.safetensors").exists() == (run == "parts-whole")
    assert numbers(runs / run, after=4) == pytest.approx(numbers(runs / one, after=4), rel=1e-4)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_one_process_goes_on_where_two_shared_the_model(runs, config_file, sharding):
    from attnzoo.config import load_config
    from attnzoo.training import train

    run = runs / f"parts-{sharding}"
    cut_back(runs / "parts", run)
    train(load_config(config_file, [f"output_dir={run}", f"sharding={sharding}"]))
    assert numbers(run, after=4) == pytest.approx(numbers(runs / "parts", after=4), rel=1e-4)


def test_a_run_of_which_one_process_was_killed_goes_on_to_the_same_bits(runs):
    assert numbers(runs / "parts-killed") == numbers(runs / "parts")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        killed, two = (newest(runs / run) / "model" / name for run in ("parts-killed", "parts"))
        assert killed.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("run", ["parts", "parts-tied"])
def test_one_process_puts_the_model_together(runs, run):
    import torch

    from attnzoo.training import load_run

    model, other = load_run(runs / run)[0], load_run(runs / {"parts": "one", "parts-tied": "one-tied"}[run])[0]
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, other(tokens).logits, atol=1e-4)


def test_a_sharded_run_is_exported_and_started_from(runs, tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    import attnzoo  # noqa: F401  # registers the model's class
    from attnzoo.trained.exchange import export_run
    from attnzoo.training import load_run
    from attnzoo.training.start import start_from

    model, config = load_run(runs / "parts")
    exported = transformers.AutoModelForCausalLM.from_pretrained(export_run(runs / "parts", tmp_path / "model"))
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, model(tokens).logits)
        fresh = type(model)(model.config)
        start_from(fresh, str(runs / "parts"), config.data)
        assert torch.equal(fresh(tokens).logits, model(tokens).logits)


def test_a_damaged_part_is_named_and_the_checkpoint_before_it_taken(runs, caplog):
    import shutil

    from attnzoo.training import load_run
    from attnzoo.training.checkpoint import identity, usable_checkpoint

    shutil.copytree(runs / "parts", runs / "damaged")
    assert (
        identity(newest(runs / "damaged")) == identity(newest(runs / "parts")) != identity(newest(runs / "parts-tied"))
    )
    path = newest(runs / "damaged") / "model" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    load_run(runs / "damaged")
    assert usable_checkpoint(runs / "damaged").name == "step-00000004"
    assert "__1_0.distcp is damaged" in caplog.text


def test_a_part_that_cannot_be_written_is_an_error_that_names_the_process(config_file, monkeypatch):
    from attnzoo.config import load_config
    from attnzoo.training import CheckpointError, train

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", full)
    run = config_file.parent / "full"
    with pytest.raises(CheckpointError, match="could not write the checkpoint of step 4 .*process 0.*No space left"):
        train(load_config(config_file, [f"output_dir={run}", FSDP]))
    assert not list((run / "checkpoints").iterdir())


def test_what_does_not_work_with_parts_is_refused(config_file):
    from attnzoo.config import load_config

    with pytest.raises(ValueError, match="mixed_precision=fp16 .* sharding=fsdp"):
        load_config(config_file, [FSDP, "mixed_precision=fp16"])
    with pytest.raises(ValueError, match="sharding.*'fsdp'"):
        load_config(config_file, ["sharding=fsdp2"])
