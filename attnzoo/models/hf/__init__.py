"""The decoder as a Hugging Face model: `AutoModelForCausalLM`, `generate`, `Trainer`, PEFT.

Needs transformers (`pip install 'attnzoo[hf]'`), 4.57 or newer. After `import attnzoo`, the Auto classes know
`model_type: attnzoo` (:mod:`attnzoo.models.hf.register`).
"""

from typing import TYPE_CHECKING

from attnzoo.lazy import lazy

if TYPE_CHECKING:
    from attnzoo.models.hf.cache import ModelCache
    from attnzoo.models.hf.config import AttnzooConfig
    from attnzoo.models.hf.model import AttnzooForCausalLM

__all__ = ["AttnzooConfig", "AttnzooForCausalLM", "ModelCache"]

__getattr__ = lazy(__name__, {"AttnzooConfig": "config", "AttnzooForCausalLM": "model", "ModelCache": "cache"})
