"""What makes a step fit and fast changes no number: the head's loss in chunks, recomputed and compiled blocks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import config_of, numbers, weights, write_text

from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel
from attnzoo.models.loss import chunk_loss, head_loss
from attnzoo.training import load_run, train
from attnzoo.training.steps import TooLargeError


def build(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
    return LanguageModel(ModelConfig(**{**sizes, **options})).double()


def tokens(T=13):
    return torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(1))


# the head's loss


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
def test_loss_in_chunks_is_the_loss(rows):
    torch.manual_seed(0)
    x, weight = torch.randn(23, 8).double().requires_grad_(), torch.randn(50, 8).double().requires_grad_()
    targets = torch.randint(0, 50, (23,))
    targets[[0, 5, 6, 22]] = -100
    expected = F.cross_entropy(x @ weight.T, targets)
    # the library's loss is computed in float32, as everywhere
    loss = head_loss(x, weight, targets, limit=rows * 50)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(value, (x, weight)) for value in (loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_no_chunk_holds_more_logits_than_allowed(monkeypatch):
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, *b: seen.append(len(x) * len(w)) or linear(x, w, *b))
    head_loss(torch.randn(23, 8), torch.randn(50, 8), torch.zeros(23, dtype=torch.int64), limit=200)
    assert len(seen) == 6
    assert max(seen) == 200


@pytest.mark.parametrize("trained", ["both", "x", "weight"])
def test_a_training_step_computes_each_chunks_logits_once(trained, monkeypatch):
    """Under autocast too, where the weight is rounded once; gradients are those of the chunks computed again."""
    torch.manual_seed(0)
    x, weight = torch.randn(23, 8), torch.randn(50, 8)
    targets = torch.randint(0, 50, (23,))
    leaves = {"both": [x, weight], "x": [x], "weight": [weight]}[trained]
    for leaf in leaves:
        leaf.requires_grad_()
    seen = []

    def chunk(rows, head, *given):
        seen.append(head.dtype)
        return chunk_loss(rows, head, *given)

    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = head_loss(x, weight, targets, limit=200, chunk=chunk)
            found = torch.autograd.grad(loss, leaves, retain_graph=True)
            again = torch.autograd.grad(loss, leaves)
            assert seen == [dtype] * 6
            with monkeypatch.context() as patched:
                patched.setattr("attnzoo.models.loss.in_transform", lambda: True)
                expected = torch.autograd.grad(head_loss(x, weight, targets, limit=200), leaves)
        seen.clear()
        for ours, same, theirs in zip(found, again, expected, strict=True):
            assert ours.dtype == theirs.dtype == torch.float32
            assert torch.equal(ours, same)
            torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-3)


def test_a_model_gives_its_loss_without_logits():
    model = build()
    whole, alone = model(tokens(), tokens()), model(tokens(), tokens(), with_logits=False)
    assert alone.logits is None
    torch.testing.assert_close(alone.loss, whole.loss)


def test_prefill_computes_the_logits_of_the_last_position_alone():
    model = build().eval()
    lengths = []
    model.head.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[:-1].numel()))
    model.generate(tokens(), 3, temperature=0)
    assert lengths == [2, 2, 2]


# recomputed and compiled blocks


def assert_alike(run, other, rel):
    for ours, theirs in zip(numbers(run), numbers(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == (pytest.approx(value, rel=rel) if isinstance(value, float) else value), name


@pytest.mark.parametrize("attention", ["fox", "path_fox", "mamba2", "gated_deltanet"])
def test_recomputed_blocks_give_the_same_gradients(attention):
    def gradients(recompute):
        model = build(attention=attention)
        model.recompute = recompute
        model(tokens(), tokens()).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for kept, again in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(kept, again)


@pytest.mark.parametrize("option", ["recompute=true", "compile=true"])
def test_a_run_with_it_trains_the_same_losses(option, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    write_text(tmp_path)
    plain = train(config_of(tmp_path, "plain"))
    other = train(config_of(tmp_path, "other", option))
    assert_alike(other, plain, 1e-4)
    assert weights(plain) != b""
    assert type(load_run(other)[0]) is LanguageModel


def test_a_step_that_does_not_fit_says_what_to_change(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LanguageModel, "hidden", full)
    write_text(tmp_path)
    with pytest.raises(TooLargeError, match=r"step 1, with 2 sequences of 16 tokens.*gradient_accumulation.*recompute"):
        train(config_of(tmp_path))


# on a GPU


def on_a_gpu(folder, run, *options):
    write_text(folder)
    return config_of(folder, run, "device=auto", "steps=30", "eval_every=0", "checkpoint_every=10", *options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("mixed_precision=bf16",), ("mixed_precision=fp16",), ("compile=true",)])
@pytest.mark.parametrize("attention", ["fox", "gated_deltanet"])
def test_a_model_learns_on_a_gpu(attention, options, tmp_path):
    run = train(on_a_gpu(tmp_path, "run", f"model.attention={attention}", "model.hidden_size=64", *options))
    losses = [row["loss"] for row in numbers(run) if "loss" in row]
    assert losses[-1] < losses[0] - 1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_the_head_loss_on_a_gpu_is_that_of_float64(compiled):
    """A vocabulary of 50 is multiplied as one of 64, which nothing of the loss or its gradients shows."""
    torch.manual_seed(0)
    x, weight, targets = torch.randn(23, 16).double(), torch.randn(50, 16).double(), torch.randint(0, 50, (23,))
    targets[[0, 5, 22]] = -100
    pair = (x.requires_grad_(), weight.requires_grad_())
    expected = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets), pair)
    chunk = torch.compile(chunk_loss) if compiled else chunk_loss
    on_gpu = [part.detach().cuda().requires_grad_() for part in pair]
    loss = head_loss(*on_gpu, targets.cuda(), limit=8 * 64, chunk=chunk)
    torch.testing.assert_close(loss.cpu().double(), F.cross_entropy(x @ weight.T, targets), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(loss, on_gpu), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_a_run_goes_on_to_the_same_losses_on_a_gpu(tmp_path):
    from tiny_runs import StoppedError, stop_at

    straight = train(on_a_gpu(tmp_path, "straight"))
    with pytest.raises(StoppedError):
        train(on_a_gpu(tmp_path, "stopped"), stop_at(15))
    resumed = train(on_a_gpu(tmp_path, "stopped"))
    assert_alike(resumed, straight, 2e-3)


@pytest.mark.gpu
def test_a_batch_that_is_too_large_says_what_to_change_on_a_gpu(tmp_path):
    torch.cuda.set_per_process_memory_fraction(0.01)  # other tests may be using the GPU too
    try:
        with pytest.raises(TooLargeError, match="gradient_accumulation"):
            train(on_a_gpu(tmp_path, "large", "batch_size=8192", "model.hidden_size=2048"))  # 1 GiB for the embeddings
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
