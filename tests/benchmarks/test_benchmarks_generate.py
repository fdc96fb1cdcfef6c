"""Benchmarks of generation: what is chosen, what is measured, and what is said of that which does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnzoo.benchmarks import generate


def test_what_does_not_fit_into_memory_is_said_and_what_fails_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(model: Any, contender: generate.TimedModel, batch: int, tokens: int) -> dict[str, Any]:
        if batch == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        if tokens == 4096:
            raise MemoryError("caches of 4 sequences: expected room for 99.00 GiB on cuda, got 1.25 GiB")
        return {"ms": 1.0, "cache_gb": 2.0} if batch == 4 else {"failed": "so it is"}

    here = {"gpu": "none", "torch": "", "triton": "", "date": ""}
    for name, fake in (("build", lambda contender: None), ("measure", measure), ("describe_versions", lambda: here)):
        monkeypatch.setattr(generate, name, fake)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)  # there is nothing that it could forget
    generate.run(tmp_path, [1024, 4096], [4, 8, 64], ["RoPE"], 60.0)
    text = (tmp_path / "results.md").read_text()
    assert "| 4 | 1024 | RoPE | 1.00 | 2.00 | - |\n| 8 | 1024 | RoPE | so it is | - | - |\n" in text
    assert text.count("| RoPE |") == 2
    assert "RoPE at batch 64 and 1024 tokens: CUDA out of memory." in text
    assert "RoPE at batch 4 and 4096 tokens: caches of 4 sequences: expected room for 99.00 GiB on cuda, got" in text


def test_models_to_generate_with_are_chosen_by_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(model: Any, *given: Any) -> dict[str, Any]:
        return {"ms": 1.0, "cache_gb": 2.0}

    for name in ("build", "llama"):
        monkeypatch.setattr(generate, name, lambda *given: None)
    for name in ("measure", "measure_llama"):
        monkeypatch.setattr(generate, name, measure)
    monkeypatch.setattr(generate, "load_peer", lambda name, load, missing: True)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    generate.run(tmp_path, [64], [1], ["Llama, s", "RoPE"], 60.0)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["RoPE", "Llama, static cache, compiled"]
    with pytest.raises(ValueError, match="unknown contender 'Llama, statisch'.*did you mean 'Llama, static"):
        generate.run(tmp_path, [64], [1], ["Llama, statisch"], 60.0)


@pytest.mark.parametrize("contender", generate.OURS, ids=lambda contender: contender.name)
def test_generation_is_measured_from_full_caches(contender: generate.TimedModel) -> None:
    sizes = {"hidden_size": 64, "num_layers": 1, "num_heads": 8, "vocab_size": 50, "intermediate_size": 64}
    row = generate.measure(generate.build(contender, device="cpu", **sizes), contender, 2, 1500)
    assert row["ms"] > 0
    assert row["cache_gb"] > 0
    if contender.evict is not None:
        assert 0.25 < row["kept"] < 0.95
    else:
        assert row.get("kept") == (None if contender.attention in ("mamba2", "gated_deltanet") else 1.0)
