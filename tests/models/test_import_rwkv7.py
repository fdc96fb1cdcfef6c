"""RWKV-7 imported: the logits and the generation of flash-linear-attention's own class, without its kernels."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.models import Generator, LanguageModel
from attnzoo.models.peers import Weights, build_peer, from_peer, peer_of
from attnzoo.models.peers.table import PEERS

pytestmark = [pytest.mark.fla, pytest.mark.filterwarnings("ignore::UserWarning")]  # theirs, of RWKV's authors
SIZES = {
    "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 70, "hidden_ratio": 3, "fuse_norm": False,
    "decay_low_rank_dim": 8, "gate_low_rank_dim": 12, "a_low_rank_dim": 9, "v_low_rank_dim": 7,
    "fuse_cross_entropy": False, "use_cache": False,
}  # fmt: skip


def shifted(x: Tensor, cu_seqlens: Any, cache: Any = None, output_cache: bool = False) -> tuple[Tensor, Tensor]:
    before = torch.zeros_like(x[:, :1]) if cache is None else cache.reshape(x[:, :1].shape)
    return torch.cat([before, x[:, :-1]], 1) - x, x[:, -1:]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Their model with random weights, in float32 and with plain torch in place of kernels."""
    patch = pytest.MonkeyPatch()
    layer, model = (importlib.import_module(f"fla.{name}") for name in ("layers.rwkv7", "models.rwkv7.modeling_rwkv7"))
    dplr = importlib.import_module("fla.ops.generalized_delta_rule.dplr.naive")

    def run(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state: Any, **_: Any) -> Any:
        inputs = (r * r.shape[-1] ** 0.5, k, v, a, b, w)
        o, state = dplr.dplr_recurrence(*(x.transpose(1, 2) for x in inputs), initial_state)
        return o.transpose(1, 2), state

    def step(r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, **given: Any) -> Any:
        return run(r, w, k, v, -kk, kk * a, **given)

    for module in (layer, model):
        patch.setattr(module, "token_shift", shifted)
    patch.setattr(layer, "chunk_rwkv7", run)
    patch.setattr(layer, "fused_mul_recurrent_rwkv7", step)
    for name, home, plain in (
        ("fused_addcmul_rwkv7", "fused_addcmul", "torch_addcmul_rwkv7"),
        ("fused_k_rwkv7", "fused_k_update", "k_update_ref"),
        ("gate_output_correction", "gate_output_correction", "gate_output_correction_ref"),
    ):
        patch.setattr(layer, name, getattr(importlib.import_module(f"fla.ops.rwkv7.{home}"), plain))
    patch.setitem(importlib.import_module("fla.modules.activations").ACT2FN, "sqrelu", lambda x: x.relu().square())
    torch.manual_seed(0)
    models = importlib.import_module("fla.models")
    found = models.RWKV7ForCausalLM(models.RWKV7Config(**SIZES)).eval()
    for name, parameter in found.named_parameters():  # much of it is zeros at the start
        torch.nn.init.normal_(parameter, 0.3 if parameter.ndim == 1 or ".x_" in name else 0.0, 0.2)
    yield found
    patch.undo()


@pytest.fixture(scope="module")
def ours(theirs: Any) -> LanguageModel:
    return from_peer(theirs)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
def test_logits_and_greedy_tokens_are_the_peers(theirs: Any, ours: LanguageModel) -> None:
    tokens = torch.randint(1, 70, (2, 33))
    expected = theirs(tokens).logits
    close(ours(tokens).logits, expected)
    assert not [note for note in peer_of(theirs.config.to_dict()).notes if "not read" in note]
    text = tokens[:, :9]
    for _ in range(8):
        text = torch.cat([text, theirs(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(ours.generate(tokens[:, :9], 8, temperature=0), text)
    engine = Generator(ours, 2, 32)
    numbers = [engine.add(row, 8, temperature=0) for row in tokens[:, :9]]
    found = engine.run()
    assert [found[number] for number in numbers] == text[:, 9:].tolist()


@torch.no_grad()
def test_calls_of_several_lengths_padding_and_packing_are_whole_sequences(ours: LanguageModel) -> None:
    """The states between calls are three windows of one token and the matrix of each layer."""
    tokens = torch.randint(1, 70, (2, 12))
    whole, cache = ours(tokens).logits, ours.new_cache()
    close(torch.cat([ours(part, cache=cache).logits for part in tokens.split([5, 1, 6], 1)], 1), whole)
    assert {name: x.shape[1] for name, x in cache[1].windows.items()} == {"mix": 1, "gate_mix": 1, "mlp_mix": 1}
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    cache = ours.new_cache()
    padded = [ours(tokens[:, s], attention_mask=mask[:, s], cache=cache).logits for s in (slice(7), slice(7, 12))]
    close(torch.cat(padded, 1)[1, 4:], ours(tokens[1:, 4:]).logits[0])
    borders = torch.tensor([0, 5, 12])
    apart = torch.cat([ours(part).logits for part in tokens[:1].split([5, 7], 1)], 1)
    close(ours(tokens[:1], cu_seqlens=borders).logits, apart)
    cache = ours.new_cache()
    close(ours(tokens[:1], cu_seqlens=borders, cache=cache).logits, apart)
    after = ours(tokens[:, :2], cache=cache).logits
    close(after[1], ours(torch.cat([tokens[0, 5:], tokens[1, :2]])[None]).logits[0, -2:])


def test_gradients_are_the_peers_with_the_blocks_recomputed_too(theirs: Any, ours: LanguageModel) -> None:
    """Among them that of the first layer's values, which the other layers share."""
    tokens = torch.randint(1, 70, (2, 9))
    named = dict(peer_of(theirs.config.to_dict()).weights(Weights.of_state(theirs.state_dict())))
    theirs.zero_grad()
    theirs(tokens).logits.square().mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    of_theirs = dict(peer_of(theirs.config.to_dict()).weights(Weights.of_state(gradients)))
    for recompute in (False, True):
        ours.zero_grad()
        ours.recompute = recompute
        ours(tokens).logits.square().mean().backward()
        for name, parameter in ours.named_parameters():
            close(parameter.grad, of_theirs[name].view(parameter.shape))
    ours.recompute = False
    assert named.keys() == of_theirs.keys()


def test_early_files_have_the_mixtures_in_one_tensor(theirs: Any, ours: LanguageModel) -> None:
    state = theirs.state_dict()
    for i in range(3):
        names = [f"model.layers.{i}.attn.x_{name}" for name in "rwkvag"]
        state[f"model.layers.{i}.attn.x_x"] = torch.stack([state.pop(name) for name in names])
    again = build_peer(peer_of(theirs.config.to_dict()), Weights.of_state(state))
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value_dim": 128}, r"config.json: value_dim: expected hidden_size = 64 in every layer, got \[?128"),
        ({"norm_bias": False}, "config.json: norm_bias = False is not supported"),
        ({"hidden_act": "swish"}, "config.json: hidden_act = 'swish' is not supported"),
    ],
)
def test_what_it_has_no_place_for_is_named(fields: dict[str, Any], message: str) -> None:
    assert "rwkv7" in PEERS
    with pytest.raises(ValueError, match=message):
        peer_of({"model_type": "rwkv7", **SIZES, **fields})
