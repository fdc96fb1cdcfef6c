"""Steps that check proposed tokens: whatever is proposed, a sequence goes on as without, and in fewer steps."""

import pytest
import torch
from generated import LAYERS, alone, build, filled, forgetful, that_forgets
from layers import assert_same, layer, rows
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo.algebra import validation
from attnzoo.forms.caches import device_memory
from attnzoo.forms.caches.pages.pool import PAGE
from attnzoo.models import Generator
from attnzoo.models.generation.batch import Batch, StepOptions
from attnzoo.models.generation.proposals import from_model, look_up
from attnzoo.models.generation.request import Request
from attnzoo.models.generation.sampling import Sampling
from attnzoo.registry import get, list_variants

NEW = 20
CASES = {name: (LAYERS[name], {}) for name in ("mamba2-groups", "rope-grouped", "fox-pro-acp")}
CASES |= {
    "selective": ({"attention": ["mamba3", "fox_rope"]}, {}),
    "householders": ({"attention": "gated_deltanet", "attention_options": {"num_householder": 2}}, {}),
    "path-fox-pages": ({"attention": ["path_fox", "retnet"], "attention_options": {"block": "pro"}}, {"evict": 1e-30}),
    "carried": ({"attention": ["path_fox", "wall"], "attention_options": {"num_kv_heads": 1, "sinks": True}}, {}),
    "products": ({"attention": ["rope_path", "path_wall", "gated_wall"], "num_layers": 3}, {}),
    "path-window": ({"attention": "path", "attention_options": {"window": 70, "num_kv_heads": 1}}, {"evict": 1e-30}),
}


def proposals(answers, seed=0):
    """Right for some tokens, then wrong; sometimes none at all."""
    draws = torch.Generator().manual_seed(seed)

    def draft(request):
        right, wrong = (int(torch.randint(6, (), generator=draws)) for _ in range(2))
        start = len(request.tokens)
        return [*answers[request.id][start : start + right], *[39] * wrong][: 15 if right else 0]

    return draft


def proposed(model, prompts, limits):
    """A generator whose greedy sequences, most of them proposed, were those of the model alone, in fewer steps."""
    expected = [alone(model, prompt, NEW) for prompt in prompts]
    generator, steps = Generator(model, 2, 160, **limits), 0
    ids = [generator.add(prompt, NEW, temperature=0) for prompt in prompts]
    for _ in generator.stream(proposals(expected)):
        steps += 1
    assert [generator.requests[n].tokens for n in ids] == expected
    assert steps < NEW * len(prompts) * 0.6
    return generator


@pytest.mark.parametrize("name", CASES)
def test_greedy_sequences_go_on_as_without_proposals(name):
    options, limits = CASES[name]
    model, draws = build(**options), torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 40, (T,), generator=draws) for T in (120, 3, 55)]
    generator = proposed(model, prompts, limits)
    assert generator.batch.rows.lengths == [0, 0]


@pytest.mark.parametrize("settings", [{}, {"top_k": 5, "top_p": 0.9}], ids=["", "filtered"])
def test_samples_are_those_without_proposals(settings):
    model = build(attention=["mamba2", "fox"])
    found = []
    for known in (None, found):
        generator = Generator(model, 2, 80, check_every=1)
        ids = [generator.add([3, 1, 4], NEW, temperature=0.7, seed=seed, **settings) for seed in (5, 6)]
        draft = None if known is None else proposals(dict(zip(ids, known[0], strict=True)))
        generator.run(draft)
        found.append([generator.requests[n].tokens for n in ids])
    assert found[0] == found[1]


def test_keys_that_went_are_not_needed_by_tokens_that_are_taken_back():
    """One head forgets; proposals are always wrong, so that each step takes tokens back, over borders of pages."""
    model, draws = forgetful("fox"), torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 40, (150,), generator=draws)
    generator = Generator(model, 1, 400, evict=1e-30)
    number = generator.add(prompt, 66, temperature=0)
    assert generator.run(lambda request: [39] * 15)[number] == alone(model, prompt, 66)
    forgets, remembers = generator.requests[number].kept[0]
    assert forgets <= remembers - 2 * PAGE


def test_stop_tokens_and_lengths_end_a_sequence_within_a_step():
    model = build()
    answer = alone(model, torch.tensor([1, 2, 3]), 30)
    stop = answer[20]
    for more in ({}, {"stop": [stop]}):
        generator = Generator(model, 1, 33)
        number = generator.add([1, 2, 3], 30, temperature=0, **more)
        found = generator.run(lambda request: answer[len(request.tokens) :][:15])[number]
        assert found == (answer[: answer.index(stop) + 1] if more else answer)


