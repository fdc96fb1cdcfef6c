"""The installed Triton compiles kernels for GPUs that are not here; ``make test-long`` more, and ``make test-versions``
with each Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from machine_code import unset_registers
from thinning import in_long

from attnzoo.kernels.common.device import GLUON, triton_version

HERE = Path(__file__).parent
CASES = (  # of each kind of GPU
    f"8.0:decode bf16 64 step:{in_long('tokens', '')}",
    "8.0:linear bf16 64 mamba2 (parts|step)",
    "8.0:path bf16 8 step",
    f"8.0:retention bf16 64 {in_long('lesson', '')}:lesson",
    f"9.0:decode bf16 64 {in_long('path ', '(path )?')}rows",
    "9.0:fox bf16 128 gate$|path bf16 64 gate$:(?<!block_)(fwd|bwd)_hopper",
    "8.6:path bf16 128 heads$:carry_bwd",
    "10.0:path bf16 64 gate prune$:prune_rows",
    "12.0:fox bf16 64 gate$:fwd",
)
MORE = (
    "8.9:wall bf16 64 gate$:carry_bwd",
    "9.0:linear bf16 128 (delta (chunks|pairs)|chunks (of 128|split))",
    "8.6:linear fp32 128 chunks of 128:chunk_output",
    "9.0:fox bf16 64 retention$:portable",
    "10.0:fox bf16 64 gate$:fwd",
    "10.0:path bf16 64 gate$:product_bwd",
)


PORTABLE = in_long(("fwd",), ("fwd", "dkdv"))
WHOLE = (  # the kernels of PaTH in which ptxas 12.8 left out what sets a register, and the one with hardly any left
    f"9.0:path bf16 64 narrow:({'|'.join(PORTABLE)})_portable",
    "9.0:path bf16 64 gate$:block_fwd_hopper",
    "9.0:retention bf16 64 lesson:lesson",
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Few to machine code, the rest as far as PTX: ptxas takes minutes, and no interface of Triton changes there."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TRITON_INTERPRET": "0"}
    command = [sys.executable, HERE / "compiling.py", *WHOLE, "--ptx", *CASES, *in_long((), MORE)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [row for row in rows if "failed" in row]
    assert done.returncode == 0, done.stderr[-2000:]
    return rows


@pytest.fixture(scope="module")
def machine_code(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "reg" in row]


@pytest.fixture(scope="module")
def compiled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "reg" not in row]


def test_machine_code_sets_what_it_reads(machine_code: list[dict[str, Any]]) -> None:
    """Also, products start together."""
    kernels = {row["kernel"] for row in machine_code}
    portable = {f"path_{name}_portable_kernel" for name in PORTABLE}
    assert kernels == {"path_block_fwd_hopper_kernel", "retention_lesson_kernel", *portable}


def test_what_keys_learn_leaves_few_registers(
    machine_code: list[dict[str, Any]], compiled: list[dict[str, Any]]
) -> None:  # fmt: skip
    """128 registers let four programs share a multiprocessor of an H200, which was faster than three that spill nothing
    (docs/benchmarks/log/linear.md); what they spill then is a few numbers."""
    rows = [row for row in machine_code if row["kernel"] == "retention_lesson_kernel"]
    assert len(rows) == 2  # of the units, and of what is learnt from them
    assert all(row["reg"] <= 128 and row["stack"] <= 64 for row in rows), rows
    assert {row["capability"] for row in compiled if row["kernel"] == "retention_lesson_kernel"} == {"8.0"}


LISTING = """
        /*0030*/                   ULDC.64 UR6, c[0x0][0x208] ;                /* 0x0 */
        /*0040*/                   S2UR UR4, SR_CgaCtaId ;                     /* 0x0 */
        /*0050*/                   UIADD3 UR14, UP1, UR4, 0x2, URZ ;           /* 0x0 */
        /*0060*/                   UIADD3.X UR15, URZ, 0x20, URZ, UP1, !UPT ;  /* 0x0 */
        /*0070*/              @!P1 LDG.E.128 R24, desc[UR6][R2.64] ;           /* 0x0 */
        /*0074*/                   MOV.SPILL R9, UR40 ;                        /* 0x0 */
        /*0078*/                   R2UR.FILL UR40, R9 ;                        /* 0x0 */
        /*0080*/                   STS.128 [R5+UR4+0x800], R24 ;               /* 0x0 */
        /*0090*/                   ULOP3.LUT UP0, UR12, UR6, 0x40, URZ, 0xc0, !UPT ;
        /*00a0*/                   UMOV UR13, 0x40000040 ;
        /*00b0*/                   HGMMA.64x64x16.F32.BF16 R32, gdesc[UR12], R32, gsb0 ;
        /*00c0*/                   HGMMA.64x64x16.F32.BF16 R32, R24, gdesc[UR12].tnspB, R32, gsb0 ;
        /*00d0*/                   LDCU.128 UR24, c[0x0][0x390] ;
        /*00e0*/                   UTCHMMA gdesc[UR24], gdesc[UR26], tmem[UR4], tmem[UR6], idesc[UR15], UPT ;
