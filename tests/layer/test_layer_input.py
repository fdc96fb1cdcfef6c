"""What a layer refuses, and that the message names the argument."""

import math

import pytest
import torch
from layers import D, H

from attnzoo import Prune, build_attention, get
from attnzoo.config import ModelConfig
from attnzoo.layer.attention import Attention
from attnzoo.models import LanguageModel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "foks"}, r"unknown variant 'foks'.*did you mean 'fox'"),
        ({"name": "fox", "output_nrom": "rms"}, r"'output_nrom'.*did you mean 'output_norm'"),
        ({"name": "gla", "temprature": 2}, r"'temprature'.*did you mean 'temperature'"),
        ({"name": "fox", "block": "prod"}, r"unknown block 'prod'.*did you mean 'pro'"),
        ({"name": "fox", "impl": "trition"}, r"unknown impl 'trition'.*did you mean 'triton'"),
        ({"name": "fox", "qk_norm": True}, r"unknown qk_norm True: expected one of none, rms, rms_full, l2"),
        ({"name": "fox", "qk_norm_eps": 0.5}, r"qk_norm_eps: expected \S+ without qk_norm, got 0.5"),
        ({"name": "fox", "output_norm_eps": 0.5}, r"output_norm_eps: expected \S+ without output_norm, got 0.5"),
        ({"name": "fox", "output_gate": "sigmoyd"}, r"unknown output_gate.*did you mean 'sigmoid'"),
        ({"name": "fox", "gate": "forgot"}, r"unknown gate 'forgot'.*did you mean 'forget'"),
        ({"name": "fox", "gate": "delta"}, r"'fox' needs the parts.*log_decay.*'delta' provides"),
        ({"name": "rope", "acp": True}, r"acp: 'rope' has no scalar decay.*alibi, fox, path_fox"),
        ({"name": "gla", "acp": True}, r"acp: 'gla' has no scalar decay.*\(it serves retnet, mamba2, mamba3\)"),
        ({"name": "gated_deltanet", "acp": True}, r"acp: 'gated_deltanet' has no kernel that leaves out what states"),
        ({"name": "mamba2", "acp": Prune(bound="paper")}, r"acp: expected bound='tail'"),
        ({"name": "deltanet", "qk_norm": "rms"}, r"qk_norm: expected 'l2'"),
        ({"name": "fox", "hidden_size": 100}, r"hidden_size: expected a multiple of num_heads = 12"),
        ({"name": "fox", "num_kv_heads": 5}, r"num_kv_heads: expected a divisor of num_heads = 12, got 5"),
        ({"name": "fox", "num_heads": 0}, r"num_heads: expected a positive integer, got 0"),
        ({"name": "fox", "conv_size": -1}, r"conv_size: expected"),
        ({"name": "rope", "head_dim": 7}, r"head_dim .*: expected an even number .*, got 7"),
        ({"name": "rope", "hidden_size": 60}, r"by default hidden_size / num_heads\): expected an even .*, got 5"),
        ({"name": "rope", "theta": 0}, r"theta: expected a base of at least 1"),
        ({"name": "fox", "gate": "fixed", "t_min": 9, "t_max": 3}, r"t_min, t_max: expected"),
        ({"name": "mamba2", "dt_min": 0}, r"dt_min, dt_max: expected"),
        ({"name": "gla", "gate_rank": 0}, r"gate_rank: expected at least 1"),
        ({"name": "path", "w": "keys"}, r"unknown w 'keys'.*did you mean 'key'"),
        ({"name": "path", "w": ["key"]}, r"w: expected a name, got \['key'\]"),
        ({"name": "path", "w_conv_size": -1}, r"w_conv_size: expected a number of tokens >= 0, got -1"),
        ({"name": "fox", "gate": ["forget", "alibi"]}, r"gate: .*log_decay, got both 'forget' and 'alibi'"),
        ({"name": "fox", "gate": "mamba2"}, r"gate: 'mamba2' says how strongly tokens write, and a softmax \('fox'\)"),
        ({"name": "path", "gate": "delta", "qk_norm": "l2"}, r"gate: 'delta' says how strongly tokens write"),
        ({"name": "rope", "theta": 10**30}, r"theta: expected a number that float32 holds, got 10000"),
        ({"name": "deltanet", "num_householder": 2**31}, r"num_householder: expected a whole number below 2\^31, got"),
        ({"name": "mamba2", "expand": 1e12}, r"expand: expected less than 2\^31 channels per head, got 1000000000000"),
        ({"name": "fox", "gate": []}, r"gate: expected at least one name"),
        ({"name": "fox", "kv_shift": "no"}, r"kv_shift: expected True or False, got 'no'"),
        ({"name": "fox", "sinks": 1}, r"sinks: expected True or False, got 1"),
        ({"name": "deltanet", "allow_neg_eigval": "no"}, r"allow_neg_eigval: expected True or False, got 'no'"),
        ({"name": "alibi", "learnable_slopes": None}, r"learnable_slopes: expected True or False, got None"),
        ({"name": "fox", "qk_norm_eps": -1}, r"qk_norm_eps: expected a positive number, got -1"),
        ({"name": "fox", "output_norm_eps": math.nan}, r"output_norm_eps: expected a number .*, got nan"),
        ({"name": "fox", "scale": math.nan}, r"scale: expected a number .*, got nan"),
        ({"name": "gla", "scale": -0.3}, r"scale: expected a positive number, got -0.3"),
        ({"name": "fox", "rotary": 0}, r"rotary: expected a base of at least 1 .*, got 0"),
        ({"name": "rope", "theta": math.inf}, r"theta: expected a number .*, got inf"),
        ({"name": "fox", "gate": "fixed", "t_max": math.inf}, r"t_max: expected a number .*, got inf"),
        ({"name": "fox", "gate": "fixed", "t_min": "16"}, r"t_min: expected a number .*, got '16'"),
        ({"name": "mamba2", "dt_max": math.nan}, r"dt_max: expected a number .*, got nan"),
        ({"name": "mamba2", "a_max": 10**400}, r"a_max: expected a number that float32 holds, got 1000"),
        ({"name": "gla", "temperature": math.nan}, r"temperature: expected a number .*, got nan"),
        ({"name": "gla", "gate_rank": 2.0}, r"gate_rank: expected a whole number .*, got 2.0"),
        ({"name": "fox", "num_heads": True}, r"num_heads: expected a whole number .*, got True"),
        ({"name": "fox", "window": 2.5}, r"window: expected a whole number .*, got 2.5"),
        ({"name": "fox", "block": ["pro"]}, r"unknown block \['pro'\]"),
        ({"name": "fox", "qk_norm": None}, r"unknown qk_norm None: expected one of none, rms"),
        ({"name": "wall", "block": "hgrn2", "qk_norm": "rms"}, r"qk_norm: expected 'none' \(BoundedForgetGate makes"),
        ({"name": "gla", "block": "hgrn2", "rotary": 1e4}, r"rotary: expected None \(BoundedForgetGate makes"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build_attention(**options)


def test_bad_types_are_named():
    with pytest.raises(TypeError, match="acp: expected True, False or attnzoo.Prune, got 'yes'"):
        build_attention("fox", acp="yes")
    with pytest.raises(TypeError, match="gate: expected a name or a GateProjection class"):
        build_attention("fox", gate=[3])
    for gate in (None, {"forget"}, {"forget": 1}, 0):
        with pytest.raises(TypeError, match="gate: expected a name or a GateProjection class, got"):
            build_attention("fox", gate=gate)
    with pytest.raises(TypeError, match="config: expected AttentionConfig, got dict"):
        Attention(get("fox"), {"hidden_size": 8})
    with pytest.raises(TypeError, match="config: expected ModelConfig, got dict"):
        LanguageModel({"attention": "fox"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_eps": -1}, "norm_eps: expected a number above 0, got -1"),
        ({"norm_eps": math.nan}, "norm_eps: expected a number that float32 holds, got nan"),
        ({"hidden_size": "64"}, "hidden_size: expected a whole number .*, got '64'"),
        ({"num_layers": 2.0}, "num_layers: expected a whole number .*, got 2.0"),
        ({"tie_embeddings": "no"}, "tie_embeddings: expected True or False, got 'no'"),
        ({"attention_options": [1]}, r"attention_options: expected a mapping, got \[1\]"),
        ({"attention_options": {1: 2}}, "attention_options: expected names of options, got 1"),
    ],
)
def test_bad_sizes_of_a_model_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, x: a(x[0]), ValueError, r"x: expected \[B, T, D = 24\], got \(6, 24\)"),
        (lambda a, x: a(x[..., :5]), ValueError, r"x: expected \[B, T, D = 24\]"),
        (lambda a, x: a(x[:, :0]), ValueError, "x: expected at least one token"),
        (lambda a, x: a(x, attention_mask=torch.ones(2, 5)), ValueError, r"attention_mask: expected .*\(2, 6\)"),
        (lambda a, x: a(x, attention_mask=torch.ones(2, 9)), ValueError, "attention_mask: expected"),
        (lambda a, x: a(x, attention_mask=[1]), TypeError, "attention_mask: expected a tensor"),
        (lambda a, x: a(x, cu_seqlens=torch.tensor([0, 6])), ValueError, "x: expected one row"),
        (lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0, 5])), ValueError, "cu_seqlens: expected borders"),
        (lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0, 4, 3, 6])), ValueError, "cu_seqlens: expected borders"),
        (lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0.0, 6.0])), TypeError, "cu_seqlens: expected an int32"),
        (lambda a, x: a(x[:1], cu_seqlens=torch.tensor(6)), ValueError, "cu_seqlens: expected one axis"),
        (
            lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0, 6]), attention_mask=torch.ones(1, 6)),
            ValueError,
            "attention_mask: expected None with cu_seqlens",
        ),
        (lambda a, x: a(x, cache={}), TypeError, "cache: expected what new_cache"),
        (lambda a, x: a(x.tolist()), ValueError, "x: expected .*, got list"),
        (
            lambda a, x: a(x.bfloat16()),
            TypeError,
            r"x: expected the dtype of the layer, torch.float32 .*got torch.bfloat16",
        ),
        (lambda a, x: a(x.long()), TypeError, "x: expected the dtype of the layer, torch.float32 .*got torch.int64"),
        (lambda a, x: a(x.to("meta")), ValueError, "x: expected the device of the layer, cpu, got meta"),
        (lambda a, x: a.project(x.double()), TypeError, "x: expected the dtype of the layer"),
        (lambda a, x: a(x, attention_mask=x[..., 0]), TypeError, "attention_mask: expected bool or integers"),
        (
            lambda a, x: a(x, attention_mask=torch.tensor([[0, 0, -10000, 0, 0, 0]] * 2)),
            ValueError,
            r"attention_mask: expected 1 for tokens and 0 for padding, got \[-10000, 0\]",
        ),
    ],
)
def test_bad_calls_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(build_attention("fox", hidden_size=D, num_heads=H), torch.randn(2, 6, D))
