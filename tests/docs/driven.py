"""A page that is driven by hand: its sliders and its numbers."""

from __future__ import annotations

import torch


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def slide(page, name: str, keys: str) -> None:
    """Press keys on a slider."""
    slider = page.locator(f"[name={name}]")
    slider.focus()
    for key in keys.split():
        slider.press(key)
