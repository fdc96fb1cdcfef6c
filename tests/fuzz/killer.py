"""A process that trains in children and kills them: a line of standard input per case, a line of output per answer.

A case is {"run": name, "blows": [[share of a run's time, signal], ...]}: the run is started and struck once per blow,
then started again and let finish. The answer is how each process ended.
"""

import json
import os
import sys
import time
from pathlib import Path

from tiny_processes import end_of, import_all, in_child, start_child
from tiny_runs import config_of

OVERRIDES = ("steps=12", "eval_every=3", "checkpoint_every=2", "keep_checkpoints=1")


def main(folder: Path) -> None:
    from attnzoo.training import load_run, newest_checkpoint, train

    def work(run: str) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if newest_checkpoint(folder / run) is not None:
            load_run(folder / run)
        train(config_of(folder, run, *OVERRIDES))

    import_all(config_of(folder))
    started = time.monotonic()
    print(json.dumps([in_child(lambda: work("reference"))]), flush=True)
    whole = time.monotonic() - started
    for line in sys.stdin:
        case = json.loads(line)
        ends = []
        for share, signal in case["blows"]:
            child = start_child(lambda run=case["run"]: work(run))
            time.sleep(share * whole)
            os.kill(child, signal)
            ends.append(end_of(child))
        ends.append(in_child(lambda run=case["run"]: work(run)))
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
