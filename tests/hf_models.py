"""Small models behind Hugging Face's interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers")

from attnzoo.models.hf import AttnzooConfig, AttnzooForCausalLM  # noqa: E402

HYBRID = ["mamba2", "fox"]
SOME = ["fox", "path_fox", "complex_linear", "retnet", "gated_deltanet", HYBRID]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


@pytest.fixture
def tokens():
    return torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def build(attention="fox", seed=0, **options):
    torch.manual_seed(seed)
    config = AttnzooConfig(attention, **{**SIZES, "pad_token_id": 0, "eos_token_id": None, **options})
    return AttnzooForCausalLM(config).eval()


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def ids(model):
    return "-".join(model) if isinstance(model, list) else model


def peft_of_this_release() -> Any:
    """PEFT, where this release of transformers takes it: 5.24 asks for a later one than there is."""
    peft, integration = pytest.importorskip("peft"), pytest.importorskip("transformers.integrations.peft")
    if Version(peft.__version__) < Version(integration.MIN_PEFT_VERSION):
        pytest.skip(f"transformers {transformers.__version__} takes PEFT from {integration.MIN_PEFT_VERSION} on")
    return peft
