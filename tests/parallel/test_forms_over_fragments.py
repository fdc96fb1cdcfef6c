"""A form over fragments on several ranks gives what it gives of the whole sequence, gradients too."""

import math
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks

from attnzoo import Gate, Prune, get, list_variants
from attnzoo.errors import UnavailableError
from attnzoo.forms.options import LinearOptions
from attnzoo.forms.protocol import Kernel
from attnzoo.parallel import Fragments, attention, collectives, pruned, states
from attnzoo.parallel.rows import Rows
from attnzoo.samples import random_inputs
from attnzoo.testing import assert_close, leaves_of

T = 23


@dataclass
class Run:
    """A form of whole sequences, and over fragments: the output and gradients of both."""

    name: str
    fragments: Fragments
    inputs: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    transport: str = "auto"

    def whole(self):
        borders = self.fragments.borders
        packed = {"cu_seqlens": torch.tensor(borders)} if len(borders) > 2 else {}
        return self._run(lambda q, k, v, gate: self._form(q, k, v, gate, **self.options, **packed), self.inputs)

    def _form(self, *inputs, **options):
        return get(self.name).forms["parallel"](*inputs, **options)

    def _run(self, form, inputs, cotangent=lambda x: x):
        q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
        gate = inputs[3].map(lambda part: part.detach().clone().requires_grad_())
        leaves = leaves_of((q, k, v, gate))
        o = form(q, k, v, gate)
        do = torch.randn(1, T, *o.shape[2:], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad(o, tuple(leaves.values()), cotangent(do), allow_unused=True)
        pairs = zip(leaves.items(), grads, strict=True)
        return {"o": o.detach(), **{n: torch.zeros_like(x) if g is None else g for (n, x), g in pairs}}

    def together(self):
        def rank(number):
            own = self.fragments
            *rows, gate = self.inputs
            local = gate.map(lambda part: part if part.ndim == 1 else own.shard(part))
            options = {name: own.shard(x) if name == "write" else x for name, x in self.options.items()}

            def form(q, k, v, gate):
                return self._form(q, k, v, gate, fragments=own, transport=self.transport, **options)

            return self._run(form, (*own.shard(*rows), local), own.shard)

        found = on_ranks(self.fragments.ranks, rank)
        index = torch.cat([self.fragments.index(r) for r in range(self.fragments.ranks)]).argsort()
        joined = {}
        for name in found[0]:
            parts = [one[name] for one in found]
            joined[name] = sum(parts) if parts[0].ndim == 1 else torch.cat(parts, 1)[:, index]
        return joined


def compare(run):
    whole, together = run.whole(), run.together()
    assert_close({"o": together.pop("o")}, {"o": whole.pop("o")}, 1e-10)
    assert_close(together, whole, 1e-9)


@st.composite
def tables(draw, ranks):
    """Any table: uneven, empty and neighbouring fragments, and documents that end anywhere."""
    cuts = sorted(draw(st.sets(st.integers(1, T - 1), min_size=ranks - 1, max_size=6)))
    spans = list(zip([0, *cuts], [*cuts, T], strict=True))
    owners = draw(st.permutations([n % ranks for n in range(len(spans))]))
    borders = [0, *sorted(draw(st.sets(st.integers(1, T - 1), max_size=2))), T]
    empty = [(cuts[0], cuts[0], 0)]
    return Fragments.of([*((a, b, r) for (a, b), r in zip(spans, owners, strict=True)), *empty], ranks, borders)


def shut_at_cuts(gate, fragments):
    for part in ("log_decay", "log_diag"):
        gates = getattr(gate, part)
        if gates is not None and gates.ndim > 1:
            gates[:, [row.start for row in fragments.table]] = -torch.inf


@pytest.mark.parametrize("name", list_variants())
@settings(max_examples=3)
@given(data=st.data())
def test_ranks_together_give_what_one_does(name, data):
    ranks = data.draw(st.integers(2, 4))
    fragments = data.draw(tables(ranks))
    regime = data.draw(st.sampled_from(("mixed", "open", "closed")))
    H, G = data.draw(st.sampled_from(((3, 1), (6, 3), (4, 2), (2, 2))))
    inputs = random_inputs(name, B=1, T=T, H=H, G=G, K=4, V=3, regime=regime, seed=data.draw(st.integers(0, 99)))
    if data.draw(st.booleans(), label="closed exactly at the cuts"):
        shut_at_cuts(inputs[3], fragments)
    options = {}
    if get(name).side == "softmax":
        if data.draw(st.booleans(), label="window"):
            options["window"] = data.draw(st.integers(1, 12))
        if data.draw(st.booleans(), label="sink"):
            options["sink"] = torch.linspace(-1, 1, H, dtype=torch.float64)
    transport = data.draw(st.sampled_from(("auto", "heads"))) if H % ranks == 0 else "auto"
    compare(Run(name, fragments, inputs, options, transport))


@pytest.mark.parametrize("transport", ["heads", "auto"])
@pytest.mark.parametrize("name", ["nope", "fox", "path_fox", "wall", "mamba2", "gla", "gated_deltanet"])
def test_with_heads_exchanged_or_documents_whole_any_number_of_ranks_gives_the_same_bits(name, transport, monkeypatch):
    """Ranks that have whole documents send nothing of them, unless they are asked to exchange heads."""
    if transport == "auto":
        for collective in ("_all_gather", "_reduce_scatter", "swap"):
            monkeypatch.setattr(collectives, collective, None)
    *rows, gate = random_inputs(name, B=1, T=64, H=4, G=4, K=16, V=16, dtype=torch.float32)
    found = {}
    for ranks in (1, 2, 4):
        fragments = Fragments.zigzag([0, 8, 16, 32, 40, 48, 64], ranks)
        if transport == "auto":
            table = [(0, 16, 0), (16, 32, ranks - 1), (32, 48, ranks // 2), (48, 64, ranks // 4)]
            fragments = Fragments.of(table, ranks, range(0, 65, 8))  # padded alike, as all are as long

        def rank(_, fragments=fragments):
            given = [x.clone().requires_grad_() for x in fragments.shard(*rows)]
            local = gate.map(lambda part: part if part.ndim == 1 else fragments.shard(part))
            o = get(name).forms["parallel"](*given, local, fragments=fragments, transport=transport)
            return o.detach(), *torch.autograd.grad(o.square().sum(), given)

        order = torch.cat([fragments.index(r) for r in range(ranks)]).argsort()
        found[ranks] = [torch.cat(parts, 1)[:, order] for parts in zip(*on_ranks(ranks, rank), strict=True)]
    for ranks in (2, 4):
        assert all(torch.equal(got, one) for got, one in zip(found[ranks], found[1], strict=True))


@pytest.mark.parametrize(
    ("name", "H", "G"),
    [("fox", 4, 4), ("fox", 4, 1), ("path_fox", 8, 4), ("alibi", 4, 2), ("mamba2", 4, 1), ("gated_deltanet", 8, 4)],
)
def test_heads_are_dealt_by_what_pruning_keeps_and_come_back_in_their_order(name, H, G, monkeypatch):
    fragments, dealt = Fragments.zigzag([0, 9, T], 2), []
    *rows, gate = random_inputs(name, B=1, T=T, H=H, G=G, K=4, V=3, regime="open", seed=3)
    decays = -0.4 - torch.linspace(0.0, 0.2, H, dtype=torch.float64)  # the first heads keep most
    if gate.log_decay.ndim > 1:  # though not by the tokens of rank 0
        decays = decays.expand(1, T, H).clone()
        for number, sign in enumerate((4, -4)):
            decays[:, fragments.index(number)] += torch.linspace(-sign, sign, H) / fragments.count(number)
    gate = replace(gate, log_decay=decays)
    options = {"prune": Prune(1e-30), "sink": torch.linspace(-1, 1, H, dtype=torch.float64)}
    if get(name).side == "linear":
        options = {"prune": Prune(1e-30), "write": torch.rand(1, T, max(G, 4), dtype=torch.float64)}
    deal = attention.dealt
    monkeypatch.setattr(attention, "dealt", lambda *given: dealt.append(deal(*given)) or dealt[-1])
    compare(Run(name, fragments, (*rows, gate), options, "heads"))
    for _, order in dealt:
        size = 1 if G == 1 else H // G  # query heads that stay together
        groups = range(0, H, size)
        turns = [[*groups[0::4], *groups[3::4]], [*groups[1::4], *groups[2::4]]]  # to and fro
        assert [set(share) for share in order.unflatten(0, (2, -1)).tolist()] == [
            {first + i for first in turn for i in range(size)} for turn in turns
        ]


@pytest.mark.parametrize("name", ["rope", "complex_linear"])
def test_angles_of_every_token_are_those_of_all_heads(name):
    *rows, gate = random_inputs(name, B=1, T=T, H=4, G=2, K=4, V=3)
    gate = replace(gate, angle=torch.tensor([0.3, 0.7], dtype=torch.float64))
    compare(Run(name, Fragments.zigzag(T, 2), (*rows, gate), {}, "heads"))


def test_states_over_many_tokens_of_float16_are_read_in_float32():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert states._times(x, x.mT).item() == 360_000


@pytest.mark.parametrize(
    ("name", "form", "tokens", "chosen"),
    [
        ("path_fox", "triton", T, "heads"),
        ("path_fox", "reference", T, "gather"),
        ("deltanet", "triton", [0, 9, T], "heads"),
        ("deltanet", "triton", T, "states"),
        ("deltanet", "reference", [0, 9, T], "states"),
        ("gated_deltanet", "triton", [0, 9, T], "states"),
    ],
)
def test_a_kernel_that_takes_whole_sequences_alone_gets_heads(name, form, tokens, chosen):
    forms, inputs = get(name).form_set, random_inputs(name, B=1, T=T, H=4, G=2, K=4, V=3)
    call = forms, form, Rows(*inputs, forms.OPTIONS()), Fragments.contiguous(tokens, 2)
    assert attention.choose_transport(*call, "auto")[0] == chosen
    if chosen == "heads":
        with pytest.raises(
            UnavailableError, match="'gather': the triton form takes whole sequences alone, expected 'h"
        ):
            attention.choose_transport(*call, "gather")


@pytest.mark.parametrize("name", ["fox", "alibi", "path_fox", "fox_rope"])
def test_what_is_not_sent_weighs_no_more_than_eps(name):
    """With next to nothing allowed the result is the whole one; with more no output moves by more than it may."""
    for table, borders, window in ((None, T, None), (Fragments.zigzag, [0, 9, T], 11), (Fragments.contiguous, T, None)):
        fragments = (
            Fragments.of([(0, 2, 1), (2, 9, 0), (9, 15, 2), (15, T, 1)], 3, borders)
            if table is None
            else table(borders, 3)
        )
        inputs = random_inputs(name, B=1, T=T, H=4, G=2, K=4, V=3, regime="closing" if window else "open", seed=5)
        options = {} if window is None else {"window": window}
        run = Run(name, fragments, inputs, {**options, "prune": Prune(1e-30)}, "pruned")
        whole = replace(run, options=options).whole()
        together = run.together()
        assert_close({"o": together.pop("o")}, {"o": whole["o"]}, 1e-10)
        assert_close(together, {n: x for n, x in whole.items() if n != "o"}, 1e-9)
        eps = 0.05
        assert pruned.allowed(Prune(eps)).eps == pytest.approx(eps - eps * pruned.UNSENT)
        moved = replace(run, options={**options, "prune": Prune(eps)}).together()["o"] - whole["o"]
        assert float(moved.abs().max()) <= 2 * eps * float(inputs[2].abs().max())


def test_no_byte_of_a_key_crosses_that_the_certificate_drops(monkeypatch):
    """Every row that any rank hands to a collective is one that some rank needs, and each is sent once to it."""
    fragments = Fragments.zigzag(240, 3)
    q, k, v, gate = random_inputs("fox", B=2, T=240, H=4, G=2, K=4, V=3, regime="open", seed=1)
    gate = Gate(log_decay=torch.tensor([-3.0, -0.7, -0.1, -0.004], dtype=torch.float64).expand(2, 240, 4) * 1.0)
    k[..., 0] = torch.arange(2 * 240 * 2).view(2, 240, 2) * 1e-6  # its name
    sent = []
    swap = collectives.swap
    monkeypatch.setattr(
        pruned, "swap", lambda group, x, *to: sent.append((dist.get_rank(), x, to[0])) or swap(group, x, *to)
    )
    gathered = []
    all_gather = collectives._all_gather
    monkeypatch.setattr(
        collectives, "_all_gather", lambda out, x, **how: gathered.append(x.numel()) or all_gather(out, x, **how)
    )
    eps = 1e-3

    def rank(_):
        local = gate.map(fragments.shard)
        given = {"prune": Prune(eps), "fragments": fragments, "transport": "pruned"}
        return get("fox").forms["parallel"](*fragments.shard(q, k, v), local, **given)

    on_ranks(3, rank)
    names = {}
    for source, x, sizes in sent:
        if x.shape[1] == 4:  # keys
            for target, rows in enumerate(x.split(sizes)):
                ids = (rows[:, 0] * 1e6).round().long().tolist()
                assert len(set(ids)) == len(ids)
                names[source, target] = set(ids)
    assert len(names) == 9
    assert max(gathered) <= 6 * 2 * 4 * 2  # numbers per fragment, batch and head, and no keys
    expected = certified(q, k, gate, fragments, eps / 16)
    total = 0
    for (source, target), ids in names.items():
        assert ids == expected.get((source, target), set())
        total += len(ids)
    assert 0 < total < 0.7 * sum(len(x) for x in certified(q, k, gate, fragments, 1e-300).values())


def certified(q, k, gate, fragments, eps):
    """The names of the keys that each rank must have of each other, by the tail certificate written out."""
    found = {}
    scaled, keys = q.transpose(1, 2) * q.shape[-1] ** -0.5, k.transpose(1, 2).repeat_interleave(2, 1)
    c = gate.log_decay.transpose(1, 2).cumsum(-1)
    own = (scaled * keys).sum(-1)
    for b in fragments.table:
        rows = slice(b.start, b.stop)
        upper = scaled[:, :, rows].norm(dim=-1).amax(-1) * keys[:, :, : b.stop].norm(dim=-1).amax(-1)
        worst = upper + (c - own)[:, :, rows].amax(-1)
        for j in range(b.start):
            needed = worst + torch.logsumexp(-c[:, :, : j + 1], -1) > math.log(eps) - 1e-3
            source = next(row.rank for row in fragments.table if row.start <= j < row.stop)
            if source != b.rank:
                for batch, head in needed.view(2, 2, 2).any(-1).nonzero().tolist():
                    found.setdefault((source, b.rank), set()).add(batch * 480 + j * 2 + head)
    return found


@pytest.mark.parametrize("options", [{"transport": "gather"}, {"transport": "pruned", "prune": Prune(1e-3)}])
def test_what_needs_no_key_of_another_rank_is_attended_to_before_the_wait_for_keys(options, monkeypatch):
    """The first fragment of a text, and rows whose window ends among their own rank's keys."""
    events = {}
    forms = type(get("fox").form_set)

    def noted(name, call):
        def run(*given, **named):
            events.setdefault(dist.get_rank(), []).append(name)
            return call(*given, **named)

        return run

    for owner, name in ((forms, "whole"), (forms, "go_on"), (collectives.Works, "wait")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    fragments = Fragments.of([(0, 5, 0), (5, 12, 1), (12, 17, 1), (17, T, 0)], 2)
    *rows, gate = random_inputs("fox", B=1, T=T, H=2, G=2, K=4, V=3, regime="open")

    def rank(_):
        local = gate.map(fragments.shard)
        return get("fox").forms["parallel"](*fragments.shard(*rows), local, window=4, fragments=fragments, **options)

    on_ranks(2, rank)
    assert events == {0: ["whole", "wait", "go_on"], 1: ["go_on", "wait", "go_on"]}


@pytest.mark.parametrize(("name", "more"), [("gated_deltanet", 4), ("gla", 4), ("mamba2", 0)])
def test_a_fragment_of_the_linear_side_is_computed_by_the_form_of_the_call_alone(name, more, monkeypatch):
    """Once forward, with a column more for each channel of a key where transitions are matrices, and once backward."""
    forms, calls, inside = get(name).form_set, {}, threading.local()

    def extend(q, k, v, gate, state, given):
        calls.setdefault(dist.get_rank(), []).append((v.shape[3], state is not None))
        inside.kernel = True
        try:
            return forms._extend(q, k, v, gate, state, given)
        finally:
            inside.kernel = False

    kind = type(forms.transition)
    block = kind.block
    monkeypatch.setattr(kind, "block", lambda *given: block(*given) if inside.kernel else pytest.fail("a second way"))
    kernel = Kernel(lambda *_: pytest.fail("whole"), extend, honours=frozenset(LinearOptions.__match_args__))
    own, fragments = replace(forms, kernels={"kernel": kernel}), Fragments.contiguous(T, 2)
    *rows, gate = random_inputs(name, B=1, T=T, H=2, G=2, K=4, V=3, regime="open")

    def rank(_):
        inside.kernel = False
        given = [x.clone().requires_grad_() for x in fragments.shard(*rows)]
        o = attention.attend(own, "kernel", Rows(*given, gate.map(fragments.shard), LinearOptions()), fragments)
        torch.autograd.grad(o.sum(), given)

    on_ranks(2, rank)
    assert calls == {number: [(3 + more, more > 0), (3, True)] for number in range(2)}


def test_a_kernel_that_takes_no_more_columns_runs_twice():
    forms = get("gated_deltanet").form_set

    def extend(q, k, v, *others):
        assert v.shape[3] <= 4
        return forms._extend(q, k, v, *others)

    kernel = Kernel(
        lambda *_: None, extend, lambda call: "wide" if call.v.shape[3] > 4 else "",
        honours=frozenset(LinearOptions.__match_args__),
    )  # fmt: skip
    own, fragments = replace(forms, kernels={"kernel": kernel}), Fragments.zigzag([0, 9, T], 2)
    *rows, gate = random_inputs("gated_deltanet", B=1, T=T, H=2, G=2, K=4, V=3)
    whole = get("gated_deltanet").forms["parallel"](*rows, gate, cu_seqlens=torch.tensor([0, 9, T]))

    def rank(_):
        return attention.attend(
            own, "kernel", Rows(*fragments.shard(*rows), gate.map(fragments.shard), LinearOptions()), fragments
        )

    for number, o in enumerate(on_ranks(2, rank)):
        assert (o - whole[:, fragments.index(number)]).abs().max() <= 1e-10


@pytest.mark.parametrize("name", ["fox", "nope", "path", "mamba2"])
def test_documents_have_the_same_borders_in_every_row_of_a_batch(name):
    """On one rank, by heads, of whole documents on each rank, and by what the side sends."""
    *rows, gate = random_inputs(name, B=2, T=T, H=4, G=2, K=4, V=3)
    form, borders = get(name).forms["parallel"], [0, 5, 12, T]
    row = [(*(x[b : b + 1] for x in rows), gate.map(lambda x, b=b: x[b : b + 1])) for b in range(2)]
    expected = torch.cat([form(*one, cu_seqlens=torch.tensor(borders)) for one in row])
    whole = Fragments.of([(0, 12, 1), (12, T, 0)], 2, borders)
    cases = [(Fragments.zigzag(borders, ranks), way) for ranks, way in ((1, "auto"), (2, "heads"), (2, "auto"))]
    for fragments, transport in [*cases, (whole, "auto")]:

        def rank(_, fragments=fragments, transport=transport):
            local = gate.map(fragments.shard)
            return form(*fragments.shard(*rows), local, fragments=fragments, transport=transport)

        for number, o in enumerate(on_ranks(fragments.ranks, rank)):
            torch.testing.assert_close(o, expected[:, fragments.index(number)], rtol=0, atol=1e-10)


@pytest.mark.parametrize("transport", ["gather", "heads", "pruned"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_of_no_sequences_gives_no_rows(transport, ranks):
    *rows, gate = random_inputs("fox", B=1, T=T, H=4, G=2, K=4, V=3)
    fragments = Fragments.zigzag([0, 7, T], ranks)

    def rank(_):
        given = [fragments.shard(x)[:0] for x in (*rows, gate.log_decay)]
        options = {"prune": Prune(1e-3), "fragments": fragments, "transport": transport}
        return get("fox").forms["parallel"](*given[:3], Gate(log_decay=given[3]), **options).shape

    found = on_ranks(ranks, rank) if ranks > 1 else [rank(0)]
    assert found == [(0, fragments.count(number), 4, 3) for number in range(ranks)]


def test_log_sum_exps_come_too():
    inputs = random_inputs("path_fox", B=1, T=T, H=4, G=2, K=4, V=3, seed=3)
    fragments = Fragments.zigzag([0, 7, T], 2)
    form = get("path_fox").forms["parallel"]

    def rank(_):
        local = inputs[3].map(fragments.shard)
        return form(*fragments.shard(*inputs[:3]), local, return_lse=True, fragments=fragments)[1]

    lse = form(*inputs, return_lse=True, cu_seqlens=torch.tensor(fragments.borders))[1]
    for number, found in enumerate(on_ranks(2, rank)):
        assert torch.allclose(found, lse[:, fragments.index(number)], rtol=0, atol=1e-10)
