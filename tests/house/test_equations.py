"""The equations that `attnzoo show` prints are true: each line is read as a formula and compared with the oracle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import get, list_variants, oracle
from attnzoo.equations import equations_of
from attnzoo.samples import random_inputs

T = 6
READOUT = "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ"
NAME = "[A-Za-zβθλ]+"


@dataclass
class Matrix:
    """A matrix whose juxtaposition is a product; one number times a matrix scales it."""

    x: Tensor

    def __matmul__(self, other: Matrix) -> Matrix:
        return Matrix(self.x * other.x if 1 in (self.x.numel(), other.x.numel()) else self.x @ other.x)

    def __add__(self, other: Matrix) -> Matrix:
        return Matrix(self.x + other.x)

    def __sub__(self, other: Matrix) -> Matrix:
        return Matrix(self.x - other.x)

    def __neg__(self) -> Matrix:
        return Matrix(-self.x)


def rotation(angle: Matrix) -> Matrix:
    blocks = [torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])]) for a in angle.x[:, 0]]
    return Matrix(torch.block_diag(*blocks))


FUNCTIONS: dict[str, Any] = {
    "exp": lambda m: Matrix(m.x.exp()),
    "Diag": lambda m: Matrix(m.x[:, 0].diag()),
    "Rot": rotation,
}


def python(formula: str) -> str:
    """The formula as a Python expression: `λ kⱼᵀ qₜ` is `at("λ") @ at("kⱼᵀ") @ at("qₜ")`."""
    formula = re.sub(r"([gaθ])ⱼ₊₁ \+ ⋯ \+ \1ₜ", r"d\1", formula).replace("Rⱼ₊₁ ⋯ Rₜ", "P").replace("−", "-")
    out: list[str] = []
    for token in re.findall(rf"{NAME}[ₜⱼ]?(?:₋₁)?ᵀ?|[()+-]", formula):
        value = token if token in "()+-" or token in FUNCTIONS else f"at({token!r})"
        if out and out[-1][-1] == ")" and value not in ")+-":
            out.append("@")
        out.append(value)
    return " ".join(out)


class Tokens:
    """The symbols of one head of random inputs, at a query t and a key j."""

    def __init__(self, name: str) -> None:
        constant = name in ("alibi", "retnet")
        inputs = random_inputs(name, B=1, T=T, H=1, G=1, K=4, V=3, regime="open", seed=3)
        if constant:
            inputs = (*inputs[:3], inputs[3].map(lambda g: g[:, :1].expand(-1, T, -1)))
        self.inputs = inputs
        q, k, v, gate = inputs
        self.columns = {"q": q, "k": k, "v": v, "g": gate.log_decay, "a": gate.log_diag, "θ": gate.angle, "w": gate.w}
        self.columns |= {"β": gate.beta, "u": gate.u}
        self.m = None if gate.log_decay is None else -gate.log_decay[0, 0, 0]
        self.defined: dict[str, list[Matrix]] = {}

    def column(self, symbol: str, t: int) -> Matrix:
        if symbol in self.defined:
            return self.defined[symbol][t]
        values = self.columns[symbol]
        assert values is not None, f"{symbol} is not a part of this gate"
        return Matrix(values[0, t].reshape(-1, 1))

    def value(self, formula: str, t: int, j: int) -> Tensor:
        def at(token: str) -> Matrix:
            transposed = token.endswith("ᵀ")
            symbol = token.rstrip("ᵀ")
            if symbol in ("t", "j"):
                return Matrix(torch.tensor([[float(t if symbol == "t" else j)]], dtype=torch.float64))
            if symbol == "λ":
                return Matrix(torch.tensor([[0.5]], dtype=torch.float64))
            if symbol == "m":
                assert self.m is not None
                return Matrix(self.m.reshape(1, 1))
            if symbol == "I":
                return Matrix(torch.eye(4, dtype=torch.float64))
            if symbol in ("dg", "da", "dθ"):
                columns = [self.column(symbol[1], i).x for i in range(j + 1, t + 1)]
                return Matrix(sum(columns, torch.zeros_like(self.column(symbol[1], t).x)))
            if symbol == "P":
                product = Matrix(torch.eye(4, dtype=torch.float64))
                for i in range(j + 1, t + 1):
                    product = product @ self.column("R", i)
                return product
            letter, index = symbol[0], symbol[1:]
            found = self.column(letter, {"ₜ": t, "ⱼ": j, "ₜ₋₁": t - 1}[index]).x
            return Matrix(found.mT if transposed else found)

        return eval(python(formula), {"at": at, **FUNCTIONS}).x  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list_variants())
def test_equations_equal_oracle(name: str) -> None:
    variant, tokens = get(name), Tokens(name)
    q, k, v, gate = tokens.inputs
    K, V = q.shape[3], v.shape[3]
    outputs = oracle.linear(q, k, v, gate, scale=0.5)[0, :, 0]
    s, d = (x[0, 0] for x in oracle.scores(q, k, gate, scale=0.5))
    checked = []
    lines = list(equations_of(variant))
    for number, line in enumerate(lines):
        left, _, right = (part.strip() for part in line.partition("="))
        left = left or lines[number - 1].partition("=")[0].strip()
        for t in range(T):
            if line == READOUT:
                continue
            if right.startswith("Σⱼ"):
                terms = [tokens.value(right[2:].strip(), t, j) for j in range(t + 1)]
                torch.testing.assert_close(sum(terms[1:], terms[0])[:, 0], outputs[t], rtol=1e-12, atol=1e-12)
            elif left == "Sₜ":
                states = tokens.defined.setdefault("S", [])
                before = states[-1] if states else Matrix(torch.zeros(V, K, dtype=torch.float64))
                tokens.defined["S"] = [*states, before]  # S at t - 1, of which S at -1 is 0
                now = tokens.value(right.replace("Sₜ₋₁", "Sₜ"), t, t)
                tokens.defined["S"] = [*states, Matrix(now)]
            elif left == "oₜ":
                torch.testing.assert_close(tokens.value(right, t, t)[:, 0], outputs[t], rtol=1e-12, atol=1e-12)
            elif left == "ℓₜⱼ":
                logits = torch.cat([tokens.value(right, t, j)[0] for j in range(t + 1)])
                torch.testing.assert_close(logits, (s + d)[t, : t + 1], rtol=1e-12, atol=1e-12)
            elif left == "gₜ":
                torch.testing.assert_close(tokens.value(right, t, t)[0], gate.log_decay[0, t], rtol=0, atol=0)
            else:
                assert left == "Rₜ", f"{line!r}: nothing here checks {left!r}"
                tokens.defined["R"] = [*tokens.defined.get("R", []), Matrix(tokens.value(right, t, t))]
        checked.append(line)
    assert checked == lines
    if variant.side == "softmax":
        assert lines[-1] == READOUT
        assert any(line.startswith("ℓₜⱼ") for line in lines)
    else:
        assert [line.partition("=")[0].strip() for line in lines[-3:]] == ["Sₜ", "oₜ", ""]
