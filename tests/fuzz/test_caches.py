"""Random histories of caches that give up keys, and of generators: each sequence as it is without the others."""

import copy
import pickle

import torch
from generated import LAYERS, build, forgetful
from layers import layer

from attnzoo import Evict
from attnzoo.models import Generator
from attnzoo.models.generation.proposals import look_up
from attnzoo.models.generation.sampling import Samplers, Sampling

TINY = 1e-25  # what is certified below it is nothing beside any rounding
ROOM = 240


def evicting(rng):
    """A layer, what its cache gives up, and whether its tokens can be taken back."""
    name = rng.choice(["fox", "path_fox", "alibi", "fox_rope", "rope", "path"])
    away, shifts = rng.random() < 0.5, rng.random() < 0.5
    options = {"sinks": rng.random() < 0.3, "qk_norm": "none" if away else "rms"}
    if name in ("rope", "path") or rng.random() < 0.4:
        options["window"] = rng.choice([3, 70, 130])
    if "path" in name:
        options["w_conv_size"] = rng.choice([0, 4]) if shifts else 0
    attn = layer(name, "pro", **options)
    if not shifts:
        attn.k_shift = attn.v_shift = None
    for part in attn.modules():
        if hasattr(part, "forget_proj"):
            part.forget_proj.bias.copy_(torch.tensor([-2.0, 3.0, -1.0, -3.0]))
    crops = not shifts and name != "fox_rope"
    return attn, Evict(TINY, offload=True) if away else TINY, crops, f"{name} {options}"


class History:
    """A cache, and the tokens of each of its sequences."""

    def __init__(self, rng, attn, evict):
        self.rng, self.attn, self.cache = rng, attn, attn.new_cache(evict=evict)
        self.rows: list[torch.Tensor] = []

    def tokens(self):
        """Random ones for each sequence; now and then a long one."""
        B, T = len(self.rows) or self.rng.choice([1, 2, 3]), self.rng.choice([1, 1, 3, 40, 63, 64, 65, 130])
        x = torch.randn(B, T, self.attn.config.hidden_size).double()
        if self.rng.random() < 0.2:
            x[:, self.rng.randrange(T)] *= 30
        return x

    def add(self):
        x = self.tokens()
        there = torch.rand(x.shape[:2]) < self.rng.choice([0.7, 1.0, 1.0])
        y = self.attn(x, attention_mask=there, cache=self.cache)
        self.rows = self.rows or [x[0, :0]] * len(x)
        for b, row in enumerate(x):
            n, self.rows[b] = len(self.rows[b]), torch.cat([self.rows[b], row[there[b]]])
            if len(self.rows[b]) > n:
                expected = self.attn(self.rows[b][None])[0, n:]
                torch.testing.assert_close(y[b, there[b]], expected, rtol=0, atol=1e-9 * float(expected.abs().max()))

    def fail(self):
        before = vars(self.cache).copy()
        self.attn(self.tokens(), cache=self.cache)
        vars(self.cache).update(before)

    def reorder(self):
        index = [self.rng.randrange(len(self.rows)) for _ in range(self.rng.choice([1, 2, 3]))]
        self.cache.reorder(torch.tensor(index))
        self.rows = [self.rows[b] for b in index]

    def copy(self):
        self.cache = self.rng.choice([copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])(self.cache)

    def fork(self):
        self.attn(self.tokens(), cache=copy.deepcopy(self.cache))

    def crop(self):
        state = self.cache.state
        tokens = max(0, len(state) - self.rng.choice([0, 1, 5, 20, 70]))
        try:
            self.cache.state = state.crop(tokens)
        except ValueError as refused:
            assert "tokens: expected at least" in str(refused)  # noqa: PT017
            return
        valid = state.valid
        lengths = [tokens] * len(self.rows) if valid is None else valid[:, :tokens].sum(1).tolist()
        self.cache.seen, self.rows = torch.tensor(lengths), [x[:n] for x, n in zip(self.rows, lengths, strict=True)]

    def check(self):
        """Each page belongs to as many sequences as it says, or is free."""
        pool = self.cache.state.pool
        counts = torch.bincount(pool.pages[pool.pages >= 0], minlength=len(pool.refs))
        assert torch.equal(counts.int(), pool.refs)
        assert sorted(pool.free) == (pool.refs == 0).nonzero()[:, 0].tolist()


@torch.no_grad()
def test_random_histories_of_a_cache_that_gives_up_keys_change_no_output(fuzz):
    for rng in fuzz(3):
        attn, evict, crops, what = evicting(rng)
        history, done = History(rng, attn, evict), ["add"]
        history.add()
        for _ in range(rng.choice([4, 8])):
            kinds = ["add", "add", "add", "fail", "reorder", "copy", "fork", *(["crop"] if crops else [])]
            done.append(rng.choice(kinds))
            try:
                getattr(history, done[-1])()
                if done[-1] not in ("crop", "fail"):  # these show when the next call begins
                    history.check()
            except Exception as error:
                error.add_note(f"{what}: {done}")
                raise


