"""Layers of flash-linear-attention whose factors have two vectors: their classes as they are, on our forms.

Their kernels need a GPU, so each is replaced by the definition that stands beside it (``naive.py``), and then by ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from two_vectors import two_vectors

from attnzoo import Gate, get
from attnzoo.forms.caches.state import RecurrentState

pytestmark = pytest.mark.fla
Kernel = Callable[..., tuple[Tensor, Tensor | None]]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with two_vectors():
        yield


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def on_ours(name: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: Tensor | None, **options: Any) -> Any:
    """A variant from a state of theirs, ``[B, H, K, V]``, to the next."""
    past = None if state is None else RecurrentState(state.to(q.dtype))
    o, after = get(name).extend(q, k, v, gate, past, **options)
    return o, after.matrix


def gdn2(naive: Any) -> tuple[Kernel, Kernel]:
    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, initial_state: Any, **_: Any) -> Any:
        return naive.naive_recurrent_gdn2(unit(q), unit(k), v, g, b, w, None, initial_state, True)

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, initial_state: Any, **_: Any) -> Any:
        k, ones = unit(k), torch.ones_like(g[..., 0])
        gate = Gate(log_diag=g, w=k, beta=ones, u=b * k)
        return on_ours("gdn2", unit(q), k, w * v, gate, initial_state)

    return theirs, ours


def comba(naive: Any) -> tuple[Kernel, Kernel]:
    def theirs(
        q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, initial_state: Any, **_: Any
    ) -> Any:
        return naive.naive_recurrent_comba(unit(q), unit(k), v, unit(p), beta, g, None, initial_state, True)

    def ours(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, initial_state: Any, **_: Any) -> Any:
        gate = Gate(log_decay=g, w=unit(k), beta=beta, u=unit(p))
        return on_ours("comba", unit(q), unit(k), v, gate, initial_state, write=beta)

    return theirs, ours


def rwkv7(naive: Any) -> tuple[Kernel, Kernel]:
    def theirs(r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, initial_state: Any, **_: Any) -> Any:
        inputs = (r * r.shape[-1] ** 0.5, k, v, -kk, kk * a, w)
        o, state = naive.dplr_recurrence(*(x.transpose(1, 2) for x in inputs), initial_state)
        return o.transpose(1, 2), state

    def ours(r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, initial_state: Any, **_: Any) -> Any:
        gate = Gate(log_diag=w, w=a * kk, beta=torch.ones_like(w[..., 0]), u=kk)
        return on_ours("dplr", r, k, v, gate, initial_state, scale=1.0)

    return theirs, ours


SIZES = {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "layer_idx": 0}
CASES = {  # module, class, options, kernel for a few tokens, the file of its definition, and both as kernels
    "gdn2": ("gdn2", "GatedDeltaNet2", {}, "fused_recurrent_gdn2", "gdn2.naive", gdn2),
    "gdn2, negative eigenvalues": (
        "gdn2", "GatedDeltaNet2", {"allow_neg_eigval": True}, "fused_recurrent_gdn2", "gdn2.naive", gdn2,
    ),
    "comba": ("comba", "Comba", {}, "fused_recurrent_comba", "comba.naive", comba),
    "rwkv7": (
        "rwkv7", "RWKV7Attention", {"num_hidden_layers": 2}, "fused_mul_recurrent_rwkv7",
        "generalized_delta_rule.dplr.naive", rwkv7,
    ),
}  # fmt: skip


def shifted(x: Tensor, cu_seqlens: Any, cache: Any, output_cache: bool) -> tuple[Tensor, Tensor]:
    """What the token before had more of, in plain torch."""
    before = torch.zeros_like(x[:, :1]) if cache is None else cache.reshape(x[:, :1].shape)
    return torch.cat([before, x[:, :-1]], 1) - x, x[:, -1:]


def plain_modules(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their other kernels in plain torch, where the class uses them."""
    ops = "fla.ops.rwkv7."
    for name, home, plain in (
        ("token_shift", None, shifted),
        ("fused_addcmul_rwkv7", ops + "fused_addcmul", "torch_addcmul_rwkv7"),
        ("fused_k_rwkv7", ops + "fused_k_update", "k_update_ref"),
        ("gate_output_correction", ops + "gate_output_correction", "gate_output_correction_ref"),
    ):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, plain if home is None else getattr(importlib.import_module(home), plain))

    def normed(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight * gate.sigmoid()

    monkeypatch.setattr(importlib.import_module("fla.modules").FusedRMSNormGated, "forward", normed)


@pytest.mark.filterwarnings("ignore::UserWarning")  # theirs, of short convolutions and of RWKV's authors
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_layer_of_theirs_is_the_same_on_our_forms_whole_and_in_steps(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, cls, options, kernel, naive, both = CASES[case]
    module = importlib.import_module(f"fla.layers.{where}")
    torch.manual_seed(0)
    more = {} if where == "rwkv7" else {"use_short_conv": False}
    layer = getattr(module, cls)(**{**SIZES, **more, **options}).eval()
    for parameter in layer.parameters():  # some are zeros at the start
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    plain_modules(module, monkeypatch)
    theirs, ours = both(importlib.import_module(f"fla.ops.{naive}"))
    x = torch.randn(2, 21, 32)
    monkeypatch.setattr(module, kernel, theirs)
    expected = layer(x)[0]
    monkeypatch.setattr(module, kernel, ours)
    cache = importlib.import_module("fla.models.utils").Cache()
    steps = [layer(part, past_key_values=cache, use_cache=True)[0] for part in x.split([13, 1, 1, 6], 1)]
    for got in (layer(x)[0], torch.cat(steps, 1)):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
