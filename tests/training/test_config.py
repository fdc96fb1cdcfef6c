"""Configuration: what is written is what is read, and what is wrong is refused by name."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from attnzoo.algebra.pruning import Prune
from attnzoo.config import LayerSpec, ModelConfig, TrainConfig, config_differences, load_config, save_config
from attnzoo.errors import unknown
from attnzoo.experiments.builtin import CONFIGS, built_in, find_config
from attnzoo.experiments.compare import CompareConfig
from attnzoo.settings import read_settings, read_yaml, write_yaml
from attnzoo.training.model import new_model


def names(config: ModelConfig) -> list[str]:
    return [layer.name for layer in config.layers()]


def test_list_and_mapping_take_each_others_place_where_either_may_stand(tmp_path):
    path = tmp_path / "config.yaml"
    one, several = {"name": "rope", "options": {"theta": 5e5}}, ["rope", {"name": "fox", "options": {"acp": True}}]
    for there, over in ((one, several), (several, one)):
        save_config(TrainConfig(model=ModelConfig(attention=there)), path)
        assert load_config(path, [f"model.attention={json.dumps(over)}"]).model.attention == over
        assert load_config(path, ["model.attention=gla"]).model.attention == "gla"
    for wrong in ("model.attention_options=[1]", "optimizer=[1]", "data.sources={a: 1}"):
        with pytest.raises(ValueError, match=re.escape(wrong.partition("=")[0])):
            load_config(path, [wrong])


def test_a_mapping_given_whole_takes_the_place_of_the_one_there():
    there = {"model": {"attention": "fox", "attention_options": {"acp": True}}}
    for given, options in (
        (["model.attention_options={}"], {}),
        (["model={attention_options: {sink: true}}"], {"sink": True}),
        (["model.attention_options.sink=true"], {"acp": True, "sink": True}),
        (["model.attention_options={sink: true}", "model.attention_options.block=pro"], {"sink": True, "block": "pro"}),
    ):
        assert load_config(there, given).model.attention_options == options
    named = {"model": {"attention": {"name": "rope", "options": {"theta": 5e5}}}}
    assert load_config(named, ["model.attention={name: fox, options: {}}"]).model.attention == {
        "name": "fox", "options": {},
    }  # fmt: skip


def test_a_mapping_without_a_default_may_be_given():
    @dataclass
    class Schema:
        options: dict[str, int]
        train: TrainConfig = field(default_factory=TrainConfig)

    given = ["options={a: 1}", "options.b=2", "train={data: {source: task:mqar, task_options: {pairs: 2}}}"]
    assert load_config(None, given, Schema).options == {"a": 1, "b": 2}
    assert load_config(None, [*given, "options={}"], Schema).options == {}


def test_texts_are_what_is_written():
    for given, said in (("7", "7"), ("2026-11-26", "2026-11-26"), ("'1.10'", "1.10"), ("runs/no", "runs/no")):
        assert load_config(None, [f"output_dir={given}"]).output_dir == said


def test_a_written_config_reads_back_equal(tmp_path):
    config = load_config(
        None, ["steps=700", "model.attention=[fox,{name: gla,options: {acp: true}}]", "optimizer.lr=3e-4"]
    )
    assert config.steps == 700
    assert config.optimizer.lr == 3e-4
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("steps: 500\nbatch_size: 8\n")
    config = load_config(tmp_path / "c.yaml", ["steps=900"])
    assert (config.steps, config.batch_size, config.seed) == (900, 8, TrainConfig().seed)


def test_another_schema_may_nest_the_train_config():
    @dataclass
    class Comparison:
        variants: list[str] = field(default_factory=list)
        train: TrainConfig = field(default_factory=TrainConfig)

    # A class defined in a function has no module scope for its annotations.
    Comparison.__annotations__ = {"variants": list[str], "train": TrainConfig}
    config = load_config(None, ["variants=[fox,nope]", "train.model.num_layers=2"], Comparison)
    assert config.variants == ["fox", "nope"]
    assert config.train.model.num_layers == 2
    with pytest.raises(ValueError, match=r"train\.model\.num_layer.*did you mean 'train\.model\.num_layers'"):
        load_config(None, ["train.model.num_layer=2"], Comparison)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "unknown configuration key 'stepz'.*did you mean 'steps'"),
        ("model.hiden_size=3", r"'model\.hiden_size'.*did you mean 'model\.hidden_size'"),
        ("optimiser.lr=3", "'optimiser'.*did you mean 'optimizer'"),
        ("mixed_precision=bf61", "unknown mixed_precision 'bf61'.*did you mean 'bf16'"),
        ("progress=queit", "did you mean 'quiet'"),
        ("data.dtype=int61", "did you mean 'int64'"),
        ("steps=many", "^steps: expected a whole number, got 'many'$"),
        ("steps=1.5", "^steps: expected a whole number, got 1.5$"),
        ("steps=null", "^steps: expected a whole number, got None$"),
        ("compile=maybe", "^compile: expected true or false, got 'maybe'$"),
        ("optimizer.lr=fast", r"^optimizer\.lr: expected a number, got 'fast'$"),
        ("data.vocab_size=x", r"^data\.vocab_size: expected a whole number or null, got 'x'$"),
        ("model.attention_options=3", r"^model\.attention_options: expected a mapping, got 3$"),
        ("start_from=[a]", r"^start_from: expected a text or null, got \['a'\]$"),
        ("data.seed=-1", r"^data\.seed: expected at least 0, got -1"),
        ("steps=0", "^steps: expected at least 1, got 0"),
        ("optimizer.lr=-1", r"^optimizer\.lr: expected a number above 0, got -1"),
        ("optimizer.beta2=1", r"^optimizer\.beta2: expected a number in \[0, 1\), got 1"),
        ("optimizer.warmup_steps=1000", "warmup_steps=1000 must be below steps=1000"),
        ("data.heldout_fraction=1.5", r"^data\.heldout_fraction: expected a number between 0 and 1, got 1.5"),
        ("model=fox", "model: expected a mapping"),
        ("steps", "expected key=value"),
        ("=3", "expected key=value"),
        ("steps=[", "not readable"),
        ("data.pattern=*.py", r"'data\.pattern=\*\.py' is not readable: .*needs quotes: 'data\.pattern=\"\*\.py\"'"),
        ("steps=???", r"steps: \?\?\? stands for a value that is missing"),
        ("model.attention_options={block: '???'}", r"model\.attention_options\.block: \?\?\? stands for"),
        ("data.source=~", "data.source: "),
        ("data.source=${nope}", r"^data\.source: Interpolation key 'nope' not found$"),
        ("steps=1:30", r"^steps: expected a whole number, got '1:30'$"),
        ("model={num_heads: 2020-01-01}", r"^model\.num_heads: expected a whole number"),
        ("data={seed: 1, seed: 2}", r"not readable: found duplicate key seed"),
        ("device=cuda", r"^device: expected auto \(a GPU where there is one\) or cpu, got 'cuda'$"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(override, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.norm_kind=x", "unknown model.norm_kind 'x'"),
        ("model.norm=befor", "unknown model.norm 'befor'"),
        ("model.attention=[{name: fox, optoins: {}}]", "model.attention: unknown key 'optoins'"),
        ("model.attention=[{name: fox, norm: x}]", "model.attention: unknown norm 'x' of fox"),
        ("data.documents=x", "unknown data.documents 'x'"),
        ("data.sources=[{source: a, weight: 1}, {source: b, weight: -1}]", "data.sources[1].weight: expected"),
        ("optimizer.name=adm", "unknown optimizer.name 'adm'"),
        (
            "optimizer.extensions=[{after: 0, planned: 1, schedule: constant, lr: 1}]",
            "optimizer.extensions[0].after: expected at least 1",
        ),
        ("forgetting.order=x", "unknown forgetting.order 'x'"),
        ("context_parallel=2 model.attention_options.forgetting={}", "model.attention_options: expected no forgetting"),
        (
            "context_parallel=2 model.attention=[{name: fox, options: {training_groups: 4}}]",
            "model.attention: expected no training_groups of 'fox' with context_parallel=2",
        ),
        (
            "context_parallel=2 model.attention=[fox,stick_breaking]",
            "model.attention: expected no 'stick_breaking' with",
        ),
        (
            "data.documents=packed model.attention_options.training_groups=4",
            "data.documents: expected joined with training_groups of 'fox' (a group may hold two documents)",
        ),
        ("context_parallel=4 data.context_length=7", "data.context_length: expected at least two tokens for each of"),
    ],
)
def test_an_error_has_the_whole_path_of_its_field(override, said):
    words = re.split(r" (?=[\w.]+=)", override)
    start = "unknown " if said.startswith("unknown ") else ""
    said = re.escape(said.removeprefix(start))
    for schema, section in ((TrainConfig, ""), (CompareConfig, "train.")):
        with pytest.raises(ValueError, match=f"^{start}{section}{said}"):
            load_config(None, [section + word for word in words], schema)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_heads=5", "model.hidden_size: expected a multiple of num_heads = 5"),
        ("model.attention=foks", "model.attention: unknown variant 'foks'"),
        ("model.attention_options={blok: pro}", "model.attention_options: unknown option 'blok' of 'fox'"),
        ("model.attention_options={block: por}", "model.attention_options: unknown block 'por'"),
        ("model.attention_options={num_kv_heads: 3}", "model.attention_options.num_kv_heads: expected a divisor"),
        ("model.attention_options={acp: {eps: 2}}", "model.attention_options.acp.eps: expected"),
        ("model.attention_options={acp: {bound: tial}}", "model.attention_options: unknown acp.bound 'tial'"),
        ("model.attention_options={forgetting: {window: -1}}", "model.attention_options.forgetting.window: expected"),
        ("model.attention_options={gate: nothing}", "model.attention_options: unknown gate 'nothing'"),
        ("model.attention=[{name: fox, options: {blok: 1}}]", "model.attention: unknown option 'blok' of 'fox'"),
        ("model.attention=[{name: fox, options: {head_dim: 0}}]", "model.attention: head_dim: expected a positive"),
    ],
)
def test_what_a_layer_refuses_has_the_path_of_the_field_that_it_came_from(override, said):
    config = load_config(None, [override])
    with torch.device("meta"), pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        new_model(config)


@pytest.mark.parametrize("text", ["steps: [", "- steps", "modle:\n  num_layers: 2\n"])
def test_a_wrong_file_is_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"readable|mapping|did you mean 'model'"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"c\.yaml is empty: expected keys and values"),
        (b"~", r"c\.yaml is empty"),
        (b"# steps: 3\n", r"c\.yaml is empty"),
        (b"3", r"c\.yaml: expected a mapping"),
        (b"steps: ???", "steps: .* missing"),
        (b"steps: 3\nsteps: 4", r"c\.yaml is not readable as YAML: found duplicate key steps"),
        (b"output_dir: \xff\xfe", r"c\.yaml is not UTF-8 text"),
        (b"output_dir: \0", r"c\.yaml is not readable as YAML"),
        (b"model: " + b"[" * 5000, r"c\.yaml is not readable as YAML"),
    ],
)
def test_a_file_without_a_configuration_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("a=07", 7),
        ("a=1_000", 1000),
        ("a=0x10", 16),
        ("a='010'", "010"),
        ("a=010", 10),
        ("a=0__17", 17),
        ("a=1:30", "1:30"),
        ("a=no", "no"),
        ("a=2020-01-01", "2020-01-01"),
        ("a=1e3", 1000.0),
        ("a=", None),
        ("a=[1, {b: .5}]", [1, {"b": 0.5}]),
        ("a=8:x", "8:x"),
        ("a=0.25", 0.25),
        ("a=0", 0),
    ],
)
def test_numbers_and_texts_that_are_read_as_they_look_stay(setting, value):
    assert read_settings([setting]) == {"a": value}


@pytest.mark.parametrize("said", ["1.10", "no", "007", "1e3", "1:30", "2020-01-01", "0x10", ".5", "true"])
def test_a_text_is_what_is_written(tmp_path, said):
    path = tmp_path / "c.yaml"
    path.write_text(f"output_dir: {said}\nstart_from: {said}\ndata: {{sources: [{{source: {said}}}]}}\n")
    overrides = [f"output_dir={said}", f"start_from={said}", f"data={{sources: [{{source: {said}}}]}}"]
    for config in (load_config(path), load_config(None, overrides)):
        assert (config.output_dir, config.start_from, config.data.sources[0].source) == (said, said, said)
    save_config(config, path)
    assert load_config(path) == config


@pytest.mark.parametrize("said", ["1.10", "no", "010", "008", "1e3", "1:30", "2020-01-01", "0x10", "~", "", "=", "<<"])
def test_texts_and_numbers_are_read_back_where_anything_may_stand(said):
    values = {"text": said, "number": 1e-5, "whole": 3, "flag": True, "none": None}
    assert read_yaml(write_yaml(values)) == values


def test_a_file_may_say_that_it_takes_the_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("{}")
    assert load_config(tmp_path / "c.yaml") == TrainConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((3,), "path: expected a file, a mapping or None, got 3"), ((None, "steps=3"), "overrides: expected a list")],
)
def test_an_argument_of_another_kind_is_refused_by_name(arguments, message):
    with pytest.raises(TypeError, match=message):
        load_config(*arguments)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        load_config("nowhere.yaml")


def test_one_name_serves_every_layer():
    assert names(ModelConfig(attention="gla", num_layers=3)) == ["gla"] * 3


def test_a_pattern_repeats_over_the_layers():
    assert names(ModelConfig(attention=["mamba2", "fox"], num_layers=6)) == ["mamba2", "fox"] * 3
    repeated = [{"name": "mamba2", "repeat": 3}, "fox"]
    assert names(ModelConfig(attention=repeated, num_layers=8)) == (["mamba2"] * 3 + ["fox"]) * 2


def test_options_of_an_entry_are_added_to_those_of_the_model():
    config = ModelConfig(
        attention=["gla", {"name": "fox", "options": {"acp": True, "block": None}}],
        attention_options={"block": "pro"},
        num_layers=2,
    )
    assert config.layers() == [LayerSpec("gla", {"block": "pro"}), LayerSpec("fox", {"acp": True, "block": None})]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (["fox", "gla", "nope"], "pattern of 3 layers.*num_layers=4"),
        (["fox"] * 8, "pattern of 8 layers.*num_layers=4"),
        ([], "empty list"),
        ([["fox"]], "expected a name or a mapping"),
        ({"repeat": 2}, "with a name"),
        ({"name": "fox", "options": {"hidden_size": 8}}, "hidden_size is the model's"),
        ({"name": "fox", "option": {}}, "did you mean 'options'"),
        ({"name": "fox", "repeat": 0}, "at least 1 as repeat of fox, got 0"),
        ({"name": "fox", "options": ["acp"]}, "expected a mapping as options of fox"),
    ],
)
def test_a_wrong_attention_pattern_is_refused(attention, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(attention=attention, num_layers=4)


def test_differences_are_named_by_their_dotted_field():
    old, new = TrainConfig(), load_config(None, ["model.hidden_size=64", "seed=5"])
    assert config_differences(old, new) == {"seed": (0, 5), "model.hidden_size": (256, 64)}
    assert config_differences(old, TrainConfig()) == {}


def test_options_differ_only_where_their_files_would():
    old = ModelConfig(attention=("fox", "gla"), attention_options={"acp": Prune(eps=0.25)})
    same = ModelConfig(attention=["fox", "gla"], attention_options={"acp": {"eps": 0.25, "bound": "tail"}})
    other = ModelConfig(
        attention=["fox", "gla"], attention_options={"acp": {"eps": 0.5, "bound": "tail"}, "block": "pro"}
    )
    assert config_differences(old, same) == {}
    assert config_differences(same, other) == {
        "attention_options.acp.eps": (0.25, 0.5),
        "attention_options.block": (None, "pro"),
    }


@pytest.mark.parametrize("name", built_in("train"))
def test_the_configurations_that_come_along_are_valid(name):
    config = load_config(find_config(name, "train"))
    assert config.output_dir == f"runs/{name}"
    assert config.model.layers()[0].name == "fox"


def test_every_file_that_comes_along_belongs_to_a_command():
    assert sorted(CONFIGS.rglob("*.yaml")) == sorted([*built_in("train").values(), *built_in("compare").values()])
    assert {*built_in("train")} >= {"tiny", "fox_small"}
    assert {*built_in("compare")} >= {"demo"}


def test_a_path_that_exists_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("tiny", "train") == CONFIGS / "train/tiny.yaml"
    Path("tiny").mkdir()  # a folder is no configuration
    assert find_config("tiny", "train") == CONFIGS / "train/tiny.yaml"
    Path("tiny").rmdir()
    Path("tiny").write_text("steps: 7")
    assert load_config(find_config("tiny", "train"), ["optimizer.warmup_steps=0"]).steps == 7


def test_an_unknown_name_is_answered_with_the_nearest():
    message = str(unknown("variant", "foks", ["nope", "fox"]))
    assert message == "unknown variant 'foks': expected one of nope, fox; did you mean 'fox'?"
    assert str(unknown("variant", "FOX", ["nope", "fox"])).endswith("did you mean 'fox'?")


def test_an_unknown_name_that_nothing_resembles_gets_no_guess():
    assert "did you mean" not in str(unknown("variant", "zzz", ["nope", "fox"]))
    assert "none is expected" in str(unknown("option", "x", []))


@pytest.mark.parametrize(
    "value", ["${oc.env:SECRET}", "a ${oc.env:SECRET, none} b", "${oc.${data.source}:SECRET}", "${oc.decode:'[1]'}"]
)
def test_a_file_reads_nothing_of_the_environment(value, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "the password")
    path = tmp_path / "config.yaml"
    for text in (f'output_dir: "{value}"', f'model: {{attention_options: {{block: ["{value}"]}}}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"config\.yaml: expected a value, or \$\{KEY\}") as refused:
            load_config(path)
        assert "password" not in str(refused.value)


def test_a_file_may_name_another_key_and_an_override_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", "there")
    path = tmp_path / "config.yaml"
    path.write_text('{output_dir: "runs:${data.source}:x", data: {source: stdlib}}')
    assert load_config(path).output_dir == "runs:stdlib:x"
    assert load_config(path, ["output_dir=${oc.env:PLACE}"]).output_dir == "there"


def test_bytes_that_the_terminals_language_lacks_are_named():
    """As `LANG=C` without UTF-8 gives them."""
    with pytest.raises(ValueError, match=r"override 'output_dir=\\xe9': expected letters.*PYTHONUTF8=1"):
        load_config(None, ["output_dir=" + "é".encode().decode("ascii", "surrogateescape")])
