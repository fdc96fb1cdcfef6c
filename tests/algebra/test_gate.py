"""The gate: its parts, and its dense form against small formulas written apart from it."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from thinning import given_variant

from attnzoo import Gate, get, list_variants
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.transitions import HeadGate
from attnzoo.samples import random_inputs
from attnzoo.testing import CPU_FORMS, cases

B, T, H, G, K = 2, 5, 4, 2, 6


def everything() -> tuple[torch.Tensor, Gate]:
    """q and a gate with all parts but u, which takes the place of a w."""
    q = torch.randn(B, T, H, K, dtype=torch.float64)
    return q, Gate(
        log_decay=-torch.rand(B, T, H, dtype=torch.float64),
        log_diag=-torch.rand(B, T, H, K, dtype=torch.float64),
        angle=torch.randn(B, T, H, K // 2, dtype=torch.float64),
        w=F.normalize(torch.randn(B, T, G, K, dtype=torch.float64), dim=-1),
        beta=2 * torch.rand(B, T, G, dtype=torch.float64),
        levels=torch.rand(B, T, H, 3, dtype=torch.float64),
        log_decay_back=-torch.rand(B, T, H, dtype=torch.float64),
    )


def test_empty_gate_is_the_identity() -> None:
    g, R = Gate().dense(torch.randn(B, T, H, K))
    assert torch.equal(g, torch.zeros(B, T, H, dtype=torch.float64))
    assert torch.equal(R, torch.eye(K, dtype=torch.float64).expand(B, T, H, K, K))


def test_log_decay_is_the_scalar_part() -> None:
    q, gate = everything()
    g, R = Gate(log_decay=gate.log_decay).dense(q)
    assert gate.log_decay is not None
    assert torch.equal(g, gate.log_decay)
    assert torch.equal(R, torch.eye(K, dtype=torch.float64).expand(B, T, H, K, K))


def test_dense_is_diag_times_rotation_times_householder() -> None:
    """Entry by entry, in that order, for every token and head."""
    q, gate = everything()
    _, R = gate.dense(q)
    assert R.dtype == torch.float64
    for b, t, h in [(0, 0, 0), (1, 3, 1), (1, 4, 2), (0, 2, 3)]:
        a, theta = gate.log_diag[b, t, h], gate.angle[b, t, h]  # type: ignore[index]
        w, beta = gate.w[b, t, h // 2], float(gate.beta[b, t, h // 2])  # type: ignore[index]
        rotation = torch.zeros(K, K, dtype=torch.float64)
        for i in range(K // 2):
            c, s = math.cos(theta[i]), math.sin(theta[i])
            rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
        expected = torch.diag(a.exp()) @ rotation @ (torch.eye(K, dtype=torch.float64) - beta * torch.outer(w, w))
        assert torch.allclose(R[b, t, h], expected, atol=1e-14, rtol=0)


def test_shared_angle_is_every_tokens_angle() -> None:
    q, _ = everything()
    theta = torch.randn(K // 2, dtype=torch.float64)
    shared = Gate(angle=theta)
    assert torch.equal(shared.dense(q)[1], Gate(angle=theta.expand(B, T, H, K // 2)).dense(q)[1])
    assert torch.equal(shared.dense(q)[1], shared.per_token(q).dense(q)[1])
    assert shared.per_token(q).angle.shape == (B, T, 1, K // 2)  # type: ignore[union-attr]


def test_shared_log_decay_is_every_tokens_log_decay() -> None:
    q, _ = everything()
    g = -torch.rand(H, dtype=torch.float64)
    shared = Gate(log_decay=g)
    assert torch.equal(shared.dense(q)[0], g.expand(B, T, H))
    assert torch.equal(shared.per_token(q).log_decay, g.expand(B, T, H))  # type: ignore[arg-type]
    assert torch.equal(shared.slice(1, 3).log_decay, g)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n in list_variants() if "log_decay" in get(n).requires])
def test_every_form_takes_a_shared_log_decay(name: str) -> None:
    """A decay per head alone is the same as it repeated for every token, with padding and in segments too."""
    q, k, v, gate = random_inputs(name, B, 9, H, G, K, 5, regime="open")
    assert gate.log_decay is not None
    shared = replace(gate, log_decay=gate.log_decay[0, 0].clone())
    repeated = replace(gate, log_decay=gate.log_decay[:1, :1].expand(B, 9, H).contiguous())
    valid = torch.ones(B, 9, dtype=torch.bool)
    valid[0, :2] = False
    variant = get(name)
    for form in variant.forms:
        if form in CPU_FORMS:
            assert torch.equal(variant.forms[form](q, k, v, shared), variant.forms[form](q, k, v, repeated))
    got, _ = variant.extend(q, k, v, shared, valid=valid)
    expected, _ = variant.extend(q, k, v, repeated, valid=valid)
    assert torch.equal(got, expected)
    state, whole = None, variant.extend(q, k, v, repeated)[0]
    for start, stop in [(0, 4), (4, 5), (5, 9)]:
        now = slice(start, stop)
        o, state = variant.extend(q[:, now], k[:, now], v[:, now], shared.slice(start, stop), state)
        torch.testing.assert_close(o, whole[:, now], rtol=1e-12, atol=1e-12)


def test_rotation_turns_counter_clockwise() -> None:
    """A quarter turn takes the first axis of a pair to the second."""
    _, R = Gate(angle=torch.tensor([math.pi / 2])).dense(torch.zeros(1, 1, 1, 2))
    assert torch.allclose(
        R[0, 0, 0] @ torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0]).double(), atol=1e-7
    )


def test_beta_two_reflects_and_one_projects() -> None:
    w = F.normalize(torch.randn(1, 2, 1, K, dtype=torch.float64), dim=-1)
    _, R = Gate(w=w, beta=torch.tensor([[[2.0], [1.0]]], dtype=torch.float64)).dense(torch.zeros(1, 2, 1, K))
    reflect, project = R[0, :, 0]
    assert torch.allclose(reflect @ reflect, torch.eye(K, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(reflect @ w[0, 0, 0], -w[0, 0, 0], atol=1e-14)
    assert torch.allclose(project @ project, project, atol=1e-14)
    assert torch.allclose(project @ w[0, 1, 0], torch.zeros(K, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("name", list_variants())
@given_variant(data=st.data())
def test_transitions_never_expand(name: str, data: st.DataObject) -> None:
    """Spectral norm at most 1: what pruning and stability rest on."""
    q, _, _, gate = data.draw(cases(name, max_t=8)).inputs()
    g, R = gate.dense(q)
    assert float(torch.linalg.matrix_norm(R, 2).max()) <= 1 + 1e-12
    assert float(g.max()) <= 0


def test_all_parts_together_never_expand() -> None:
    q, gate = everything()
    assert float(torch.linalg.matrix_norm(gate.dense(q)[1], 2).max()) <= 1 + 1e-12


def test_parts_names_what_is_given_in_order() -> None:
    assert Gate().parts == ()
    gate = everything()[1]
    assert replace(gate, u=gate.w).parts == tuple(PARTS)


@pytest.mark.parametrize("name", list_variants())
def test_random_gate_has_the_parts_of_its_variant(name: str) -> None:
    assert set(random_inputs(name)[3].parts) == set(get(name).requires)


def test_map_and_slice() -> None:
    _, gate = everything()
    assert gate.map(lambda x: 2 * x).parts == gate.parts
    assert all(torch.equal(getattr(gate.slice(1, 3), p), getattr(gate, p)[:, 1:3]) for p in gate.parts)
    theta = torch.randn(K // 2)
    assert torch.equal(Gate(angle=theta).slice(1, 3).angle, theta)  # type: ignore[arg-type]


def test_at_is_one_token_without_its_axis() -> None:
    _, gate = everything()
    assert all(torch.equal(getattr(gate.at(2), p), getattr(gate, p)[:, 2]) for p in gate.parts)
    theta, g = torch.randn(K // 2), -torch.rand(H)
    shared = Gate(angle=theta, log_decay=g).at(2)
    assert torch.equal(shared.angle, theta)  # type: ignore[arg-type]
    assert torch.equal(shared.log_decay, g)  # type: ignore[arg-type]


def test_heads_first_gate_cuts_along_time() -> None:
    """In the layout of transitions tokens come after heads, in parts with channels and without."""
    q, gate = everything()
    heads = HeadGate.of(gate, q)
    for p in gate.parts:
        x = getattr(gate, p).transpose(1, 2).repeat_interleave(H // getattr(gate, p).shape[2], 1)
        assert torch.equal(getattr(heads, p), x)
        assert torch.equal(getattr(heads.at(3), p), x[:, :, 3])
        assert torch.equal(getattr(heads.slice(1, 3), p), x[:, :, 1:3])
        assert torch.equal(getattr(heads.cut(2).at(1), p)[:, :, 1], x[:, :, 3])
        assert (getattr(heads.cut(2).at(1), p)[:, :, 2] == PARTS[p].neutral).all()  # filled up with identities
    assert HeadGate.of(Gate(angle=torch.ones(K // 2), log_decay=-torch.ones(H)), q).angle.shape == (B, H, T, K // 2)  # type: ignore[union-attr]


def test_declared_parts_are_the_fields_of_a_gate() -> None:
    assert tuple(PARTS) == tuple(f.name for f in fields(Gate))
    _, gate = everything()
    gate = replace(gate, u=gate.w)
    for name, part in PARTS.items():
        assert getattr(gate, name).ndim == part.ndim


def test_neutral_where_is_the_identity_there_and_nothing_elsewhere() -> None:
    q, gate = everything()
    absent = torch.zeros(B, T, dtype=torch.bool)
    absent[0, 2], absent[1, 4] = True, True
    assert gate.log_decay is not None
    gate.log_decay[0, 2] = -torch.inf
    g, R = gate.neutral_where(absent).dense(q)
    assert not g[absent].any()
    assert torch.equal(R[absent], torch.eye(K, dtype=torch.float64).expand(2, H, K, K))
    assert torch.equal(g[~absent], gate.dense(q)[0][~absent])
    assert torch.equal(R[~absent], gate.dense(q)[1][~absent])


def test_neutral_where_takes_parts_that_hold_for_every_token() -> None:
    q, _ = everything()
    absent = torch.zeros(B, T, dtype=torch.bool)
    absent[0, 2] = True
    shared = Gate(angle=torch.randn(K // 2).double(), log_decay=-torch.rand(H).double())
    g, R = shared.neutral_where(absent).dense(q)
    assert not g[absent].any()
    assert torch.equal(R[absent], torch.eye(K, dtype=torch.float64).expand(1, H, K, K))
    assert torch.equal(g[~absent], shared.dense(q)[0][~absent])
    assert torch.equal(R[~absent], shared.dense(q)[1][~absent])


def test_gate_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Gate().log_decay = torch.zeros(1)  # type: ignore[misc]
