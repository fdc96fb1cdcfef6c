"""What the small trained models of the package are worth: a table, and what pages quote.

The numbers on the standard library's source are kept in ``data/small.json``: ``python docs/figures/small.py`` takes
them, on a CPU in some minutes. Those on held-out files are of the models' own training.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from attnzoo.benchmarks.measure import markdown_table

DATA = Path(__file__).parent / "data" / "small.json"
MODELS = ("mamba2-small", "fox-small", "gated_deltanet-small", "path_fox-small")
TOKENS = 32768
EPSILONS = (1e-8, 1e-6, math.exp(-10), 1e-3, 1e-2, 1e-1)


def record() -> None:
    """Keep each model's loss in its training context and in the next one, and what pruning leaves out."""
    import torch

    from attnzoo.data.windows import heldout_windows
    from attnzoo.evaluation import token_losses
    from attnzoo.evaluation.pruning import measure_pruning, sweep_eps
    from attnzoo.experiments.report.results import describe_machine
    from attnzoo.trained.model import held_out_text, load_trained

    torch.set_flush_denormal(True)
    found: dict[str, Any] = {"machine": describe_machine()}
    for name in MODELS:
        trained = load_trained(name)
        T = trained.context
        assert T is not None
        windows = torch.from_numpy(heldout_windows(held_out_text(trained, "stdlib"), 2 * T, TOKENS))
        losses = token_losses(trained.model, windows, 1)
        found[name] = {"loss": float(losses[:, :T].mean()), "beyond": float(losses[:, T:].mean())}
        if "fox" in name:
            pruned = measure_pruning(trained.model, windows[0, :T])
            found[name] |= {"pruned": pruned.share, "heads": pruned.heads}
        if name == "fox-small":
            rows = sweep_eps(trained.model, windows[:2, : T + 1], EPSILONS, repeats=1).rows
            found[name]["eps"] = [{field: getattr(row, field) for field in ("eps", "change", "kept")} for row in rows]
        print(name, found[name], flush=True)
    DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def of(name: str) -> dict[str, Any]:
    """The numbers of a model; ``held out`` is its training's."""
    from attnzoo.training import read_metrics
    from attnzoo.training.small import SMALL

    held_out = [row["loss"] for row in read_metrics(SMALL / name) if row["kind"] == "eval"]
    return {**json.loads(DATA.read_text(encoding="utf-8"))[name], "held out": held_out[-1]}


def table() -> str:
    """The models by name, with their losses."""
    rows = []
    for name in MODELS:
        found = of(name)
        pruned = f"{100 * found['pruned']:.0f}%" if "pruned" in found else ""
        rows.append([f"`{name}`", *(f"{found[kind]:.3f}" for kind in ("held out", "loss", "beyond")), pruned])
    titles = ["", "held-out files", "standard library", "in the next 4096 bytes", "blocks pruned"]
    return "\n".join(markdown_table(titles, rows))


def eps_table() -> str:
    """What pruning adds to the loss of FoX, and what it keeps, by eps."""
    rows = of("fox-small")["eps"][1:]
    cells = ((f"{row['eps']:.2g}", f"{row['change']:.1e}", f"{100 * row['kept']:.1f}%") for row in rows)
    return "\n".join(markdown_table(["eps", "loss added", "blocks kept"], cells))


if __name__ == "__main__":
    record()
