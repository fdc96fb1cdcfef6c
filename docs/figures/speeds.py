"""The tables of speeds of the README and of the page of benchmarks, from the records that are not in the archive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quoted import BENCHMARKS, mean, over, run
from quoted import row as row_of

from attnzoo.benchmarks.gpt import PLAIN
from attnzoo.benchmarks.measure import with_kernels
from attnzoo.benchmarks.modes import MODES
from attnzoo.experiments.experiment import find
from attnzoo.registry.table import BUILT_IN, PAIRS

Row = dict[str, Any]


def records(kernel: str) -> list[tuple[str, dict[str, Any]]]:
    """Folder and record of every current run of a benchmark, the newest first."""
    names = sorted((path.name for path in BENCHMARKS.glob(f"*-{kernel}")), reverse=True)
    return [(name, run(name)) for name in names]


def link(folder: str, said: str = "all") -> str:
    return f"[{said}](src:docs/benchmarks/results/{folder}/results.md)"


def machine(record: dict[str, Any]) -> str:
    """The GPU and the release of Triton, in short words."""
    gpu = record["machine"]["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
    return f"{gpu}, {record['machine']['triton']}"


def times(ours: Row | None, other: Row | None, key: str = "both_ms") -> str:
    """How many times our time another takes."""
    return f"{other[key] / ours[key]:.2f}" if ours and other else ""


def shaped(kernel: str, peers: Iterable[str]) -> list[tuple[str, dict[str, Any], tuple[int, ...], dict[str, Row]]]:
    """Folder, record, shape and rows by name, one per machine, shape and number of key heads: the newest that timed a
    peer, else the newest."""
    chosen: dict[tuple[Any, ...], Any] = {}
    peers = tuple(peers)
    for folder, record in records(kernel):
        shapes = dict.fromkeys(tuple(row[axis] for axis in "BHTK") for row in record["rows"])
        for shape in shapes:
            rows = {row["name"]: row for row in record["rows"] if tuple(row[axis] for axis in "BHTK") == shape}
            key = (machine(record), shape, record.get("kv_heads"))
            has = any(peer in rows for peer in peers)
            if key not in chosen or (has and not chosen[key][4]):
                chosen[key] = (folder, record, shape, rows, has)
    order = sorted(chosen.values(), key=lambda each: (each[2][3], each[2][2], machine(each[1]), each[0]))
    return [each[:4] for each in order]


def markdown(titles: list[str], rows: Iterable[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


def _shape(shape: tuple[int, ...], record: dict[str, Any]) -> str:
    heads = f", {record['kv_heads']} key heads" if "kv_heads" in record else ""
    return f"({', '.join(map(str, shape))}){heads}"


def fox() -> str:
    """FoX, forward and backward: our milliseconds, and how many times as long the others take."""
    others = {"its authors'": "official", "FLA": "FLA", "cuDNN, no gate": "SDPA cuDNN (no gate)"}
    titles = ["(B, H, T, K)", "GPU, Triton", "ms", *others, "with ACP, ms", "its authors' with ACP", ""]
    lines = []
    for folder, record, shape, rows in shaped("fox", ("official", "FLA")):
        ours, pruned = rows["ours"], rows.get("ours, pruned (tail)")
        lines.append([
            _shape(shape, record), machine(record), f"{ours['both_ms']:.1f}",
            *(times(ours, rows.get(name)) for name in others.values()),
            f"{pruned['both_ms']:.2f}" if pruned else "", times(pruned, rows.get("official, pruned")), link(folder),
        ])  # fmt: skip
    return markdown(titles, lines)


def path() -> str:
    """PaTH and PaTH-FoX, forward and backward."""
    titles = ["(B, H, T, K)", "GPU, Triton", "", "ms", "FLA", "our FoX", "extra GiB", "FLA's", ""]
    peers = {"PaTH": "FLA PaTH", "PaTH-FoX": "FLA PaTH-FoX"}
    lines = []
    for folder, record, shape, rows in shaped("path", peers.values()):
        for name in [name for name in rows if name.startswith("PaTH")]:
            peer = rows.get(peers[name.partition(",")[0]])
            base = rows["FoX, pruned" if "pruned" in name else "FoX"]
            lines.append([
                _shape(shape, record), machine(record), name.replace(", pruned", " + ACP"),
                f"{rows[name]['both_ms']:.1f}", times(rows[name], peer),
                f"{rows[name]['both_ms'] / base['both_ms']:.2f}",
                f"{rows[name]['extra_GiB']:.2f}", f"{peer['extra_GiB']:.2f}" if peer else "", link(folder),
            ])  # fmt: skip
    return markdown(titles, lines)


def wall() -> str:
    """Wall, forward and backward."""
    titles = ["(B, H, T, K)", "GPU, Triton", "ms", "FLA", "our FoX, no gate", "extra GiB", "FLA's", ""]
    lines = []
    for folder, record, shape, rows in shaped("wall", ["FLA Wall"]):
        ours, peer, base = rows["Wall"], rows.get("FLA Wall"), rows.get("FoX without a gate")
        lines.append([
            _shape(shape, record), machine(record), f"{ours['both_ms']:.1f}", times(ours, peer),
            f"{ours['both_ms'] / base['both_ms']:.2f}" if base else "", f"{ours['extra_GiB']:.2f}",
            f"{peer['extra_GiB']:.2f}" if peer else "", link(folder),
        ])  # fmt: skip
    return markdown(titles, lines)


def decode() -> str:
    """One token of FoX after a cache."""
    titles = ["(B, H, cached, K)", "GPU, Triton", "ms", "of a copy", "its authors'", "FLA", "SDPA, no gate"]
    titles += ["with ACP, ms", "its authors' with ACP", ""]
    lines = []
    for folder, record in records("decode"):
        for shape in dict.fromkeys(tuple(row[axis] for axis in "BHSK") for row in record["rows"]):
            rows = {row["name"]: row for row in record["rows"] if tuple(row[axis] for axis in "BHSK") == shape}
            timed = {name: row for name, row in rows.items() if "ms" in row}
            ours, pruned = timed["ours"], timed["ours, pruned (tail)"]
            lines.append([
                _shape(shape, record), machine(record), f"{ours['ms']:.3f}", f"{ours['of_floor']:.2f}",
                *(times(ours, timed.get(name), "ms") for name in ("official", "FLA", "SDPA (no gate)")),
                f"{pruned['ms']:.3f}", times(pruned, timed.get("official, pruned"), "ms"), link(folder),
            ])  # fmt: skip
    return markdown(titles, lines)


def generate() -> str:
    """A step of generation of whole models, milliseconds."""
    models = ("FoX (Pro) + ACP, fused", "FoX (Pro) + ACP, evicting, fused", "PaTH-FoX (Pro) + ACP, fused")
    models += ("PaTH-FoX (Pro) + ACP, evicting, fused", "Mamba-2", "Gated DeltaNet", "Llama, static cache, compiled")
    titles = ["FoX", "evicting", "PaTH-FoX", "evicting", "Mamba-2", "Gated DeltaNet", "Llama"]
    lines = []
    for folder, record in records("generate"):
        if "not compiled" in record["sizes"]:
            continue
        for size in dict.fromkeys((row["batch"], row["tokens"]) for row in record["rows"]):
            rows = {row["name"]: row for row in record["rows"] if (row["batch"], row["tokens"]) == size}
            cells = [f"{rows[name]['ms']:.2f}" if "ms" in rows.get(name, {}) else "" for name in models]
            lines.append([f"{size[0]} × {size[1]}", machine(record), *cells, link(folder)])
    return markdown(["sequences × cached", "GPU, Triton", *titles, ""], lines)


def layers() -> str:
    """Every layer beside its dual, milliseconds: the pairs that the newest run has at both sizes."""
    folder, record = records("layers")[0]
    rows = {(row["T"], row["name"]): row for row in record["rows"]}
    titles, lines = ["linear side", "softmax side"], []
    titles += ["linear, 4 × 4096", "softmax", "with ACP", "linear, 1 × 16384", "softmax", "with ACP"]
    for names in ((pair.linear, pair.softmax, f"{pair.softmax} + ACP") for pair in BUILT_IN):
        cells = [rows.get((tokens, name)) for tokens in (4096, 16384) for name in names]
        if cells[0] and cells[1] and cells[3] and cells[4]:
            shown = [f"{cell['both_ms']:.1f}" if cell else "" for cell in cells]
            forms = ", ".join(with_kernels(cell, "form") for cell in cells[:2] if cell)
            lines.append([f"`{names[0]}`", f"`{names[1]}`", *shown, forms])
    return markdown([*titles, f"forms ({link(folder, machine(record))})"], lines)


COSTS = {"first_s": "first step, s", "peak_GiB": "GiB"}  # of a GPT's eager and compiled steps; graphs hide their memory


def gpt() -> str:
    """A GPT's training with each attention, on each machine, the fastest first in the first mode that it has: every
    mode is from the newest run that has it, and its share is of SDPA in that run."""
    chosen: dict[tuple[str, str], dict[str, tuple[str, Row, float]]] = {}
    for folder, record in records("gpt"):
        whole = {row["mode"]: row["tokens_per_second"] for row in record["rows"] if row["name"] == PLAIN}
        for row in record["rows"]:
            found = chosen.setdefault((row["name"], machine(record)), {})
            found.setdefault(row["mode"], (folder, row, row["tokens_per_second"] / whole[row["mode"]]))
    modes = [mode for mode in MODES if any(mode in found for found in chosen.values())]
    lines = []
    ordered = [(key, {mode: found[mode] for mode in modes if mode in found}) for key, found in chosen.items()]
    ordered.sort(key=lambda each: -next(iter(each[1].values()))[2])
    for (name, where), found in ordered:
        speeds = {
            mode: f"{row['tokens_per_second'] / 1e3:.0f} ({share:.2f})" for mode, (_, row, share) in found.items()
        }
        costs = [f"{found[mode][1][key]:.0f}" if mode in found else "" for key in COSTS for mode in modes[:2]]
        of: dict[str, list[str]] = {}
        for mode in found:
            of.setdefault(found[mode][0], []).append(mode)
        links = [link(folder, ", ".join(said) if len(of) > 1 else "all") for folder, said in of.items()]
        lines.append([name, *(speeds.get(mode, "") for mode in modes), *costs, where, "; ".join(links)])
    costs = [f"{said}, {mode}" for said in COSTS.values() for mode in modes[:2]]
    return markdown(["", *modes, *costs, "GPU, Triton", ""], lines)


def five() -> str:
    """The README's five, each a ratio of two times of one run."""
    fox, k64, k128 = (
        "2026-11-26-h200-fox",
        "2026-11-27-h200-triton-3.7.1-gluon-k64-path",
        "2026-11-27-h200-triton-3.7.1-gluon-path",
    )
    wall, token = "2026-11-22-h200-wall", "2026-11-23-h100-generate"

    def ratio(folder: str, slow: str, fast: str, **where: int) -> str:
        return f"{over(folder, slow, fast, **where):.1f}"

    def both(folders: tuple[str, str], slow: str, fast: str) -> str:
        low, high = sorted(ratio(f, slow, fast, K=K, T=16384) for f, K in zip(folders, (64, 128), strict=True))
        return f"{low} to {high}"

    def line(what: str, how: str, peer: str, *folders: str) -> list[str]:
        where = machine(run(folders[0])).replace(",", ", Triton")
        records = ", ".join(f"[record](docs/benchmarks/results/{folder}/results.md)" for folder in folders)
        return [what, how, peer, f"{where} ({records})"]

    return markdown(
        ["forward and backward, 16384 tokens", "times as fast", "as", "on"],
        [
            line("FoX", both((fox, fox), "official", "ours"), "the authors' kernel, as released", fox),
            line("FoX + ACP", both((fox, fox), "official, pruned", "ours, pruned (tail)"),
                "the same with its pruning, at the same ε", fox),
            line("PaTH-FoX", both((k64, k128), "FLA PaTH-FoX", "PaTH-FoX"),
                "flash-linear-attention 0.6.0, tuned", k64, k128),
            line("Wall", both((wall, wall), "FLA Wall", "Wall"),
                "flash-linear-attention 0.6.0, one of its 24 tiles", wall),
            line("a token of generation, FoX + ACP with eviction, 4 × 16384 cached",
                ratio(token, "Llama, static cache, compiled", "FoX (Pro) + ACP, evicting, fused", batch=4),
                "Hugging Face's Llama of that size, static cache, compiled", token),
        ],
    )  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "FoX": fox, "PaTH": path, "Wall": wall, "decoding": decode, "generation": generate, "layers": layers, "GPT": gpt,
}  # fmt: skip


