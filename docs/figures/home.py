"""What the home page's live picture needs of a trained FoX: scores and gates of three heads on a piece of code."""

from __future__ import annotations

import json

import torch
from trained import HERE, cores, fox_config, model_of

TEXT = "def area(r):\n    return pi * r * r\n\nprint(area(2))\n"
OUT = HERE.parent / "interactive" / "fox_data.js"


def live() -> None:
    """Write ``interactive/fox_data.js``: of a local head, one between and a global one, s below the diagonal and g."""
    tokens = torch.tensor(list(TEXT.encode()))
    found = []
    for core in cores(model_of(fox_config()), tokens):
        assert core.gate.log_decay is not None
        s = torch.einsum("thk,jhk->htj", core.q, core.k)
        for head in range(core.q.shape[1]):
            g = core.gate.log_decay[0, :, head]
            rows = [[round(float(x), 3) for x in s[head, t, : t + 1]] for t in range(len(tokens))]
            place = f"layer {core.layer + 1}, head {head + 1}"
            found.append((float(g.sum()), {"place": place, "g": [round(float(x), 4) for x in g], "s": rows}))
    found.sort(key=lambda entry: entry[0])
    heads = [found[0][1], found[len(found) // 2][1], found[-1][1]]
    data = json.dumps({"text": TEXT, "heads": heads}, separators=(",", ":"))
    OUT.write_text(f"// drawn by docs/figures/home.py\nwindow.foxData = {data};\n", encoding="utf-8")


if __name__ == "__main__":
    live()
