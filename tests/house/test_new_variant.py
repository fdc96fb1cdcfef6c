"""A pair from outside the package: one file per side and one row, and every form of it holds.

The gate is a decay per channel times a Householder factor, as in Kimi Delta Attention (arXiv:2510.26692).
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnzoo import Pair, build_attention, describe, dual, get, list_variants, pair_for, register, registry
from attnzoo.cli import app
from attnzoo.registry import unregister
from attnzoo.testing import (
    CPU_FORMS,
    LIMIT,
    Case,
    assert_close,
    cases,
    cut_points,
    extend_in_segments,
    relative_error,
    value_and_gradients,
)
from attnzoo.verify import Where, verify

LINEAR = '''
"""The linear side of a pair that lives outside attnzoo."""
import torch

from attnzoo.forms.linear import LinearForms
from attnzoo.algebra.transitions import ClosedForm, Transition

TITLE = "Kimi Delta Attention"
PAPER = "Kimi Team, 2025 (arXiv:2510.26692)"


class DecayThenErase(Transition):
    """R_t = Diag(exp(a_t)) (I - beta_t w_t w_t^T)"""

    def apply(self, gate, state):
        state = gate.log_diag.exp()[..., None] * state
        w = gate.w[..., None, :]
        return state - w.mT @ (gate.beta[..., None, None] * (w @ state))

    def block(self, q, k, gate):
        C, K = q.shape[-2:]
        total = torch.eye(K, dtype=q.dtype).expand(*q.shape[:-2], K, K)
        keys, scores, back = k[..., :0, :].mT, [], []
        for i in range(C):
            now = gate.at(i)
            keys = torch.cat([self.apply(now, keys), k[..., i, :, None]], -1)
            total = self.apply(now, total)
            row = q[..., i, None, :] @ keys
            scores.append(torch.nn.functional.pad(row, (0, C - 1 - i)))
            back.append(q[..., i, None, :] @ total)
        return ClosedForm(torch.cat(scores, -2), torch.cat(back, -2), keys.mT, total)

    def carry(self, total, state):
        return total @ state


FORMS = LinearForms(DecayThenErase(), chunk_size=16)
'''

SOFTMAX = '''
"""The softmax side of a pair that lives outside attnzoo."""
from attnzoo.forms.softmax import SoftmaxForms
from kimi_delta import DecayThenErase

TITLE = "Kimi PaTH"
PAPER = "the exact softmax dual of Kimi Delta Attention"

FORMS = SoftmaxForms(DecayThenErase())
'''

ROW = Pair(
    "kimi_delta", "kimi_path", ("log_diag", "w", "beta"), "0", "Diag(exp(a_t)) (I - beta_t w_t w_t^T)",
    linear_module="kimi_delta", softmax_module="kimi_path",
)  # fmt: skip
NAMES = ("kimi_delta", "kimi_path")
# the pair is registered once for all examples
SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def write(folder: Path) -> None:
    (folder / "kimi_delta.py").write_text(LINEAR)
    (folder / "kimi_path.py").write_text(SOFTMAX)


@pytest.fixture
def kimi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    register(ROW)
    yield
    unregister(ROW)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("kimi")
def test_new_pair_is_listed_like_any_other() -> None:
    assert set(NAMES) <= set(list_variants())
    assert dual("kimi_delta") is get("kimi_path")
    assert set(get("kimi_delta").forms) == {"recurrent", "parallel", "chunk"}
    assert set(get("kimi_path").forms) == {"recurrent", "parallel"}
    assert "Kimi Delta Attention" in describe("kimi_delta")
    with pytest.raises(ValueError, match="did you mean 'kimi_delta'"):
        get("kimi_dleta")


@pytest.mark.usefixtures("kimi")
@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
def test_forms_of_new_pair_equal_oracle(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, max_t=24))
    inputs, variant = case.inputs(), case.variant
    cuts = data.draw(cut_points(case.T))
    expected = value_and_gradients(lambda *x: variant.oracle(*x, scale=case.scale), inputs)
    with case.blocks():
        for form in set(CPU_FORMS) & set(variant.forms):
            got = value_and_gradients(lambda *x, f=form: variant.forms[f](*x, scale=case.scale), inputs)
            assert_close(got, expected, what=f"{form} of {case}")
        got = value_and_gradients(lambda *x: extend_in_segments(variant, x, cuts, case.scale)[0], inputs)
        assert_close(got, expected, what=f"cuts {cuts} of {case}")


@pytest.mark.usefixtures("kimi")
@pytest.mark.parametrize("name", NAMES)
def test_padding_of_new_pair_changes_nothing(name: str) -> None:
    q, k, v, gate = Case(name, B=1, T=20).inputs()
    valid = torch.ones(1, 20, dtype=torch.bool)
    valid[:, [0, 1, 7, 13]] = False
    index = valid[0].nonzero()[:, 0]
    o, _ = get(name).extend(q, k, v, gate, valid=valid)
    short, _ = get(name).extend(q[:, index], k[:, index], v[:, index], gate.map(lambda x: x[:, index]))
    assert relative_error(o[:, index], short) <= 1e-10


@pytest.mark.usefixtures("kimi")
def test_new_pair_passes_verify() -> None:
    checks = list(verify(NAMES, Where(examples=2)))
    assert {check.variant for check in checks} == set(NAMES)
    assert all(check.ok for check in checks), checks
    # it has no LAYER, and its class says nothing of its symbols
    assert {check.law for check in checks if check.refused} == {"matrices", "pruning", "layer"}


def test_one_line_makes_a_pair_of_known_parts() -> None:
    """Forms, layers, listings and checks of both sides, without a module of its own, and with defaults of its own."""
    register(
        pair := Pair(
            "turned_gla", "turned", ("log_decay", "log_diag", "angle"), paper="nobody, 2026",  # turned.py is no pair's
            linear_layer={"gate": ("retention", "channel_softplus", "rotary"), "conv_size": 2, "theta": 100.0},
            softmax_layer={"gate": ("fixed", "low_rank", "selective")},
        )
    )  # fmt: skip
    try:
        assert (pair.g, pair.R) == ("g_t", "Diag(exp(a_t)) Rot(theta_t)")
        linear, softmax = get("turned_gla"), get("turned")
        assert {"recurrent", "parallel", "chunk", "triton"} <= set(linear.forms)
        assert {"recurrent", "parallel"} <= set(softmax.forms)
        assert softmax.prunable
        assert linear.dual is softmax
        assert pair_for(pair.requires).linear == "rope_gated_gla"  # the table's comes first
        for variant in (linear, softmax):
            inputs = Case(variant.name, B=1, T=20).inputs()
            expected = variant.oracle(*inputs)
            for form in set(CPU_FORMS) & set(variant.forms):
                assert relative_error(variant.forms[form](*inputs), expected) <= LIMIT
            attn, x = build_attention(variant.name, hidden_size=16, num_heads=2), torch.randn(1, 7, 16)
            cache = attn.new_cache()
            steps = [attn(part, cache=cache) for part in x.split([5, 1, 1], 1)]
            assert torch.allclose(torch.cat(steps, 1), attn(x), atol=1e-6)
            assert copy.deepcopy(attn).variant is variant
            assert variant.paper == "nobody, 2026"
        rotary = build_attention("turned_gla", hidden_size=16, num_heads=2)
        assert rotary.project(x).gate.angle[1] == torch.tensor(100.0**-0.25)
        assert rotary.q_conv.size == 2
        assert rotary.output_norm is not None  # made of the parts, as what is not given
        assert all(check.ok for check in verify(["turned"], Where(examples=1)))
        listed = CliRunner().invoke(app, ["list"], catch_exceptions=False).output.split()
        assert listed[listed.index("turned_gla") :][1:5] == ["turned", "x", "x", "x"]
        shown = CliRunner().invoke(app, ["show", "turned"]).output
        assert "Rₜ  = Diag(exp(aₜ)) Rot(θₜ)" in shown
        assert "gate='fixed'" in shown
    finally:
        unregister(pair)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            {"gate": ("forget", "rotary"), "gat_bias": 1.0},
            r"option 'gat_bias' of the layer of 'worn' \(did you mean 'gate_bias'\?\)",
        ),
        ({"gate": "forget"}, "gate: 'worn' needs the parts log_decay, angle; 'forget' provides log_decay"),
    ],
)
def test_defaults_that_serve_no_layer_are_named(layer: dict[str, object], message: str) -> None:
    register(pair := Pair("worn_linear", "worn", ("log_decay", "angle"), softmax_layer=layer))
    try:
        with pytest.raises(ValueError, match=message):
            build_attention("worn", hidden_size=16, num_heads=2)
    finally:
        unregister(pair)


def plug_in(folder: Path, target: str) -> None:
    """What installing a distribution with that entry point leaves behind."""
    info = folder / "kimi_zoo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kimi-zoo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnzoo.variants]\nkimi = {target}\n")


def run_with(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    other = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", registry.FILES: ""}  # none that another test registered
    environment = {**os.environ, **other}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def test_entry_point_adds_the_pair(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "kimi_row.py").write_text(f"from attnzoo import Pair\n\nPAIRS = [{ROW!r}]\n")
    plug_in(tmp_path, "kimi_row:PAIRS")
    code = (
        "import sys, attnzoo\n"
        "assert 'kimi_row' not in sys.modules\n"
        "assert attnzoo.get('kimi_delta').dual.name == 'kimi_path'\n"
        "assert attnzoo.list_variants('softmax')[-1] == 'kimi_path'\n"
        "from attnzoo import oracle\n"
        "from attnzoo.samples import random_inputs\n"
        "inputs = random_inputs('kimi_delta')\n"
        "error = attnzoo.get('kimi_delta').forms['chunk'](*inputs) - oracle.linear(*inputs)\n"
        "print(float(error.abs().max()) < 1e-12)\n"
    )
    done = run_with(tmp_path, code)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with five plugins: three that are broken, one whose module is missing, and one that works."""
    folder = tmp_path_factory.mktemp("broken")
    write(folder)
    (folder / "kimi_row.py").write_text(
        f"from attnzoo import Pair\nimport dataclasses\nPAIR = {ROW!r}\nTEXT = 'not a pair'\n"
        "GONE = dataclasses.replace(PAIR, linear='gone', softmax='gone_path', linear_module='no_such_module')\n"
    )
    (folder / "kimi_exits.py").write_text("import sys\nsys.exit('no licence\\nfor this')\n")
    (folder / "kimi_silent.py").write_text("assert 1 + 1 == 3\n")
    others = "exits = kimi_exits:PAIR\nsilent = kimi_silent:PAIR\ngone = kimi_row:GONE\nworks = kimi_row:PAIR"
    plug_in(folder, f"kimi_row:TEXT\n{others}")
    return folder


