"""A decoder language model over any of the zoo's attention variants, one per layer."""

from attnzoo.models.decoder import LanguageModel, ModelOutput

__all__ = ["LanguageModel", "ModelOutput"]
