"""Generation with whole models on one GPU: milliseconds per token and memory over cached tokens and batch.

    attnzoo bench generate [--out DIR] [--tokens 16384]... [--batch 4]... [--only NAME]... [--seconds 500]

Models of random weights in bfloat16, 24 layers of 1536 channels and 24 heads by default. The gates of FoX are those of
fox.py (three quarters of the heads decay within 8 to 256 tokens), and so are those of the other variants that decay by
a scalar. Those named 8B have the sizes of Llama 3.1 8B. Caches are filled with random keys, values and states, so that
nothing waits for a prompt. A step draws the likeliest token of every row. Cached keys and values have 8 bits where a
name says fp8. Maps of one input are one product where a name says fused, and on the linear side. Peers: the Llama of
transformers with the same sizes, with its growing cache, and with its static cache, compiled. What does not fit into
the GPU's memory is left out, and said. Writes results.json and results.md.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.benchmarks.measure import (
    Result,
    chosen,
    describe_versions,
    finish,
    keeper,
    load_peer,
    markdown_table,
    not_measured,
)
from attnzoo.benchmarks.train import trained_biases
from attnzoo.errors import reason
from attnzoo.forms.caches.pages.paged_cache import PagedCache
from attnzoo.forms.caches.state import KVCache, RecurrentState
from attnzoo.layer.cache import LayerCache
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.generation.engine import Generator
from attnzoo.models.generation.sampling import Sampling

SIZES: dict[str, Any] = {"hidden_size": 1536, "num_layers": 24, "num_heads": 24, "vocab_size": 50257}
LLAMA_8B: dict[str, Any] = {  # config.json of meta-llama/Llama-3.1-8B
    "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
STEPS, WARM = 32, 8
EVICT = math.exp(-10.0)


@dataclass(frozen=True)
class TimedModel:
    """A model whose generation is timed.

    Args:
        name: shown name.
        attention: the variant of every layer.
        options: options of its layers.
        evict, kv_dtype: see :class:`~attnzoo.models.generation.engine.Generator`.
        graph: whether a step is one CUDA graph.
        compile: whether its blocks are compiled.
        fuse: whether maps of one input are one product.
        sizes: of the model, in place of those of :data:`SIZES`.
    """

    name: str
    attention: str
    options: dict[str, Any] = field(default_factory=dict)
    evict: float | None = None
    graph: bool = True
    compile: bool = True
    fuse: bool = False
    kv_dtype: str | None = None
    sizes: dict[str, Any] = field(default_factory=dict)


PRO = {"block": "pro", "acp": True}
GROUPED = {"num_kv_heads": 8}
OURS = (
    TimedModel("FoX (Pro) + ACP", "fox", PRO),
    TimedModel("FoX (Pro) + ACP, evicting", "fox", PRO, EVICT),
    TimedModel("FoX (Pro) + ACP, fused", "fox", PRO, fuse=True),
    TimedModel("FoX (Pro) + ACP, evicting, fused", "fox", PRO, EVICT, fuse=True),
    TimedModel("FoX (Pro) + ACP, fp8, fused", "fox", PRO, fuse=True, kv_dtype="fp8"),
    TimedModel("FoX (Pro) + ACP, evicting, fp8, fused", "fox", PRO, EVICT, fuse=True, kv_dtype="fp8"),
    TimedModel("FoX (Pro), fused", "fox", {"block": "pro"}, fuse=True),
    TimedModel("FoX (Pro), fp8, fused", "fox", {"block": "pro"}, fuse=True, kv_dtype="fp8"),
    TimedModel("FoX (Pro) + ACP, not compiled", "fox", PRO, compile=False),
    TimedModel("FoX (Pro) + ACP, no graph", "fox", PRO, graph=False, compile=False),
    TimedModel("RoPE", "rope"),
    TimedModel("PaTH-FoX", "path_fox"),
    TimedModel("PaTH-FoX (Pro) + ACP, fused", "path_fox", PRO, fuse=True),
    TimedModel("PaTH-FoX (Pro) + ACP, evicting, fused", "path_fox", PRO, EVICT, fuse=True),
    TimedModel("Mamba-2", "mamba2", fuse=True),
    TimedModel("Gated DeltaNet", "gated_deltanet", fuse=True),
    TimedModel("8B, RoPE", "rope", GROUPED, sizes=LLAMA_8B),
    TimedModel("8B, RoPE, fp8", "rope", GROUPED, kv_dtype="fp8", sizes=LLAMA_8B),
    TimedModel("8B, FoX + ACP", "fox", {**GROUPED, "acp": True}, sizes=LLAMA_8B),
    TimedModel("8B, FoX + ACP, fp8", "fox", {**GROUPED, "acp": True}, kv_dtype="fp8", sizes=LLAMA_8B),
)
PEERS = (  # of transformers
    TimedModel("Llama, dynamic cache", "llama", compile=False),
    TimedModel("Llama, static cache, compiled", "llama"),
)


def build(contender: TimedModel, device: str = "cuda", **sizes: Any) -> LanguageModel:
    """A model with random weights in bfloat16, and gates as in trained models."""
    torch.manual_seed(0)
    sizes = {**SIZES, **contender.sizes, **sizes}
    config = ModelConfig(attention=contender.attention, attention_options=contender.options, **sizes)
    with torch.device(device):
        model = LanguageModel(config).bfloat16().eval()
    with torch.no_grad():
        for projection, bias in trained_biases(model).values():
            projection.weight.zero_()
            projection.bias.copy_(bias)
    return model


@torch.no_grad()
def filled(model: LanguageModel, tokens: int, seed: int, evict: float | None = None) -> list[LayerCache]:
    """Caches of one sequence filled with random keys and states of ``tokens`` tokens; see ``new_cache`` for
    ``evict``."""
    torch.manual_seed(seed)
    device = model.embedding.weight.device
    caches = model.new_cache(evict)
    model.hidden(torch.zeros(1, 1, dtype=torch.int64, device=device), cache=caches)
    for cache in caches:
        state = cache.state
        if not state.grows:
            cache.state = RecurrentState(torch.randn_like(state.matrix), tokens)
        elif state.in_pages:
            cache.state = _pages(state, tokens)
        else:
            cache.state = _keys(state, tokens)
        cache.windows = {name: torch.randn_like(window) for name, window in cache.windows.items()}
        cache.seen = torch.full((1,), tokens, device=device)
    return caches


def _keys(state: KVCache, tokens: int) -> KVCache:
    """A cache with random keys of length sqrt(K), values and gates of ``tokens`` tokens."""

    def draw(x: Tensor) -> Tensor:
        return torch.randn(1, tokens, *x.shape[2:], dtype=x.dtype, device=x.device)

    k, gates = F.rms_norm(draw(state.k), state.k.shape[-1:]), state.log_decay
    if gates is not None:
        gates = 2 * torch.rand(1, tokens, gates.shape[2], device=gates.device) * gates
    return replace(KVCache(k, draw(state.v), gates, carried=state.carried), phase=state.phase, angle=state.angle)


def _pages(state: PagedCache, tokens: int) -> PagedCache:
    """A paged cache with random keys, values and gates of ``tokens`` tokens, from one with a token."""
    pool, device = state.pool, state.pool.k.device
    B, G, K, V, T = len(pool.lengths), pool.table.shape[1], pool.k.shape[2], pool.v.shape[2], tokens - 1
    k, v = F.rms_norm(torch.randn(B, T, G, K, device=device), (K,)), torch.randn(B, T, G, V, device=device)
    g = None if pool.total is None else 2 * torch.rand(B, T, pool.total.shape[1], device=device) * pool.total[:, None]
    g = None if g is None else g.float()
    w = F.normalize(torch.randn(B, T, G, K, device=device), dim=-1)  # w of transitions that carry keys
    pool.add(k, v, Gate(log_decay=g, w=w, beta=2 * torch.rand(B, T, G, device=device)), None)
    return PagedCache.of(pool, state.evict, tokens=tokens, phase=state.phase, angle=state.angle)


def generator_of(model: LanguageModel, contender: TimedModel, batch: int, tokens: int, steps: int) -> Generator:
    """A generator whose rows all have ``tokens`` cached tokens."""
    generator = Generator(
        model, batch, tokens + steps + 1, check_every=16, evict=contender.evict, kv_dtype=contender.kv_dtype,
        graph=contender.graph and model.embedding.weight.is_cuda,
        compile=contender.compile and model.embedding.weight.is_cuda, fuse=contender.fuse,
    )  # fmt: skip
    for row in range(batch):
        generator.resume(filled(model, tokens, row, contender.evict), 0, steps, Sampling(0.0))
        generator.admit()  # one by one, so that only one cache is held twice
    if generator.waiting:
        raise MemoryError(f"caches: expected room for {batch} sequences, got it for {batch - len(generator.waiting)}")
    return generator


def milliseconds_per_step(step: Callable[[], Any], device: torch.device) -> float:
    """The mean wall time of ``STEPS`` steps in sequence, after ``WARM`` further ones."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARM):
        step()
    wait()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    return (time.perf_counter() - start) / STEPS * 1e3


