"""vLLM says the tokens of the decoder itself: chunked, batched, preempted, and from its prefix cache."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, VOCABULARY, build, export, wrong

from attnzoo.models import LanguageModel
from attnzoo.models.vllm import register

pytest.importorskip("vllm", reason="vLLM is not installed (make test-vllm)")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_model_len": 320, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "block_size": 32, "disable_log_stats": False,
}  # fmt: skip
PAGES = {
    "fox_window": 12,
    "hybrid": 40,
    "heads_of_keys": 44,
    "linear_and_fox": 13,
}  # or 28: so few that four sequences of 250 tokens have no room


def engine(folder: str, **settings: Any) -> Any:
    from vllm import LLM

    register()
    return LLM(folder, **{"dtype": "float32", **SETTINGS, **settings})


def release(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def ask(llm: Any, prompts: list[list[int]], tokens: int, **sampling: Any) -> Any:
    from vllm import SamplingParams

    given = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "detokenize": False, **sampling})
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], given, use_tqdm=False)


def said(llm: Any, model: LanguageModel, prompts: list[list[int]], tokens: int) -> Any:
    """The outputs, each of which is what the model itself says."""
    outputs = ask(llm, prompts, tokens)
    found = {len(p): wrong(model, p, list(o.outputs[0].token_ids)) for p, o in zip(prompts, outputs, strict=True)}
    assert not any(found.values()), found
    assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)
    return outputs


def counted(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def prompt(length: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_decoders_own(family: str, tmp_path: Path) -> None:
    random.seed(0)
    model = build(family)
    llm = engine(export(model, tmp_path), enable_prefix_caching=True, num_gpu_blocks_override=PAGES.get(family, 28))
    try:
        prompts = [prompt(n) for n in (1, 5, 17, 40, 64, 150, 250)]
        said(llm, model, prompts, 30)  # in chunks of at most 64 tokens, four sequences at a time
        reused = said(llm, model, [prompts[-1] + prompt(n) for n in (0, 3, 20)], 30)
        assert all(output.num_cached_tokens >= 128 for output in reused), [o.num_cached_tokens for o in reused]
        before = counted(llm, "num_preemptions")
        said(llm, model, [prompt(100) for _ in range(4)], 150)
        if any(layer.variant.side == "softmax" for layer in model.attentions()):  # a state takes no further pages
            assert counted(llm, "num_preemptions") > before
    finally:
        release(llm)
