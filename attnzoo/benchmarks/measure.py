"""Shared parts of all benchmarks: inputs, timing, errors, peers, the machine's limits, and result files."""

from __future__ import annotations

import functools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from attnzoo.errors import reason, unknown
from attnzoo.files import write_whole
from attnzoo.forms.backends import fla, fla_kernels
from attnzoo.kernels.common.device import installed_triton

T = TypeVar("T")
Result = dict[str, Any]


def decay_lengths(H: int, generator: torch.Generator) -> Tensor:
    """The tokens [H] in which each head decays to 1/e: for 75% log-uniform in 8..256, for the others in 1e5..1e6."""
    local = round(0.75 * H)
    spans = [torch.empty(n).uniform_(math.log(a), math.log(b), generator=generator)
             for n, a, b in ((local, 8, 256), (H - local, 1e5, 1e6))]  # fmt: skip
    return torch.cat(spans).exp()[torch.randperm(H, generator=generator)]


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of a - b divided by the norm of b."""
    return float((a.detach().double() - b.detach()).norm() / b.detach().norm())


def milliseconds(call: Callable[[], Any], rep: int) -> float:
    """The median time of the calls in ``rep`` milliseconds, or of three calls if each takes over half a second."""
    from triton.testing import do_bench  # Triton may be missing without a GPU

    call()
    times = [once(call)]
    if times[0] > 500:
        return statistics.median(times + [once(call) for _ in range(2)])
    return float(do_bench(call, warmup=40, rep=rep, return_mode="median"))


def once(call: Callable[[], Any]) -> float:
    """The milliseconds of one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def host_time(call: Callable[[], Any]) -> float:
    """Median milliseconds, of 40 calls, after which a call returns to the host, which does not wait for the GPU."""
    times = []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def timing(call: Callable[[], Tensor], leaves: list[Tensor], do: Tensor, rep: int) -> tuple[float, float]:
    """The milliseconds of forward (no grad) and of forward + backward."""
    with torch.no_grad():
        forward = milliseconds(call, rep)
    for leaf in leaves:
        leaf.requires_grad_()
    return forward, milliseconds(lambda: torch.autograd.grad(call(), leaves, do), rep)


def extra_memory(call: Callable[[], Tensor], leaves: list[Tensor], do: Tensor) -> float:
    """The peak GiB of forward + backward beyond inputs, outputs and gradients."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = call()
    grads = torch.autograd.grad(o, leaves, do)
    torch.cuda.synchronize()
    own = sum(x.numel() * x.element_size() for x in (o, *grads))
    return (torch.cuda.max_memory_allocated() - before - own) / 2**30


def measured(call: Callable[[], Tensor], leaves: list[Tensor], do: Tensor, rep: int) -> Result:
    """The milliseconds of :func:`timing` and GiB of :func:`extra_memory`."""
    forward, both = timing(call, leaves, do, rep)
    memory = extra_memory(call, leaves, do)
    return {"forward_ms": round(forward, 3), "both_ms": round(both, 3), "extra_GiB": round(memory, 2)}


def ceiling() -> float:
    """The TFLOP/s of an 8192^3 bf16 matrix product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b, 200) / 1e9


def copy_bandwidth() -> float:
    """The TB/s, read and written, of a copy of 2 GiB."""
    x = torch.empty(2 << 30, device="cuda", dtype=torch.uint8).random_()
    y = torch.empty_like(x)
    return 2 * x.numel() / milliseconds(lambda: y.copy_(x), 200) / 1e9


def describe_versions() -> dict[str, str]:
    """The processor, the versions of the libraries, and the date."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "triton": installed_triton() or "not installed",
        "fla": fla_kernels.described(fla.VERSION) or "not installed",
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


class Named(Protocol):
    """An object with a name, by which it is chosen."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def chosen(contenders: Sequence[N], only: Sequence[str]) -> list[N]:
    """The contenders that :func:`chosen_names` chooses."""
    names = chosen_names([x.name for x in contenders], only)
    return [x for x in contenders if x.name in names]


