"""The same over gloo: two processes that torch.distributed joins, many cases in one group."""

import os
import socket
import time
import traceback
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from pages import DOCS, blocks

from attnzoo import Prune, get
from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel
from attnzoo.parallel import Fragments, context_parallel
from attnzoo.samples import random_inputs
from attnzoo.training.launch import lost_another

T = 21
CASES = {
    "fox gathered": ("fox", {}, "gather"),
    "fox by heads": ("fox", {"window": 9}, "heads"),
    "fox pruned": ("fox", {"prune": Prune(1e-30)}, "pruned"),
    "path_fox pruned": ("path_fox", {"prune": Prune(1e-30)}, "pruned"),
    "wall gathered": ("wall", {}, "auto"),
    "kda by states": ("kda", {}, "auto"),
    "gla by heads": ("gla", {}, "heads"),
}
FRAGMENTS = [Fragments.zigzag([0, 12, T], 2), Fragments.of([(0, 3, 1), (3, 5, 0), (5, T, 1)], 2)]


def differences(rank):
    """Of each case the largest error of this rank's outputs and gradients."""
    for case, (name, options, transport) in CASES.items():
        for fragments in FRAGMENTS:
            q, k, v, gate = random_inputs(name, B=1, T=T, H=4, G=2, K=4, V=4, regime="open", seed=2)
            borders = torch.tensor(fragments.borders)
            rows = [x.requires_grad_() for x in (q, k, v)]
            gate = gate.map(lambda part: part.requires_grad_())
            leaves = [*rows, *(getattr(gate, part) for part in gate.parts)]
            form = get(name).forms["parallel"]
            plain = {n: x for n, x in options.items() if n != "prune"}
            whole = form(*rows, gate, cu_seqlens=borders, **plain)
            do = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            expected = torch.autograd.grad(whole, leaves, do)
            local = [fragments.shard(x).detach().requires_grad_() for x in leaves]
            parts = dict(zip(gate.parts, local[3:], strict=True))
            o = form(*local[:3], type(gate)(**parts), fragments=fragments, transport=transport, **options)
            grads = torch.autograd.grad(o, local, fragments.shard(do))
            error = float((o - fragments.shard(whole)).abs().max())
            pairs = zip(grads, expected, strict=True)
            yield case, error, max(float((a - fragments.shard(b)).abs().max() / b.abs().max()) for a, b in pairs)


def small_model():
    torch.manual_seed(0)
    config = ModelConfig(attention=["fox", "mamba2"], hidden_size=16, num_layers=2, num_heads=2, vocab_size=11)
    return LanguageModel(config)


def page_loops(rank):
    """The largest differences of a model's weights and gradients that the page's loops leave from one process's."""
    page = (DOCS / "how-to" / "long_text.md").read_text()
    session = {"Fragments": Fragments, "context_parallel": context_parallel}
    for code, _ in blocks(page):
        if "def train(" in code or "class SharedTexts" in code:
            exec(code, session)
    tokens, loss_of = torch.arange(T + 1)[None] % 11, torch.nn.functional.cross_entropy
    rows = [(tokens[:, :-1], tokens[:, 1:])] * 2
    alone = small_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for inputs, targets in rows:
        optimizer.zero_grad()
        alone(inputs, targets=targets, with_logits=False).loss.backward()
        optimizer.step()
    model = small_model()
    session["train"](Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.5), lambda _: rows, 2)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    yield max(float((a - b).abs().max()) for a, b in pairs)

    class StandIn(session["SharedTexts"]):
        parallel_dims, ntokens_seen = SimpleNamespace(get_mesh=lambda _: dist.group.WORLD), 0

        def fwd_bwd_fn(self, inputs, labels, tokens, _):
            loss = loss_of(model(inputs).logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            loss.backward()
            return loss

    model, alone = small_model(), small_model()
    inputs, labels = rows[0]
    trainer = StandIn()
    trainer.forward_backward_step(input_dict={"input": inputs}, labels=labels, global_valid_tokens=labels.numel())
    alone(inputs, targets=labels, with_logits=False).loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    yield max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


def left_alone(rank):
    """What rank 0 is told, and after how many seconds, of a rank 1 that takes no part in an exchange."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    start = time.monotonic()
    try:
        if rank == 0:
            Fragments.zigzag(8, group).gather(torch.ones(1, 4))
    except RuntimeError as error:
        return lost_another(error), time.monotonic() - start, str(error)
    finally:
        dist.barrier()  # of all: until then rank 1 is alive, and only slow
    return None


def work(rank, port, results):
    try:
        torch.set_num_threads(1)
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in named.items()})
        dist.init_process_group("gloo", rank=rank, world_size=2)
        results.put((rank, list(differences(rank))))
        results.put((rank, list(page_loops(rank))))
        results.put((rank, left_alone(rank)))
        dist.destroy_process_group()
    except Exception:
        results.put((rank, traceback.format_exc()))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def told():
    """By rank, what the processes say, one thing after the other."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # once for both
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=work, args=(rank, port, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = {0: [], 1: []}
        for _ in range(6):
            rank, one = results.get(timeout=120)
            assert not isinstance(one, str), one
            found[rank].append(one)
        yield found
    finally:
        for process in processes:
            process.terminate()
            process.join()


def test_two_processes_give_what_one_does(told):
    for rank, (found, *_) in told.items():
        assert len(found) == len(CASES) * len(FRAGMENTS)
        for case, value, gradient in found:
            assert value <= 1e-10, (rank, case, value)
            assert gradient <= 1e-9, (rank, case, gradient)


def test_loops_of_the_page_train_what_one_process_does(told):
    """accelerate's, and the method for torchtitan's trainer."""
    for _, differences, _ in told.values():
        assert len(differences) == 2
        assert max(differences) < 1e-5


def test_a_rank_that_hangs_ends_the_others_in_bounded_time(told):
    (*_, (lost, seconds, words)), (*_, nothing) = told[0], told[1]
    assert nothing is None
    assert lost, words
    assert "\n" not in words.strip()
    assert 0.9 < seconds < 10
