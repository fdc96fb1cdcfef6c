"""Heads before tokens, as PyTorch has them: accepted where it is said, and seen where it is not."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from attnzoo import Prune
from attnzoo.kernels.fox import fox_attention, kept_fraction
from attnzoo.kernels.linear import linear_chunks
from attnzoo.kernels.path import kept_fraction as kept_fraction_of_path
from attnzoo.kernels.path import path_attention
from attnzoo.kernels.wall import wall_attention

B, T, H, G, K = 2, 12, 4, 2, 8


def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k, v, w = (torch.randn(B, T, heads, K, generator=generator) for heads in (H, G, G, G))
    log_decay = F.logsigmoid(torch.randn(B, T, H, generator=generator) + 2)
    log_diag = F.logsigmoid(torch.randn(B, T, H, K, generator=generator) + 2)
    w, beta = F.normalize(w, dim=-1), 2 * torch.rand(B, T, G, generator=generator)
    return q, k, v, {"log_decay": log_decay, "log_diag": log_diag, "w": w, "beta": beta}


@pytest.mark.parametrize(
    ("function", "parts"),
    [(fox_attention, ["log_decay"]), (path_attention, ["w", "beta", "log_decay"]), (wall_attention, ["log_diag"])],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_heads_first_is_the_same_attention_with_axes_exchanged(function, parts):
    q, k, v, gate = inputs()
    gate = {name: gate[name] for name in parts}
    options = {"prune": Prune(1e-3)} if "log_decay" in parts else {}
    o, lse = function(q, k, v, **gate, **options, return_lse=True)
    turned = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    given = {name: x.transpose(1, 2).contiguous() for name, x in gate.items()}
    o2, lse2 = function(*turned, **given, **options, return_lse=True, layout="bhtd")
    torch.testing.assert_close(o2.transpose(1, 2), o)
    torch.testing.assert_close(lse2.transpose(1, 2), lse)
    o2.sum().backward()
    assert turned[0].grad.shape == (B, H, T, K)


def test_a_gate_per_head_and_keys_that_exist_have_no_axes_to_exchange():
    q, k, v, _ = inputs()
    slopes, valid = -torch.rand(H), torch.rand(B, T) > 0.3
    expected = fox_attention(q, k, v, log_decay=slopes, valid=valid)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    o = fox_attention(*turned, log_decay=slopes, valid=valid, layout="bhtd")
    torch.testing.assert_close(o.transpose(1, 2), expected)


def test_exchanged_axes_are_seen():
    q, k, v, gate = inputs()
    g = gate["log_decay"]
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"got T=4; heads and tokens look exchanged \(layout='bhtd'"):
        fox_attention(*turned, log_decay=g.transpose(1, 2), impl="reference")
    with pytest.raises(ValueError, match=r"got H=4; heads and tokens look exchanged"):
        fox_attention(q, *turned[1:], log_decay=g)
    with pytest.raises(ValueError, match=r"log_decay: expected .*; heads and tokens look exchanged"):
        fox_attention(q, k, v, log_decay=g.transpose(1, 2))
    whole = [turned[0]] * 3
    with pytest.warns(UserWarning, match=r"^q: 12 heads of 4 tokens .* layout='bhtd'"):
        fox_attention(*whole, log_decay=g.transpose(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fox_attention(q, k, v, log_decay=g)
        fox_attention(*whole, log_decay=g.transpose(1, 2), layout="bthd")
        fox_attention(q[:, -1:], k, v, log_decay=g)  # a step
    with pytest.raises(ValueError, match=r"^unknown layout 'bhsd': expected one of bthd, bhtd; did you mean"):
        fox_attention(q, k, v, log_decay=g, layout="bhsd")


@pytest.mark.parametrize(("function", "parts"), [(kept_fraction, []), (kept_fraction_of_path, ["w", "beta"])])
def test_shares_of_what_is_computed_know_both_layouts(function, parts):
    q, k, _, gate = inputs()
    gate = {name: gate[name] for name in [*parts, "log_decay"]}
    expected = function(q, k, **gate, prune=Prune(1e-3))
    turned = {name: x.transpose(1, 2) for name, x in {"q": q, "k": k, **gate}.items()}
    assert torch.equal(function(turned.pop("q"), turned.pop("k"), **turned, prune=Prune(1e-3), layout="bhtd"), expected)
    with pytest.warns(UserWarning, match="layout='bhtd'"):
        function(*[turned_like(q)] * 2, **{name: turned_like(gate[name], heads=H) for name in gate})


def turned_like(x, heads=H):
    """Axes exchanged, with as many heads as queries have."""
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


def test_a_recurrence_knows_both_layouts_and_leaves_its_state_alone():
    q, k, v, gate = inputs()
    g, state = gate["log_decay"], torch.randn(B, H, K, K)
    o, last = linear_chunks(q, k, v, g, state, keeps_state=True)
    turned = [x.transpose(1, 2) for x in (q, k, v, g)]
    o2, last2 = linear_chunks(*turned, state, keeps_state=True, layout="bhtd")
    torch.testing.assert_close((o2.transpose(1, 2), last2), (o, last))
    o2, last2 = linear_chunks(*turned[:3], log_decay=turned[3], keeps_state=False, layout="bhtd")
    assert o2.shape == (B, H, T, K)
    assert last2 is None
    with pytest.warns(UserWarning, match=r"^q: 12 heads of 4 tokens"):
        linear_chunks(*[turned[0]] * 3, turned[3])