def chosen_names(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """The names that are one of ``only``, each with its "+ ACP"; of one that is no name, all names that start so.

    All names if ``only`` is empty. A line on stderr says which others begin like a name that was taken.

    Raises:
        ValueError: no name starts with one of ``only``.
    """
    found = set[str]() if only else {*names}
    for asked in only:
        exact = asked in names
        some = {x for x in names if (x in (asked, f"{asked} + ACP") if exact else x.startswith(asked))}
        if not some:
            raise unknown("contender", asked, names)
        found |= some
    for asked in only:
        others = [repr(x) for x in names if x.startswith(asked) and x not in found]
        if others:
            print(f"--only {asked!r} leaves out {', '.join(others)}", file=sys.stderr, flush=True)
    return [x for x in names if x in found]


X = TypeVar("X")  # inputs of one shape


def race(
    result: Result, peers: Sequence[N], shapes: Sequence[tuple[int, ...]], seconds: float, *,
    draw: Callable[..., X], errors: Callable[..., dict[str, float]], limits: Mapping[str, float],
    common: Callable[[X], Result], times: Callable[[N, X], Result | None], keep: Callable[[Result], None],
    kv_heads: int | None = None,
) -> bool:  # fmt: skip
    """Time the peers with correct results, shape by shape, into ``result``; return whether the time sufficed.

    Failures, and measurements dropped for time, are added to the "missing" of ``result``. The "fla" of a row names
    the packages whose kernels flash-linear-attention took for it in place of its own.

    Args:
        shapes: (B, H, T, K) each.
        draw: a function from a shape (and the keyword ``kv_heads``) to inputs.
        errors: a function from a peer, a number of heads and a head dim (and the keyword ``kv_heads``) to its errors by
            name, called once each; a peer beyond ``limits`` is not timed. With the heads that are timed, a kernel is
            compiled for both at once.
        common: a function from a shape to fields that its rows share.
        times: a function from a peer and a shape to its measurements; None: not at this shape.
        keep: called with ``result`` after each measurement; see :func:`keeper`.
        kv_heads: number of key/value heads; None: as many as query heads.

    Raises:
        ValueError: a shape whose heads cannot share ``kv_heads`` evenly.
    """
    if kv_heads is not None:
        result["kv_heads"] = kv_heads
        check_sharing(shapes, kv_heads)
        draw = functools.partial(draw, kv_heads=kv_heads)
        errors = functools.partial(errors, kv_heads=kv_heads)
    deadline = time.time() + seconds
    result |= {"errors": [], "rows": []}
    missing: list[str] = result.setdefault("missing", [])
    right: dict[tuple[str, int, int], bool] = {}
    for shape in shapes:
        x, (_, H, _, K) = draw(*shape), shape
        shared = common(x)
        for peer in peers:
            if time.time() > deadline:
                print("out of time at", shape, peer.name, flush=True)
                missing.append(f"{peer.name} at {shape} and what comes after it: no time was left")
                return False
            try:
                key = peer.name, H, K
                if key not in right:
                    right[key] = False
                    found = errors(peer, H, K)
                    right[key] = all(error <= limits[name] for name, error in found.items())
                    verdict = "" if right[key] else "WRONG: not timed"
                    said = {n: f"{e:.1e}" for n, e in found.items()}
                    result["errors"].append({"name": peer.name, "H": H, "K": K, **said})
                    print(json.dumps(result["errors"][-1]), verdict, flush=True)
                    keep(result)
                fla_kernels.taken()  # by what was compared
                measured = times(peer, x) if right[key] else None
            except Exception as error:
                print({"name": peer.name, "shape": shape, "failed": reason(error)[:300]}, flush=True)
                missing.append(f"{peer.name} at {shape}: {reason(error)[:200]}")
                continue
            if measured is not None:
                others = {"fla": taken} if (taken := fla_kernels.taken()) else {}
                row = {"name": peer.name, **dict(zip("BHTK", shape, strict=True)), **measured, **shared, **others}
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
                keep(result)
            torch.cuda.empty_cache()
    return True


def check_sharing(shapes: Sequence[tuple[int, ...]], kv_heads: int) -> None:
    """Raise ValueError for a shape (B, H, T, K) whose heads cannot share ``kv_heads`` evenly."""
    for shape in shapes:
        if shape[1] % kv_heads:
            raise ValueError(f"--kv-heads: expected a divisor of the {shape[1]} heads of {shape}, got {kv_heads}")


def of_kv_heads(result: Result) -> str:
    """A remark for a table's shapes where query heads share key heads, or ""."""
    return f", {result['kv_heads']} key and value heads" if "kv_heads" in result else ""


def headline(result: Result, how: str = "bf16, causal, medians.") -> str:
    """The first line of a table: the machine, the versions, and how it was measured."""
    m = result["machine"]
    return f"{m['gpu']}, torch {m['torch']}, Triton {m['triton']}, FLA {m['fla']}, {m['date']}; {how}"


def preface(result: Result, *more: str) -> list[str]:
    """The first lines of a table of kernels: the headline, the machine's limits, and what was not measured."""
    limits = f"8192^3 matmul: {result['matmul_tflops']:.0f} TFLOP/s; copy: {result['copy_TBps']:.2f} TB/s."
    return [headline(result), limits, *more, *not_measured(result["missing"]), ""]


def error_lines(result: Result, names: Sequence[str]) -> list[str]:
    """The lines of a table that show the errors of those of the outputs and gradients ``names`` that have any."""
    columns = [n for n in ("H", "K", *names) if any(n in each for each in result["errors"])]
    cells = ([e.get(n, "-") for n in ("name", *columns)] for e in result["errors"])
    return [
        "### Errors against float64 on the same bf16 inputs, T = 2048",
        "",
        *markdown_table(["", *columns], cells),
    ]


def with_kernels(row: Result, name: str) -> str:
    """What a row says under a name, with the packages whose kernels flash-linear-attention took (:func:`race`)."""
    return f"{row[name]} ({row['fla']})" if "fla" in row else str(row[name])


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table."""

    def line(cells: Iterable[object]) -> str:
        return "|" + "|".join(f" {cell} " if cell != "" else " " for cell in cells) + "|"

    return [line(columns), "|---" * len(columns) + "|", *map(line, rows)]


def load_peer(name: str, load: Callable[[], T], missing: list[str]) -> T | None:
    """The peer that ``load`` returns; None, with a line in ``missing``, if it is absent or broken."""
    try:
        return load()
    except ImportError as error:
        missing.append(f"{name}: not installed ({error})")
    except Exception as error:
        missing.append(f"{name}: {reason(error)}")
    return None


def not_measured(missing: Sequence[str]) -> list[str]:
    """The lines of a table about what was not measured, without repetitions."""
    return [f"Not measured: {reason}." for reason in dict.fromkeys(missing)]


def save(out: Path, result: Result, table: str) -> None:
    """Write ``result`` to results.json and ``table`` to results.md, in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "results.json", json.dumps(result, indent=1) + "\n")
    write_whole(out / "results.md", table)


def finish(out: Path, result: Result, table: Callable[[Result], str]) -> None:
    """Write a whole result and its table as :func:`save` does, and print the table."""
    save(out, result, table(result))
    print(table(result))


def keeper(out: Path, table: Callable[[Result], str]) -> Callable[[Result], None]:
    """A function that saves an incomplete result, marked as such, so that an interruption loses nothing."""

    def keep(result: Result) -> None:
        part = {**result, "missing": [*result.get("missing", []), "what comes after these rows: the run had not ended"]}
        save(out, part, table(part))

    return keep