def test_text_that_repeats_is_looked_up():
    request = Request(0, None, 0, [5, 6, 7, 8, 5, 6, 9, 1, 5], 9, Sampling(0.0), frozenset(), tokens=[6])
    assert look_up(3, ngram=2)(request) == [9, 1, 5]
    assert look_up(2, ngram=1)(request) == [9, 1]
    request.tokens.append(11)
    assert look_up()(request) == []
    with pytest.raises(ValueError, match="ngram: expected at least 1, got 0"):
        look_up(ngram=0)
    model = build(attention=["gla", "fox"])
    generator = Generator(model, 1, 40)
    number = generator.add([1, 2, 1, 2, 1], 20, temperature=0)
    assert generator.run(look_up())[number] == alone(model, torch.tensor([1, 2, 1, 2, 1]), 20)


@pytest.mark.parametrize("attention", ["mamba2", "fox", ["path", "gla"]], ids=str)
def test_a_smaller_model_proposes_what_it_would_draw_alone(attention):
    model, small = build(attention=["gla", "fox"]), build(attention=attention)
    request = Request(0, None, 0, [5, 6, 7], 9, Sampling(0.0), frozenset())
    draft = from_model(small, 4)
    for tokens in ([], [1], [1, 2, 3]):
        request.tokens[:] = tokens
        for _ in range(2):  # asked again, after a step that failed
            assert draft(request) == alone(small, torch.tensor([5, 6, 7, *tokens]), 4)
    generator = Generator(model, 2, 40)
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    ids = [generator.add(prompt, 12, temperature=0) for prompt in prompts]
    found = generator.run(from_model(model, 3))  # always right
    assert [found[n] for n in ids] == [alone(model, prompt, 12) for prompt in prompts]
    sampled = []
    for proposes in (None, from_model(small, 3)):  # seldom right: its own state goes back to what was drawn
        generator = Generator(model, 2, 40)
        numbers = [generator.add(prompt, 12, temperature=0.8, seed=n) for n, prompt in enumerate(prompts)]
        generator.run(proposes)
        sampled.append([generator.requests[n].tokens for n in numbers])
    assert sampled[0] == sampled[1]
    assert all(0 <= generator.requests[n].accepted < generator.requests[n].proposed for n in numbers)


RECURRENCES = {
    "mamba2": {"attention": "mamba2", "attention_options": {"num_qk_heads": 1, "skip": True, "conv_size": 4}},
    "delta": {"attention": ["gated_deltanet", "gla"], "attention_options": {"conv_size": 3}},
    "rotary": {"attention": ["retnet", "mamba3"]},
}


def joined(options, device="cpu", **given):
    """Texts that a recurrence proposes within the steps are those without it, its states those of the texts alone.

    One draft is always right, so that whole steps stay, another seldom. Sequences join late, are cancelled, come from
    another loop and go on for some steps without the draft.
    """
    model, small = (build(**{**one, **given}).to(device) for one in ({"attention": ["mamba2", "fox"]}, options))
    prompts = [torch.randint(0, 40, (T,), generator=torch.Generator().manual_seed(T)).to(device) for T in (9, 30, 4)]
    for target, draft in ((small, from_model(small, 5)), (model, from_model(small, 3))):
        expected = [alone(target, prompt, 12) for prompt in prompts]
        generator = Generator(target, 2, 60)
        first, cache = generator.add(prompts[0], 12, temperature=0), target.new_cache()
        generator.step(draft)
        begun = int(target.logits(target.hidden(prompts[1][None], cache=cache)[:, -1]).argmax())
        second = generator.resume(cache, begun, 11, Sampling(0.0))
        generator.step(draft)
        for _ in range(2):
            generator.step()
        lost, third = (generator.add(prompts[2], 12, temperature=0) for _ in range(2))
        generator.step(draft)
        batch = generator.batch
        for row, request in generator._running():  # what the draft remembers
            text = torch.tensor([[*request.prompt, *request.tokens][:-1]], device=device)
            small.hidden(text, cache=(known := small.new_cache()))
            for fixed, one in zip(batch.draft.caches, known, strict=True):
                matrix = one.state.matrix[0]
                assert (fixed.memory.matrix[row] - matrix).norm() < 1e-3 * matrix.norm()
        generator.cancel(lost)
        generator.run(draft)
        texts = [generator.requests[number].tokens for number in (first, second, third)]
        assert texts == [expected[0], expected[1][1:], expected[2]]
        assert batch.draft.model is small
        assert batch.draft.rows.lengths == [0, 0]
        for one in map(generator.requests.get, (first, third)):  # of which the draft knows all tokens
            assert one.accepted == one.proposed if target is small else one.accepted < one.proposed
    return generator


