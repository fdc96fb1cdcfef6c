"""The installed Triton compiles kernels for GPUs that are not here; ``make test-versions`` more, with each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from attnzoo.kernels.common.device import GLUON, triton_version

HERE = Path(__file__).parent
CASES = (
    "8.0:decode bf16 64 step",
    "8.0:linear bf16 64 mamba2 step",
    "9.0:decode bf16 64 (path )?rows",
    "9.0:fox bf16 128 gate$|path bf16 64 gate$:hopper",
    "8.6:path bf16 128 heads$:carry_bwd",
    "8.9:wall bf16 64 gate$:carry_bwd",
    "10.0:fox bf16 64 gate$:fwd",
    "10.0:path bf16 64 gate$:product_bwd",
    "12.0:fox bf16 64 gate$:fwd",
)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """As far as PTX: ptxas takes minutes, and no interface of Triton changes there."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, HERE / "compiling.py", "--ptx", *CASES], capture_output=True, text=True, env=env
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [row for row in rows if "failed" in row]
    assert done.returncode == 0, done.stderr[-2000:]
    return rows


@pytest.mark.skipif(triton_version() not in GLUON, reason=f"the Gluon kernels are for Triton {GLUON}")
def test_every_gluon_kernel_compiles_to_warpgroup_products(compiled: list[dict[str, Any]]) -> None:
    products = {row["kernel"]: row["wgmma"] for row in compiled if row["kernel"].endswith("hopper_kernel")}
    assert products == {
        "fox_fwd_hopper_kernel": 96,
        "fox_bwd_hopper_kernel": 64,
        "path_fwd_hopper_kernel": 68,
        "path_bwd_hopper_kernel": 48,
    }


@pytest.mark.parametrize(("capability", "call"), [("8.0", ""), ("9.0", ""), ("9.0", "path ")])
def test_steps_over_pages_compile(compiled: list[dict[str, Any]], capability: str, call: str) -> None:
    name = "decode bf16 64 " + call + ("step" if capability == "8.0" else "rows")
    kernels = {row["kernel"] for row in compiled if row["capability"] == capability and row["call"] == name}
    others = ("prune", "carry") if call else ("prune", "tokens")
    assert kernels >= {f"paged_{name}_kernel" for name in ("append", "split", *others)}


def test_steps_of_the_linear_side_compile(compiled: list[dict[str, Any]]) -> None:
    kernels = {row["kernel"] for row in compiled if row["call"] == "linear bf16 64 mamba2 step"}
    assert kernels == {"linear_step_kernel", "linear_finish_kernel"}


def test_portable_kernels_fit_small_gpus(compiled: list[dict[str, Any]]) -> None:
    """``compiling`` holds each against the shared memory of its GPU; the carries' backward is the one with stages."""
    portable = {(row["capability"], row["kernel"]) for row in compiled if row["capability"] not in ("8.0", "9.0")}
    assert portable == {
        ("8.6", "path_carry_bwd_kernel"),
        ("8.9", "wall_carry_bwd_kernel"),
        ("10.0", "fox_fwd_portable_kernel"),
        ("10.0", "path_product_bwd_kernel"),
        ("12.0", "fox_fwd_portable_kernel"),
    }
