"""Processes that `attnzoo train --processes` starts: what one of them says, and nothing else, is what a user reads."""

import logging
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tiny_runs
from accelerate.state import AcceleratorState
from tiny_processes import end_of, environment, in_child, start_child

from attnzoo import cli
from attnzoo.config import to_yaml
from attnzoo.training.launch import GONE, LaunchError, check_processes, first_failure, launch

# Python without torch, which starts at once. Process 1 fails in the way that it is told, the other waits for its end.
PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, "{root}")
if os.environ["RANK"] == "0":
    time.sleep(60)
from attnzoo.cli import _fail
{work}
"""


ROOT = os.path.dirname(os.path.dirname(cli.__file__))


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """What `launch` sets for its processes is not left to the tests after these."""
    for name in ("ATTNZOO_LAUNCHED", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("ATTNZOO_LAUNCHED")
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def program(work):
    return [sys.executable, "-c", PROGRAM.format(root=ROOT, work=work)]


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("_fail('no data at\\n nowhere', 2)", "process 1 of 2: no data at nowhere"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "process 1 of 2: ended by SIGKILL; the same command goes on from the"),
        ("sys.exit(3)", "process 1 of 2: ended with status 3"),
    ],
)
def test_what_ended_a_process_is_the_error_and_nothing_more_is_printed(work, said, capfd):
    with pytest.raises(LaunchError, match=f"^{said}"):
        launch(program(work), 2)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if "[c10d]" not in line] == []  # where there is no IPv6, torch says so


def test_processes_that_all_end_well_are_no_error(tmp_path, monkeypatch):
    work = "import os, pathlib; pathlib.Path(os.environ['RANK'] + os.environ['WORLD_SIZE']).touch()"
    monkeypatch.chdir(tmp_path)
    launch([sys.executable, "-c", work], 3)
    assert sorted(os.listdir(tmp_path)) == ["03", "13", "23"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_processes_end_with_a_launcher_that_is_killed(monkeypatch):
    monkeypatch.setenv("ATTNZOO_LAUNCHED", "1")
    work = "launch.end_with_launcher(); print(1, flush=True); time.sleep(60); print(2)"
    path = f"import sys, time; sys.path.insert(0, {ROOT!r}); from attnzoo.training import launch; "
    words = [sys.executable, "-c", path + work]
    start = f"import subprocess; subprocess.run({words!r})"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "1\n"  # the process that it has started is at work
        launcher.kill()
        assert launcher.stdout.read() == ""  # to the end of what that process may write: it is gone


def test_processes_that_cannot_be_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    check_processes(2, "auto")
    check_processes(4, "cpu")
    with pytest.raises(ValueError, match=r"processes=4: expected one for each GPU, and this machine has 2"):
        check_processes(4, "auto")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match="process of a launcher already"):
        check_processes(2, "cpu")


def test_a_launcher_that_is_stopped_stops_its_processes(tmp_path, capfd):
    work = f"import os, time; open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').write(str(os.getpid())); "

    def launch_until_stopped():
        try:
            launch([sys.executable, "-c", work + "time.sleep(60)"], 2)
        except KeyboardInterrupt as stopped:
            print("interrupted:", stopped, file=sys.stderr)
            raise

    child = start_child(launch_until_stopped)
    while len([path for path in tmp_path.iterdir() if path.stat().st_size]) < 2:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), capfd.readouterr().err
        time.sleep(0.05)
    os.kill(child, signal.SIGTERM)
    assert end_of(child) == 130
    said = capfd.readouterr().err
    assert "interrupted: stopped by SIGTERM" in said.splitlines()
    assert "death signal" not in said  # of torch's own log
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def failure(exitcode, message="", error_file="<N/A>"):
    return SimpleNamespace(exitcode=exitcode, message=message, error_file=error_file)


def test_a_process_that_failed_for_itself_comes_before_those_that_missed_it():
    gone, ended = failure(2, f"{GONE}: Connection closed by peer", __file__), failure(-signal.SIGTERM)
    killed, wrong = failure(-signal.SIGKILL), failure(2, "batch_size=5 does not divide", __file__)
    assert "2 of 3: ended by SIGKILL" in first_failure({0: gone, 1: ended, 2: killed}, 3)
    assert "1 of 3: batch_size=5" in first_failure({0: gone, 1: wrong, 2: ended}, 3)
    assert f"0 of 2: {GONE}" in first_failure({0: gone}, 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_for_which_another_has_waited_too_long_does_not_answer(number):
    """It runs until the launcher ends it, which is no reason; one that dies is missed at once."""
    waited, ended = failure(2, f"{GONE}: Timed out waiting 10000ms for recv operation", __file__), failure(-number)
    said = first_failure({0: waited, 1: ended}, 2)
    assert said.startswith("process 1 of 2: no answer in the time that an exchange may take (process 0 has waited); ")
    assert signal.Signals(number).name not in said


@pytest.mark.parametrize(
    "error", [RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:5"), ValueError("x")]
)
def test_an_error_of_one_of_several_processes_is_one_line_with_its_number(error, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def fail(**_):
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    expected = f"{GONE}: {error}" if isinstance(error, RuntimeError) else str(error)
    assert capsys.readouterr().err == f"attnzoo: process 1: {expected}\n"
    assert f'"message": "{expected}"' in (tmp_path / "error.json").read_text()


@pytest.fixture
def command(monkeypatch, capfd):
    """A command in this process, which may start others: its exit status, and what all of them print."""
    for name, value in {**environment(), "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["attnzoo", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capfd.readouterr()

    return command


def test_processes_train_and_refuse_in_one_line(tmp_path, command):
    """On a CPU together: where there is no GPU, `device=auto` is that."""
    tiny_runs.write_text(tmp_path)
    (tmp_path / "config.yaml").write_text(to_yaml(tiny_runs.config_of(tmp_path)))
    small = ["train", str(tmp_path / "config.yaml"), "steps=3", "device=auto", "progress=lines"]
    first, again = (f"output_dir={tmp_path / name}" for name in ("run", "again"))
    code, out, err = command(*small, first, "batch_size=3", "--processes", "2")
    assert (code, out) == (2, "")
    assert err.startswith("attnzoo: batch_size=3 does not divide evenly among 2 processes")
    assert err.count("\n") == 1
    code, _, err = command(*small, first, "batch_size=4")
    assert code == 0, err
    code, out, err = command(*small, again, "batch_size=4", f"start_from={tmp_path / 'run'}", "--processes", "2")
    assert code == 0, err
    assert out == f"run: {tmp_path / 'again'}\n"  # by the first process alone, as are the lines of the log
    assert err.count("weights from") == 1


def test_processes_that_the_environment_names_and_nobody_starts_are_said_and_waited_for_a_while(
    tmp_path, monkeypatch, capfd
):
    tiny_runs.write_text(tmp_path)
    (tmp_path / "config.yaml").write_text(to_yaml(tiny_runs.config_of(tmp_path)))
    words = [str(tmp_path / "config.yaml"), f"output_dir={tmp_path}/run", "exchange_timeout=1"]
    monkeypatch.setattr(sys, "argv", ["attnzoo", "train", *words])
    left = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    for name, value in left.items():
        monkeypatch.setenv(name, value)

    def train_as_a_new_process():
        AcceleratorState._reset_state(reset_partial_state=True)  # of trainings before, in this process
        logging.getLogger().handlers.clear()
        cli.main()

    ended = in_child(train_as_a_new_process)
    said = capfd.readouterr().err
    assert ended == 2, said
    assert "Traceback" not in said
    assert "RANK=0 and WORLD_SIZE=2 are set: this process waits for the others, at most 1 seconds" in said
    assert "the other processes have not come in 1 seconds; unset RANK and WORLD_SIZE" in said.splitlines()[-1]