class Recorded:
    """What stands for a graph on a CPU: a step that is the same whenever it runs, over the same tensors."""

    def __init__(self, batch, needs):
        self.batch, self.needs, self.then = batch, needs, self.now(batch)

    @staticmethod
    def now(batch):
        return batch.rows.tokens, batch._ahead, batch.draft, [x.data_ptr() for x in batch.tensors()]

    def replay(self):
        assert self.then == self.now(self.batch)
        self.batch._forward(self.needs)


@pytest.mark.parametrize("name", RECURRENCES)
@torch.no_grad()
def test_a_recurrence_proposes_within_the_steps_of_the_batch(name, monkeypatch):
    monkeypatch.setattr(StepOptions, "decided", lambda options, device: options._replace(graph=True))
    monkeypatch.setattr(Batch, "_warm_up", lambda *_: None)
    monkeypatch.setattr(Batch, "_captured", lambda batch, needs: Recorded(batch, needs))
    check_graphs(joined(RECURRENCES[name]))


def check_graphs(generator):
    assert {(tokens, ahead) for _, tokens, ahead in generator.batch.graphs} >= {(4, 3), (2, 1), (1, 0), (1, None)}


class WithoutReading(TorchDispatchMode):
    """Operations that need no value on the host, as those that a CUDA graph records."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_what_a_draft_adds_to_a_step_reads_nothing_on_the_host_and_leaves_its_tensors_in_place(monkeypatch):
    """So that it can be recorded; a graph's first run, without sequences, changes no state."""
    monkeypatch.setattr(validation, "check_values", lambda gate: None)  # as on a GPU
    generator = Generator(build(), 2, 60)
    generator.add([1, 2, 3], 20)
    generator.step(from_model(build(**RECURRENCES["mamba2"]), 3))
    draft, proposals = generator.batch.draft, generator.batch.proposals
    before, places = [x.clone() for x in draft.tensors()], [x.data_ptr() for x in draft.tensors()]
    for kept in (0, 4, 2):
        with WithoutReading():
            draft.propose(generator.batch.tokens, proposals, 3)
            draft.settle(torch.full((2,), kept))
        same = all(map(torch.equal, before, draft.tensors()))
        assert same == (kept == 0)
    assert draft.rows.length.tolist() == [generator.batch.rows.lengths[0] + 6, 0]
    assert places == [x.data_ptr() for x in draft.tensors()]


def test_a_draft_with_keys_or_other_tokens_stays_outside_of_the_steps():
    model, small = build(attention="fox"), build(attention=["mamba2", "fox"])
    assert not from_model(build(attention="mamba2", vocab_size=41)).joins(model, 9)
    generator = Generator(model, 1, 30)
    number = generator.add([1, 2, 3], 9, temperature=0)
    assert generator.run(from_model(small, 3))[number] == alone(model, torch.tensor([1, 2, 3]), 9)
    assert generator.batch.draft is None


@pytest.mark.parametrize("attention", ["mamba2", "fox"])
def test_a_draft_proposes_as_far_as_it_has_learned_positions(attention):
    model, small = build(), build(attention=attention, learned_positions=16)
    generator, asked = Generator(model, 1, 40), []
    number = generator.add([1, 2, 3], 37, temperature=0)
    for _ in generator.stream(from_model(small, 4)):
        asked.append((len(generator.requests[number].tokens), generator.requests[number].proposed))
    assert generator.requests[number].tokens == alone(model, torch.tensor([1, 2, 3]), 37)
    before = [proposed for tokens, proposed in asked if tokens < 13]
    assert 0 < before[0] < before[-1]
    assert asked[-1][1] == max(proposed for tokens, proposed in asked if tokens < 19)


FORGETTING = {
    "decays": ({"attention": ["fox", "path_fox"], "forgetting": {"network": "decay"}, "window": 30}, {}),
    "pairs": ({"attention": "rope", "forgetting": {"network": "pair"}, "num_kv_heads": 1}, {"budget": 8}),
    "evicting": ({"attention": ["wall", "fox"]}, {"budget": 12, "evict": 1e-30}),
}


def same_with_proposals(name, device="cpu"):
    options, limits = FORGETTING[name]
    model, draws = that_forgets(**options).to(device), torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 39, (T,), generator=draws).to(device) for T in (30, 3)]
    found, answers, steps = [], {}, 0
    for draft in (None, proposals(answers)):
        generator = Generator(model, 2, 50, **limits)
        ids = [generator.add(prompt, 14, temperature=0.7 * n, seed=n) for n, prompt in enumerate(prompts)]
        for _ in generator.stream(draft):
            steps += draft is not None
        answers |= {n: generator.requests[n].tokens for n in ids}
        found.append([(generator.requests[n].tokens, generator.requests[n].kept) for n in ids])
    assert found[0] == found[1]
    assert steps <= 8


@pytest.mark.parametrize("name", FORGETTING)
def test_layers_that_forget_go_on_as_without_proposals(name):
    same_with_proposals(name)


