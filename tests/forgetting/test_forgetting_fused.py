"""Layers whose student runs on kernels: as by panels, in training, evaluation and with caches."""

from __future__ import annotations

import pytest
import torch
from layers import layer, rows

import attnzoo.layer.dispatch
from attnzoo import Prune
from attnzoo.forgetting.rules import Forgetting

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` takes kernels, in Triton's interpreter without a GPU."""
    monkeypatch.setattr(attnzoo.layer.dispatch, "on_gpu", lambda x: True)


def both(name, block=None, **options):
    """A layer on kernels in float32 and one by panels in float64, with the same weights."""
    made = [layer(name, block, **options, impl=impl).to(DEVICE) for impl in ("auto", "reference")]
    if name in ("fox", "fox_rope"):  # gates whose sums lose few digits in float32
        gate = made[0].gate if name == "fox" else made[0].gate.members[1]
        gate.forget_proj.bias.data += 3.0
    made[1].load_state_dict(made[0].float().state_dict())
    return made


def inputs(attn, B, T):
    return rows(B, T).to(DEVICE, attn.q_proj.weight.dtype)


def assert_near(got, want, what=""):
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-3)
    assert float(error) <= 1e-4, (what, float(error))


CALLS = {
    "plain": {},
    "packed": {"cu_seqlens": torch.tensor([0, 6, 40, 90])},
    "padded": {"attention_mask": torch.tensor([1] * 20 + [0] * 9 + [1] * 61)[None]},
}


@pytest.mark.parametrize(
    ("name", "network", "call", "options"),
    [
        ("fox", "key", "plain", {"sinks": True}), ("alibi", "decay", "packed", {"window": 30}),
        ("rope", "key", "padded", {}), ("fox", "key", "packed", {"acp": Prune(1e-5)}),
    ],
)  # fmt: skip
def test_kernels_train_a_student_as_panels_do(name, network, call, options):
    forgetting = Forgetting(network=network, window=3, width=8, temperature=6.0, learned_budget=True, budget=0.3)
    made = both(name, forgetting=forgetting, **options)
    given = {n: t.to(DEVICE) for n, t in CALLS[call].items()}
    found = []
    for attn in made:
        attn.forget.distils, attn.forget.blend = False, 0.8
        y, terms = attn(inputs(attn, 1, 90), **given), attn.forget.terms
        assert terms.distillation is None
        named = dict(attn.named_parameters())
        grads = torch.autograd.grad(y.sin().sum() + 3 * terms.budget, [*named.values()], allow_unused=True)
        found.append({"y": y, "budget": terms.budget, "kept": terms.kept} | dict(zip(named, grads, strict=True)))
    assert (made[0].picked, made[1].picked) == (f"triton on {DEVICE}", f"reference on {DEVICE}")
    for part, want in found[1].items():
        assert (found[0][part] is None) == (want is None), part
        if want is not None:
            assert_near(found[0][part], want, part)


@pytest.mark.parametrize(("name", "network", "call"), [("fox", "key", "padded"), ("rope", "decay", "packed")])
def test_kernels_read_what_a_cache_keeps(name, network, call):
    made = both(name, forgetting=Forgetting(network=network, window=3, width=8))
    given = {n: t.to(DEVICE) for n, t in CALLS[call].items()}
    whole = [attn.eval()(inputs(attn, 1, 90), **given) for attn in made]
    assert_near(*whole)
    steps = []
    with torch.no_grad():
        for attn in made:
            cache, x = attn.new_cache(budget=20), inputs(attn, 1, 90)
            first = attn(x[:, :70], cache=cache)
            steps.append(torch.cat([first, attn(x[:, 70:73], cache=cache)], 1))
    assert_near(*steps)


@pytest.mark.parametrize(
    ("name", "network", "call", "options", "target"),
    [
        ("fox", "key", "plain", {"sinks": True}, {}),
        ("fox", "decay", "padded", {"window": 30}, {}),
        ("alibi", "decay", "packed", {"window": 30}, {"normalize": "max", "divergence": "mse"}),
        ("rope", "key", "padded", {}, {"discount": 0.9}),
        ("fox_rope", "decay", "packed", {"acp": Prune(1e-5)}, {"pool": "max"}),
        ("nope", "key", "padded", {"window": 30, "softcap": 3.0}, {"pool": "softmax"}),
    ],
)  # fmt: skip
def test_kernels_teach_a_student_as_panels_do(name, network, call, options, target, monkeypatch):
    """Phase 1: both outputs are blended, and the network learns from the teacher, in kernels alone."""
    monkeypatch.setattr("attnzoo.forgetting.target.Goal.panel", None)
    forgetting = Forgetting(network=network, window=3, width=8, temperature=6.0, budget=0.3, **target)
    made = both(name, forgetting=forgetting, **options)
    given = {n: t.to(DEVICE) for n, t in CALLS[call].items()}
    found = []
    for attn in made:
        attn.forget.blend = 0.3
        y, terms = attn(inputs(attn, 1, 90), **given), attn.forget.terms
        named = dict(attn.named_parameters())
        grads = torch.autograd.grad(y.sin().sum() + 9 * terms.distillation + terms.budget, [*named.values()],
                                    allow_unused=True)  # fmt: skip
        found.append({"y": y, "lesson": terms.distillation, "kept": terms.kept} | dict(zip(named, grads, strict=True)))
        monkeypatch.undo()
    for part, want in found[1].items():
        assert (found[0][part] is None) == (want is None), part
        if want is not None:
            assert_near(found[0][part], want, part)


@pytest.mark.parametrize("target", [{"pool": "softmax", "discount": 0.9}, {"discount": 0.4}])
def test_what_no_kernel_teaches_is_found_by_panels(target):
    made = both("fox", forgetting=Forgetting(window=3, width=8, temperature=6.0, **target))
    terms = [attn(inputs(attn, 1, 40)) is None or attn.forget.terms for attn in made]
    assert_near(terms[0].distillation, terms[1].distillation)
