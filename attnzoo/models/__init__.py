"""A decoder language model over any of the zoo's attention variants, one per layer."""

from typing import TYPE_CHECKING

from attnzoo.lazy import lazy

if TYPE_CHECKING:
    from attnzoo.models.decoder import LanguageModel, ModelOutput
    from attnzoo.models.generation.engine import Generator

__all__ = ["Generator", "LanguageModel", "ModelOutput"]

__getattr__ = lazy(__name__, {"Generator": "generation.engine", "LanguageModel": "decoder", "ModelOutput": "decoder"})
