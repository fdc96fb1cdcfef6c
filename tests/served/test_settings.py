"""Settings of the engine: what is refused at the start, what is said of the channels, how tokens are drawn."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, export
from test_tokens import ask, engine, prompt, release

from attnzoo.models.vllm import register

pytest.importorskip("vllm", reason="vLLM is not installed (make test-vllm)")

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def settings_of(folder: str, **settings: Any) -> Any:
    from vllm import EngineArgs

    register()
    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, **settings}
    return EngineArgs(model=folder, **given).create_engine_config()


@pytest.fixture(scope="module")
def fox(tmp_path_factory: pytest.TempPathFactory) -> str:
    return export(build("fox"), tmp_path_factory.mktemp("fox"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: expected 1"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size: expected 1"),
        ({"quantization": "fp8"}, "--quantization: expected none"),
        ({"speculative_config": NGRAM}, "--speculative-config: expected none"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype: expected auto"),
        ({"dtype": "float16"}, "expected --dtype bfloat16 or float32"),
        ({"hf_overrides": {"gate_channels": 0}}, "gate_channels: expected a number of channels from 1 to 8, got 0"),
        ({"hf_overrides": {"gate_chanels": 2}}, "did you mean 'gate_channels'"),
        ({"hf_overrides": {"attention": "path"}}, "got 'path': later tokens change its cached keys"),
        ({"hf_overrides": {"attention": "wall"}}, "got 'wall': later tokens change its cached keys"),
        ({"hf_overrides": {"attention_options": {"sinks": True}}}, "a sink takes part in the softmax without a decay"),
        ({"hf_overrides": {"attention_options": {"forgetting": {}}}}, "One-Pass Forgetting evicts keys"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fox: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        settings_of(fox, **settings)


def test_channels_widen_the_keys_and_narrow_the_error(fox: str) -> None:
    from attnzoo.models.vllm.start import said

    config = settings_of(fox, hf_overrides={"gate_channels": 5})
    assert config.model_config.get_head_size() == 32  # 16 channels and 5, as the kernels take them
    assert config.model_config.hf_config.storages()[0].key_dim == 21
    assert "at most 1e-05 where they sum to at least -33.55" in said(torch.float32, 3, 1000)
    assert "at most 0.001 where they sum to at least -3355" in said(torch.bfloat16, 3, 1000)
    assert "sum to at least -0.256 " in said(torch.bfloat16, 1, 1000)


def test_on_a_cpu_keys_take_a_quarter_of_the_free_memory_unless_a_setting_says_more(
    fox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    assert current_platform.is_cpu()
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    given = settings_of(fox).cache_config.kv_cache_memory_bytes
    assert 0 < given < current_platform.get_device_total_memory() / 4
    assert settings_of(fox, gpu_memory_utilization=0.3).cache_config.kv_cache_memory_bytes is None
    assert settings_of(fox, kv_cache_memory_bytes=2**28).cache_config.kv_cache_memory_bytes == 2**28
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert settings_of(fox).cache_config.kv_cache_memory_bytes == 3 * 2**30


def test_tokens_are_drawn_as_asked(tmp_path: Path) -> None:
    random.seed(1)
    model = build("hybrid")
    llm = engine(export(model, tmp_path), enable_prefix_caching=False)
    try:
        prompts = [prompt(n) for n in (7, 12)]  # a seed beside prompts in chunks ends vLLM 0.32 on a CPU
        greedy = [list(o.outputs[0].token_ids) for o in ask(llm, prompts, 12)]
        narrow = ask(llm, prompts, 12, temperature=1.0, top_k=1)
        assert [list(o.outputs[0].token_ids) for o in narrow] == greedy
        options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "n": 3, "seed": 5}
        twice = [[[list(c.token_ids) for c in o.outputs] for o in ask(llm, prompts, 12, **options)] for _ in range(2)]
        assert twice[0] == twice[1]
        assert len({tuple(tokens) for tokens in twice[0][0]}) == 3
        stopped = ask(llm, prompts, 12, stop_token_ids=[greedy[0][3]])
        assert list(stopped[0].outputs[0].token_ids) == greedy[0][: greedy[0].index(greedy[0][3]) + 1]
        assert stopped[0].outputs[0].finish_reason == "stop"
        for given, output in zip(prompts, ask(llm, prompts, 12, logprobs=3), strict=True):
            tokens = list(output.outputs[0].token_ids)
            with torch.no_grad():
                logits = model(torch.tensor([given + tokens])).logits[0, len(given) - 1 : -1]
            expected = logits.log_softmax(-1)
            for place, found in enumerate(output.outputs[0].logprobs):
                for token, said in found.items():
                    assert abs(float(expected[place, token]) - said.logprob) < 1e-3
    finally:
        release(llm)


def test_bfloat16_costs_what_it_costs_the_decoder_itself(tmp_path: Path) -> None:
    random.seed(2)
    model = build("fox_pro")
    llm = engine(export(model, tmp_path), dtype="bfloat16", enable_prefix_caching=False)
    try:
        prompts = [prompt(300) for _ in range(3)]
        found = ask(llm, prompts, 1, prompt_logprobs=0)
        logprobs = {}
        for name, dtype in (("exact", torch.float64), ("own", torch.bfloat16)):
            with torch.no_grad():
                logits = model.to(dtype)(torch.tensor(prompts)).logits[:, :-1].double()
            logprobs[name] = logits.log_softmax(-1).gather(2, torch.tensor(prompts)[:, 1:, None])[..., 0]
        served = [[each[t].logprob for t, each in zip(p[1:], o.prompt_logprobs[1:], strict=True)]
                  for p, o in zip(prompts, found, strict=True)]  # fmt: skip
        own = (logprobs["own"] - logprobs["exact"]).abs().mean()
        off = (torch.tensor(served, dtype=torch.float64) - logprobs["exact"]).abs().mean()
        print(f"mean error of a log probability: {off:.3g}, the decoder's own {own:.3g}")
        assert off < 2 * own
    finally:
        release(llm)
