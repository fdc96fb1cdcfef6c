"""Folders of others: what their configuration says twice, weights of several dtypes, quantised ones, damaged ones."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from attnzoo.models.peers import from_peer, peer_of  # noqa: E402
from attnzoo.models.peers.table import PEERS  # noqa: E402

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 20, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
NEW = Version(transformers.__version__) >= Version("5.0")  # two places for one thing


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a Llama."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture
def changed(saved, tmp_path):
    """What makes a folder with some fields and tensors changed; fields that are None go."""

    def change(fields=None, tensors=None):
        known = {**json.loads((saved / "config.json").read_text()), **(fields or {})}
        (tmp_path / "config.json").write_text(json.dumps({name: x for name, x in known.items() if x is not None}))
        state = load_file(saved / "model.safetensors")
        state = {name: (tensors or (lambda name, x: x))(name, x) for name, x in state.items()}
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return change


@pytest.fixture
def tokens():
    return torch.randint(1, 20, (1, 40), generator=torch.Generator().manual_seed(1))


def theirs(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("attnzoo")]


LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.skipif(not NEW, reason="an older transformers knows one of the two places")
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": LINEAR, "rope_parameters": DEFAULT},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": DEFAULT},
        {"rope_scaling": {}, "rope_parameters": {**LINEAR, "rope_theta": 77.0}},
        {"rope_scaling": {**LINEAR, "rope_theta": 77.0}, "rope_parameters": {**DEFAULT, "rope_theta": 77.0}},
        {"rope_scaling": LINEAR, "rope_parameters": {**DEFAULT, "rope_theta": 77.0}, "rope_theta": 77.0},
        {"rope_scaling": LINEAR, "rope_parameters": None, "rope_theta": 77.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 77.0},
        {"rope_parameters": None, "rope_theta": 77.0},
        {"rope_parameters": None},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "rope_theta": 9.0,
            }
        },
        {"head_dim": None, "num_key_value_heads": 1},
        {"torch_dtype": "float32", "dtype": None},
    ],
)
def test_what_is_said_in_two_places_is_what_transformers_takes(fields, changed, tokens):
    folder = changed(fields)
    expected = theirs(folder)(tokens).logits
    torch.testing.assert_close(from_peer(folder)(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "spiral", "factor": 4.0}, "rope_parameters": DEFAULT},
            "rope_type = 'spiral' is not",
        ),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {**DEFAULT, "rope_theta": 77.0}, "rope_theta": None},
            r"expected rope_theta = 77.0 of rope_parameters in rope_scaling, too, which counts alone .*, got None",
        ),
        (
            {"rope_parameters": DEFAULT, "rope_theta": 77.0},
            r"rope_theta = 77.0 and rope_parameters.rope_theta = 10000.0 say one thing twice, and differ",
        ),
        (
            {"rope_parameters": {**LINEAR, "type": "spiral"}},
            r"rope_parameters.rope_type = 'linear' and type = 'spiral' say one thing twice, and differ",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype = 'float32' and torch_dtype = 'bfloat16' say one"),
        (
            {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
            r"layer_types = \['full_attention', 'sliding_attention'\] is not supported beside sliding_window = 5",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
            r"layer_types = \['full_attention', 'sliding_attention'\] is not supported beside sliding_window = None",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types = .* is not supported beside sliding_window = None"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types: expected 2 entries, one for each"),
        (
            {"model_type": "qwen2_lv", "text_config": {"model_type": "qwen2"}},
            r"unknown model_type 'qwen2_lv'.*the language model within it, in text_config, is of 'qwen2'",
        ),
    ],
)
def test_what_differs_in_two_places_is_refused(fields, message, changed):
    with pytest.raises(ValueError, match=rf"^config\.json: .*{message}"):
        from_peer(changed(fields))


@pytest.mark.skipif(not NEW, reason="an older transformers knows one of the two places")
def test_the_place_that_does_not_count_is_a_line_of_the_log(changed, caplog):
    from_peer(changed({"rope_scaling": LINEAR, "rope_parameters": DEFAULT}))
    assert lines(caplog) == [
        "config.json: rope_scaling counts, and rope_parameters beside it does not, as in transformers"
    ]


MIXED = {
    "head": lambda name, x: x if "lm_head" in name else x.bfloat16(),
    "norms": lambda name, x: x if "norm" in name else x.bfloat16(),
    "embedding": lambda name, x: x if "embed" in name else x.half(),
    "a projection": lambda name, x: x.double() if "0.self_attn.o_proj" in name else x,
}


@pytest.mark.skipif(not NEW, reason="an older transformers loads float32 where nobody asks")
@pytest.mark.parametrize("said", ["bfloat16", "float32", None])
@pytest.mark.parametrize("kind", MIXED)
def test_weights_of_several_dtypes_become_those_of_one_as_in_transformers(kind, said, changed, tokens, caplog):
    folder = changed({"dtype": said}, MIXED[kind])
    expected, ours = theirs(folder, dtype="auto"), from_peer(folder)
    dtypes = {p.dtype for p in ours.parameters()}
    assert dtypes == {expected.dtype}
    (line,) = lines(caplog)
    assert f"all become {expected.dtype}, as " in line
    for name, x in expected.state_dict().items():
        if "lm_head" in name or "o_proj" in name or "model.norm" in name:
            own = name.replace("lm_head", "head").replace("model.", "").replace("layers", "blocks")
            assert torch.equal(ours.state_dict()[own.replace("self_attn", "attention")], x)
    assert ours(tokens).logits.dtype == expected.dtype
    assert {p.dtype for p in from_peer(folder, dtype=torch.float64).parameters()} == {torch.float64}


def test_weights_of_one_dtype_stay_in_it(changed, caplog):
    for dtype in (torch.bfloat16, torch.float64):
        assert {p.dtype for p in from_peer(changed(None, lambda name, x, dtype=dtype: x.to(dtype))).parameters()} == {
            dtype
        }
    assert not lines(caplog)


F8 = torch.float8_e4m3fn
QUANTISED = {  # what config.json says, the weights, and what is said of both
    "fp8": ({"quant_method": "fp8"}, lambda x: x.to(F8), "fp8: .*F8_E4M3"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, lambda x: x.to(torch.int32), "gptq, 4 bits: .*I32"),
    "awq": ({"quant_method": "awq", "bits": 4}, lambda x: x.to(torch.int32), "awq, 4 bits: .*I32"),
    "8 bit": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        lambda x: x.to(torch.int8),
        "bitsandbytes, 8 bits: .*I8",
    ),
    "4 bit": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda x: torch.zeros(x.numel() // 2, 1, dtype=torch.uint8),
        "bitsandbytes, 4 bits: .*U8",
    ),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, lambda x: x.to(torch.int8), "compressed-tensors: "),
    "mlx": ({"group_size": 64, "bits": 4}, lambda x: x.to(torch.uint32), "MLX, 4 bits: .*U32"),
    "nobody says": (None, lambda x: x.to(F8), "F8_E4M3"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_named_with_what_to_do(kind, changed):
    how, make, message = QUANTISED[kind]
    place = "quantization" if kind == "mlx" else "quantization_config"
    folder = changed({place: how}, lambda name, x: make(x) if "proj" in name else x)
    begins = rf"^config\.json: {place}: " if how else "^expected weights of float64, float32, .*"
    with pytest.raises(ValueError, match=begins + message) as refused:
        from_peer(folder)
    assert r"model.layers.0.mlp.down_proj.weight and 13 more" in str(refused.value)
    assert "what dequantises them" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_plain_weights_beside_a_quantisation_are_taken_with_a_line(changed, caplog, tokens):
    from_peer(changed({"quantization_config": {"quant_method": "fp8"}}))(tokens)
    assert lines(caplog) == ["config.json: quantization_config: fp8 counts for nothing: the weights are not quantised"]


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


DAMAGED = [
    ("num_attention_heads", "16"), ("num_attention_heads", True), ("num_hidden_layers", "x"), ("num_hidden_layers", 0),
    ("num_hidden_layers", -1), ("head_dim", float("nan")), ("head_dim", 8.5), ("hidden_size", "1536"),
    ("hidden_size", None), ("hidden_size", []), ("vocab_size", {}), ("vocab_size", 2**40), ("intermediate_size", 0),
    ("rms_norm_eps", "1e-6"), ("rms_norm_eps", None), ("rms_norm_eps", float("inf")), ("rms_norm_eps", -1.0),
    ("attention_bias", "false"), ("attention_bias", 1), ("mlp_bias", [1]), ("tie_word_embeddings", "true"),
    ("initializer_range", "x"), ("rope_theta", "x"), ("rope_parameters", True), ("rope_parameters", [1]),
    ("rope_parameters", {"rope_theta": "x"}), ("rope_parameters", {"rope_theta": None, "rope_type": 3}),
    ("rope_parameters", {"rope_type": "linear"}), ("rope_parameters", {"rope_type": "linear", "factor": "4"}),
    ("rope_parameters", {"rope_type": "linear", "factor": 0}), ("rope_scaling", 3), ("rope_scaling", "spiral"),
    ("num_key_value_heads", 0), ("model_type", {"a": 1}), ("model_type", None), ("model_type", ""), ("model_type", 7),
    ("dtype", []), ("dtype", "load"), ("torch_dtype", 32), ("text_config", 3), ("hidden_act", ["silu"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), DAMAGED)
def test_a_damaged_field_is_named_with_its_file(name, value, changed):
    folder = changed({name: value, **({"rope_parameters": None} if name == "rope_theta" else {})})
    with pytest.raises(ValueError, match=rf"^config\.json: .*\b{name}\b") as refused:
        from_peer(folder)
    assert type(refused.value) is ValueError
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", sorted(PEERS))
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_size_as_text_is_named_for_every_kind(kind, name):
    sizes = {"num_heads": 2, "n_groups": 1, "state_size": 4, "head_dim": 8, "conv_kernel": 4, "rms_norm_eps": 1e-6}
    linear = {f"linear_{part}": 2 for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
    fields = {**SIZES, **sizes, **linear, "linear_conv_kernel_dim": 4, "model_type": kind, "num_experts": 0}
    peer_of(fields)
    with pytest.raises(ValueError, match=rf"^config\.json: {name}: expected a whole number below 2\^31, got '24'"):
        peer_of({**fields, name: "24"})


@pytest.mark.parametrize("layers", [7, "full_attention", [7], [None, None]])
def test_kinds_of_layers_that_are_none_are_named(layers, changed):
    with pytest.raises(ValueError, match=r"^config\.json: layer_types"):
        from_peer(changed({"model_type": "qwen2", "layer_types": layers}))


def test_json_without_end_is_named(changed):
    folder = changed()
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"config\.json is not readable as JSON"):
        from_peer(folder)
    changed()
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map":' * 200_000)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is not readable as JSON"):
        from_peer(folder)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_that_names_files_elsewhere_is_refused(kind, changed, tmp_path):
    folder = changed() / "model"
    folder.mkdir()
    (tmp_path / "config.json").rename(folder / "config.json")
    state = load_file(tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "outside.bin")
    (tmp_path / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = folder / {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}[kind]
    for part in (f"../outside.{kind}", str(tmp_path / f"outside.{kind}"), f"a/../../outside.{kind}", ".."):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(state, part)}))
        with pytest.raises(ValueError, match=rf"{index.name}: expected names of files of its own folder, got '"):
            from_peer(folder)
    (folder / f"part.{kind}").symlink_to(tmp_path / f"outside.{kind}")  # as the hub's cache has them
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, f"part.{kind}")}))
    from_peer(folder)


@pytest.mark.parametrize(
    ("content", "got"),
    [([1], "list"), ({"model.norm.weight": 3}, "int by 'model.norm.weight'"), ({3: torch.ones(1)}, "Tensor by 3"),
     ({"model.norm.weight": torch.eye(16).to_sparse()}, "torch.sparse_coo by 'model.norm.weight'")],
)  # fmt: skip
def test_a_pickle_of_something_else_is_named(content, got, changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"pytorch_model\.bin: expected tensors by their names, got {got}"):
        from_peer(folder)


HUGE = (10**4, 10**7, 10**9, 2**31 - 1)


@pytest.mark.parametrize("kind", ["Llama", "Mamba2", "Qwen3Next"])
def test_a_size_that_no_model_has_is_named_before_anything_is_made_of_it(kind, tmp_path):
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("this release of transformers has no such model")
    more = {
        "Mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1},
        "Qwen3Next": {
            "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "num_experts": 0, "mlp_only_layers": [0, 1], "partial_rotary_factor": 0.25,
            "layer_types": ["linear_attention", "full_attention"],
        },
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**SIZES | more.get(kind, {}))
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())
    names = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "num_heads"]
    names += ["state_size", "num_key_value_heads", *(name for name in known if name.startswith("linear_"))]
    read_nowhere = {"Mamba2": ("num_attention_heads", "num_key_value_heads", "intermediate_size")}.get(kind, ())
    for name in (name for name in names if name in known and name not in read_nowhere):
        without = {"layer_types": None} if name == "num_hidden_layers" else {}
        for value in (*HUGE, float("nan"), -1):
            (tmp_path / "config.json").write_text(json.dumps({**known, **without, name: value}))
            named = rf"^config\.json: .*({name}|num_(qk|kv)_heads|weight)|^[\w.]+: expected shape"
            with pytest.raises(ValueError, match=named):
                from_peer(tmp_path)
    for share in (1e9, 1e38):
        rope = {**known.get("rope_parameters", {}), "partial_rotary_factor": share}
        (tmp_path / "config.json").write_text(json.dumps({**known, "rope_parameters": rope}))
        if kind != "Mamba2":
            with pytest.raises(ValueError, match=r"^config\.json: .*partial_rotary_factor"):
                from_peer(tmp_path)
