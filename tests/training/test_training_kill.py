"""Real processes, really killed: whenever it happens, the disk holds a whole run, which goes on to the same bits.

Run as a script, this file trains in child processes and kills them; run by pytest, it starts that script and looks at
what is left. The script imports torch once and forks, so that a dozen killed processes cost a few seconds.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_runs
from tiny_processes import end_of, environment, import_all, in_child, start_child
from tiny_runs import outcome

STEPS = 12
# Each leaves the process dead by SIGKILL at another place of writing rows or the checkpoint of step 8.
POINTS = [
    "at the first row",
    "between two checkpoints",
    "within a row",
    "before the checkpoint is saved",
    "in a half-written checkpoint",
    "before the checkpoint is flushed",
    "before the checkpoint is renamed",
    "before an old checkpoint is removed",
    "in a half-removed checkpoint",
    "after the last checkpoint",
]


def config_of(folder: Path, run: str):
    own = ("model.attention=[fox,mamba2]", "model.num_layers=2", "data.context_length=24", f"steps={STEPS}")
    return tiny_runs.config_of(folder, run, *own, "eval_every=3", "checkpoint_every=4", "keep_checkpoints=1")


def name_of(point: str) -> str:
    return point.replace(" ", "-")


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(folder: Path, point: str) -> None:
    """Train with a trap at `point`; returns only when the trap was never reached."""
    import shutil

    import accelerate

    from attnzoo.training import checkpoint, metrics, train

    steps = {"at the first row": 1, "between two checkpoints": 7, "after the last checkpoint": 13}
    save_state, replace, rmtree, append = (
        accelerate.Accelerator.save_state,
        os.replace,
        shutil.rmtree,
        metrics.Metrics.append,
    )

    def on_row(row):
        if row["step"] == steps.get(point):
            die()

    def torn_append(self, row):
        if row["step"] == 7:
            self._file.write(b'{"kind": "train", "step": 7, "lo')
            die()
        append(self, row)

    def trapped_save(self, target, *args, **kwargs):
        at_step_8 = "step-00000008" in str(target)
        if at_step_8 and point == "before the checkpoint is saved":
            die()
        save_state(self, target, *args, **kwargs)
        if at_step_8 and point == "in a half-written checkpoint":
            os.truncate(Path(target) / "optimizer.bin", 100)
            die()

    def trapped_sync(path):
        if "step-00000008" in str(path) and point == "before the checkpoint is flushed":
            die()

    def trapped_replace(source, target):
        if str(target).endswith("step-00000008") and point == "before the checkpoint is renamed":
            die()
        if str(source).endswith("step-00000004") and point == "before an old checkpoint is removed":
            die()
        replace(source, target)

    def trapped_rmtree(path, *args, **kwargs):
        if str(path) == "step-00000004" and point == "in a half-removed checkpoint":
            os.unlink("step-00000004/model.safetensors", **kwargs)
            die()
        rmtree(path, *args, **kwargs)

    if point == "within a row":
        metrics.Metrics.append = torn_append
    accelerate.Accelerator.save_state = trapped_save
    checkpoint.sync = trapped_sync
    checkpoint.os.replace = trapped_replace
    shutil.rmtree = trapped_rmtree
    train(config_of(folder, name_of(point)), on_row=on_row)
    if point == "after the last checkpoint":
        die()


def report(folder: Path, name: str, text: object) -> None:
    (folder / f"{name}.report").write_text(str(text))


def train_in_small_files(folder: Path) -> None:
    from attnzoo.training import CheckpointError, train

    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    try:
        train(config_of(folder, "small-files"))
    except CheckpointError as error:
        # No file may grow by now: the report is a name.
        (folder / ("refused" if "could not write the checkpoint of step 4" in str(error) else "other")).touch()


def kill_from_outside(folder: Path) -> str:
    """How the process ended and how the next one did, and how many rows the first has left."""
    from attnzoo.training import train

    reader, writer = os.pipe()

    def wait_at_step_6(row):
        if row["step"] == 6:
            os.write(writer, b"6")
            time.sleep(600)

    child = start_child(lambda: train(config_of(folder, "outside"), on_row=wait_at_step_6))
    os.close(writer)
    assert os.read(reader, 1) == b"6"
    os.kill(child, signal.SIGKILL)
    killed = end_of(child)
    rows = (folder / "outside" / "metrics.jsonl").read_bytes().count(b"\n")
    return f"{killed} {in_child(lambda: train(config_of(folder, 'outside')))} {rows}"


def main(folder: Path) -> None:
    from attnzoo.training import load_run, newest_checkpoint, train

    def check_and_train(name: str) -> None:
        if newest_checkpoint(folder / name) is not None:
            load_run(folder / name)
        train(config_of(folder, name))

    import_all(config_of(folder, "none"))
    report(folder, "reference", in_child(lambda: train(config_of(folder, "reference"))))
    for point in POINTS:
        name = name_of(point)
        killed = in_child(lambda point=point: train_and_die(folder, point))
        report(folder, name, [killed, in_child(lambda name=name: check_and_train(name))])
    in_child(lambda: train_in_small_files(folder))
    report(folder, "small-files", in_child(lambda: train(config_of(folder, "small-files"))))
    report(folder, "outside", kill_from_outside(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    tiny_runs.write_text(folder)
    done = subprocess.run([sys.executable, __file__, str(folder)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_any_point_goes_on_to_the_same_bits(folder, point):
    killed, resumed = -int(signal.SIGKILL), 0
    assert (folder / f"{name_of(point)}.report").read_text() == str([killed, resumed])
    rows, weights = outcome(folder / name_of(point))
    expected_rows, expected_weights = outcome(folder / "reference")
    assert len(expected_rows) == STEPS + STEPS // 3
    assert rows == expected_rows
    assert weights == expected_weights
    assert [path.name for path in (folder / name_of(point) / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]


def test_a_disk_without_room_is_an_error_and_not_the_end_of_the_run(folder):
    assert (folder / "refused").exists()
    assert (folder / "small-files.report").read_text() == "0"
    assert outcome(folder / "small-files") == outcome(folder / "reference")


def test_a_process_killed_from_outside_goes_on_to_the_same_bits(folder):
    *ends, rows = (folder / "outside.report").read_text().split()
    assert ends == [f"{-signal.SIGKILL}", "0"]
    assert 6 <= int(rows) < STEPS
    assert outcome(folder / "outside") == outcome(folder / "reference")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
