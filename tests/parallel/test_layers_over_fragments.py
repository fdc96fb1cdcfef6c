"""Layers and models on several ranks give what one process gives of whole sequences, gradients too."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import layer, rows
from ranks import on_ranks
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

from attnzoo import list_variants
from attnzoo.config import ModelConfig
from attnzoo.errors import UnavailableError
from attnzoo.evaluation.losses import measure_losses
from attnzoo.forgetting.rules import Forgetting
from attnzoo.models import LanguageModel
from attnzoo.parallel import Fragments, context_parallel
from attnzoo.registry.readout_variant import READOUT_VARIANTS

T = 19
TABLES = {
    "zigzag": Fragments.zigzag([0, 8, T], 2),
    "any": Fragments.of([(0, 1, 1), (1, 3, 0), (3, 4, 1), (4, 11, 0), (11, T, 1)], 2, [0, 2, 12, T]),
}
LAYERS = {
    **{name: {"name": name} for name in list_variants()},
    "fox pro with ACP, window and sinks": {"name": "fox", "block": "pro", "acp": True, "window": 6, "sinks": True},
    "path_fox pro": {"name": "path_fox", "block": "pro"},
    "retnet with rotations": {"name": "retnet", "rotary": 10000.0},
    "mamba2 with convolutions": {"name": "mamba2", "conv_size": 4, "skip": True},
    "path with two factors": {"name": "path", "num_householder": 2},
    "gated DeltaProduct": {"name": "gated_deltanet", "num_householder": 2},
}


def gradients(module, loss):
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), found, strict=True)}


def assert_all_close(got, expected, limit):
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        error = float((got[name] - x).abs().max())
        assert error <= limit * max(float(x.abs().max()), 1e-3 * largest), f"{name}: {error}"


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_on_two_ranks_is_the_layer(case):
    attn, x = layer(**LAYERS[case]), rows(1, T)
    for fragments in TABLES.values():
        whole = attn(x, cu_seqlens=torch.tensor(fragments.borders))
        expected = gradients(attn, whole.square().sum())

        def rank(_, fragments=fragments):
            mine = copy.deepcopy(attn)
            with context_parallel(fragments, "pruned" if mine.prune else "auto"):
                y = mine(fragments.shard(x))
            return y.detach(), gradients(mine, y.square().sum())

        found = on_ranks(2, rank)
        for number, (y, _) in enumerate(found):
            assert (y - whole[:, fragments.index(number)]).abs().max() <= 1e-10 * whole.abs().max()
        assert_all_close({n: found[0][1][n] + found[1][1][n] for n in expected}, expected, 1e-9)


@pytest.mark.parametrize("name", ["rope_gla", "rwkv7", "fox", "path_fox"])
@settings(max_examples=3)
@given(data=st.data())
def test_documents_and_windows_may_be_cut_anywhere(name, data):
    cuts, ends = (data.draw(st.sets(st.integers(1, T - 1), min_size=n, max_size=8), label="cuts") for n in (3, 0))
    spans = pairwise([0, *sorted(cuts), T])
    owners = data.draw(st.permutations([n % 4 for n in range(len(cuts) + 1)]))
    fragments = Fragments.of(
        [(*span, rank) for span, rank in zip(spans, owners, strict=True)], 4, [0, *sorted(ends), T]
    )
    attn, x = layer(name, token_mix=True, conv_size=3), rows(1, T)
    whole = attn(x, cu_seqlens=torch.tensor(fragments.borders))
    expected = gradients(attn, whole.square().sum())

    def rank(_):
        mine = copy.deepcopy(attn)
        with context_parallel(fragments):
            y = mine(fragments.shard(x))
        return y.detach(), gradients(mine, y.square().sum())

    found = on_ranks(4, rank)
    for number, (y, _) in enumerate(found):
        assert (y - whole[:, fragments.index(number)]).abs().max() <= 1e-10 * whole.abs().max()
    assert_all_close({n: sum(one[n] for _, one in found) for n in expected}, expected, 1e-9)


@pytest.mark.parametrize("name", ["rope_gla", "fox", "gated_deltanet"])
def test_a_rank_whose_tokens_have_no_use_for_a_gate_sends_the_gradients_of_what_its_window_reads(name):
    """Of one token a form may leave out the gate, which is mixed with the token before it, of another rank."""
    attn, x = layer(name, token_mix=True), rows(1, 5)
    fragments = Fragments.of([(0, 4, 1), (4, 5, 0)], 2, [0, 4, 5])
    expected = gradients(attn, attn(x, cu_seqlens=torch.tensor(fragments.borders)).square().sum())

    def rank(_):
        mine = copy.deepcopy(attn)
        with context_parallel(fragments):
            return gradients(mine, mine(fragments.shard(x)).square().sum())

    first, second = on_ranks(2, rank)
    assert_all_close({n: first[n] + second[n] for n in expected}, expected, 1e-9)


def test_a_rank_with_so_few_tokens_that_another_kernel_takes_them_sends_what_all_send(monkeypatch):
    """Of packed documents without a decay kernels exchange heads, and the reference sends states."""
    attn, x = layer("deltanet"), rows(1, T)
    fragments = Fragments.of([(0, 3, 0), (3, T, 1)], 2, [0, 8, T])
    by_tokens = {3: "triton", T - 3: "reference"}  # as a GPU has it without flash-linear-attention
    monkeypatch.setattr("attnzoo.layer.attention.chosen", lambda _v, _i, call, *_: by_tokens[call.q.shape[1]])

    def rank(_):
        with torch.no_grad(), context_parallel(fragments):
            return attn(fragments.shard(x))

    found = torch.cat(on_ranks(2, rank), 1)
    monkeypatch.undo()
    whole = attn(x, cu_seqlens=torch.tensor(fragments.borders))
    assert (found - whole).abs().max() <= 1e-10 * whole.abs().max()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_hybrid_model_on_two_ranks_has_the_same_loss_and_gradients(recompute):
    layers = ["gated_deltanet", {"name": "fox", "options": {"block": "pro"}}]
    torch.manual_seed(0)
    config = ModelConfig(
        attention=layers, hidden_size=32, num_layers=2, num_heads=2, vocab_size=40, initializer_range=0.3
    )
    model, fragments = LanguageModel(config).double(), TABLES["any"]
    model.recompute = recompute
    tokens = torch.randint(40, (1, T + 1), generator=torch.Generator().manual_seed(1))
    given = {"cu_seqlens": torch.tensor(fragments.borders), "with_logits": False}
    loss = model(tokens[:, :-1], targets=tokens[:, 1:], **given).loss
    expected = gradients(model, loss)

    def rank(number):
        mine = copy.deepcopy(model)
        inputs, targets = fragments.shard(tokens[:, :-1], tokens[:, 1:])
        with context_parallel(fragments):
            part = mine(inputs, targets=targets, with_logits=False).loss * (fragments.count(number) / T)
        return part.detach(), gradients(mine, part)

    (first, of_first), (second, of_second) = on_ranks(2, rank)
    assert abs(float(first + second - loss.detach())) <= 1e-10
    assert_all_close({n: of_first[n] + of_second[n] for n in expected}, expected, 1e-9)


def test_a_compiled_layer_on_two_ranks_is_the_layer():
    attn, x = layer("fox"), rows(1, T)
    whole, fragments = attn(x), Fragments.zigzag(T, 2)
    expected = gradients(attn, whole.square().sum())

    def rank(_):
        mine = copy.deepcopy(attn)
        mine.compile(backend="eager")
        with context_parallel(fragments):
            y = mine(fragments.shard(x))
        return y.detach(), gradients(mine, y.square().sum())

    torch.compiler.reset()
    counters.clear()
    found = on_ranks(2, rank)
    torch.compiler.reset()
    for number, (y, _) in enumerate(found):
        assert (y - whole[:, fragments.index(number)]).abs().max() <= 1e-10 * whole.abs().max()
    assert_all_close({n: found[0][1][n] + found[1][1][n] for n in expected}, expected, 1e-9)
    assert counters["stats"]["unique_graphs"] > 1  # it was compiled, in parts


def test_what_cannot_be_shared_is_refused_by_name():
    fragments = Fragments.contiguous(T, 1)
    attn, x = layer("fox"), rows(1, T)
    cache = attn.new_cache()
    attn(x, cache=cache)
    with context_parallel(fragments):
        with pytest.raises(ValueError, match="cache: expected an empty one that keeps all of one text .* got tokens"):
            attn(x, cache=cache)
        for one in READOUT_VARIANTS:
            with pytest.raises(UnavailableError, match=f"{one.name}: the readout .* needs whole sequences"):
                layer(one.name)(x)
        with pytest.raises(ValueError, match="x: expected the 19 tokens of rank 0"):
            attn(x[:, :5])
        with pytest.raises(ValueError, match="forgetting: expected None in context_parallel"):
            layer("fox", forgetting=Forgetting())(x)
    with pytest.raises(ValueError, match="did you mean 'heads'"), context_parallel(fragments, "head"):
        pass


def test_inside_torchs_own_context_parallel_layers_refuse_and_after_it_run():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        attn, x = layer("nope"), rows(1, 8)
        mesh, expected = init_device_mesh("cpu", (1,)), attn(x)
        with torch_context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
            with pytest.raises(UnavailableError, match=r"expected attnzoo\.parallel\.context_parallel"):
                attn(x)
            with context_parallel(Fragments.zigzag(x.shape[1], 1)), pytest.raises(UnavailableError, match="torch's"):
                attn(x)
        assert torch.equal(attn(x), expected)
    finally:
        dist.destroy_process_group()


def test_one_rank_is_bit_equal_to_no_fragments():
    attn, x = layer("fox", "pro"), rows(2, T)
    with context_parallel(Fragments.contiguous(T, 1)):
        shared = attn(x)
    assert torch.equal(shared, attn(x))


def test_losses_by_position_of_windows_that_ranks_share_are_those_of_one_process():
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2, attention=["fox", "mamba2"])
    model = LanguageModel(config).double()
    windows = torch.randint(0, 11, (3, 24))
    expected = measure_losses(model, windows)
    for found in on_ranks(2, lambda rank: measure_losses(model, windows, over=dist.group.WORLD)):
        assert abs(found.loss - expected.loss).max() < 1e-6  # logits are scored in float32
        assert found.windows == 3
