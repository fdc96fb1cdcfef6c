"""Parts of a gate that are registered, as a user's file does: a second vector beside w, for factors that may expand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor
from two_vectors import two_vectors

from attnzoo import Gate, Pair, Prune, build_attention, describe, get, oracle, register, register_part
from attnzoo.algebra.parts import PARTS, GatePart
from attnzoo.algebra.transitions import HeadGate, Transition
from attnzoo.cli import app
from attnzoo.layer.gates import GateProjection
from attnzoo.recurrences.deltanet import Oblique
from attnzoo.registry import unregister, unregister_part
from attnzoo.samples import random_gate
from attnzoo.testing import LAWS, Case, check, relative_error, run_law

B, T, H, K, V = 2, 17, 2, 6, 5
U = PARTS["u"]


class TwoVectors(GateProjection):
    """w, u and beta of a layer."""

    provides = ("w", "beta", "u")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.proj = torch.nn.Linear(self.sizes.hidden_size, self.sizes.num_heads * (2 * self.sizes.head_dim + 1))

    def forward(self, x: Tensor, k: Tensor, stream: Any) -> tuple[Gate, Any]:
        w, u, beta = self.proj(x).unflatten(-1, (self.sizes.num_heads, -1)).split([self.sizes.head_dim] * 2 + [1], -1)
        w, u = F.normalize(w, dim=-1), F.normalize(u, dim=-1)
        return Gate(w=w, beta=2 * beta[..., 0].sigmoid(), u=u), None


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with two_vectors():
        yield


@pytest.mark.parametrize("name", ["two_vectors", "gdn2_path", "comba_path", "dplr"])
def test_every_law_holds_of_factors_that_may_expand(name: str) -> None:
    trials = {law: run_law(name, law, 2) for law in LAWS if law != "layer"}
    assert [trial.said for trial in trials.values() if not trial.ok] == []
    assert bool(trials["matrices"].refused) == (name == "dplr")  # the others' are the product of their parts
    assert trials["pruning"].refused


def inputs(name: str) -> tuple[Tensor, Tensor, Tensor, Gate]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, n, dtype=torch.float64) for n in (K, K, V))
    return q, F.normalize(k, dim=-1), v, random_gate(name, B, T, H, H, K)


def read(q: Tensor, S: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", q * K**-0.5, S)


def test_gated_deltanet_2_is_a_pair_of_parts() -> None:
    """S_t = (I - k_t (b_t * k_t)^T) Diag(exp(a_t)) S_{t-1} + k_t (c_t * v_t)^T, as flash-linear-attention's
    ``ops/gdn2/naive.py`` states it; so w = k, u = b * k and beta = 1."""
    q, k, v, gate = inputs("gdn2")
    b, c = torch.rand_like(k), torch.rand_like(v)
    S, outputs = q.new_zeros(B, H, K, V), []
    for t in range(T):
        S = cast(Tensor, gate.log_diag)[:, t].exp()[..., None] * S
        erased = ((b * k)[:, t, :, :, None] * S).sum(-2)
        S = S + k[:, t, :, :, None] * ((c * v)[:, t] - erased)[..., None, :]
        outputs.append(read(q[:, t], S))
    theirs = Gate(log_diag=gate.log_diag, w=k, beta=torch.ones(B, T, H).double(), u=b * k)
    for form in ("recurrent", "parallel", "chunk"):
        assert relative_error(get("gdn2").forms[form](q, k, c * v, theirs), torch.stack(outputs, 1)) <= 1e-10


def test_comba_is_a_pair_of_parts() -> None:
    """S_t = exp(g_t) (I - beta_t k_t p_t^T) S_{t-1} + beta_t k_t v_t^T (Hu et al., 2025, arXiv:2506.02475)."""
    q, k, v, gate = inputs("comba")
    p = 0.7 * k
    g, beta = cast(Tensor, gate.log_decay).exp(), cast(Tensor, gate.beta)
    S, outputs = q.new_zeros(B, H, K, V), []
    for t in range(T):
        S = g[:, t, :, None, None] * S
        new = beta[:, t, :, None] * (v[:, t] - (p[:, t, :, :, None] * S).sum(-2))
        S = S + k[:, t, :, :, None] * new[..., None, :]
        outputs.append(read(q[:, t], S))
    theirs = Gate(log_decay=gate.log_decay, w=k, beta=beta, u=p)
    for form in ("recurrent", "parallel", "chunk"):
        got = get("comba").forms[form](q, k, v, theirs, write=beta)
        assert relative_error(got, torch.stack(outputs, 1)) <= 1e-10


def test_rwkv_7_is_a_pair_of_one_transition_and_has_a_softmax_dual() -> None:
    """S_t = S_{t-1} (Diag(w_t) - kappa_t^T (a_t * kappa_t)) + v_t^T k_t (Peng et al., 2025, arXiv:2503.14456), kappa of
    length 1: u = kappa, w = a * kappa, beta = 1. The dual is written out from the same matrices."""
    q, k, v, gate = inputs("dplr")
    kappa, a = F.normalize(torch.randn_like(k), dim=-1), torch.rand_like(k)
    decay = cast(Tensor, gate.log_diag).exp()
    R = torch.diag_embed(decay) - kappa[..., :, None] * (a * kappa)[..., None, :]
    S, outputs = q.new_zeros(B, H, V, K), []
    for t in range(T):
        S = S @ R[:, t] + v[:, t, :, :, None] * k[:, t, :, None, :]
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t] * K**-0.5))
    ones = torch.ones(B, T, H).double()
    theirs = Gate(log_diag=gate.log_diag, w=a * kappa, beta=ones, u=kappa)
    for form in ("recurrent", "parallel", "chunk"):
        assert relative_error(get("dplr").forms[form](q, k, v, theirs), torch.stack(outputs, 1)) <= 1e-10
    logits = q.new_full((B, H, T, T), -torch.inf)
    for t in range(T):
        back = q[:, t] * K**-0.5
        for j in range(t, -1, -1):
            logits[:, :, t, j] = (k[:, j] * back).sum(-1)
            back = torch.einsum("bhkl,bhl->bhk", R[:, j], back)
    dual = torch.einsum("bhtj,bjhv->bthv", logits.softmax(-1), v)
    for form in ("recurrent", "parallel"):
        assert relative_error(get("dplr_path").forms[form](q, k, v, theirs), dual) <= 1e-10


@pytest.mark.fla
def test_they_are_what_flash_linear_attention_defines() -> None:
    """Its naive functions compute in float32."""
    from fla.ops.comba.naive import naive_recurrent_comba
    from fla.ops.gdn2.naive import naive_recurrent_gdn2

    q, k, v, gate = inputs("gdn2")
    b, c, beta = torch.rand_like(k), torch.rand_like(v), cast(Tensor, gate.beta)
    g = cast(Tensor, gate.log_diag).clamp(min=-30.0)
    theirs, _ = naive_recurrent_gdn2(q, k, v, g, b, c)
    ours = Gate(log_diag=g, w=k, beta=torch.ones_like(beta), u=b * k)
    assert relative_error(get("gdn2").forms["chunk"](q, k, c * v, ours), theirs) <= 64 * 2**-24
    theirs, _ = naive_recurrent_comba(q, k, v, 0.7 * k, beta, g[..., 0])
    ours = Gate(log_decay=g[..., 0], w=k, beta=beta, u=0.7 * k)
    assert relative_error(get("comba").forms["chunk"](q, k, v, ours, write=beta), theirs) <= 64 * 2**-24


def test_a_list_of_pairs_marks_the_part_beside_the_one_that_it_is_of() -> None:
    listed = CliRunner().invoke(app, ["list"], catch_exceptions=False).output
    lines = listed.splitlines()
    column = next(line for line in lines if "linear side" in line).index("u_t")
    marks = {line.split()[1]: line[column : column + 1] for line in lines if line[:3].strip().isdigit()}
    assert {name for name, mark in marks.items() if mark == "x"} == {"rwkv7", "two_vectors", "gdn2", "comba", "dplr"}
    said = " ".join(listed.split())
    assert "(I - beta_t w_t w_t^T), of the parts marked; with u_t a factor is I - beta_t u_t w_t^T." in said


def test_nothing_is_pruned_where_a_part_may_expand_and_the_part_is_not_forgotten_by_the_oracle() -> None:
    q, k, v, gate = inputs("comba")
    assert not get("comba_path").prunable
    with pytest.raises(ValueError, match="makes vectors longer"):
        get("comba_path").forms["parallel"](q, k, v, gate, prune=Prune())
    norms = torch.linalg.matrix_norm(oracle.matrices(q, gate)[1], 2)
    assert float(norms.max()) > 1.1
    assert torch.equal(oracle.matrices(q, gate)[1], gate.dense(q)[1])


def test_a_layer_of_the_part_generates_as_it_trains() -> None:
    x = torch.randn(1, 7, 16)
    for name in ("two_vectors", "two_vectors_path"):
        attn = build_attention(name, hidden_size=16, num_heads=2, gate=TwoVectors)
        cache = attn.new_cache()
        assert torch.allclose(torch.cat([attn(p, cache=cache) for p in x.split([5, 1, 1], 1)], 1), attn(x), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "part", "more", "message"),
    [
        ("w", U, {}, "name: expected a new name that a keyword may have, got 'w'"),
        ("slice", U, {}, "name: expected a new name that a keyword may have, got 'slice'"),
        ("new", "U", {}, "part: expected attnzoo.algebra.parts.GatePart, got str"),
        ("new", U, {"factor": Oblique()}, "factor: expected one whose parts have 'new', got w, beta, u"),
        ("new", U, {"factor": "x"}, "factor: expected an object of a class Transition, got 'x'"),
    ],
)
def test_what_cannot_be_registered_is_named(name: str, part: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        register_part(name, part, **more)
    assert list(PARTS)[-1] == "log_decay_back"


class Lean(Transition):
    """``R_t = (1 - m_t) I + m_t P`` with P the cyclic shift of channels and a number m_t per head."""

    parts = ("lean",)
    symbol = "(1 - m_t) I + m_t P"

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        assert state.numel()  # a Fourier transform, which shifts may be made of, takes no empty tensors
        m = getattr(gate, "lean")[..., None, None]  # noqa: B009
        return cast(Tensor, (1 - m) * state + m * state.roll(-1, -2))


class LeanGate(GateProjection):
    provides = ("lean",)

    def forward(self, x: Tensor, k: Tensor, stream: Any) -> tuple[Gate, Any]:
        return Gate(lean=x[..., : self.sizes.num_heads].sigmoid()), None  # type: ignore[call-arg]


def lean_matrix(gate: Gate, q: Tensor) -> Tensor:
    m, eye = getattr(gate, "lean")[..., None, None], torch.eye(q.shape[-1], dtype=torch.float64)  # noqa: B009
    return cast(Tensor, (1 - m) * eye + m * eye.roll(1, 0))


LEAN = GatePart(
    "mₜ", ("B, T, H",), "in [0, 1]", lambda x, gate: "", lambda draws, shape: draws.uniform(shape) / 2, tex="m",
    matrix=lean_matrix, factor="(1 - m_t) I + m_t P", letter="L", projections=(LeanGate, LeanGate),
)  # fmt: skip


def test_a_part_of_a_number_per_head_is_a_factor_too() -> None:
    part = LEAN
    with pytest.raises(ValueError, match="part.matrix: expected the matrix of lean's factor of R_t, got None"):
        register_part("lean", replace(part, matrix=None), factor=Lean())
    register_part("lean", replace(part, matrix=None))
    with pytest.raises(ValueError, match=r"pair.transition: expected gate parts that are factors of R_t .*, got mₜ"):
        register(Pair("lean", "lean_fox", ("log_decay", "lean"), transition=Lean()))
    unregister_part("lean")
    register_part("lean", part, factor=Lean())
    register(pair := Pair("lean", "lean_fox", ("log_decay", "lean")))
    try:
        trials = {(name, law): run_law(name, law, 2) for name in ("lean", "lean_fox") for law in LAWS}
        assert [trial.said for trial in trials.values() if not trial.ok] == []
        assert {law for (_, law), trial in trials.items() if trial.refused} == {"pruning"}  # of a state
        assert "gate=LeanGate: gives lean" in describe("lean")
    finally:
        unregister(pair)
        unregister_part("lean")


class Kept(Transition):
    """``R_t = r_t I`` with a number r_t per head, which is 1 where nothing is lost."""

    parts = ("kept",)
    symbol = "r_t I"

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return cast(Tensor, getattr(gate, "kept")[..., None, None] * state)  # noqa: B009


def kept_matrix(gate: Gate, q: Tensor) -> Tensor:
    return cast(Tensor, getattr(gate, "kept")[..., None, None] * torch.eye(q.shape[-1], dtype=q.dtype))  # noqa: B009


def test_a_part_that_is_neutral_at_1_holds_every_law_and_its_layer_is_said_to_need_a_gate() -> None:
    register_part("kept", replace(LEAN, matrix=kept_matrix, neutral=1.0, projections=None), factor=Kept())
    register(pair := Pair("kept", "kept_fox", ("log_decay", "kept")))
    try:
        trials = {(name, law): run_law(name, law, 4) for name in ("kept", "kept_fox") for law in LAWS}
        assert [trial.said for trial in trials.values() if not trial.ok] == []
        for name in ("kept", "kept_fox"):
            assert (
                trials[name, "layer"].refused == "no gate projection of kept is known: build_attention takes gate=..."
            )
        last = Case("kept", B=1, T=10, H=1, G=1, K=2, V=1, block=8, cuts=(9,))  # fills up a block that goes on
        assert check("segments", last)["extend"] <= 1e-10
    finally:
        unregister(pair)
        unregister_part("kept")


def test_a_part_needs_the_one_that_it_is_of_and_stays_while_a_pair_requires_it() -> None:
    with pytest.raises(ValueError, match="expected w and beta together, got u"):
        register(Pair("one", "other", ("u",)))
    register_part("lean", LEAN, factor=Lean())
    register(pair := Pair("lean", "lean_fox", ("log_decay", "lean")))
    with pytest.raises(ValueError, match="lean requires 'lean'"):
        unregister_part("lean")
    unregister(pair)
    unregister_part("lean")
    assert get("deltanet").requires == ("w", "beta")  # which may be without it
