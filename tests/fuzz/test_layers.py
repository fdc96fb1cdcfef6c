"""Random layers and random calls: what one plain call in float64 gives, or a refusal that names the argument.

A refused call changes nothing: the calls after it are compared as if it had not been.
"""

import copy
import dataclasses
import math
import pickle

import torch
from rule import answer

from attnzoo import Prune, build_attention, get, list_variants
from attnzoo.layer.cache import LayerCache
from attnzoo.layer.config import BLOCKS, AttentionConfig
from attnzoo.layer.gates import GATES, gate_classes, gate_options

D, H = 24, 4
FIELDS = [field.name for field in dataclasses.fields(AttentionConfig)]
GATE_FIELDS = sorted({option for cls in GATES.values() for option in gate_options([cls])})
GOOD = {
    "block": [None, *BLOCKS], "num_kv_heads": [1, 2, 4], "num_qk_heads": [1, 2], "head_dim": [2, 4, 6],
    "value_dim": [1, 5], "feature_map": ["identity", "silu", "relu", "elu"],
    "qk_norm": ["none", "rms", "rms_full", "l2"],
    "conv_size": [0, 1, 4], "qk_norm_shared": [True, False], "conv_bias": [True, False],
    "conv_activation": ["silu", "none"], "kv_shift": [True, False], "qkv_bias": [True], "output_bias": [True],
    "rotary": [None, 1e4], "scale": [None, 1, 0.3], "skip": [True], "output_norm": ["none", "rms", "group"],
    "output_norm_groups": [1, 2], "output_gate": ["sigmoid", "swish", "lora"], "gate_before_norm": [True, False],
    "window": [1, 3, 200], "sinks": [True], "acp": [True, Prune(1e-9)], "t_min": [1, 20.0], "learnable_slopes": [True],
    "temperature": [1.0, 20], "theta": [1, 100.0], "w": ["key", "low_rank"], "w_conv_size": [0, 2],
    "allow_neg_eigval": [True], "gate_rank": [None, 3], "expand": [0.5, 2], "impl": ["reference"], "gate": list(GATES),
    "key_feature_map": ["identity", "silu"], "token_mix": [True], "kv_rank": [None, 7], "shared_key_dim": [1, 2],
    "qk_bias": [True], "query_correction": [True], "rotary_angles": ["rope", "retnet"], "output_norm_bias": [True],
    "output_norm_shared": [True], "bonus": [True], "output_gate_rank": [2], "output_gate_low_rank": [True],
    "softcap": [None, 3.0], "num_householder": [2, 3], "trapezoid": [True],
}  # fmt: skip
ODD = [
    None, True, False, "no", "", "rms", -1, 0, 1, 3, 2.5, 1e-45, 1e400, -math.inf, math.nan, 10**30, [], ["forget"], {},
    {"eps": 1e-3}, ("forget", "alibi"), torch.ones(2), torch.float32, object, b"silu",
]  # fmt: skip


def options_of(rng, name):
    """Options of which most are good, some are odd, and some are of other variants."""
    own = list(gate_options(gate_classes(getattr(get(name).module, "LAYER", {}).get("gate", "none"))))
    options = {}
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        key = rng.choice(
            [rng.choice(list(GOOD)), rng.choice(FIELDS), rng.choice(own or FIELDS), rng.choice(GATE_FIELDS)]
        )
        if key in ("hidden_size", "num_heads"):
            options[key] = rng.choice([*ODD, D, H, 2])
        elif rng.random() < 0.05:
            options[key[:-1]] = 1
        else:
            options[key] = rng.choice(GOOD[key]) if key in GOOD and rng.random() < 0.7 else rng.choice(ODD)
    return options


def make(rng, name, options):
    attn = build_attention(name, **{"hidden_size": D, "num_heads": H, **options}).double()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return attn


def test_random_options_make_a_layer_or_are_refused_by_name(fuzz):
    made = 0
    for rng in fuzz(30):
        name = rng.choice(list_variants())
        options = options_of(rng, name)
        names = [*options, "num_heads", "head_dim", "gate", "qk_norm"]
        attn = answer(lambda name=name, options=options, rng=rng: make(rng, name, options), names, (name, options))
        if attn is None:
            continue
        made += 1
        x = torch.randn(2, 5, attn.config.hidden_size).double()
        shared = (
            {} if attn.value_residual is None else {"first": [torch.randn(2, 5, attn.v_proj.out_features).double()]}
        )
        with torch.no_grad():
            y = answer(lambda attn=attn, x=x, shared=shared: attn(x, **shared), [], (name, options))
        assert y.shape == x.shape
        assert y.isfinite().all(), (name, options)
        assert repr(attn)
    assert made > fuzz.done // 4 or fuzz.done == 1


