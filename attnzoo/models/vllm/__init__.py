"""The decoder in vLLM: `vllm serve FOLDER` serves a folder that `attnzoo export` has written.

vLLM loads this package by the entry point `vllm.general_plugins`, and nothing else imports it. The served model is the
decoder itself; only the cores of its attention layers are vLLM's, and the states between steps lie in vLLM's pages.
"""

ARCHITECTURE = "AttnzooForCausalLM"


def register() -> None:
    """Make the model and its configuration known to vLLM, in each of its processes."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from attnzoo.models.vllm.config import ServedConfig
    from attnzoo.models.vllm.start import AtStart

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, "attnzoo.models.vllm.model:ServedModel")
    MODELS_CONFIG_MAP[ARCHITECTURE] = AtStart
