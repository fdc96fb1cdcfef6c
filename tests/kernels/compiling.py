"""Compile the kernels that calls launch, for GPUs that are not here; say what each needs of them.

    python tests/kernels/compiling.py [CAPABILITY[:CALLS[:KERNELS]]]... [--ptx CAPABILITY[:CALLS[:KERNELS]]...]

CALLS and KERNELS are regular expressions, of names in ``calls()`` and of kernels. With the Triton that is found first
(PYTHONPATH), without the interpreter. One JSON object per compiled kernel on standard output; exit status 1 where one
does not compile, or needs more shared memory than a program may have.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from machine_code import unset_registers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune
from attnzoo.kernels import convolution, decode, linear, norms
from attnzoo.kernels.common import device, launched, together
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.common.parts import Finish, Norm
from attnzoo.kernels.common.retention import Retention, Rule
from attnzoo.kernels.decode import api as page_api
from attnzoo.kernels.decode import path_pages, step
from attnzoo.kernels.fox import api as fox
from attnzoo.kernels.linear import chunk_api, delta_backward, pair_backward, segments
from attnzoo.kernels.path import api as path
from attnzoo.kernels.path import decode as path_cache
from attnzoo.kernels.path.decode import path_extend
from attnzoo.kernels.path.fits import too_small
from attnzoo.kernels.retention import Lesson
from attnzoo.kernels.retention import api as retention
from attnzoo.kernels.rotation import api as rotation
from attnzoo.kernels.wall import api as wall

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class NoGPU:
    """A driver for Triton of a GPU on which nothing can be launched."""

    launcher_cls = utils = None
    capability = (0, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.get_current_device(), 32)

    def get_current_device(self) -> int:  # what is compiled is kept by device
        return 10 * self.capability[0] + self.capability[1]

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def linear_layer_step(dtype: torch.dtype, K: int, mamba2: bool) -> Tensor:
    """A step of Mamba-2, whose heads share keys and a norm, or of Gated DeltaNet."""
    B, H, (G, V) = 2, 4, (1, 2 * K) if mamba2 else (4, K)
    made = [torch.zeros(B, 1, heads, dim, dtype=dtype) for heads, dim in ((G, K), (G, K), (H, V))]
    windows = ((x.shape[2] * x.shape[3], x) for x in made)
    conv = [linear.Convolution(x.new_zeros(X, 4), x.new_zeros(X), x.new_zeros(B, 3, X)) for X, x in windows]
    logits, head = torch.zeros(B, 1, H, dtype=dtype), torch.zeros(H)
    finish = Finish(torch.ones(H, V, dtype=dtype), 1e-5, False, torch.zeros(B, 1, H * V, dtype=dtype), True)
    options: dict[str, Any] = {"beta": logits, "norm": 1e-6}
    if mamba2:
        options = {"skip": head, "groups": 1, "gate_first": True, "writes": True}
    decay = linear.DecayLogits(logits, head, head, opposite=True)
    parts = linear.RecurrentParts(conv=tuple(conv), decay=decay, finish=finish, **options)  # type: ignore[arg-type]
    return linear.linear_step(
        *made, state=torch.zeros(B, H, K, V), active=torch.zeros(B, dtype=torch.int32), parts=parts
    )


def layer_parts(dtype: torch.dtype, K: int, mamba2: bool) -> list[Tensor]:
    """Parts of a layer of Mamba-2, or of Gated DeltaNet and KDA on packed rows: convolution, norms, log decays."""
    B, T, H, V = 1, 512, 4, 2 * K if mamba2 else K
    x, logits = (torch.zeros(B, T, H * V, dtype=dtype).requires_grad_() for _ in range(2))
    weight, head, channel = (torch.zeros(shape).requires_grad_() for shape in ((H, V), (H,), (H * V,)))
    cu_seqlens = None if mamba2 else torch.tensor([0, 100, T])
    before = torch.zeros(B, 3, H * V, dtype=dtype).requires_grad_() if mamba2 else None
    window, bias = torch.zeros(H * V, 4).requires_grad_(), channel if mamba2 else None
    y = convolution.causal_convolution(x, window, bias, before=before, cu_seqlens=cu_seqlens, silu=True).unflatten(
        -1, (H, V)
    )
    decays = linear.DecayLogits(logits if not mamba2 else logits[..., :H], head if mamba2 else channel, head, 1.0, True)
    gate, skip = norms.Gated(logits, True, mamba2), norms.Skip(y, head) if mamba2 else None
    ends = [norms.head_norm(y, weight, groups=1 if mamba2 else None, gate=gate, skip=skip)]
    ends += [] if mamba2 else [norms.head_norm(y, kind="l2")]
    if mamba2:
        ends.append(linear.written_values(y, torch.zeros(B, T, H).requires_grad_()))
    return [*ends, *(one for one in linear.log_decays(decays, steps=mamba2) if one is not None)]


def split_chunks(x: Tensor, gates: Tensor) -> Tensor:
    """A long sequence of few heads, whose segments run side by side."""
    segments.multiprocessors = lambda device: 132
    return linear.linear_chunks(x, x, x, gates, prune=Prune())[0]


def delta_chunks(dtype: torch.dtype, K: int) -> list[Tensor]:
    """The backward of a gated delta rule's chunks."""
    rows, states = torch.empty(2, 128, 3, K, dtype=dtype), torch.empty(2, 2, 3, K, K, dtype=dtype)
    x = delta_backward.DeltaChunks(*[rows] * 6, states, states, torch.empty(2, 128, 3))
    return list(delta_backward.delta_gradients(x, 1.0, None, None))


