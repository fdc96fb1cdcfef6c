"""The small trained FoX of the home page: ``python docs/figures/home.py`` trains it and writes its weights.

Training takes ten minutes of one core, so what comes of it is kept: ``interactive/fox_weights.js``.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from trained import HERE, configured, model_of

from attnzoo.config import TrainConfig
from attnzoo.data import build_data, heldout_windows
from attnzoo.models import LanguageModel
from attnzoo.precision import GateAffine

OUT = HERE.parent / "interactive" / "fox_weights.js"
BEFORE, AFTER = "// written by docs/figures/home.py\nwindow.foxWeights = ", ";\n"
MEASURED = 2**17  # held-out tokens


@dataclass(frozen=True)
class Facts:
    """What the page says of the model, and needs to run it.

    Args:
        hidden: channels.
        layers: blocks.
        heads: per layer.
        parameters: weights in all.
        tokens: bytes that it has read in training.
        bits: per byte of held-out text, with the weights that are written.
    """

    hidden: int
    layers: int
    heads: int
    parameters: int
    tokens: int
    bits: float


def home_config() -> TrainConfig:
    """The FoX of the home page."""
    return configured("home.yaml")  # type: ignore[no-any-return]


def write(model: LanguageModel, facts: Facts) -> str:
    """The script that the page loads: matrices as int8 with a scale per row, the rest as float32, in base64.

    A scale is rounded down to the upper half of a float32, so that writing what was read changes nothing.
    """
    layers = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | GateAffine | nn.Embedding)
    ]
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "head.weight":  # the embedding's
            continue
        if name.removesuffix(".weight") not in layers:
            tensors[name] = {"float32": _base64(weight.float())}
            continue
        largest = weight.float().abs().amax(1, keepdim=True).clamp(min=2**-100)
        bits = (largest / 127).view(torch.int32) & ~0xFFFF
        whole = (weight / bits.view(torch.float32)).round().clamp(-127, 127)
        tensors[name] = {"int8": _base64(whole.to(torch.int8)), "scale": _base64((bits >> 16).to(torch.int16))}
    return BEFORE + json.dumps(asdict(facts) | {"tensors": tensors}, separators=(",", ":")) + AFTER


def read(script: str, variant: str = "fox") -> tuple[LanguageModel, Facts]:
    """The model of what :func:`write` gave, its weights as they were written.

    Args:
        script: the text.
        variant: ``fox``, or ``mamba2`` for the same weights read by the recurrence.
    """
    content = json.loads(script.removeprefix(BEFORE).removesuffix(AFTER))
    tensors = content.pop("tensors")
    options = {"block": "pro", "gate": "forget"}
    model = LanguageModel(replace(home_config().model, attention=variant, attention_options=options))
    state = model.state_dict()
    for name, packed in tensors.items():
        if "float32" in packed:
            weight = _tensor(packed["float32"], np.float32).reshape(state[name].shape)
        else:
            scale = (_tensor(packed["scale"], np.int16).int() << 16).view(torch.float32)
            weight = _tensor(packed["int8"], np.int8).reshape(len(scale), -1) * scale[:, None]
        state[name] = weight
    model.load_state_dict(state | {"head.weight": state["embedding.weight"]})
    return model.eval(), Facts(**content)


@torch.inference_mode()
def bits_per_byte(model: LanguageModel, config: TrainConfig) -> float:
    """The loss in bits per byte of held-out text, in windows as long as those of training."""
    rows = heldout_windows(build_data(config.data).heldout, config.data.context_length, MEASURED)
    losses = [model(part[:, :-1], targets=part[:, 1:]).loss for part in torch.from_numpy(rows).split(32)]
    return float(torch.stack(losses).mean()) / math.log(2)


def facts_of(model: LanguageModel, config: TrainConfig, bits: float) -> Facts:
    """What is known of the model that ``config`` trains, beside the bits that were measured."""
    sizes, parameters = config.model, sum(weight.numel() for weight in model.parameters())
    tokens = config.steps * config.batch_size * config.data.context_length
    return Facts(sizes.hidden_size, sizes.num_layers, sizes.num_heads, parameters, tokens, bits)


def live() -> None:
    """Train the model, if that has not been done, and write ``interactive/fox_weights.js``."""
    config = home_config()
    model = model_of(config)
    facts = facts_of(model, config, 0.0)
    shipped, _ = read(write(model, facts))
    facts = replace(facts, bits=round(bits_per_byte(shipped, config), 3))
    OUT.write_text(write(model, facts), encoding="utf-8")
    print(facts)


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def _tensor(text: str, dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=dtype).copy())


if __name__ == "__main__":
    live()
