"""Ways to run a training step, by name; without torch, as the command line reads them before it is needed."""

from __future__ import annotations

from typing import Any

# name -> the arguments of `torch.compile`; None: it is not compiled
MODES: dict[str, dict[str, Any] | None] = {"eager": None, "compiled": {}, "graphs": {"mode": "reduce-overhead"}}