def delta_pairs(dtype: torch.dtype, K: int) -> list[Tensor]:
    """The backward of the pairs of a delta rule with a decay per channel, packed and not."""
    row, wide, pairs = torch.empty(1, 128, 3, K, dtype=dtype), torch.empty(1, 128, 3, K), torch.empty(1, 128, 3, 64)
    x = pair_backward.Pairs(row, row, wide, row[..., 0].contiguous(), pairs, pairs, wide, wide, wide[..., 0], wide)
    borders = torch.tensor([0, 100, 128])
    pair_backward.pair_gradients(x, borders, torch.tensor([[0, 0], [0, 1], [1, 0]]))
    return list(pair_backward.pair_gradients(x, None, None))


def page_step(dtype: torch.dtype, K: int, R: int, T: int) -> Tensor:
    """New tokens into pages, and the attention of their rows, with gates, without, and with a constant one."""
    int32, float64, (B, G, N, P) = torch.int32, torch.float64, (2, 2, 16, 64)
    H, q = G * R, torch.zeros(B, T, G * R, K, dtype=dtype)
    pages, new = torch.zeros(P, 64, K, dtype=dtype), torch.zeros(B, T, G, K, dtype=dtype)
    table, first, length = (torch.zeros(shape, dtype=int32) for shape in ((B, G, N), (B, G), (B,)))
    norm, gates, decay = torch.zeros(B, G, N), torch.zeros(B, T, H), torch.zeros(P, 64, R)
    page_sum, total, n_log = (torch.zeros(shape, dtype=float64) for shape in ((B, H, N), (B, H), (B, H, N)))
    since, seen = torch.zeros(B, H, dtype=int32), torch.zeros(B, H, T, dtype=int32)
    plain = decode.PagedState(decode.KeyPages(pages, pages, norm), decode.PageTable(table, first, length))
    decayed = plain._replace(gates=decode.GateState(decay, page_sum, total, since, n_log, n_log.long()))
    decode.paged_append(new, new, plain, impl="triton")
    decode.paged_append(new, new, decayed, log_decay=gates, impl="triton")
    decode.paged_crop(plain, length)
    decode.paged_crop(decayed, length.long())
    attend = functools.partial(decode.paged_attention, q, impl="triton")
    attend(plain, options=AttentionOptions(sink=gates[0, 0], window=100))
    pruned = AttentionOptions(prune=Prune())
    attend(plain, log_decay=gates[0, 0], options=pruned._replace(logit_bound=gates[0, 0]))
    attend(decayed, options=pruned)
    parts = decode.TokenParts(
        finish=Finish(q[0, 0], gate=q), norm=Norm(q[0, 0], new[0, 0], 1e-5),
        shift=step.Shift(new[..., 0], new[..., 0], new[:, 0].clone(), new[:, 0].clone()),
    )  # fmt: skip
    whole = functools.partial(step.paged_step, q, new, new, past=length.long(), count=length, impl="triton")
    whole(plain, parts=parts)
    whole(decayed, parts=parts._replace(gate=step.Forget(q[..., 0], gates[0, 0])))
    bits, exponents = torch.zeros(P, 64, K, dtype=torch.uint8), torch.zeros(P, 64, 2, dtype=torch.int8)
    eight = decayed._replace(pages=decode.KeyPages(bits, bits, norm, exponents))
    decode.paged_append(new, new, eight, log_decay=gates, impl="triton")
    attend(eight, options=pruned)
    whole(eight, parts=parts._replace(gate=step.Forget(q[..., 0], gates[0, 0])))
    return attend(decayed, first_visible=seen)


