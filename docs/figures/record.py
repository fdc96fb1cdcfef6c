"""Reads off the trained zoo what the figures compare: ``python docs/figures/record.py``, after `attnzoo compare`.

Training fourteen models takes a quarter of an hour, so what is read off them is kept: arrays in ``data/zoo.npz``, the
numbers and names of the runs in ``data/zoo.json``.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import torch
from trained import HERE, ROOT, Array, cores, heldout, zoo_config

from attnzoo.algebra.gate import Gate
from attnzoo.experiments.compare import plan, result_of
from attnzoo.training import load_run

DATA = HERE / "data"
DISTANCES = 256


def decay_profile(gate: Gate, heads: int, K: int, length: int) -> Array:
    r"""What is left of a key after n tokens, for a query that looks the same way: ``e^d tr(R_{j+1} ... R_t) / K``.

    The mean of :math:`e^{d_{tj}} x^\top R_{j+1} \cdots R_t x` over all unit vectors x: 1 where nothing is forgotten or
    turned.

    Args:
        gate: of one sequence, float64.
        heads: H.
        K: channels of a head.
        length: largest distance + 1; the query is the last token.

    Returns:
        ``[H, length]``.
    """
    T = next((getattr(gate, part).shape[1] for part in gate.parts if getattr(gate, part).ndim > 1), length)
    g, R = gate.dense(torch.zeros(1, T, heads, K, dtype=torch.float64))
    left = [torch.ones(heads, dtype=torch.float64)]
    product, total = torch.eye(K, dtype=torch.float64).expand(heads, K, K), torch.zeros(heads, dtype=torch.float64)
    for t in range(T - 1, T - length, -1):
        product, total = R[0, t] @ product, total + g[0, t]
        left.append(total.exp() * product.diagonal(dim1=-2, dim2=-1).sum(-1) / K)
    return np.asarray(torch.stack(left, -1).numpy(), dtype=np.float64)


def record() -> None:
    config = zoo_config()
    arrays, facts = {}, []
    window = heldout(DISTANCES + 1)
    for run in plan(config):
        result = result_of(ROOT / run.config.output_dir)
        model, _ = load_run(run.config.output_dir)
        profiles = [
            decay_profile(core.gate, core.q.shape[1], core.q.shape[2], DISTANCES) for core in cores(model, window)
        ]
        arrays[f"{run.key}.token_loss"] = result.token_loss.astype(np.float32)
        arrays[f"{run.key}.profile"] = np.concatenate(profiles).astype(np.float32)
        kept = {"label": result.facts.label, "loss": result.final_loss[0], "error": result.final_loss[1]}
        shown = ("key", "variant", "side", "pair", "context", "steps", "tokens", "parameters", "machine")
        facts.append(kept | {name: value for name, value in asdict(result.facts).items() if name in shown})
    DATA.mkdir(exist_ok=True)
    np.savez_compressed(DATA / "zoo.npz", **arrays)
    (DATA / "zoo.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
