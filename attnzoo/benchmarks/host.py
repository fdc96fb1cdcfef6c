"""The host's cost of a layer's forward: Python calls, files and time, on tensors too small for computation to
matter."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

import attnzoo
from attnzoo import build_attention
from attnzoo.errors import UnavailableError

TOKENS, WIDTH, HEADS = 16, 64, 4
PRO = {"qk_norm": "rms", "kv_shift": True, "output_norm": "rms", "output_gate": "sigmoid"}  # FoX's Pro block
LAYERS: dict[str, dict[str, Any]] = {
    "fox": {}, "rope": {}, "mamba2": {}, "fox, Pro block, acp": {**PRO, "acp": True}, "path_fox": {}, "gla": {},
}  # fmt: skip


def layer(name: str) -> torch.nn.Module:
    """The layer of a row of ``LAYERS``."""
    return build_attention(name.partition(",")[0], hidden_size=WIDTH, num_heads=HEADS, **LAYERS[name]).eval()


def hidden() -> Tensor:
    """Hidden states ``[1, TOKENS, WIDTH]``."""
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def calls(run: Callable[[], object], package: ModuleType = attnzoo) -> tuple[int, int]:
    """The number of calls of the package's functions in ``run()``, and of the files that they are in."""
    root = Path(package.__file__ or "").resolve().parent
    roots = tuple(str(path) for path in {root, *(link.resolve() for link in root.iterdir() if link.is_symlink())})
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    files = {name: str(Path(name).resolve()) for name in set(found)}
    inside = [name for name in found if not name.startswith("<") and files[name].startswith(roots)]
    return len(inside), len(set(inside))


def fastest(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The seconds of processor time of each function's fastest run, measured in turns."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for number, run in enumerate(runs):
            start = time.thread_time()
            run()
            best[number] = min(best[number], time.thread_time() - start)
    return best


def llama() -> Callable[[Tensor], object]:
    """transformers' LlamaAttention of that size, with precomputed rotary angles.

    Raises:
        UnavailableError: transformers is not installed.
    """
    try:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
    except ImportError as error:
        raise UnavailableError("transformers is not installed (pip install 'attnzoo[hf]')") from error
    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, head_dim=WIDTH // HEADS)
    config._attn_implementation = "sdpa"
    attention = LlamaAttention(config, 0).eval()
    angles = LlamaRotaryEmbedding(config)(hidden(), torch.arange(TOKENS)[None])
    return lambda x: attention(x, position_embeddings=angles, attention_mask=None)


@torch.no_grad()
def table(repeats: int) -> list[tuple[str, int, int, float, float]]:
    """Rows Rows Rows (layer, calls, files, microseconds, ratio to LlamaAttention) of a forward on one thread."""
    import transformers

    x, threads = hidden(), torch.get_num_threads()
    layers: dict[str, Callable[[Tensor], object]] = {"LlamaAttention": llama(), **{n: layer(n) for n in LAYERS}}
    runs = [partial(made, x) for made in layers.values()]
    torch.set_num_threads(1)
    try:
        for run in runs:
            run()
        seconds = fastest(runs, repeats)
        counts = [calls(run, attnzoo if number else transformers) for number, run in enumerate(runs)]
    finally:
        torch.set_num_threads(threads)
    return [
        (name, *count, 1e6 * taken, taken / seconds[0])
        for name, count, taken in zip(layers, counts, seconds, strict=True)
    ]  # fmt: skip


def run(repeats: int) -> None:
    """Print the table; the fastest of ``repeats`` runs counts."""
    print(f"\nA layer's forward on one thread, B=1, T={TOKENS}, D={WIDTH}, H={HEADS}, float32, no gradient\n")
    try:
        rows = table(repeats)
    except UnavailableError as error:
        print(f"not measured: {error}")
        return
    print("| layer | calls | files | us | ratio |\n|---|---|---|---|---|")
    for name, count, files, taken, ratio in rows:
        print(f"| `{name}` | {count} | {files} | {taken:.0f} | {ratio:.2f} x |", flush=True)