BROKEN = [
    "entry point 'kimi' of attnzoo.variants (kimi_row:TEXT) is broken: pair: expected attnzoo.Pair, got str",
    "entry point 'exits' of attnzoo.variants (kimi_exits:PAIR) is broken: no licence for this",
    "entry point 'silent' of attnzoo.variants (kimi_silent:PAIR) is broken: "
    "AssertionError in kimi_silent.py, line 1: assert 1 + 1 == 3",
]


def test_broken_plugins_are_warned_of_once_and_listed_and_stop_nothing_else(broken: Path) -> None:
    code = (
        "import sys, warnings\n"
        "import attnzoo\n"
        "from attnzoo import cli\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    attnzoo.get('fox')\n"
        "    assert not said\n"
        "    assert attnzoo.list_variants()[-1] == attnzoo.list_variants()[-1] == 'kimi_path'\n"
        "print(*(f'{w.category.__name__}: {w.message}' for w in said), 'rc ', sep='\\n')\n"
        "def run(*words):\n"
        "    sys.argv = ['attnzoo', *words]\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as done:\n"
        "        print('rc', done.code, flush=True)\n"
        "run('list')\n"
        "run('show', 'kimi_delta')\n"
        "sys.stderr = sys.stdout\n"
        "run('show', 'gone')\n"
        "run('show', 'kimmi_delta')\n"
    )
    done = run_with(broken, code)
    assert (done.returncode, done.stderr) == (0, "")
    warned, listed, shown, gone, unknown = done.stdout.split("rc ")[:5]
    assert warned.splitlines() == [f"RuntimeWarning: {line}" for line in BROKEN]
    assert [line for line in listed.splitlines() if "is broken" in line] == BROKEN
    assert "kimi_delta" in listed
    assert "wall" in listed
    assert shown.startswith("0\n")
    assert gone.startswith("0\nattnzoo: variant 'gone': its module 'no_such_module' cannot be imported: ModuleNotFound")
    assert unknown.startswith(
        "2\nattnzoo: unknown variant 'kimmi_delta' (did you mean 'kimi_delta'?): expected one of "
    )
    assert f" that `attnzoo list` shows; {'; '.join(BROKEN)}\n" in unknown
