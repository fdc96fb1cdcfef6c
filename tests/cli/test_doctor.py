"""What `attnzoo doctor` says of machines that are not here."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses import fake_tensor

pytest.importorskip("triton")
from click.testing import CliRunner

from attnzoo import doctor, get, list_variants
from attnzoo.cli import app
from attnzoo.forms.backends import fla, fla_delta, fla_kernels, fla_pairs, fla_steps, fox_path
from attnzoo.kernels.common import device
from attnzoo.kernels.linear import segments
from attnzoo.layer import dispatch

Pretend = Callable[..., doctor.Report]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """A GPU of some capability, with a release of Triton."""

    def machine(capability: tuple[int, int], release: tuple[int, int], fla_installed: bool = True) -> doctor.Report:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # torch for GPUs asks a driver
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "Pretend")
        monkeypatch.setattr(device, "triton_version", lambda: release)
        monkeypatch.setattr(segments, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(fla, "INSTALLED", fla_installed)
        some = ["fox", "path", "mamba2", "gated_deltanet", "deltanet", "kda", "wall"]
        monkeypatch.setattr(doctor, "list_variants", lambda side=None: [] if side else some)
        device.capability.cache_clear()
        try:
            return doctor.examine(head_dim=128)
        finally:
            device.capability.cache_clear()

    return machine


def row(report: doctor.Report, variant: str, when: str) -> doctor.Row:
    return next(row for row in report.rows if (row.variant, row.when) == (variant, when))


def test_a_hopper_with_a_known_triton_runs_gluon_kernels(pretend: Pretend) -> None:
    report = pretend((9, 0), (3, 7))
    for variant in ("fox", "path", "wall"):
        training = row(report, variant, "training")
        assert (training.form, training.kernels, training.why) == ("triton", "Gluon forward, Gluon backward", ())
    assert row(report, "fox", "cached step").kernels == "split-key forward"
    training = row(report, "mamba2", "training")
    assert (training.form, training.kernels, training.why) == ("triton", "chunks", ())
    assert row(report, "wall", "cached step").kernels == "a step per token over all keys"
    assert "cuda:0: Pretend, compute capability 9.0" in report.text()
    assert report.parts == "short convolutions (of up to 4 tokens), norms and log decays of layers run on triton"
    assert "split texts from 11264 tokens on where batch times heads are at most 6," in report.splits
    assert report.splits in report.text(200)


def test_a_slow_setup_is_explained_with_its_remedy(pretend: Pretend) -> None:
    report = pretend((9, 0), (3, 5), fla_installed=False)
    training = row(report, "fox", "training")
    assert training.kernels == "portable forward, portable backward"
    assert "expected Triton 3.6 to 3.9 for the Gluon kernels, got 3.5 (torch 2.10 and later bring one)" in training.why
    assert "pip install 'attnzoo[fla]'" in row(report, "deltanet", "training").why[0]
    assert row(report, "mamba2", "training").form == "triton"
    text = report.text()
    assert text.count("got 3.5") == 1  # a note, not a line of every row
    assert all(len(line) < 160 for line in text.splitlines())


def test_a_triton_that_miscompiles_scalar_decays_is_named(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "MISCOMPILING", "3.6.0")
    monkeypatch.setattr(fla_delta, "register", lambda: True)
    report = pretend((9, 0), (3, 6))
    assert row(report, "gated_deltanet", "training").kernels == "chunks, one backward kernel of ours"
    assert row(report, "gated_deltanet", "prefill").kernels == ""
    with monkeypatch.context() as patch:
        patch.setattr(fla_kernels, "asked_for", lambda name: name == "tilelang")
        assert row(pretend((9, 0), (3, 6)), "gated_deltanet", "training").kernels == ""  # that one's comes first
    monkeypatch.setattr(fla_delta, "register", lambda: False)
    report = pretend((9, 0), (3, 6))
    training = row(report, "gated_deltanet", "training")
    assert (training.form, training.kernels) == ("fla", "chunks, a decay per channel")
    assert training.why[-1].startswith("Triton 3.6.0 miscompiles flash-linear-attention's backward of a scalar decay")
    assert row(report, "gated_deltanet", "prefill").kernels == row(report, "deltanet", "training").kernels == ""
    assert (row(report, "mamba2", "training").form, row(report, "mamba2", "training").why) == ("triton", ())


def test_a_backward_kernel_of_ours_within_the_peers_is_named(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_pairs, "register", lambda: True)
    monkeypatch.setattr(fla, "MISCOMPILING", "")
    report = pretend((9, 0), (3, 7))
    assert row(report, "kda", "training").kernels == "chunks, one backward kernel of ours"
    assert row(report, "kda", "prefill").kernels == row(report, "gated_deltanet", "training").kernels == ""
    assert row(pretend((8, 0), (3, 7)), "kda", "training").kernels == ""  # made for Hopper
    monkeypatch.setattr(fla_pairs, "register", lambda: False)  # not wanted, or a release that takes none
    assert row(pretend((9, 0), (3, 7)), "kda", "training").kernels == ""


def test_what_slows_a_whole_machine_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*doctor.SETTINGS, "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *scheme: str(tmp_path))
    monkeypatch.setattr(fla, "VERSION", "")
    assert not list(doctor._slow())
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("ATTNZOO_VALIDATE", "0")  # makes nothing slow
    monkeypatch.setenv("TRITON_INTERPRET", "false")  # nor this
    monkeypatch.setenv("ATTNZOO_FLA_TUNING", "full")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda *scheme: "nowhere")
    text = doctor.Report("a system", (), {}, "layers", (), tuple(doctor._slow())).text(200)
    assert "- slow: CUDA_LAUNCH_BLOCKING=1: Python waits for every kernel (unset it)" in text
    assert "- slow: no C compiler" in text
    assert "- slow: no headers of Python, without which Triton launches no kernel (install python3-dev)" in text
    assert "- slow: ATTNZOO_FLA_TUNING=full: flash-linear-attention measures all tiles" in text
    assert text.count("slow: ") == 4


def test_what_keeps_training_steps_of_the_library_in_python_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "VERSION", "0.6.0")
    monkeypatch.setattr(fla_steps, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(fla_kernels, "in_use", lambda: ["tilelang", "flash_kda"])
    monkeypatch.setenv("FLA_GLUON", "1")

    def said() -> list[str]:
        return [line for line in doctor._slow() if "training steps" in line]

    assert [line.partition(":")[0] for line in said()] == ["tilelang", "flash_kda", "FLA_GLUON=1"]
    assert said()[0].endswith("always run its Python code (FLA_TILELANG=0 switches it off)")
    monkeypatch.setattr(fla, "VERSION", "0.5.0")  # whose steps are its own in any case
    assert not said()
    monkeypatch.setattr(fla, "VERSION", "0.6.0")
    monkeypatch.setattr(fla_kernels, "in_use", list)
    monkeypatch.delenv("FLA_GLUON")
    assert not said()


def test_the_kernels_of_the_peer_have_a_version_where_the_rest_of_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fla, "VERSION", "0.6.0")  # of fla-core
    assert doctor._version("flash-linear-attention") == "0.6.0"


@pytest.mark.parametrize(("cuda", "said"), [(None, "built without CUDA"), ("13.0", "built for 13.0, and finds no")])
def test_a_machine_without_a_gpu_says_why(cuda: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor, "list_variants", lambda side=None: [])
    assert f"- no CUDA GPU: this torch is {said}" in doctor.examine().text()


def test_a_variable_that_may_hide_the_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor._no_gpu().endswith("(nvidia-smi), or CUDA_VISIBLE_DEVICES='' hides it (unset it)")


def test_old_gpus_and_rocm_run_no_kernel_of_ours(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row.form for row in pretend((7, 5), (3, 7)).rows} == {"reference"}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    report = pretend((9, 0), (3, 7))
    assert {row.form for row in report.rows if row.variant in ("fox", "path", "wall")} == {"reference"}
    assert row(report, "mamba2", "training").form == "fla"


def test_other_gpus_run_portable_kernels_without_complaint(pretend: Pretend) -> None:
    report = pretend((8, 6), (3, 7))
    training = row(report, "path", "padded training")
    assert (training.form, training.kernels, training.why) == ("triton", "portable forward, portable backward", ())


def test_variants_that_run_alike_share_their_lines() -> None:
    alike = [("prefill", "fla", ""), ("cached step", "triton", "a step")]
    other = [("prefill", "reference", "no kernel"), ("cached step", "triton", "a step")]
    each = [(f"variant_{n}", other if n == 2 else alike) for n in range(6)]
    rows = [
        doctor.Row(name, when, form, why=(why,) if why else ())
        for name, situations in each for when, form, why in situations
    ]  # fmt: skip
    text = doctor.Report("a system", (), {}, "layers", tuple(rows)).text()
    assert text.partition("layers:\n\n")[2].partition("\n\n")[0].splitlines() == [
        "- variant_0, variant_1, variant_3, variant_4, variant_5:",
        "  - prefill: fla",
        "  - cached step: triton [1]",
        "- variant_2:",
        "  - prefill: reference [2]",
        "  - cached step: triton [1]",
    ]
    assert text.endswith("\n[1] a step\n[2] no kernel\n")


@pytest.mark.parametrize(("value", "on"), [("1", True), ("TRUE", True), ("0", False), ("false", False), ("", False)])
def test_the_interpreter_is_on_where_triton_says_so(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert device.interpreted() == on
    knobs = pytest.importorskip("triton.knobs")  # from Triton 3.4 on
    assert knobs.getenv_bool("TRITON_INTERPRET", False) == on


def test_a_kernel_that_only_the_interpreter_would_run_says_why_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(doctor, "list_variants", lambda side=None: [] if side else ["fox"])
    report = doctor.examine(dtype=torch.float32)
    if not torch.cuda.is_available():
        assert {row.why for row in report.rows} == {
            ("triton: auto takes it only on a GPU", "sdpa: auto takes it only on a GPU")
        }
        assert report.parts.endswith("run on PyTorch: auto looks for kernels only on a GPU")


def test_the_budget_of_gates_in_keys_is_said_where_no_kernel_of_ours_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor, dispatch):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
    monkeypatch.setattr(fox_path, "refused", lambda call: "not here")
    monkeypatch.setattr(doctor, "list_variants", lambda side=None: [] if side else ["fox", "rope"])
    text = doctor.examine().text()
    assert "\n- fox: reference [1] [2]\n" in text
    assert "\n- rope: sdpa [1]\n" in text
    said = "[2] sdpa: a logit is off by at most 0.001 where the running sums of the gates span at most "
    assert said in " ".join(text.split())
    assert "[1] triton: not here" in text


def test_every_variant_and_situation_is_in_the_report_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False).output)
    assert threads == [1]
    assert {(row["variant"], row["when"]) for row in report["rows"]} == {
        (name, when) for name in (*list_variants(), *list_variants("other")) for when in doctor.situations(get(name))
    }
    assert torch.__version__.startswith(report["versions"]["torch"])  # without +cu130 in what PyPI has
    rows = tuple(doctor.Row(**row | {"why": tuple(row["why"])}) for row in report.pop("rows"))
    kept = doctor.Report(**report, rows=rows)
    assert len(kept.text().splitlines()) <= 40  # a screen
    for width in (80, 60):
        assert max(map(len, kept.text(width).splitlines())) <= width
    if not torch.cuda.is_available():
        assert all(row.form == "reference" and row.why for row in rows)


def test_the_page_names_the_releases_that_run_gluon_kernels() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "what_runs_where.md"
    releases = ", ".join(f"{major}.{minor}" for major, minor in device.GLUON)
    assert f"| {releases} | Gluon and portable kernels |" in page.read_text()