def path_page_step(dtype: torch.dtype, K: int, R: int, T: int) -> Tensor:
    """New tokens of PaTH into pages and the attention of their rows, with gates and without."""
    int32, float64, (B, G, N, P) = torch.int32, torch.float64, (2, 2, 16, 64)
    H, q, new = G * R, torch.zeros(B, T, G * R, K, dtype=dtype), torch.zeros(B, T, G, K, dtype=dtype)
    gates, n_log = torch.zeros(B, T, H), torch.zeros(B, H, N, dtype=float64)
    table = decode.PageTable(
        torch.zeros(B, G, N, dtype=int32), torch.zeros(B, G, dtype=int32), torch.zeros(B, dtype=int32)
    )
    values, norm = torch.zeros(P, 64, K, dtype=dtype), torch.zeros(B, G, N)
    opened = decode.OpenGroup(torch.zeros(B, G, 512, K), torch.zeros(B, G, K, K), torch.zeros(B, dtype=int32))
    several = decode.PathGroups(torch.zeros(B, G, N // 8, K, K), opened)
    gate_state = decode.GateState(
        torch.zeros(P, 64, R), n_log, n_log[..., 0].contiguous(), torch.zeros(B, H, dtype=int32), n_log, n_log.long()
    )
    count, tokens = torch.zeros(B, dtype=int32), decode.PathTokens(new, new, new[..., 0].float())
    plain = decode.PagedState(decode.KeyPages(values, values, norm), table)
    grouped = decode.PagedState(decode.KeyPages(values, values, norm), table, gate_state)
    windowed = AttentionOptions(window=100, sink=gates[0, 0])
    path_pages.paged_path_step(q, new, tokens, plain, several, options=windowed)
    path_pages.paged_path_carry(tokens._replace(counts=count), grouped, several)
    tokens = tokens._replace(log_decay=gates, counts=count)
    return path_pages.paged_path_step(
        q, new, tokens, grouped, several, options=AttentionOptions(prune=Prune()), carry=T == 1
    )


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Named calls that together launch every kernel in every form that a plan can choose; each makes its tensors."""
    for n in (1, 2):
        keeps = Retention(drawn(torch.float32, 1, 512, 2, n), Rule(64.0, 0.5, 30.0, 16))
        yield f"retention fp32 {n}", functools.partial(retention.held_keys, keeps, window=100, impl="triton")
    for kind, dtype in DTYPES.items():
        yield f"path {kind} 8 step", functools.partial(path_step, dtype, 8)  # tensor cores take no fewer than 16
        for K in (64, 128, 256):
            for name, call in (*softmax_calls(dtype, K), *linear_calls(dtype, K), *page_calls(dtype, K)):
                family, _, rest = name.partition(" ")
                yield f"{family} {kind} {K} {rest}", call


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def of_dtype(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Tensors with a gradient by their sizes, of the dtype and in float32."""
    return functools.partial(drawn, dtype), functools.partial(drawn, torch.float32)


def path_step(dtype: torch.dtype, K: int, *factors: int) -> Any:
    """A token after 300, written by several factors, or by one without gates."""
    x, wide = of_dtype(dtype)
    w, beta, keys = x(2, 1, 2, *factors, K), wide(2, 1, 2, *factors), wide(2, 300, 2, K)
    gates = () if K < 16 else (wide(2, 301, 4),)
    return path_extend(x(2, 1, 4, K), x(2, 1, 2, K), w, beta, keys, x(2, 301, 2, K), *gates)


def softmax_calls(dtype: torch.dtype, K: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of FoX, PaTH and Wall, by family and kind of call."""
    x, wide = of_dtype(dtype)
    attend, carried, walled = (
        functools.partial(attention, impl="triton")
        for attention in (fox.fox_attention, path.path_attention, wall.wall_attention)
    )
    q, k, v, full, slope = x(1, 512, 4, K), x(1, 512, 2, K), x(1, 512, 2, K), wide(1, 512, 4), wide(4)
    factors = {"w": x(1, 512, 2, K), "beta": wide(1, 512, 2)}
    options: dict[str, dict[str, Any]] = {
        "": {}, " prune": {"prune": Prune()}, " sink": {"sink": wide(4), "return_lse": True, "window": 200},
    }  # fmt: skip
    for extra, given in options.items():
        for gate, g in (("gate", full), ("slope", slope.detach()), ("learnt slope", slope), ("none", None)):
            if (g is None and "prune" in given) or (gate == "learnt slope" and extra):
                continue
            yield f"fox {gate}{extra}", functools.partial(attend, q, k, v, log_decay=g, **given)
            if K <= 128 and (g is None or g is full):
                yield f"path {gate}{extra}", functools.partial(carried, q, k, v, **factors, log_decay=g, **given)
    alone, narrow = x(1, 8192, 1, K), x(1, 512, 2, 32)
    keeps = Retention(wide(1, 512, 2, 2), Rule(64.0, 0.5, 30.0, 16))
    yield "fox shared keys", lambda: attend(x(1, 8192, 4, K), alone, alone, log_decay=wide(1, 8192, 4))
    yield "fox retention", lambda: attend(q, k, v, log_decay=full, retention=keeps)
    taught = functools.partial(retention.key_divergence, q, k, v, (q, wide(1, 512, 4)), impl="triton")
    yield "retention lesson", lambda: taught(keeps, Lesson(discount=0.99), log_decay=full, window=100)
    rate = keeps._replace(keys=wide(1, 512, 2, 1))
    yield "retention largest", lambda: taught(rate, Lesson("max", 1.0, "max", "mse"), log_decay=None)
    yield "fox narrow values", lambda: attend(q, k, narrow, log_decay=full)
    past = x(2, 1024, 2, K)
    yield "fox step", lambda: attend(x(2, 1, 4, K), past, past, log_decay=wide(2, 1024, 4))
    if K > 128:
        return
    equal = {"w": wide(1, 512, 2, K), "beta": factors["beta"]}  # as many heads of queries as of keys
    yield "path narrow values", lambda: carried(q, k, narrow, **factors, log_decay=full)
    yield "path heads", lambda: carried(k, k, v, **equal, log_decay=wide(1, 512, 2))
    yield "path decays", lambda: carried(k, k, v, **equal, log_diag=wide(1, 512, 2, K))
    yield "path step", functools.partial(path_step, dtype, K)
    yield "path factors step", functools.partial(path_step, dtype, K, 3)
    yield "wall gate", lambda: walled(q, k, v, log_diag=wide(1, 512, 4, K))
    yield "wall two gates", lambda: walled(q, k, v, log_diag=wide(1, 512, 4, K), log_decay=full, prune=Prune())


def linear_calls(dtype: torch.dtype, K: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of the linear side and of rotations, by family and kind of call."""
    x, wide = of_dtype(dtype)
    q, k, gates = x(1, 512, 4, K), x(1, 512, 2, K), wide(1, 512, 4)
    several = Gate(
        log_decay=wide(2, 1, 4), log_diag=wide(2, 1, 4, K), angle=wide(K // 2), w=x(2, 1, 2, 3, K),
        beta=wide(2, 1, 2, 3),
    )  # fmt: skip
    one = x(2, 1, 2, K)
    yield "linear factors step", lambda: linear.linear_steps(x(2, 1, 4, K), one, one, several)
    yield "linear chunks split", lambda: split_chunks(x(1, 12288, 2, K), wide(1, 12288, 2))
    if dtype != torch.float32:
        yield "linear delta chunks", functools.partial(delta_chunks, dtype, K)
        yield "linear delta pairs", functools.partial(delta_pairs, dtype, K)
    for V in (32, K):
        chunks = functools.partial(linear.linear_chunks, q, k, x(1, 512, 2, V), gates, wide(1, 4, K, V))
        yield f"linear chunks of {V}", functools.partial(chunks, keeps_state=True)
    for name in ("mamba2", "gated_deltanet"):
        yield f"linear {name} parts", functools.partial(layer_parts, dtype, K, name == "mamba2")
        yield f"linear {name} step", functools.partial(linear_layer_step, dtype, K, name == "mamba2")
    turned = functools.partial(rotation.rotate, dtype=dtype)
    for name, heads in (("heads", 4), ("tokens", 1)):
        angles = wide(1, 512, heads, K // 2), q, q, wide(1, 512, 4, K)
        yield f"rotation {name}", functools.partial(turned, *angles, received=True, balanced=True)
    yield "rotation fixed", lambda: turned(wide(K // 2).detach(), q, k)


def page_calls(dtype: torch.dtype, K: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of steps over pages."""
    for rows, R, T in (("step", 1, 1), ("rows", 2, 3)):
        yield f"decode {rows}", functools.partial(page_step, dtype, K, R, T)
        if K <= 128:
            yield f"decode path {rows}", functools.partial(path_page_step, dtype, K, R, T)


def needs(kernel: Any) -> dict[str, Any]:
    """Shared memory, products of warpgroups and, of machine code, registers and stack (spills) per thread, and whether
    it reads registers that nothing has written, or waits for each product of a kernel that starts several."""
    products = kernel.asm["ptx"].count("wgmma.mma_async")
    found = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, "wgmma": products}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if kernel.asm.get("cubin"):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            usage, sass = (
                subprocess.run([tool, asked, file.name], capture_output=True, text=True, check=True).stdout
                for asked in ("-res-usage", "-sass")
            )
        found |= {name.lower(): int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", usage)}
        started, waits = (len(re.findall(rf"\b{name}\b", sass)) for name in ("HGMMA", r"WARPGROUP\.DEPBAR"))
        if kernel.metadata.name.endswith("_hopper_kernel") and waits >= started / 2:
            found["failed"] = f"ptxas waits for each product: {waits} waits for {started} (C7512)"
        if unset := unset_registers(sass):
            found["failed"] = f"reads what nothing has written: {', '.join(unset)[:500]}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    case_of = "CAPABILITY[:CALLS[:KERNELS]]"
    parser.add_argument("cases", nargs="*", metavar=case_of, help="compile to machine code")
    parser.add_argument("--ptx", nargs="+", default=[], metavar=case_of, help="stop before ptxas, the slowest part")
    args = parser.parse_args()
    failed, seen, run, here = False, {}, JITFunction.run, NoGPU()
    row: dict[str, Any] = {}
    kernels = ""

    def compile_only(self: Any, *given: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        nonlocal failed
        found = {**row, "kernel": self.fn.__name__}
        if not re.search(kernels, found["kernel"]):
            return
        try:
            kernel = run(self, *given, grid=grid, warmup=True, **options)
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"[:2000]
        else:
            if id(kernel) in seen:
                return
            seen[id(kernel)] = kernel
            found |= needs(kernel)
            most = device.shared_memory(here.capability)
            if found["shared"] > 1024 * most:
                found["failed"] = f"expected at most {most} KiB of shared memory"
        failed = failed or "failed" in found
        print(json.dumps(found), flush=True)

    triton.runtime.driver.set_active(here)
    launched._current_device = int  # which torch for GPUs asks a driver of theirs for
    JITFunction.run = compile_only
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    together.can_compile_together = lambda: False  # each where it would be launched
    device.capability = lambda of: here.capability
    device.triton_version = lambda: release
    retention.triton_unavailable = lambda keys: ""
    for api in (
        convolution.api,
        page_api,
        path_pages,
        fox,
        linear.api,
        chunk_api,
        linear.gates,
        norms.api,
        path,
        path_cache,
        retention,
        rotation,
        wall,
    ):
        api.kernels_unavailable = lambda *given, **limits: ""

    def compile_cases(cases: list[str]) -> None:
        nonlocal kernels, row
        for case in cases:
            which, names, kernels = [*case.split(":"), "", ""][:3]
            here.capability = tuple(map(int, which.split(".")))
            for name, function in calls():
                if not re.search(names, name):
                    continue
                family, dtype, K = name.split()[:3]
                if family == "path" and too_small(DTYPES[dtype], int(K), device.Machine(here.capability, release)):
                    continue
                row = {"triton": triton.__version__, "capability": which, "call": name}
                with torch.set_grad_enabled("step" not in name):
                    o = [y for y in tree_leaves(function()) if isinstance(y, Tensor) and y.requires_grad]
                    if o:
                        torch.autograd.backward(o, [torch.ones_like(y) for y in o])

    compile_cases(args.cases)
    with (
        tempfile.TemporaryDirectory() as cache,  # nobody may find kernels without machine code
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        mock.patch.object(CUDABackend, "make_cubin", return_value=b""),
    ):
        compile_cases(args.ptx)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