def measure(model: LanguageModel, contender: TimedModel, batch: int, tokens: int) -> dict[str, Any]:
    """The milliseconds per step (one token of all rows), the memory of the cache, and the share of keys held."""
    generator = generator_of(model, contender, batch, tokens, STEPS + WARM + 2)
    kept = [cache.memory.kept(0) for cache in generator.batch.caches]
    heads = [n / generator.batch.rows.lengths[0] for layer in kept if layer is not None for n in layer]
    ms = milliseconds_per_step(generator.step, generator.device)
    share = {"kept": sum(heads) / len(heads)} if heads else {}
    return {"ms": ms, "cache_gb": generator.bytes() / 1e9, **share}


def llama() -> Any:
    """The Llama of transformers with these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    wide = ModelConfig(**SIZES)
    config = LlamaConfig(
        hidden_size=wide.hidden_size, num_hidden_layers=wide.num_layers, num_attention_heads=wide.num_heads,
        intermediate_size=wide.mlp_size, vocab_size=wide.vocab_size, max_position_embeddings=2**18,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        return LlamaForCausalLM(config).bfloat16().eval()


@torch.no_grad()
def measure_llama(model: Any, static: bool, batch: int, tokens: int) -> dict[str, Any]:
    """The measurements of ``measure`` for Llama; steps with the static cache are compiled."""
    from transformers import DynamicCache, StaticCache

    from attnzoo.models.hf.cache import NAME

    config = model.config
    new = STEPS + WARM + 2
    size = -(-(tokens + new) // 128) * 128
    cache = StaticCache(config=config, max_cache_len=size) if static else DynamicCache(config=config)
    head = (config.num_attention_heads, tokens, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(batch, *head, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cache.update(k, v, layer, {"cache_position": torch.arange(tokens, device="cuda")})
    used = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    run = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if static else model.forward
    token = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
    place = torch.full((1,), tokens, device="cuda")

    def step() -> None:
        given = {NAME: cache, "use_cache": True, "position_ids": place[None], "cache_position": place}
        logits = run(input_ids=token, **given).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        place.add_(1)

    return {"ms": milliseconds_per_step(step, torch.device("cuda")), "cache_gb": used / 1e9}


def table(result: Result) -> str:
    """The result as a page of Markdown."""
    m = result["machine"]
    lines = [
        f"{m['gpu']}, torch {m['torch']}, Triton {m['triton']}, {m['date']}; bf16, {result['sizes']}.",
        *not_measured(result["missing"]),
        "",
    ]

    def cells(r: Result) -> list[object]:
        measured = [f"{r['ms']:.2f}", f"{r['cache_gb']:.2f}"] if "ms" in r else [r["failed"], "-"]
        return [r["batch"], r["tokens"], r["name"], *measured, f"{r['kept']:.0%}" if "kept" in r else "-"]

    columns = ("batch", "cached tokens", "", "ms per token", "GB of cache", "keys kept")
    return "\n".join([*lines, *markdown_table(columns, map(cells, result["rows"]))]) + "\n"


def run(out: Path, tokens: Sequence[int], batch: Sequence[int], only: Sequence[str], seconds: float) -> None:
    """Measure, print the table, and write results.json and results.md to ``out``."""
    missing: list[str] = []
    asked = chosen([*OURS, *PEERS], only)
    if any(peer in asked for peer in PEERS) and load_peer("Llama", lambda: __import__("transformers"), missing) is None:
        asked = [contender for contender in asked if contender not in PEERS]
    result: Result = {"machine": describe_versions(), "sizes": str(SIZES), "missing": missing, "rows": []}
    end, keep = time.perf_counter() + seconds, keeper(out, table)
    cells = [(B, S) for B in batch or (4,) for S in tokens or (16384,)]
    for contender in asked:
        name, ours, model = contender.name, contender in OURS, cast(Any, None)
        for B, S in cells:
            found: dict[str, Any] = {}
            if time.perf_counter() > end:
                missing.append(f"{name} at batch {B} and {S} tokens: no time was left")
                continue
            try:
                model = (build(contender) if ours else llama()) if model is None else model
                found = measure(model, contender, B, S) if ours else measure_llama(model, contender.compile, B, S)
            except (MemoryError, torch.OutOfMemoryError) as error:
                missing.append(f"{name} at batch {B} and {S} tokens: {str(error).split('. ')[0]}")
                print(missing[-1], flush=True)
            except Exception as error:
                found = {"failed": reason(error)[:200]}
            if found:
                result["rows"].append({"name": name, "batch": B, "tokens": S, **found})
                print(json.dumps(result["rows"][-1]), flush=True)
                keep(result)
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()  # drop the compiled code of the last measurement
    order = {cell: n for n, cell in enumerate(cells)}
    result["rows"].sort(key=lambda row: order[row["batch"], row["tokens"]])
    finish(out, result, table)
