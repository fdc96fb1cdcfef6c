"""Compiled for every length, past those at which blocks of rows begin; exported strictly, and traced."""

import pytest
import torch
from layers import layer, rows
from thinning import in_long
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from attnzoo.algebra.gate import CLOSED, is_closed
from attnzoo.algebra.transitions import cut
from attnzoo.layer import modules
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel
from attnzoo.testing import block_sizes


@pytest.fixture(autouse=True)
def no_cache_of_fake_tensors():
    """Where sizes are symbols, torch's takes longer than it saves."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


def assert_compiles_for(lengths, attn, backend, dynamic=True):
    torch._dynamo.reset()
    compiled = torch.compile(attn, backend=backend, dynamic=dynamic, fullgraph=True)
    for T in lengths:
        x = rows(2, T).to(attn.o_proj.weight.dtype).requires_grad_()
        leaves, results = [x, *attn.parameters()], []
        for run in (compiled, attn):
            y = run(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        for got, want in zip(*results, strict=True):
            assert (got - want).norm() <= 1e-4 * want.norm() + 1e-6, T


def test_blocks_of_rows_compile_for_lengths_that_vary():
    assert_compiles_for([257, 513], layer("alibi"), "eager")


@pytest.mark.parametrize("name", ["nope", "fox", "path", "wall"])
def test_small_blocks_of_rows_compile_for_lengths_that_vary(name):
    """Of four tokens, so that few tokens make as many blocks as hundreds do: two, and in the long profile three too."""
    with block_sizes(4):
        assert_compiles_for(in_long([5, 7], [5, 7, 9]), layer(name), "eager")


@pytest.mark.parametrize("name", ["gated_deltanet", "gated_gla"])
def test_derivatives_compile_without_machine_code(name):
    """Whose strides the compiler must know."""
    assert_compiles_for([20], layer(name), "aot_eager", dynamic=None)


def test_blocks_that_are_computed_again_compile_for_lengths_that_vary():
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": in_long(1, 2), "num_heads": 2, "vocab_size": 20, "intermediate_size": 16}
    model = LanguageModel(ModelConfig(attention="deltanet", **sizes))
    model.recompute = True
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    for T in (9, 12):
        tokens = torch.randint(20, (2, T))
        got, want = (
            torch.autograd.grad(run(tokens, targets=tokens).loss, list(model.parameters())) for run in (compiled, model)
        )
        for x, y in zip(got, want, strict=True):
            assert (x - y).norm() <= 1e-4 * y.norm() + 1e-6


@pytest.mark.parametrize("name", ["fox", "path"])
def test_a_strict_export_serves_every_length(name):
    attn = layer(name)
    program = torch.export.export(
        attn, (rows(2, 300),), dynamic_shapes=({1: torch.export.Dim("T", min=2)},), strict=True
    )
    with torch.no_grad():
        for T in (2, 257):
            assert torch.equal(program.module()(rows(2, T)), attn(rows(2, T)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["path", "wall", "mamba3"])
@torch.no_grad()
def test_a_layer_is_traced(name):
    attn, x = layer(name), rows(2, 20)
    torch.testing.assert_close(torch.jit.trace(attn, (x,), check_trace=False)(x), attn(x))


def test_blocks_of_a_length_that_varies_have_a_size_that_does_not():
    """A size in terms of the length is in every shape that comes of a block: compiling takes twice as long."""
    sizes = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.zeros(1, 2, 20, 4), symbolic_context=sizes)
    blocks = cut(x, 8)
    assert isinstance(x.shape[2], torch.SymInt)
    assert [type(n) for n in blocks.shape] == [int, int, torch.SymInt, int, int]
    assert cut(torch.ones(1, 1, 20, 1), 8).shape[2:4] == (3, 8)
    assert cut(torch.ones(1, 1, 20, 1), 20).shape[2:4] == (1, 20)


def test_numbers_that_are_written_out_are_those_with_names():
    """As globals they would be symbols of a graph that is compiled for every length."""
    edge = torch.tensor([CLOSED, CLOSED + 1, -torch.inf], dtype=torch.float64)
    assert is_closed(edge).tolist() == [True, False, True]
    short = torch.tensor([1e-3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(modules.l2_normalize(short), short / (1e-6 + modules.UNIT_EPS) ** 0.5)


def test_maps_in_other_words_are_torchs_own():
    x = torch.tensor([-700.0, -30.0, -1.0, 0.0, 0.5, 30.0, 700.0], dtype=torch.float64, requires_grad=True)
    pairs = [(modules.softplus, torch.nn.functional.softplus)]
    pairs.append((modules.FEATURE_MAPS["elu"], lambda x: torch.nn.functional.elu(x) + 1))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
        got, want = (torch.autograd.grad(f(x).sum(), x)[0] for f in (ours, theirs))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
