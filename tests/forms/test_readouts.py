"""Readouts beside the linear and the softmax one: each equals its two derivations, and obeys every law."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from generated import alone, build, filled
from layers import assert_same, layer, rows
from torch import Tensor

from attnzoo import (
    Gate,
    Pair,
    Prune,
    Readout,
    Scores,
    build_attention,
    get,
    list_variants,
    register,
    register_part,
    register_readout,
)
from attnzoo.algebra import oracle
from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.parts import GatePart
from attnzoo.errors import UnavailableError
from attnzoo.forgetting.rules import Forgetting
from attnzoo.forms.protocol import Call
from attnzoo.layer.dispatch import choose
from attnzoo.layer.gates import GateProjection, Sizes
from attnzoo.layer.gates.base import Write
from attnzoo.layer.stream import Stream
from attnzoo.models import Generator
from attnzoo.registry import unregister_part, unregister_readout
from attnzoo.samples import random_inputs
from attnzoo.testing import LAWS, Case, check, relative_error, run_law, value_and_gradients

NAMES = list_variants("other")
CAUSAL = [name for name in NAMES if get(name).causal]
LIMIT = 1e-11
Inputs = tuple[Tensor, Tensor, Tensor, Gate]


@pytest.mark.parametrize("name", NAMES)
def test_a_readout_obeys_every_law_that_applies_and_says_why_another_does_not(name: str) -> None:
    trials = {law: run_law(name, law, 2, seed=2) for law in LAWS}
    assert [trial.said for trial in trials.values() if not trial.ok] == []
    refused = {law for law, trial in trials.items() if trial.refused}
    later = set() if get(name).causal else {"segments", "causality", "padding", "layer"}
    assert refused == {"matrices", "pruning"} | later


def by_definition(name: str, inputs: Inputs, definition: Callable[..., Tensor]) -> None:
    """Every form equals a definition that shares no code with it, values and gradients."""
    expected = value_and_gradients(definition, inputs)
    for form in get(name).forms.values():
        got = value_and_gradients(form, inputs)
        for part, x in expected.items():
            assert relative_error(got[part], x, 1e-3) <= LIMIT, part


def heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return expand_heads(k, q.shape[2]), expand_heads(v, q.shape[2])


def paper_recurrence(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """Equations 7 to 9 of the FoX paper."""
    (k, v), f = heads(q, k, v), gate.log_decay.exp()  # type: ignore[union-attr]
    q, k = F.elu(q) + 1, F.elu(k) + 1
    S, z, outputs = torch.zeros_like(k[:, 0])[..., None] * v[:, 0, :, None], torch.zeros_like(k[:, 0]), []
    for t in range(q.shape[1]):
        S = f[:, t, :, None, None] * S + k[:, t, :, :, None] * v[:, t, :, None]
        z = f[:, t, :, None] * z + k[:, t]
        outputs.append((q[:, t, :, None] @ S)[:, :, 0] / (q[:, t] * z).sum(-1, keepdim=True))
    return torch.stack(outputs, 1)


def paper_parallel(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """Equation 10 of the FoX paper."""
    (k, v), f = heads(q, k, v), gate.log_decay.exp()  # type: ignore[union-attr]
    q, k = F.elu(q) + 1, F.elu(k) + 1
    outputs = []
    for t in range(q.shape[1]):
        share = [f[:, j + 1 : t + 1].prod(1) * (q[:, t] * k[:, j]).sum(-1) for j in range(t + 1)]
        total = sum(share[1:], share[0])
        outputs.append(sum(p[..., None] * v[:, j] for j, p in enumerate(share)) / total[..., None])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("definition", [paper_recurrence, paper_parallel])
def test_normalised_linear_attention_is_that_of_the_fox_paper(definition: Callable[..., Tensor]) -> None:
    by_definition("normalised_linear_attention", random_inputs("normalised_linear_attention", T=9, regime="open"),
                  definition)  # fmt: skip


def test_features_that_are_almost_zero_still_share_out_a_row() -> None:
    q, v = torch.full((1, 6, 2, 4), -40.0), torch.randn(1, 6, 2, 3)
    mean = v.cumsum(1) / torch.arange(1, 7)[:, None, None]
    for form in get("normalised_linear_attention").forms.values():
        torch.testing.assert_close(form(q, q, v, Gate(log_decay=torch.zeros(1, 6, 2))), mean)


def test_fox_follows_with_an_exponential_for_the_product_of_features() -> None:
    q, k, v, gate = random_inputs("fox", H=2, G=2)
    s, d = oracle.scores(q, k, gate)
    share = s.exp() * d.exp()
    o = (share / share.sum(-1, keepdim=True)) @ v.transpose(1, 2)
    assert relative_error(get("fox").forms["parallel"](q, k, v, gate), o.transpose(1, 2)) <= LIMIT


def levels_of_the_past(t: int) -> list[range]:
    """Tokens by level, read off the row's number: its lowest digit 1 is cut off again and again."""
    found = {0: range(t, t + 1)}
    while t:
        size = t & -t
        found[size.bit_length()] = range(t - size, t)
        t -= size
    return [found.get(level, range(0)) for level in range(max(found) + 1)]


