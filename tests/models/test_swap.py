"""One word of a configuration changes the variant: options that the new one has no use for are left out, and named."""

import pytest
import torch
from thinning import EVERYWHERE, OF_PRODUCTS, in_long

from attnzoo import list_variants
from attnzoo.config import load_config
from attnzoo.experiments.builtin import built_in, find_config
from attnzoo.layer.build import build_attention, from_file
from attnzoo.models import presets
from attnzoo.models.swap import Unfilled

PRESETS = [
    "transformer-pro-125m",
    "fox-pro-125m",
    "deltanet-125m",
    "window_transformer-llama-360m",
    "hgrn2-125m",
    "samba-125m",
]


def layers(config):
    """The distinct layers of a configuration, which this builds on the meta device."""
    found = {str(spec): spec for spec in config.model.layers()}
    sizes = {"hidden_size": config.model.hidden_size, "num_heads": config.model.num_heads}
    with torch.device("meta"), Unfilled():
        return [build_attention(spec.name, **{**sizes, **from_file(spec.options)}) for spec in found.values()]


@pytest.mark.parametrize("name", [*PRESETS, *built_in("train")])
def test_every_variant_stands_in_every_configuration_by_one_word(name, caplog):
    found = find_config(name, "train")
    plain = load_config(found)
    for variant in in_long(sorted({*list_variants()} - OF_PRODUCTS | EVERYWHERE), list_variants()):
        caplog.clear()
        config = load_config(found, [f"model.attention={variant}"])
        (layer,) = layers(config)
        assert layer.variant.name == variant
        before, after = plain.model.attention_options, config.model.attention_options
        assert {**before, **after} == before  # nothing is made up
        without = [option for option in before if option not in after]
        lines = [record.message for record in caplog.records]
        assert lines == [f"model.attention: {variant} has no use for {', '.join(without)}, left out"] * bool(without)


def test_options_that_the_new_variant_can_use_stay():
    pro = find_config("fox-pro-125m", "train")
    assert load_config(pro, ["model.attention=gla"]).model.attention_options == {"block": "pro", "qk_norm_shared": True}
    assert load_config(pro, ["model.attention=fox"]) == load_config(pro)
    window = find_config("window_transformer-llama-125m", "train")
    assert load_config(window, ["model.attention=fox"]).model.attention_options == {"window": 2048, "block": "llama"}
    assert load_config(window, ["model.attention=mamba2"]).model.attention_options == {"block": "llama"}


def test_pruning_goes_where_nothing_can_be_pruned(caplog):
    settings = {"model": {"attention": "fox", "attention_options": {"acp": {"eps": 1e-4}, "gate_bias": 5.0}}}
    config = load_config(settings, ["model.attention=rope"])
    assert config.model.attention_options == {}
    assert [r.message for r in caplog.records] == ["model.attention: rope has no use for acp, gate_bias, left out"]
    assert load_config(settings, ["model.attention=path_fox"]).model.attention_options["acp"] == {"eps": 1e-4}


def test_layers_of_a_pattern_keep_each_its_own():
    settings = {"model": {"attention": "fox", "attention_options": {"acp": True, "block": "pro"}}}
    config = load_config(settings, ["model.attention=[gla, {name: fox, options: {gate_bias: 5.0}}]"])
    assert [(spec.name, spec.options) for spec in config.model.layers()[:2]] == [
        ("gla", {"block": "pro"}), ("fox", {"acp": True, "block": "pro", "gate_bias": 5.0}),
    ]  # fmt: skip


def test_what_is_typed_is_refused_by_name(caplog):
    preset = find_config("transformer-pro-125m", "train")
    for typed, said in (
        ("acp=true", "acp: 'rope' has no scalar decay"),
        ("theta2=5", "unknown option 'theta2' of 'nope'"),
    ):
        variant = "rope" if "acp" in typed else "nope"
        config = load_config(preset, [f"model.attention={variant}", f"model.attention_options.{typed}"])
        with pytest.raises(ValueError, match=said):
            layers(config)
    assert not caplog.records
    config = load_config(preset, ["model.attention=fox", "model.attention_options.theta=10000"])
    with pytest.raises(ValueError, match="^unknown option 'theta' of 'fox'"):
        layers(config)


def test_a_preset_that_is_built_swaps_alike(caplog):
    with torch.device("meta"):
        model = presets.build("transformer-pro-125m", attention="fox", num_layers=1)
    assert model.config.attention_options == {"block": "pro", "qk_norm_shared": True}
    assert [r.message for r in caplog.records] == ["model.attention: fox has no use for theta, left out"]
