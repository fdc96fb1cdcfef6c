"""Whole steps of layers of the linear side: the kernels against the same layer, part by part, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import build_attention
from attnzoo.forms.caches.inplace import BatchRows, MatrixMemory
from attnzoo.layer import attention
from attnzoo.layer.attention import Attention
from attnzoo.layer.inplace import FixedCache
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.generation.engine import Generator
from attnzoo.precision import GateAffine
from attnzoo.recurrences.complex_linear import rotate_all
from attnzoo.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D = 24
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", {"head_dim": 8}),
    "mamba2-groups": (
        "mamba2",
        {"num_heads": 4, "head_dim": 6, "num_qk_heads": 2, "output_norm_groups": 2, "gate_before_norm": False},
    ),
    "gated_deltanet": ("gated_deltanet", {"conv_bias": True, "conv_activation": "identity"}),
    "gated_deltanet-gqa": ("gated_deltanet", {"num_kv_heads": 1, "value_dim": 5, "allow_neg_eigval": True}),
    "deltanet": ("deltanet", {"conv_size": 1, "output_norm": "group", "output_norm_shared": True}),
    "gla": ("gla", {"head_dim": 7, "value_dim": 9, "qkv_bias": True, "block": "gated"}),
    "gla-full": ("gla", {"gate": "full_rank", "output_norm": "none", "conv_size": 2}),
    "kda": ("kda", {}),
    "gated_gla": (
        "gated_gla",
        {"gate": ("forget", "low_rank"), "qk_norm": "rms", "qk_norm_shared": True, "feature_map": "silu"},
    ),
    "retnet": ("retnet", {"head_dim": 6}),
    "linear_attention": ("linear_attention", {"key_feature_map": "relu", "skip": True, "scale": 0.3}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "turns": ("mamba3", {}),
    "shift": ("retnet", {"block": "pro", "qk_norm": "none"}),
    "factors": ("deltanet", {"num_householder": 2}),
    "rotated after norms": ("retnet", {"qk_norm": "rms"}),
    "together": ("gla", {"qk_norm": "rms_full"}),
    "keys of the gate": ("gla", {"block": "hgrn2"}),
    "reference": ("gla", {"impl": "reference"}),
}


def layer_of(case: tuple[str, dict[str, Any]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Attention:
    """Rounded from float64, with nothing left at zero or one."""
    name, options = case
    torch.manual_seed(seed)
    attn = build_attention(name, hidden_size=D, **{"impl": "triton", "num_heads": 2, **options}).double()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return attn.to(DEVICE, dtype).eval()


def tokens(T: int, seed: int, B: int = 1) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def empty(attn: Attention, sequences: int = 3) -> FixedCache:
    like = attn.new_cache()
    attn(tokens(1, 0).to(attn.o_proj.weight.dtype), cache=like)
    return FixedCache.of(attn, like, BatchRows.idle(sequences, DEVICE), 64)


def begin(attn: Attention, fixed: FixedCache, row: int, seed: int) -> None:
    """A sequence of one token goes on in a row."""
    cache = attn.new_cache()
    attn(tokens(1, seed).to(attn.o_proj.weight.dtype), cache=cache)
    fixed.admit(row, cache, 64)
    fixed.rows.begin(row, 1)


def generated(attn: Attention, fixed: FixedCache) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all that runs while sequences end and join, and what is kept of those that still run."""
    found, rows = [], fixed.rows
    for row in (0, 2):
        begin(attn, fixed, row, row)
    for step in range(4):
        if step == 1:
            begin(attn, fixed, 1, 1)
        if step == 2:
            fixed.clear(0)
            rows.end(0)
        y = attn(tokens(1, 10 + step, 3).to(attn.o_proj.weight.dtype), cache=fixed)
        rows.length += rows.active
        found.append(y[rows.active != 0].flatten().double())
    assert isinstance(fixed.memory, MatrixMemory)
    return torch.cat(found), [x[1:].double() for x in (fixed.memory.matrix, *fixed.windows.values())]


def by_parts(attn: Attention) -> tuple[Tensor, list[Tensor]]:
    fixed = empty(attn)
    fixed.whole = False
    return generated(attn, fixed)


def exact(attn: Attention) -> tuple[Tensor, list[Tensor]]:
    """The same in float64, by the reference."""
    attn = copy.deepcopy(attn).double()
    attn.impl = "reference"
    return by_parts(attn)


class RoundedMap(GateAffine):
    """A map in float64 whose product with the weight has the precision of ``kind``."""

    kind: torch.dtype

    def unbiased(self, x: Tensor) -> Tensor:
        return super().unbiased(x).to(self.kind).to(x.dtype)

    def forward(self, x: Tensor, product: Tensor | None = None) -> Tensor:
        return self.unbiased(x) if self.bias is None else self.unbiased(x) + self.bias


