"""A part of a gate is known by its declaration alone: one that is added is served, or refused by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attnzoo
from attnzoo import Gate, Pair, Prune, get, register, register_part
from attnzoo.algebra import oracle
from attnzoo.algebra.parts import PARTS, Draws, GatePart
from attnzoo.algebra.transitions import HeadGate, Transition
from attnzoo.forgetting.cache import Network, Policy
from attnzoo.forgetting.rules import Forgetting
from attnzoo.forgetting.steps import extend_forgetting
from attnzoo.forms.backends.fox_path import path_kernel
from attnzoo.forms.backends.wall import wall_kernel
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.recurrences import products
from attnzoo.registry import unregister, unregister_part
from attnzoo.testing import relative_error

NAME = "shrink"
PAIR = Pair("shrunk_linear", "shrunk_softmax", (NAME,))
B, T, H, G, K = 2, 9, 4, 2, 6


class Shrinks(Transition):
    """``R_t = Diag(1 - s_t)``, which nothing but its declaration tells the library of."""

    parts = (NAME,)
    width = 1

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return (1 - getattr(gate, NAME))[..., None] * state


@pytest.fixture
def shrink() -> Iterator[GatePart]:
    """A declared part of each query head."""
    part = GatePart(
        "sₜ", ("B, T, H, K",), "in [0, 1]", lambda x, gate: "", lambda draws, shape: draws.uniform(shape), tex="s",
        matrix=lambda gate, q: torch.diag_embed(1 - getattr(gate, NAME)), factor="Diag(1 - s_t)", letter="S",
    )  # fmt: skip
    register_part(NAME, part)
    yield part
    unregister_part(NAME)


def inputs(*heads: int) -> tuple[Tensor, Tensor, Tensor, Gate]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, n, K, dtype=torch.float64) for n in (H, G, G))
    draws = Draws("mixed", torch.float64, None)
    return q, k, v, Gate(**{NAME: PARTS[NAME].sample(draws, (B, T, H, K))})


def test_cached_keys_are_kept_for_each_query_head_that_a_new_part_tells_apart(shrink: GatePart) -> None:
    q, k, v, gate = inputs()
    forms = SoftmaxForms(Shrinks())
    whole = oracle.softmax(q, k, v, gate)
    assert relative_error(forms.parallel(q, k, v, gate), whole) <= 1e-12
    first, state = forms.extend(q[:, :5], k[:, :5], v[:, :5], gate.slice(0, 5))
    rest, _ = forms.extend(q[:, 5:], k[:, 5:], v[:, 5:], gate.slice(5, T), state)
    assert relative_error(torch.cat([first, rest], 1), whole) <= 1e-12
    assert state.k.shape[2] == H


def test_keys_that_a_layer_forgets_are_kept_for_each_of_those_heads_too(shrink: GatePart) -> None:
    q, k, v, gate = inputs()
    forms, everything = (
        SoftmaxForms(Shrinks()),
        Network(
            keys=lambda k, v: k.new_zeros(B, G, k.shape[1], 1),
            rows=lambda q: q.new_zeros(B, G, q.shape[1], 1),
            join=lambda keys, rows: lambda panel: torch.full((B, G, *panel.age.shape[2:]), 30.0, dtype=torch.float64),
        ),
    )
    given, policy = SoftmaxOptions(), Policy(Forgetting(), None)
    outputs, state = [], None
    for now in (slice(0, 5), slice(5, T)):
        qkv = (x[:, now] for x in (q, k, v))
        o, state = extend_forgetting(forms, *qkv, gate.slice(now.start, now.stop), everything, policy, state, given)
        outputs.append(o)
    whole = forms.parallel(q, k, v, gate)
    assert relative_error(torch.cat(outputs, 1), whole) <= 1e-12


def test_a_pair_of_a_new_part_has_forms_once_a_factor_is_made_of_it(shrink: GatePart, monkeypatch) -> None:
    register(PAIR)
    try:
        with pytest.raises(ValueError, match="gate part 'shrink': expected a factor of R_t that reads it"):
            get("shrunk_softmax")
        monkeypatch.setattr(products, "FACTORS", [*products.FACTORS, Shrinks()])
        q, k, v, gate = inputs()
        for side, form, truth in (("softmax", "parallel", oracle.softmax), ("linear", "chunk", oracle.linear)):
            o = get(f"shrunk_{side}").forms[form](q, k, v, gate)
            assert relative_error(o, truth(q, k, v, gate)) <= 1e-12
        assert "triton" not in get("shrunk_linear").forms  # the kernels know nothing of the part
    finally:
        unregister(PAIR)


@pytest.mark.parametrize("kernel", [path_kernel, wall_kernel])
def test_a_kernel_refuses_a_part_that_it_does_not_read(kernel, shrink: GatePart) -> None:
    q, k, v, gate = inputs()
    forms = SoftmaxForms(Shrinks(), kernels={"triton": kernel()})
    assert "reads no gate part but" in forms.refuses("triton", Call(q, k, v, gate))


def test_a_transition_of_parts_that_may_expand_is_not_pruned(shrink: GatePart, monkeypatch) -> None:
    monkeypatch.setitem(PARTS, NAME, replace(shrink, expands=True))
    q, k, v, gate = inputs()
    gate = replace(gate, log_decay=-torch.rand(B, T, H, dtype=torch.float64))
    with pytest.raises(ValueError, match="makes vectors longer"):
        SoftmaxForms(Shrinks()).parallel(q, k, v, gate, prune=Prune())


def test_every_part_of_the_product_has_one_factor() -> None:
    whole = [factor for factor in products.FACTORS if not any(PARTS[part].optional for part in factor.parts)]
    made = [part for factor in whole for part in factor.parts]
    assert sorted(made) == sorted(name for name, part in PARTS.items() if part.carries and not part.optional)
    for optional in (name for name, part in PARTS.items() if part.optional):
        assert len([factor for factor in products.FACTORS if optional in factor.parts]) == 1


LISTS = {  # where names of several parts stand together, and why
    "algebra.parts": "the declaration",
    "registry.table": "the table of pairs",
    "evaluation.pruning": "what the kernels' counts of blocks read",
    "docs.tools.pairs": "what the interactive page has controls for",
    "forms.backends.recurrent": "what a kernel reads",
    "forms.backends.fox_path": "what a kernel reads",
    "forms.backends.wall": "what a kernel reads",
    "forms.backends.sdpa": "what a kernel reads",
}


def lists_of_parts(code: str) -> list[int]:
    """Lines with a tuple, list, set or dictionary that names parts of two groups; ``provides`` is a gate's own."""
    found, own = [], {name: part.of or name for name, part in PARTS.items()}
    tree = ast.parse(code)
    gates = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) and named(node) == "provides"}
    for node in ast.walk(tree):
        shown = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", None)
        if not shown:
            continue
        names = {x.value for x in ast.walk(ast.List(shown)) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
        if len({own[name] for name in names if name in own}) > 1 and id(node) not in gates:
            found.append(node.lineno)
    return found


def named(node: ast.Assign) -> str:
    return getattr(node.targets[0], "id", "")


def test_no_list_of_parts_stands_beside_their_declaration() -> None:
    root = Path(attnzoo.__file__).parent
    folders = [root, root / "recurrences", root.parent / "docs"]
    files = [path for folder in folders for path in folder.rglob("*.py") if "kernels" not in path.parts]
    found = {}
    for path in files:
        module = ".".join(path.relative_to(root if path.is_relative_to(root) else root.parent).with_suffix("").parts)
        lines = lists_of_parts(path.read_text())
        if lines and module not in LISTS:
            found[module] = lines
    assert not found
    assert lists_of_parts('x = {"log_diag": 1, "w": 2}')
    assert not lists_of_parts('provides = ("log_decay", "angle")')
