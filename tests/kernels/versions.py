"""Compile the kernels with releases of Triton, each in a folder of its own; print one line per release and GPU.

    python tests/kernels/versions.py [--jobs N] [--whole] CACHE [RELEASE]...

CACHE holds the releases, what they compiled, and a report per release and GPU. No GPU is needed. Exit status 1 where a
kernel does not compile or does not fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

RELEASES = ("3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
GPUS = ("9.0", "8.0", "8.6", "8.9", "10.0", "12.0")
# Of the installed release one call of each dtype and head dim; of others every kernel once, most at head dims of 128.
EACH = "(gate|heads|step)$|gate prune$|narrow"
SAMPLE = "bf16 128 (gate|heads|decays|tokens|gate prune|(\\w+ )?(step|rows))$|(fox|path) fp32 64 gate$"
HERE = Path(__file__).parent


def runs(gpu: str, whole: bool) -> Iterator[list[str]]:
    """Arguments of ``compiling``: all kernels, most of them without ptxas, which takes most of the time."""
    if whole and gpu == "9.0":
        yield ["9.0:"]
        return
    gluon = ["9.0:bf16 (64|128):hopper"] if gpu == "9.0" else []
    yield ["--ptx", f"{gpu}:{EACH if whole else SAMPLE}", *gluon]
    yield [f"{gpu}:(fox|path) bf16 64 (gate|narrow values)$"]


def install(release: str, folder: Path) -> None:
    """Triton alone, as torch pins another; nothing of the environment that runs this changes."""
    if not (folder / "triton").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"triton=={release}"], check=True)


def check(of: tuple[str, str], cache: Path, whole: bool) -> bool:
    release, gpu = of
    env = {**os.environ, "PYTHONPATH": f"{cache / f'triton-{release}'}{os.pathsep}{HERE.parents[1]}"}
    env |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache / f"compiled-{release}")}
    report, trouble = cache / f"{release}-sm{gpu.replace('.', '')}.jsonl", ""
    with report.open("w") as out:
        for arguments in runs(gpu, whole):
            command = [sys.executable, str(HERE / "compiling.py"), *arguments]
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=env)
            trouble += done.stderr[-2000:] if done.returncode else ""
    largest: dict[str, int] = defaultdict(int)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    for row in rows:
        largest[row["kernel"]] = max(largest[row["kernel"]], row.get("shared", 0))
    failed = [row for row in rows if "failed" in row]
    hopper = sum(name.endswith("_hopper_kernel") for name in largest)
    most = max(largest.values(), default=0) / 1024
    lines = [f"Triton {release}, sm_{gpu.replace('.', '')}: {len(rows)} compiled of {len(largest)} kernels, "
             f"{hopper} in Gluon, at most {most:.0f} KiB of shared memory, {len(failed)} failed"]  # fmt: skip
    lines += [f"    {row['call']}: {row['kernel']}: {row['failed'][:300]}" for row in failed]
    ended = not trouble or bool(failed)
    print("\n".join(lines if ended else [*lines, trouble]), flush=True)
    return not trouble


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=lambda name: Path(name).expanduser())
    parser.add_argument("releases", nargs="*", metavar="RELEASE", default=RELEASES)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="all forms with all releases, not the installed one alone")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    for release in args.releases:
        install(release, args.cache / f"triton-{release}")

    def checked(of: tuple[str, str]) -> bool:
        return check(of, args.cache, args.whole or of[0] == version("triton"))

    with ThreadPoolExecutor(args.jobs) as pool:
        return int(not all(list(pool.map(checked, itertools.product(args.releases, GPUS)))))


if __name__ == "__main__":
    sys.exit(main())