def assert_no_more_error_than_the_parts(attn: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside float64 from tokens, products with weights and rotations in their precision, which both of them share."""
    kind, rounded = attn.o_proj.weight.dtype, copy.deepcopy(attn)
    rounded.register_forward_pre_hook(lambda _, given: (given[0].to(kind).double(),))
    modules: list[Any] = list(rounded.modules())
    for module in modules:
        if type(module) is GateAffine:
            module.__class__, module.kind = RoundedMap, kind
        if type(module) is torch.nn.Linear and module is not rounded.o_proj:
            module.register_forward_hook(lambda _, given, y: y.to(kind).to(y.dtype))

    def rotated(phase: Tensor, *given: Tensor) -> list[Tensor]:
        return [x.to(given[0].dtype) for x in rotate_all(phase.float(), *(x.to(kind) for x in given))]

    (y, kept), (parts, others) = generated(attn, empty(attn)), by_parts(attn)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "rotate_all", rotated)
        want, states = exact(rounded)
    assert (y - want).norm() <= (parts - want).norm()
    for ours, theirs, state in zip(kept, others, states, strict=True):
        assert (ours - state).norm() <= (theirs - state).norm() + 1e-6 * state.norm()


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_whole_step_is_that_of_the_parts(case: str) -> None:
    attn = layer_of(CASES[case])
    fixed = empty(attn)
    assert fixed.whole
    (y, kept), (want, states) = generated(attn, fixed), exact(attn)
    assert relative_error(y, want) <= 1e-5
    for ours, theirs in zip(kept, states, strict=True):
        assert ours.shape == theirs.shape
        assert not ours.numel() or relative_error(ours, theirs) <= 1e-5


@torch.no_grad()
def test_heads_too_large_for_one_program_are_normed_after_all_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnzoo.kernels.linear import whole

    monkeypatch.setattr(whole, "MOST", 64)
    monkeypatch.setattr(whole, "TILE", 64)
    attn = layer_of(CASES["gated_deltanet"])
    (y, kept), (want, states) = generated(attn, empty(attn)), exact(attn)
    assert relative_error(y, want) <= 1e-5
    assert relative_error(kept[0], states[0]) <= 1e-5
    assert relative_error(kept[1], states[1]) <= 1e-5  # a window


@torch.no_grad()
def test_half_precision_has_no_more_error_than_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        assert_no_more_error_than_the_parts(layer_of(CASES["mamba2"], torch.float16, seed), monkeypatch)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_has_no_more_error_than_the_parts(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options = CASES[case]
    sizes = (name, {**options, "head_dim": 64, "value_dim": 128, "expand": None})
    for seed in range(4):
        assert_no_more_error_than_the_parts(layer_of(sizes, torch.bfloat16, seed), monkeypatch)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet", "retnet"])
def test_a_graph_of_whole_steps_draws_the_tokens_of_the_parts(name: str) -> None:
    """In float32: sequences that end and others that join them, and a draft in between."""
    torch.manual_seed(0)
    config = ModelConfig(attention=name, hidden_size=128, num_layers=2, num_heads=4, vocab_size=97)
    model, found = LanguageModel(config).cuda(), []
    for whole in (True, False):
        generator = Generator(model, 2, 80, fuse=True, compile=whole)
        assert all(cache.whole for cache in generator.batch.caches)
        for cache in generator.batch.caches:
            cache.whole = whole
        numbers = [generator.add(torch.arange(n) + 1, 30, temperature=0) for n in (5, 20, 9)]
        drawn = generator.run()
        numbers.append(generator.add(torch.arange(4), 12, temperature=0))
        drawn |= generator.run(draft=lambda request: [3, 4])
        found.append([drawn[number] for number in numbers])
    assert found[0] == found[1]


@torch.no_grad()
@pytest.mark.parametrize("case", OTHERS)
def test_layers_with_other_parts_step_part_by_part(case: str) -> None:
    assert not empty(layer_of(OTHERS[case])).whole


@torch.no_grad()
@pytest.mark.parametrize("part", ["q_conv", "output_norm", "gate"])
def test_parts_that_a_user_has_exchanged_or_listens_to_are_called(part: str) -> None:
    attn, calls = layer_of(CASES["mamba2"]), []
    getattr(attn, part).register_forward_hook(lambda *_: calls.append(1))
    fixed = empty(attn)
    begin(attn, fixed, 0, 0)
    calls.clear()
    attn(tokens(1, 5, 3), cache=fixed)
    assert calls == [1]
    attn = layer_of(CASES["mamba2"])
    kind = type(getattr(attn, part))
    getattr(attn, part).__class__ = type("Another", (kind,), {})
    assert not empty(attn).whole


class Halved(Attention):
    """A layer of somebody's own, whose q, k and v are of other rows than its gates."""

    def rows(self, x: Tensor, *given: Any) -> Any:
        return super().rows(x / 2, *given)


@torch.no_grad()
def test_a_subclass_that_gives_rows_of_its_own_steps_part_by_part() -> None:
    attn = layer_of(CASES["mamba2"])
    attn.__class__ = Halved
    cache, x = attn.new_cache(), tokens(2, 1)
    whole = attn(x)
    fixed = empty(attn, 1)
    attn(x[:, :1], cache=cache)
    fixed.admit(0, cache, 64)
    fixed.rows.begin(0, 1)
    torch.testing.assert_close(attn(x[:, 1:], cache=fixed), whole[:, 1:])


@torch.no_grad()
@pytest.mark.parametrize("case", ["mamba2", "mamba2-groups", "gated_deltanet-gqa"])
def test_idle_sequences_stay_as_they_are_and_give_zeros(case: str) -> None:
    attn = layer_of(CASES[case])
    fixed = empty(attn)
    begin(attn, fixed, 0, 0)
    for x in fixed.tensors():
        x[1:] = torch.nan
    before, x = [x[0].clone() for x in fixed.tensors()], tokens(1, 5, 3)
    x[1:] = torch.nan
    y = attn(x, cache=fixed)
    assert torch.equal(y[1:], torch.zeros_like(y[1:]))
    assert y[0].isfinite().all()
    for now, past in zip(fixed.tensors(), before, strict=True):
        assert now[1:].isnan().all()
        assert not torch.equal(now[0], past)
