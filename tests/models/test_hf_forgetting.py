"""A model that forgets, as one of Hugging Face's: written, read, generating, and given a network after training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnzoo.config import ForgettingConfig, ModelConfig
from attnzoo.models import LanguageModel

pytest.importorskip("transformers")

from tiny_runs import config_of, write_text

from attnzoo.models.hf import AttnzooForCausalLM
from attnzoo.trained.exchange import recipe_of
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
    out = theirs(prompt)  # gradients are on, which its caches do not take
    assert out.past_key_values is None
    with torch.no_grad():
        torch.testing.assert_close(theirs(prompt).logits, out.logits, rtol=1e-4, atol=1e-5)


def test_a_folder_of_hugging_face_gets_a_network_alone(tmp_path):
    """The folder says what the model is; nobody has to repeat it."""
    write_text(tmp_path)
    folder, run = tmp_path / "folder", config_of(tmp_path, "run", "steps=2", "optimizer.warmup_steps=1")
    AttnzooForCausalLM.of(model_of()).save_pretrained(folder)
    config = with_forgetting(recipe_of(folder), OPTIONS["forgetting"])
    assert (config.start_from, config.output_dir) == (str(folder), "runs/folder-forgetting")
    config = replace(
        run, model=config.model, start_from=config.start_from, forgetting=ForgettingConfig(1, 1, alone=True)
    )
    train(config)
    before, after = model_of().state_dict(), load_run(config.output_dir)[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(after) > len(before)
    again = with_forgetting(recipe_of(config.output_dir), {"window": 9})  # and a run's folder, likewise
    assert (again.start_from, again.output_dir) == (config.output_dir, f"{config.output_dir}-forgetting")
    assert again.model.layers()[1].options["forgetting"] == {"window": 9}


def test_a_folder_that_cannot_be_trained_on_from_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="^folder: expected a run or a model folder, got .*nothing"):
        recipe_of(tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="a model of 'llama': `attnzoo import` makes it one of ours"):
        recipe_of(tmp_path)
