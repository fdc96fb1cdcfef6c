"""A model that forgets, as one of Hugging Face's: written, read, generating, and given a network after training."""

from __future__ import annotations

import pytest
import torch

from attnzoo.config import ForgettingConfig, ModelConfig
from attnzoo.models import LanguageModel

pytest.importorskip("transformers")

from tiny_runs import config_of, write_text

from attnzoo.models.hf import AttnzooForCausalLM
from attnzoo.training import load_run, train
from attnzoo.training.forgetting import networks, with_forgetting

OPTIONS = {"forgetting": {"window": 3, "width": 4, "network": "pair"}}


def model_of(**options):
    torch.manual_seed(0)
    config = ModelConfig(attention="rope", attention_options=options, hidden_size=16, num_layers=2, num_heads=2)
    return LanguageModel(config).eval()


def test_a_model_that_forgets_is_written_and_generates_alike(tmp_path):
    model = model_of(**OPTIONS)
    with torch.no_grad():
        for network in networks(model):
            for parameter in network.parameters():
                parameter.normal_()
    AttnzooForCausalLM.of(model).save_pretrained(tmp_path)
    theirs = AttnzooForCausalLM.from_pretrained(tmp_path)
    prompt = torch.randint(256, (2, 12))
    mine = model.generate(prompt, 6, temperature=0)
    assert torch.equal(theirs.generate(prompt, max_new_tokens=6, do_sample=False), mine)
    beams = theirs.generate(prompt, max_new_tokens=3, num_beams=2, do_sample=False)
    assert beams.shape == (2, 15)


def test_a_folder_of_hugging_face_gets_a_network_alone(tmp_path):
    write_text(tmp_path)
    AttnzooForCausalLM.of(model_of()).save_pretrained(tmp_path / "folder")
    recipe = config_of(tmp_path, "run", "steps=2", f"start_from={tmp_path / 'folder'}", "model.attention=rope",
                       "model={intermediate_size: null, num_layers: 2}", "optimizer.warmup_steps=1")  # fmt: skip
    config = with_forgetting(recipe, OPTIONS["forgetting"])
    config.forgetting = ForgettingConfig(1, 1, alone=True)
    train(config)
    before, after = model_of().state_dict(), load_run(config.output_dir)[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(after) > len(before)