def by_levels(last: int, q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """The sum over levels of a state for each, from nothing; all from ``last`` on are one."""
    (k, v), f = heads(q, k, v), gate.log_decay.exp()  # type: ignore[union-attr]
    outputs = []
    for t in range(q.shape[1]):
        row = torch.zeros_like(v[:, 0])
        for level, tokens in enumerate(levels_of_the_past(t)):
            for j in tokens:
                weight = f[:, j + 1 : t + 1].prod(1) * (q[:, t] * k[:, j]).sum(-1) * q.shape[-1] ** -0.5
                row = row + (gate.levels[:, t, :, min(level, last)] * weight)[..., None] * v[:, j]  # type: ignore[index]
        outputs.append(row)
    return torch.stack(outputs, 1)


def test_log_linear_attention_is_a_sum_over_the_levels_of_a_fenwick_tree() -> None:
    inputs = random_inputs("log_linear_mamba2", B=1, T=21, H=2, G=1, regime="open")
    by_definition("log_linear_mamba2", inputs, lambda *x: by_levels(4, *x))


def test_levels_double_and_partition_the_past() -> None:
    for t in range(70):
        levels = levels_of_the_past(t)
        assert sorted(j for level in levels for j in level) == list(range(t + 1))
        assert all(len(level) in (0, 2 ** max(0, n - 1)) for n, level in enumerate(levels))


@pytest.mark.parametrize(("name", "plain"), [
    ("log_linear_mamba2", "mamba2"), ("log_linear_gated_deltanet", "gated_deltanet"),
])  # fmt: skip
def test_levels_of_equal_weight_are_the_linear_readout(name: str, plain: str) -> None:
    q, k, v, gate = random_inputs(name)
    parts = {part: getattr(gate, part) for part in get(plain).requires}
    expected = get(plain).forms["chunk"](q, k, v, Gate(**parts))
    for form in get(name).forms.values():
        o = form(q, k, v, Gate(**parts, levels=torch.full((2, 24, 4, 3), 0.5).double()))
        assert relative_error(2 * o, expected) <= LIMIT


def by_breaking(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """A stick of length 1 for each row, from which its keys break their shares, the newest first."""
    k, v = heads(q, k, v)
    outputs = []
    for t in range(q.shape[1]):
        left, row = torch.ones_like(q[:, 0, :, 0]), torch.zeros_like(v[:, 0])
        for j in range(t - 1, -1, -1):
            share = left * ((q[:, t] * k[:, j]).sum(-1) * q.shape[-1] ** -0.5).sigmoid()
            left, row = left - share, row + share[..., None] * v[:, j]
        outputs.append(row)
    return torch.stack(outputs, 1)


def test_stick_breaking_breaks_a_stick() -> None:
    by_definition("stick_breaking", random_inputs("stick_breaking", T=9), by_breaking)


def test_a_row_of_a_stick_weighs_less_than_one_and_not_itself() -> None:
    q, k, _, gate = random_inputs("stick_breaking", B=1, T=12, H=1, G=1)
    p = get("stick_breaking").forms["parallel"](20 * q, k, torch.eye(12).double()[None, :, None], gate)[0, :, 0]
    assert float(p.sum(-1).max()) <= 1 + 1e-12
    assert not p.triu().any()
    assert not p[0].any()


def two_passes(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """FoX from both ends, joined by their sums, in which the row's own token would count twice."""
    fox = get("fox").forms["parallel"]
    ahead, sums = fox(q, k, v, Gate(log_decay=gate.log_decay), return_lse=True)
    back = [x.flip(1) for x in (q, k, v)]
    behind, others = (x.flip(1) for x in fox(*back, Gate(log_decay=gate.log_decay_back.flip(1)), return_lse=True))  # type: ignore[union-attr]
    k, v = heads(q, k, v)
    own = ((q * k).sum(-1) * q.shape[-1] ** -0.5).exp()
    a, b = sums.exp(), others.exp()
    joined = a[..., None] * ahead + b[..., None] * behind - own[..., None] * v
    return joined / (a + b - own)[..., None]


def test_bidirectional_fox_is_fox_from_both_ends() -> None:
    by_definition("bidirectional_fox", random_inputs("bidirectional_fox", T=9, regime="open"), two_passes)


def test_bidirectional_fox_with_its_second_gate_closed_is_fox_and_with_open_gates_is_full_attention() -> None:
    q, k, v, gate = random_inputs("bidirectional_fox", H=2, G=2)
    run = get("bidirectional_fox").forms["parallel"]
    closed = torch.full_like(gate.log_decay, -torch.inf)  # type: ignore[arg-type]
    expected = get("fox").forms["parallel"](q, k, v, Gate(log_decay=gate.log_decay))
    assert relative_error(run(q, k, v, Gate(log_decay=gate.log_decay, log_decay_back=closed)), expected) <= LIMIT
    full = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    opened = torch.zeros_like(closed)
    assert relative_error(run(q, k, v, Gate(log_decay=opened, log_decay_back=opened)), full) <= LIMIT


def test_absent_tokens_of_a_bidirectional_variant_are_as_if_they_were_not_there() -> None:
    q, k, v, gate = random_inputs("bidirectional_fox", B=1, T=7)
    valid = torch.tensor([[True, False, True, True, False, False, True]])
    index, run = valid[0].nonzero()[:, 0], get("bidirectional_fox").forms["parallel"]
    short = run(q[:, index], k[:, index], v[:, index], gate.map(lambda part: part[:, index]))
    loud = k * (1e3 * ~valid + 1)[..., None, None]
    assert relative_error(run(q, loud, v, gate, valid=valid)[:, index], short) <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_trains_in_every_precision_and_its_padding_and_packing_hold(name: str) -> None:
    attn, x = layer(name), rows(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    y = attn(x, attention_mask=mask)
    assert_same(y[0, 2:], attn(x[:1, 2:])[0])
    packed = attn(torch.cat([x[:1, 2:], x[1:]], 1), cu_seqlens=torch.tensor([0, 5, 12]))
    assert_same(packed[0], torch.cat([y[0, 2:], y[1]]))
    for parameter in attn.parameters():
        parameter.grad = None
    attn(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attn.parameters())
    low = attn.to(torch.bfloat16)(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert low.isfinite().all()


@pytest.mark.parametrize("name", CAUSAL)
def test_steps_in_place_are_the_layers_own_steps(name: str) -> None:
    attn = layer(name)
    fixed, caches = filled(attn, (1, 9, 4), 16)
    with torch.no_grad():
        for step in range(3):
            x = rows(3, 1, seed=10 + step)
            expected = torch.cat([attn(x[n : n + 1], cache=cache) for n, cache in enumerate(caches)])
            assert_same(attn(x, cache=fixed), expected)
            fixed.rows.length += 1
        fixed.rows.tokens, kept = 3, (3, 1, 2)
        x = rows(3, 3, seed=20)
        y = attn(x, cache=fixed)
        fixed.keep(torch.tensor(kept))
        fixed.rows.tokens = 1
        for n, (some, cache) in enumerate(zip(kept, caches, strict=True)):
            assert_same(y[n : n + 1, :some], attn(x[n : n + 1, :some], cache=cache))
        fixed.rows.length += torch.tensor(kept)
        x = rows(3, 1, seed=30)
        assert_same(attn(x, cache=fixed), torch.cat([attn(x[n : n + 1], cache=c) for n, c in enumerate(caches)]))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_model_generates_the_same_in_a_batch_and_alone(name: str) -> None:
    model, draws = build(attention=name), torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 40, (T,), generator=draws) for T in (3, 9, 1)]
    generator = Generator(model, 2, 32)
    ids = [generator.add(prompt, 5, temperature=0) for prompt in prompts]
    found = generator.run()
    assert [found[number] for number in ids] == [alone(model, prompt, 5) for prompt in prompts]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_can_be_reordered_and_moved(name: str) -> None:
    attn = layer(name)
    cache, swapped = attn.new_cache(), torch.tensor([1, 0])
    with torch.no_grad():
        attn(rows(2, 5), cache=cache)
        x = rows(2, 3, seed=4)
        cache.reorder(swapped)
        cache.state = cache.state.to("cpu").detach()
        y = attn(x[swapped], cache=cache)
        assert_same(y[swapped], attn(torch.cat([rows(2, 5), x], 1))[:, 5:])
    with pytest.raises(ValueError, match="tokens: expected"):
        cache.crop(9)


def test_what_cannot_apply_is_refused_by_name_with_the_reason() -> None:
    small = {"hidden_size": 16, "num_heads": 2}
    with pytest.raises(ValueError, match="acp: 'stick_breaking' is not pruned: what a row's later keys leave depends"):
        build_attention("stick_breaking", **small, acp=True)
    with pytest.raises(ValueError, match="window: expected None .'log_linear_mamba2' has a readout of its own"):
        build_attention("log_linear_mamba2", **small, window=3)
    with pytest.raises(ValueError, match="forgetting: 'stick_breaking' has a readout of its own"):
        build_attention("stick_breaking", **small, forgetting=Forgetting())
    with pytest.raises(ValueError, match="num_householder: expected 1 .'log_linear_gated_deltanet' reads one key"):
        build_attention("log_linear_gated_deltanet", **small, num_householder=2)
    with pytest.raises(ValueError, match="evict: no key of 'stick_breaking' is given up: what a row's later keys"):
        build_attention("stick_breaking", **small).new_cache(evict=1e-3)
    with pytest.raises(ValueError, match="cache: expected none for 'bidirectional_fox', whose outputs change"):
        build_attention("bidirectional_fox", **small).new_cache()
    with pytest.raises(ValueError, match="attention: expected causal variants .* got 'bidirectional_fox'"):
        build(attention="bidirectional_fox")
    call = Call(*random_inputs("stick_breaking"))
    with pytest.raises(UnavailableError, match="there is no triton form .there is recurrent, parallel"):
        choose(get("stick_breaking"), "triton", call)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'prune'"):
        get("stick_breaking").forms["parallel"](*random_inputs("stick_breaking"), prune=Prune())
    with pytest.raises(ValueError, match="state: expected no call that keeps one"):
        get("bidirectional_fox").extend(*random_inputs("bidirectional_fox"))
    _, state = get("stick_breaking").extend(*random_inputs("stick_breaking"))
    with pytest.raises(TypeError, match="state: expected ReadoutState or None, got KVCache"):
        get("log_linear_mamba2").extend(*random_inputs("log_linear_mamba2"), state)


@pytest.mark.parametrize(("of", "message"), [
    ("gated_deltanet", "of: expected another gate for 'mine' .w can make scores negative, and their sum 0."),
    ("foks", r"unknown variant 'foks' of the pairs, for 'mine' \(did you mean 'fox'\?\): expected one of "),
])  # fmt: skip
def test_a_readout_is_not_registered_where_it_cannot_stand(of: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_readout("mine", get("normalised_linear_attention").readout, of)
    assert "mine" not in list_variants("other")
    register_readout("mine", get("bidirectional_fox").readout, "wall")
    try:
        with pytest.raises(ValueError, match=r"expected a causal one over R_t = Diag\(exp\(a_t\)\) .* inverse"):
            get("mine")
    finally:
        unregister_readout("mine")


class Wrong(type(get("log_linear_mamba2").readout)):  # type: ignore[misc]
    """Its states merge a level too late."""

    def write(self, state: Tensor, k: Tensor, v: Tensor, place: Tensor, gate: Gate) -> Tensor:
        return super().write(state, k, v, place + 1, gate)


def test_a_state_that_is_not_that_of_the_weights_is_found_and_shrunk() -> None:
    register_readout("wrong", Wrong(), "mamba2", layer={"gate": ("mamba2", "levels")})
    try:
        trial = run_law("wrong", "oracle", 30)
        assert not trial.ok
        assert trial.case is not None
        assert trial.case.T <= 3
    finally:
        unregister_readout("wrong")


class Everywhere(Readout):
    """The softmax over all tokens of a sequence, without a gate."""

    causal = False

    def weights(self, scores: Scores) -> Tensor:
        return (scores.s + scores.d).softmax(-1)


@pytest.mark.parametrize("of", ["nope", "fox"])
def test_packed_sequences_do_not_see_each_other_where_later_tokens_are_seen_without_a_gate(of: str) -> None:
    register_readout("everywhere", Everywhere(), of)
    try:
        trials = [run_law("everywhere", law, 3) for law in ("oracle", "packing", "rows")]
        assert [trial.said for trial in trials if not trial.ok] == []
    finally:
        unregister_readout("everywhere")


class Bias(GateProjection):
    """A learned number per head."""

    provides = ("bias",)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.keep("number", torch.zeros(sizes.num_heads), trainable=True)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return Gate(bias=self.number), None  # type: ignore[call-arg]


class Biased(Readout):
    """A readout of one's own, ``p = sigmoid(s + d - b_h)``, with a gate part that it alone reads."""

    parts = ("bias",)

    def weights(self, scores: Scores) -> Tensor:
        return (scores.s + scores.d - scores.gate.bias[..., None]).sigmoid()  # type: ignore[attr-defined]


def test_a_readout_of_ones_own_has_a_part_of_its_own_and_everything_else() -> None:
    register_part("bias", GatePart(
        "bₜ", ("B, T, H", "H"), "finite", lambda x, gate: "", lambda draws, shape: draws.normal(shape), tex="b",
        readout=True, projections=(Bias, Bias),
    ))  # fmt: skip
    register_readout("biased", Biased(), "path_fox")
    try:
        trials = [run_law("biased", law, 2) for law in LAWS]
        assert [trial.said for trial in trials if not trial.ok] == []
        assert {trial.law for trial in trials if trial.refused} == {"matrices", "pruning"}
        attn = layer("biased")
        attn(rows(1, 5)).sum().backward()
        assert attn.gate.members[-1].number.grad.abs().min() > 0
        with pytest.raises(ValueError, match="got bias, which readouts alone read"):
            register(Pair("a_linear", "a_softmax", ("bias",)))
    finally:
        unregister_readout("biased")
        unregister_part("bias")


@pytest.mark.parametrize("name", NAMES)
def test_long_sequences_of_real_sizes_hold(name: str) -> None:
    check("oracle", Case(name, B=1, T=150, H=1, G=1, K=4, V=3))
    assert isinstance(get(name).readout, Readout)
