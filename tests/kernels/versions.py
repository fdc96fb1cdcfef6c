"""Compile every kernel with releases of Triton, each in a folder of its own; print one line per release and GPU.

    python tests/kernels/versions.py CACHE [RELEASE]...

CACHE holds the releases, what they compiled, and a report per release and GPU. No GPU is needed. Exit status 1 where a
kernel does not compile or does not fit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

RELEASES = ("3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
# All forms where the kernels were tuned, one call of each dtype and head dim elsewhere.
EVERYTHING, SAMPLE = "", "(gate|heads|step)$|gate prune$"
CASES = {"9.0": EVERYTHING, "8.0": SAMPLE, "8.6": SAMPLE, "8.9": SAMPLE, "10.0": SAMPLE, "12.0": SAMPLE}
HERE = Path(__file__).parent


def install(release: str, folder: Path) -> None:
    """Triton alone, as torch pins another; nothing of the environment that runs this changes."""
    if not (folder / "triton").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"triton=={release}"], check=True)


def check(release: str, capability: str, cache: Path) -> bool:
    folder = cache / f"triton-{release}"
    install(release, folder)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{HERE.parents[1]}", "TRITON_INTERPRET": "0"}
    env["TRITON_CACHE_DIR"] = str(cache / f"compiled-{release}")
    report = cache / f"{release}-sm{capability.replace('.', '')}.jsonl"
    with report.open("w") as out:
        command = [sys.executable, str(HERE / "compiling.py"), f"{capability}:{CASES[capability]}"]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=env)
    largest: dict[str, int] = defaultdict(int)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    for row in rows:
        largest[row["kernel"]] = max(largest[row["kernel"]], row.get("shared", 0))
    failed = [row for row in rows if "failed" in row]
    hopper = sum(name.endswith("_hopper_kernel") for name in largest)
    most = max(largest.values(), default=0) / 1024
    print(f"Triton {release}, sm_{capability.replace('.', '')}: {len(rows)} compiled of {len(largest)} kernels, "
          f"{hopper} in Gluon, at most {most:.0f} KiB of shared memory, {len(failed)} failed", flush=True)  # fmt: skip
    for row in failed:
        print(f"    {row['call']}: {row['kernel']}: {row['failed'][:300]}", flush=True)
    if done.returncode and not failed:
        print(done.stderr[-2000:], flush=True)
    return done.returncode == 0


def main() -> int:
    cache = Path(sys.argv[1]).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    results = [check(release, capability, cache) for release in sys.argv[2:] or RELEASES for capability in CASES]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
