"""The same over gloo: two processes that torch.distributed joins, many cases in one group."""

import os
import socket
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from attnzoo import Prune, get
from attnzoo.parallel import Fragments
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


def left_alone(rank):
    """What rank 0 is told, and after how many seconds, of a rank 1 that takes no part in an exchange."""
    os.environ["RANK"] = str(rank)
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
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=2)
        results.put((rank, list(differences(rank))))
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
    context = mp.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=work, args=(rank, port, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = {0: [], 1: []}
        for _ in range(4):
            rank, one = results.get(timeout=120)
            assert not isinstance(one, str), one
            found[rank].append(one)
        yield found
    finally:
        for process in processes:
            process.terminate()
            process.join()


def test_two_processes_give_what_one_does(told):
    for rank, (found, _) in told.items():
        assert len(found) == len(CASES) * len(FRAGMENTS)
        for case, value, gradient in found:
            assert value <= 1e-10, (rank, case, value)
            assert gradient <= 1e-9, (rank, case, gradient)


def test_a_rank_that_hangs_ends_the_others_in_bounded_time(told):
    (_, (lost, seconds, words)), (_, nothing) = told[0], told[1]
    assert nothing is None
    assert lost, words
    assert "\n" not in words.strip()
    assert 0.9 < seconds < 10