def choice() -> str:
    """Measured time, memory, loss and recall of the seven pairs, for the page that helps to choose."""
    layers, generation = "2026-11-30-h200-layers", "2026-11-22-h200-generate"
    models = {
        "fox": "FoX (Pro) + ACP, evicting, fused",
        "path_fox": "PaTH-FoX (Pro) + ACP, evicting, fused",
        "mamba2": "Mamba-2",
        "gated_deltanet": "Gated DeltaNet",
        "rope": "Llama, static cache, compiled",
    }
    llama, lines = models["rope"], []
    for side in ("softmax", "linear"):
        for pair in PAIRS:
            name: str = getattr(pair, side)
            at = {"batch": 1, "tokens": 131072}
            model = models.get(name)
            step = row_of(generation, model, **at) if model else None
            recall = f"{name}, K = 16"
            asked = recall in find("recall").arm_names
            lines.append([
                f"`{name}`", f"{over(layers, name, 'nope', T=16384):.2f}",
                f"{over(generation, model, llama, **at):.2f}" if model else "",
                f"{step['cache_gb']:.2f}" if step else "",
                f"{mean('factorial', 'gpu', name):.2f}" if name in find("factorial").arm_names else "",
                f"{100 * mean('recall', 'gpu', recall, 'wrong answers'):.0f}%" if asked else "",
            ])  # fmt: skip
    return markdown(["", "training", "token", "cache, GB", "loss", "recall, wrong"], lines)