class Talk:
    """One layer, one cache, and what each of its rows has said so far."""

    def __init__(self, rng, attn, story):
        self.rng, self.attn, self.story = rng, attn, story
        self.cache = attn.new_cache()
        self.rows = None  # of each row, its valid tokens [n, D]

    def tokens(self, B, T):
        x = torch.randn(B, T, D).double() * self.rng.choice([1, 1, 1, 3, 1e-3])
        if self.rng.random() < 0.1:
            x[:, self.rng.randrange(T)] = 0
        if self.rng.random() < 0.2:
            x = x.mT.contiguous().mT
        return x[:1].expand(B, T, D) if self.rng.random() < 0.05 else x

    def expected(self, said):
        """For each row: the last outputs of one plain call on all its tokens."""
        outputs = []
        for before, new in zip(self.rows or [torch.zeros(0, D).double()] * len(said), said, strict=True):
            whole = torch.cat([before, new])[None]
            outputs.append(self.attn(whole)[0, len(before) :] if whole.shape[1] else new)
        return outputs

    def compare(self, got, expected, what):
        for y, want in zip(got, expected, strict=True):
            assert y.shape == want.shape, (self.story, what)
            error = (y - want).abs().max() if y.numel() else torch.zeros(())
            assert error <= 1e-8 * want.abs().max().clamp(min=1) if want.numel() else True, (self.story, what, error)

    def good(self):
        """A call that must succeed: plain, padded or packed."""
        rng = self.rng
        B = rng.choice([1, 2, 3]) if self.rows is None else len(self.rows)
        T = rng.choice([1, 1, 2, 5, 17, rng.choice([40, 140])])
        x = self.tokens(B, T)
        kind = rng.choice(["plain", "plain", "mask", "mask", "long mask", "packed"])
        self.story.append(f"{kind} {B, T}")
        if kind == "plain":
            said = list(x)
            expected = self.expected(said)
            got = list(self.attn(x, cache=self.cache))
        elif kind == "packed":
            lengths = [rng.randrange(6) for _ in range(B)]
            lengths[rng.randrange(B)] += 1
            x = self.tokens(1, sum(lengths))
            said = list(x[0].split(lengths))
            expected = self.expected(said)
            borders = torch.tensor([0, *lengths]).cumsum(0).to(rng.choice([torch.int32, torch.int64]))
            got = list(self.attn(x, cu_seqlens=borders, cache=self.cache)[0].split(lengths))
        else:
            mask = torch.rand(B, T) < rng.choice([0.0, 0.5, 0.9, 1.0])
            said = [row[there] for row, there in zip(x, mask, strict=True)]
            expected = self.expected(said)
            dtype = rng.choice([torch.bool, torch.int64, torch.uint8, torch.int8])
            given = mask
            if kind == "long mask":
                given = torch.cat([torch.ones(B, self.cache.tokens, dtype=torch.bool), mask], 1)
            x = torch.where(mask[..., None], x, rng.choice([math.nan, math.inf, 1e300, 7.0]))
            y = self.attn(x, attention_mask=given.to(dtype), cache=self.cache)
            assert y[~mask].eq(0).all(), self.story
            got = [row[there] for row, there in zip(y, mask, strict=True)]
        self.compare(got, expected, self.story[-1])
        before = self.rows or [torch.zeros(0, D).double()] * B
        self.rows = [torch.cat(pair) for pair in zip(before, said, strict=True)]

    def alone(self):
        """A call without a cache, on rows of its own: padded or packed, its gradients too."""
        rng, attn = self.rng, self.attn
        lengths = [rng.choice([0, 1, 3, 9, 130]) for _ in range(rng.choice([1, 2, 3]))]
        lengths[rng.randrange(len(lengths))] += 1
        x = self.tokens(1, sum(lengths))
        weights = [p for p in attn.parameters() if p.requires_grad]
        self.story.append(f"alone {lengths}")
        with torch.enable_grad():
            wanted = torch.cat([attn(row) for row in x.split(lengths, 1) if row.shape[1]], 1)
            if rng.random() < 0.5:
                got = attn(x, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
            else:
                T = max(lengths) + rng.randrange(3)
                left = [rng.randrange(T - n + 1) for n in lengths]
                mask = torch.stack(
                    [(torch.arange(T) >= a) & (torch.arange(T) < a + n) for a, n in zip(left, lengths, strict=True)]
                )
                padded = torch.full((len(lengths), T, D), rng.choice([0.0, math.nan, 1e300]), dtype=torch.float64)
                padded[mask] = x[0]
                got = attn(padded, attention_mask=mask)[mask][None]
        self.compare([got], [wanted], "values")
        cotangent = torch.randn_like(wanted)
        # of one token a form may leave out the gate, whose gradient is zeros
        gradients = [
            torch.autograd.grad(y, weights, cotangent, allow_unused=True, materialize_grads=True) for y in (got, wanted)
        ]
        self.compare(*gradients, "gradients")

    def odd(self):
        """Something between two calls that keeps the meaning."""
        rng = self.rng
        kind = rng.choice(["reorder", "copy", "train", "fork", "pickle"])
        self.story.append(kind)
        if kind == "reorder" and self.rows is not None:
            index = torch.tensor([rng.randrange(len(self.rows)) for _ in range(rng.choice([1, 2, 3]))])
            self.cache.reorder(index.to(rng.choice([torch.int32, torch.int64])))
            self.rows = [self.rows[i] for i in index.tolist()]
        elif kind == "copy":
            self.cache = copy.deepcopy(self.cache)
        elif kind == "pickle":
            self.cache = pickle.loads(pickle.dumps(self.cache))
        elif kind == "train":
            self.attn.train(rng.random() < 0.5)
        elif kind == "fork" and self.rows is not None:
            other = copy.copy(self.cache)  # another hand on the same state
            self.attn(self.tokens(len(self.rows), rng.choice([1, 3])), cache=other)

    def bad(self):
        """A call that must be refused by name, and must change nothing."""
        rng, attn, cache = self.rng, self.attn, self.cache
        B, T = 1 if self.rows is None else len(self.rows), rng.choice([1, 4])
        x = self.tokens(B, T)
        given = {"cache": cache}
        label = rng.choice(["x", "x", "attention_mask", "cu_seqlens", "cache", "index"])
        if label == "x":
            x = rng.choice([
                x.float(), x.bfloat16(), x.long(), x[0], x[..., :-1], x[:, :0], x.tolist(), None, x.to("meta"),
                x.numpy(), x.to(torch.complex128), x[None],
            ])  # fmt: skip
        elif label == "attention_mask":
            ones = torch.ones(B, T)
            given[label] = rng.choice([
                ones, ones[:, 1:].bool(), ones[0].bool(), ones.long() * -10000, ones.long() + 1, [[1]], True,
                ones.half(), torch.ones(B + 1, T, dtype=torch.bool),
                torch.ones(B, T + cache.tokens + 1, dtype=torch.bool), ones.bool().to("meta"),
                ones.bool()[..., None],
            ])  # fmt: skip
        elif label == "cu_seqlens":
            x = self.tokens(1, 6)
            N = list(range(B))
            given[label] = rng.choice([
                torch.tensor([0, *N, 5]), torch.tensor([0, *N[1:], 9, 6]), torch.tensor([1, *N[1:], 6]), [0, 6],
                torch.tensor([0.0, *N[1:], 6]), torch.tensor(6), torch.tensor([6]), torch.tensor([0, *N, 6, 6, 6]),
                torch.tensor([[0, 6]]), torch.tensor([-6, 0, 6]),
            ])  # fmt: skip
            wrong_rows = torch.is_tensor(given[label]) and given[label].ndim == 1 and len(given[label]) != B + 1
            if self.rows is None and wrong_rows:
                given["attention_mask"] = torch.ones(1, 6, dtype=torch.bool)
        elif label == "cache":
            twin = copy.deepcopy(attn)
            used = twin.new_cache()
            twin(x, cache=used)
            given[label] = rng.choice([used, twin.new_cache(), {}, [cache], attn, cache.state if self.rows else 7])
        else:
            index = rng.choice([None, [0], torch.tensor([B]), torch.tensor([-1]), torch.ones(B, dtype=torch.bool), 0.5])
            call = lambda: cache.reorder(index)  # noqa: E731
        if label != "index":
            call = lambda: attn(x, **given)  # noqa: E731
        self.story.append(f"bad {label}: {given.get(label, x) if label != 'index' else index}"[:200])
        names = [label, "cache", "x"] if label in ("x", "cu_seqlens") else [label]
        assert answer(lambda: (call(), "no refusal")[1], names, self.story) is None, self.story


@torch.no_grad()
def test_random_calls_of_a_layer_give_what_one_plain_call_gives(fuzz):
    for rng in fuzz(8):
        name = rng.choice(list_variants())
        while True:
            options = {key: rng.choice(GOOD[key]) for key in rng.sample(list(GOOD), rng.choice([0, 2, 4]))}
            try:
                attn = make(rng, name, options)
                break
            except (ValueError, TypeError):
                continue
        if attn.prune is not None:
            attn.prune = Prune(1e-12)
        talk = Talk(rng, attn, [f"{name} {options}"])
        for _ in range(rng.choice([3, 6, 9])):
            rng.choice([talk.good, talk.good, talk.alone, talk.odd, talk.bad, talk.bad])()
        talk.good()
        assert isinstance(talk.cache, LayerCache)
