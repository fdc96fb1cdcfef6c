"""Models of the tests of generation, and what they generate alone."""

import torch

from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel

LENGTHS = (3, 11, 1, 6)


def build(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40, "initializer_range": 0.3}
    model = LanguageModel(ModelConfig(**{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def alone(model, prompt, new):
    return model.generate(prompt[None], new, temperature=0)[0, len(prompt) :].tolist()
