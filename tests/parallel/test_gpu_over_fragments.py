"""The kernels over fragments: two processes on one GPU, which tell each other through the host's memory."""

import faulthandler
import queue
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from attnzoo import Gate, Prune, get
from attnzoo.parallel import Fragments, collectives
from attnzoo.samples import random_gate
from attnzoo.testing import relative_error

pytestmark = pytest.mark.gpu
T, H, G, K = 1536, 8, 4, 64
LONGEST = 60  # seconds that a rank waits for the other; a case compiles kernels on both
PRUNE = {"prune": Prune(1e-6)}
CASES = {
    "mamba2 by states": ("mamba2", "fla", "auto", {}),
    "gated_deltanet by states": ("gated_deltanet", "fla", "auto", {"delta_rule": True}),
    "kda by states": ("kda", "fla", "auto", {"delta_rule": True}),
    "gla by states": ("gla", "fla", "auto", {}),
    "gla by heads": ("gla", "fla", "heads", {}),
    "fox gathered": ("fox", "triton", "gather", {}),
    "fox in a window": ("fox", "triton", "gather", {"window": 300}),
    "fox pruned": ("fox", "triton", "pruned", PRUNE),
    "fox by heads": ("fox", "triton", "heads", {}),
    "alibi pruned": ("alibi", "triton", "pruned", PRUNE),
    "nope gathered": ("nope", "triton", "gather", {}),
    "rope gathered": ("rope", "triton", "gather", {}),
    "path_fox by heads": ("path_fox", "triton", "auto", PRUNE),
    "wall by heads": ("wall", "triton", "auto", {}),
    "path_fox pruned, without a kernel": ("path_fox", "parallel", "pruned", PRUNE),
}
TABLES = (Fragments.zigzag([0, 700, T], 2), Fragments.of([(0, 100, 1), (100, 613, 0), (613, T, 1)], 2))


def through_the_host():
    """gloo exchanges no memory of GPUs, and NCCL wants a GPU for each process."""
    gather, exchange = collectives._all_gather, dist.all_to_all_single

    def all_gather(out, x, group=None, async_op=False):
        host = torch.empty(out.shape, dtype=out.dtype)
        gather(host, x.cpu(), group=group)
        out.copy_(host)

    def reduce_scatter(out, x, group=None, async_op=False):
        host = x.float().cpu()
        dist.all_reduce(host, group=group)
        out.copy_(host.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    def all_to_all_single(out, x, *sizes, group=None, async_op=False):
        host = torch.empty(out.shape, dtype=out.dtype)
        exchange(host, x.cpu(), *sizes, group=group)
        out.copy_(host)

    collectives._all_gather, collectives._reduce_scatter = all_gather, reduce_scatter
    dist.all_to_all_single = all_to_all_single


def both(form, rows, gate, do, **options):
    rows = [x.detach().requires_grad_() for x in rows]
    gate = gate.map(lambda part: part.detach().requires_grad_())
    leaves = [*rows, *(getattr(gate, part) for part in gate.parts)]
    o = form(*rows, gate, **options)
    grads = torch.autograd.grad(o, leaves, do, allow_unused=True)
    return [o, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def inputs(name):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, T, heads, K).cuda().bfloat16() for heads in (H, G, G, H))
    length = K**0.5 if get(name).side == "softmax" else 1.0
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).mul(length).bfloat16() for x in (q, k))
    gate = random_gate(name, 1, T, H, G, K, dtype=torch.float32, regime="open").map(lambda part: part.cuda())
    if gate.log_decay is not None and gate.log_decay.ndim == 3:  # local heads and global ones
        parts = {part: getattr(gate, part) for part in gate.parts}
        gate = Gate(**{**parts, "log_decay": gate.log_decay * torch.linspace(0.01, 3, H).cuda()})
    return (q, k, v), gate, do


def errors(case):
    """Of each table, the largest error of this rank's output and gradients beside the kernel's on whole sequences."""
    name, form, transport, options = CASES[case]
    run, (rows, gate, do) = get(name).forms[form], inputs(name)
    plain = {option: x for option, x in options.items() if option != "prune"}
    for fragments in TABLES:
        borders = torch.tensor(fragments.borders, dtype=torch.int32, device="cuda")
        packed = {"cu_seqlens": borders} if len(borders) > 2 else {}
        whole = both(run, rows, gate, do, **plain, **packed)
        local = gate.map(lambda part, own=fragments: part if part.ndim == 1 else own.shard(part))
        given = {**options, "fragments": fragments, "transport": transport}
        mine = both(run, fragments.shard(*rows), local, fragments.shard(do), **given)
        yield [relative_error(a, fragments.shard(b)) for a, b in zip(mine, whole, strict=True) if b.ndim > 1]


def work(rank, file, asked, told):
    """Answer each case that is asked with its errors, or with what went wrong, which ends this process."""
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=LONGEST)
        )
        through_the_host()
        for case in iter(asked.get, None):
            faulthandler.dump_traceback_later(LONGEST)  # where it waits
            told.put(list(errors(case)))
            faulthandler.cancel_dump_traceback_later()
    except Exception:
        told.put(traceback.format_exc())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two processes, with a queue to ask and one that answers."""
    context, file = mp.get_context("spawn"), tmp_path_factory.mktemp("ranks") / "store"
    found = []
    for rank in range(2):
        asked, told = context.Queue(), context.Queue()
        process = context.Process(target=work, args=(rank, file, asked, told), daemon=True)
        process.start()
        found.append((process, asked, told))
    yield found
    for process, asked, _ in found:
        asked.put(None)
        process.join(5)
        process.terminate()


@pytest.mark.parametrize("case", [case for case, (name, form, *_) in CASES.items() if form in get(name).forms])
def test_kernels_of_two_processes_give_what_one_does(case, ranks):
    for process, asked, _ in ranks:
        assert process.is_alive(), "ended in an earlier case"
        asked.put(case)
    answers = []
    for process, _, told in ranks:
        try:
            answers.append(told.get(timeout=2 * LONGEST))
        except queue.Empty:
            answers.append(f"no answer in {2 * LONGEST} seconds")
        if not isinstance(answers[-1], list):
            process.terminate()
            process.join()
    assert all(isinstance(tables, list) for tables in answers), "\n".join(map(str, answers))
    print(case, answers)
    assert max(max(map(max, tables)) for tables in answers) <= 0.03  # bfloat16, relative to the largest entry