"""
BLACKWELL = "UTCHMMA gdesc[UR24], gdesc[UR26], tmem[UR4], tmem[UR6], idesc[UR15], UPT"


@pytest.mark.parametrize(
    ("old", "new", "unset"),
    [
        ("", "", []),
        ("UP1, UR4,", "UP1, UR14,", ["0050: UIADD3 UR14, UP1, UR14, 0x2, URZ: UR14"]),
        ("SR_CgaCtaId", "SR_CgaCtaId, UR9", ["0040: S2UR UR4, SR_CgaCtaId, UR9: UR9"]),
        ("ULDC.64 UR6", "ULDC UR6", ["0070: LDG.E.128 R24, desc[UR6][R2.64]: UR7"]),
        ("[R5+UR4", "[R5+UR40", ["0080: STS.128 [R5+UR40+0x800], R24: UR40"]),
        ("LDCU.128", "LDCU.64", [f"00e0: {BLACKWELL}: UR{n}" for n in (26, 27)]),
        ("0x40000040", "UR50", ["00b0: HGMMA.64x64x16.F32.BF16 R32, gdesc[UR12], R32, gsb0: UR13"]),
        ("UMOV UR13", "MOV R13", ["00b0: HGMMA.64x64x16.F32.BF16 R32, gdesc[UR12], R32, gsb0: UR13"]),
    ],
)
def test_registers_that_nothing_has_written_are_found(old: str, new: str, unset: list[str]) -> None:
    assert unset_registers(LISTING.replace(old, new)) == unset


@pytest.mark.skipif(triton_version() not in GLUON, reason=f"the Gluon kernels are for Triton {GLUON}")
def test_every_gluon_kernel_compiles_to_warpgroup_products(rows: list[dict[str, Any]]) -> None:
    products = {row["kernel"]: row["wgmma"] for row in rows if row["kernel"].endswith("hopper_kernel")}
    assert products == {
        "fox_fwd_hopper_kernel": 96,
        "fox_bwd_hopper_kernel": 64,
        "path_block_fwd_hopper_kernel": 108,
        "path_fwd_hopper_kernel": 68,
        "path_bwd_hopper_kernel": 48,
    }


STEPS = (("9.0", "path rows", ("append", "split", "prune", "carry")), ("8.0", "step", ("tokens",)))
ALL = ("append", "split", "prune", "tokens")


@pytest.mark.parametrize(
    ("capability", "call", "kernels"), in_long(STEPS, (STEPS[0], ("8.0", "step", ALL), ("9.0", "rows", ALL)))
)
def test_steps_over_pages_compile(
    compiled: list[dict[str, Any]], capability: str, call: str, kernels: tuple[str, ...]
) -> None:
    of = f"decode bf16 64 {call}"
    found = {row["kernel"] for row in compiled if row["capability"] == capability and row["call"] == of}
    assert found >= {f"paged_{name}_kernel" for name in kernels}


def test_steps_of_the_linear_side_compile(compiled: list[dict[str, Any]]) -> None:
    kernels = {row["kernel"] for row in compiled if row["call"] == "linear bf16 64 mamba2 step"}
    assert kernels == {"linear_step_kernel", "linear_finish_kernel"}


def test_portable_kernels_fit_small_gpus(compiled: list[dict[str, Any]]) -> None:
    """``compiling`` holds each against the shared memory of its GPU; the carries' backward is the one with stages."""
    portable = {(row["capability"], row["kernel"]) for row in compiled if row["capability"] not in ("8.0", "9.0")}
    more = (
        ("8.6", "chunk_output_kernel"),
        ("8.9", "wall_carry_bwd_kernel"),
        ("10.0", "fox_fwd_portable_kernel"),
        ("10.0", "path_product_bwd_kernel"),
    )
    assert portable == {
        ("8.6", "path_carry_bwd_kernel"),
        ("10.0", "path_prune_rows_kernel"),
        ("12.0", "fox_fwd_portable_kernel"),
        *in_long((), more),
    }