def expected(model, prompt, new, sampling, stop):
    """A continuation, from a cache of its own."""
    sampler, cache, found = Samplers.empty(1, torch.device("cpu")), model.new_cache(), []
    sampler.set(0, sampling, model.config.vocab_size)
    x = torch.tensor([prompt])
    while len(found) < new and not (found and found[-1] in stop):
        found.append(int(sampler.draw(model(x, cache=cache).logits[:, -1], sampling.needs)))
        x = torch.tensor([found[-1:]])
    return found


def generating(rng):
    """A model in float64, and what its caches may give up."""
    kind = rng.choice(["any", "forgetful", "window"])
    if kind == "any":
        return build(**LAYERS[rng.choice(list(LAYERS))]).double(), None
    if kind == "window":
        options = {"window": rng.choice([9, 70]), "sinks": True, "block": "pro"}
        return build(attention=["rope", "path_fox"], attention_options=options).double(), rng.choice([TINY, "offload"])
    away = rng.random() < 0.5
    model = forgetful(rng.choice(["fox", "path_fox"]), qk_norm="none" if away else "rms").double()
    return model, "offload" if away else TINY


@torch.no_grad()
def test_random_histories_of_a_generator_give_each_sequence_what_it_gets_alone(fuzz):
    for rng in fuzz(1):
        model, evict = generating(rng)
        V, draws, ended = model.config.vocab_size, dict[int, list[int]](), set[int]()
        each = rng.choice([1, 3, 7])
        generator = Generator(
            model, rng.choice([1, 2, 3]), ROOM, check_every=each, evict=evict, fuse=rng.random() < 0.3
        )
        found: dict[int, list[int]] = {}

        def partly(request, rng=rng, draws=draws, V=V):
            """What will follow, and now and then something else."""
            coming = draws[request.id][len(request.tokens) :][: rng.choice([0, 3, 9])]
            return [token if rng.random() < 0.9 else rng.randrange(V) for token in coming]

        def broken(request):
            raise KeyError(request.id)

        for _ in range(rng.choice([5, 15])):
            kind = rng.choice(["add", "add", "resume", "step", "step", "cancel", "forget"])
            if kind in ("add", "resume") and len(draws) < 5:
                prompt = torch.randint(V, (rng.choice([2, 20, 63, 64, 130]),)).tolist()
                new, stop = rng.choice([1, 9, 30, 70]), [rng.randrange(V)] if rng.random() < 0.3 else []
                given = rng.choice([{"temperature": 0.0}, {}, {"top_k": 5}, {"temperature": 0.8, "top_p": 0.8}])
                sampling = Sampling(**given, seed=rng.randrange(100))
                if kind == "add":
                    numbers = [generator.add(prompt, new, stop=stop, **vars(sampling))]
                else:
                    cache = model.new_cache(evict)
                    model(torch.tensor([prompt[:-1]]), cache=cache)
                    numbers = [generator.resume(cache, prompt[-1], new, sampling, stop) for _ in range(2)]
                draws |= dict.fromkeys(numbers, expected(model, prompt, new, sampling, stop))
            elif kind == "step":
                draft = rng.choice([None, partly, look_up(6, 2), broken])
                for _ in range(rng.choice([1, 4])):
                    try:
                        known = generator.step(draft)
                    except KeyError:
                        continue
                    for number, tokens in known.items():
                        found.setdefault(number, []).extend(tokens)
            elif kind == "cancel" and generator.requests:
                number = rng.choice(list(generator.requests))
                ended.add(number)
                generator.cancel(number)
            elif kind == "forget":
                for number in [number for number, request in generator.requests.items() if request.done]:
                    if len(generator.requests[number].tokens) == len(found.get(number, [])):
                        del generator.requests[number]
        for number, tokens in generator.run(rng.choice([None, partly])).items():
            found.setdefault(number, []).extend(tokens)
        for number, tokens in draws.items():
            got = found.get(number, [])
            assert got == tokens[: len(got) if number in ended else None], number
        for cache in generator.batch.caches:
            assert getattr(cache.memory, "pool", None) is None or not cache.memory.pool.used()


@torch.no_grad()
def test_prompts_with_one_beginning_go_on_from_what_is_remembered_of_it(fuzz):
    for rng in fuzz(2):
        model = build(**LAYERS[rng.choice(list(LAYERS))]).double()
        V, wanted, found = model.config.vocab_size, dict[int, list[int]](), dict[int, list[int]]()
        beginning = prompt = torch.randint(V, (130,)).tolist()
        generator = Generator(model, rng.choice([1, 3]), ROOM)
        for _ in range(4):
            generator.remember(rng.choice([0, 50, 50, 50]))
            prompt = rng.choice([prompt, beginning[: rng.choice([64, 100])]]) + torch.randint(V, (20,)).tolist()
            sampling = Sampling(seed=rng.randrange(100))
            wanted[generator.add(prompt, 9, **vars(sampling))] = expected(model, prompt, 9, sampling, [])
            found |= generator.run() if rng.random() < 0.7 else {}
        assert found | generator.run() == wanted
        generator.remember(0)
        assert not any(pool.used() for cache in generator.batch.caches if (pool := getattr(cache.memory, "pool", None)))