@pytest.mark.parametrize("name", list_variants())
@pytest.mark.parametrize("paged", [None, False], ids=["paged", "whole"])
@torch.no_grad()
def test_a_step_of_several_tokens_is_as_many_steps_whose_rejected_ones_leave_no_trace(name, paged):
    options = {"kv_shift": True, "conv_size": 3} if get(name).side == "linear" else {"window": 8, "sinks": True}
    attn, kept = layer(name, **options), torch.tensor([1, 5, 3])
    fixed, caches = filled(attn, (1, 9, 4, 0), 32, paged)
    batch = fixed.rows
    for step in range(3):
        batch.tokens = 5 if step < 2 else 1
        fixed.ready(range(3))
        x = rows(4, batch.tokens, seed=10 + step)
        y, kept = attn(x, cache=fixed), kept if step < 2 else kept.clamp(max=1)
        if step < 2:
            given = torch.cat([kept, kept.new_zeros(1)])
            fixed.keep(given)
        for row, cache in enumerate(caches):
            n = int(kept[row])
            assert_same(y[row, :n], torch.cat([attn(x[row : row + 1, t : t + 1], cache=cache) for t in range(n)], 1)[0])
        batch.length[:3] += kept
        batch.lengths = batch.length.tolist()
        if hasattr(fixed.memory, "pool"):
            fixed.memory.pool.lengths = batch.lengths


def test_room_for_what_a_step_with_proposals_computes_in_is_asked_for_before_it(monkeypatch):
    model = build(attention=["mamba2", "fox"])
    generator = Generator(model, 2, 90)
    one, eight = (max(cache.workspace(tokens) for cache in generator.batch.caches) for tokens in (1, 8))
    assert eight > one
    number = generator.add([1, 2], 12, temperature=0)
    generator.step()
    monkeypatch.setattr(device_memory, "available", lambda device: eight - 1)
    known = alone(model, torch.tensor([1, 2]), 12)
    with pytest.raises(MemoryError, match="step that checks 7 proposed tokens of each sequence: expected room for"):
        generator.step(lambda request: known[1:6])
    monkeypatch.setattr(device_memory, "available", lambda device: eight)
    generator.run(lambda request: known[len(request.tokens) :][:5])
    assert generator.requests[number].tokens == known


@pytest.mark.parametrize("draft", [look_up, lambda tokens: from_model(build(), tokens)], ids=["look_up", "from_model"])
def test_how_many_are_proposed_is_a_number_from_one_on(draft):
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=f"tokens: expected at least 1, got {wrong}"):
            draft(wrong)
    for wrong in (1.5, "3"):
        with pytest.raises((TypeError, ValueError), match=rf"tokens: expected .*, got {wrong!r}"):
            draft(wrong)
    with pytest.raises(TypeError, match="model: expected LanguageModel, got str"):
        from_model("model")


def test_a_draft_proposes_tokens_of_the_vocabulary():
    generator = Generator(build(), 1, 20)
    generator.add([1, 2], 3)
    with pytest.raises(ValueError, match="draft: expected tokens from 0 to 39, got 40"):
        generator.run(lambda request: [40])
    for wrong, said in (([1.5], "whole numbers, got 1.5"), (None, "a sequence of whole numbers, got None")):
        with pytest.raises(TypeError, match=f"draft: expected {said}"):
            generator.run(lambda request, wrong=wrong: wrong)


def test_tokens_that_were_known_when_a_draft_failed_are_given_by_the_next_call():
    model, prompt = build(), torch.tensor([1, 2])
    for asked in (Generator.step, Generator.run):
        generator, answers = Generator(model, 1, 20), iter([[40], [], [], [40]])
        number = generator.add(prompt, 12, temperature=0)
        assert not any(generator.step() for _ in range(3))
        with pytest.raises(ValueError, match="got 40"):
            asked(generator, lambda request, answers=answers: next(answers))
        found = generator.step(lambda request, answers=answers: next(answers))[number]
        with pytest.raises(ValueError, match="got 40"):
            generator.run(lambda request, answers=answers: next(answers))
        assert found + generator.run()[number] == alone(model, prompt, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_graph_that_checks_proposals_gives_the_same_tokens(name):
    options, limits = CASES[name]
    model = build(**{**options, "hidden_size": 128, "initializer_range": 0.1}).cuda()
    prompts = [torch.randint(0, 39, (T,), device="cuda") for T in (50, 3, 100)]
    proposed(model, prompts, limits)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORGETTING)
def test_a_graph_of_layers_that_forget_checks_proposals(name):
    same_with_proposals(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECURRENCES)
@torch.no_grad()
def test_a_recurrence_proposes_within_the_graphs_of_the_batch(name):
    check_graphs(joined(RECURRENCES[name], "cuda", hidden_size=128, initializer_range=0.1))
