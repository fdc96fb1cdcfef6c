"""What several factors per token can compute that one cannot: permutations and turns, by gates set by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from attnzoo import Gate, RecurrentState, get
from attnzoo.testing import LIMIT, relative_error

T = 120


def transpositions(places: tuple[int, ...]) -> list[tuple[int, int]]:
    """Swaps that, one after the other, take the identity to ``places``."""
    now, swaps = list(range(len(places))), []
    for i, wanted in enumerate(places):
        j = now.index(wanted)
        if i != j:
            now[i], now[j] = now[j], now[i]
            swaps.append((i, j))
    return swaps


def permuting(word: list[tuple[int, ...]], n: int, K: int) -> Gate:
    """A gate of n factors per token that permutes the channels by each letter of ``word``: a swap is a reflection."""
    w, beta = torch.zeros(1, len(word), 1, n, K).double(), torch.zeros(1, len(word), 1, n).double()
    w[..., 0] = 1.0
    for t, letter in enumerate(word):
        for f, (i, j) in enumerate(transpositions(letter)):
            w[0, t, 0, f] = 0.0
            w[0, t, 0, f, i], w[0, t, 0, f, j], beta[0, t, 0, f] = math.sqrt(0.5), -math.sqrt(0.5), 2.0
    return Gate(w=w, beta=beta)


def random_word(group: list[tuple[int, ...]], seed: int) -> list[tuple[int, ...]]:
    index = torch.randint(len(group), (T,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [group[i] for i in index]


def even(places: tuple[int, ...]) -> bool:
    return len(transpositions(places)) % 2 == 0


S3, S5 = (list(itertools.permutations(range(K))) for K in (3, 5))
A5 = [letter for letter in S5 if even(letter)]


def track(word: list[tuple[int, ...]]) -> Tensor:
    """The product of a word's letters so far, as a matrix that takes channels to their places, ``[T, K, K]``."""
    place, found = list(range(len(word[0]))), []
    for letter in word:
        for i, j in transpositions(letter):
            place = [j if x == i else i if x == j else x for x in place]
        found.append(torch.eye(len(place)).double()[place])
    return torch.stack(found)


@pytest.mark.parametrize(("group", "n"), [(S3, 2), (A5, 4), (S5, 4)], ids=["S3", "A5", "S5"])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_a_state_follows_every_word_of_a_group(group: list[tuple[int, ...]], n: int, form: str) -> None:
    """K - 1 factors make any permutation of K channels: an automaton in one layer, exact over any length."""
    word = random_word(group, n)
    K = len(word[0])
    gate, expected = permuting(word, n, K), track(word)
    nothing = torch.zeros(1, T, 1, K).double()
    eye = torch.eye(K).double()
    steps: Any = range(T) if form == "recurrent" else [0]
    for channel in range(K):  # what is read along one channel, token by token
        q = eye[channel].expand(1, T, 1, K)
        state, outputs = RecurrentState(eye[None, None]), []
        for t in steps:
            now = slice(t, t + 1 if form == "recurrent" else T)
            o, state = get("deltanet").extend(
                q[:, now], nothing[:, now], nothing[:, now], gate.slice(now.start, now.stop), state, scale=1.0
            )
            outputs.append(o)
        got = torch.cat(outputs, 1)[0, :, 0]
        assert torch.equal(got.round(), expected[:, :, channel])
        assert relative_error(got, expected[:, :, channel]) <= LIMIT


def test_a_softmax_finds_what_a_word_has_moved() -> None:
    """The dual, PaTH with four factors: each key moves on with the letters, and a sharp query asks who is here now."""
    word = random_word(S5, 7)
    gate, eye, start = permuting(word, 4, 5), torch.eye(5).double(), 5
    beta = cast(Tensor, gate.beta).clone()
    beta[:, :start] = 0.0  # the first tokens bring the five keys
    rest = torch.zeros(T, 5).double()
    k, v = rest.clone(), rest.clone()
    k[:start], v[:start] = eye, eye
    q = 60 * eye[0].expand(1, T, 1, 5)
    o = get("path").forms["parallel"](q, k[None, :, None], v[None, :, None], Gate(w=gate.w, beta=beta), scale=1.0)
    moved = track(word[start:])
    assert torch.equal(o[0, start:, 0].round(), moved[:, :, 0])


@pytest.mark.parametrize(("K", "n"), [(3, 1), (5, 3)])
def test_fewer_factors_cannot_turn_all_channels_round(K: int, n: int) -> None:
    """n of them change the identity along n directions, and a cycle of K channels changes it along K - 1.

    So whatever w and beta are, they are off by the least of these changes (Eckart and Young).
    """
    cycle = torch.eye(K).double().roll(1, 0)
    changes = torch.linalg.svdvals(cycle - torch.eye(K))
    assert float(changes[K - 1]) < 1e-12
    draw = torch.Generator().manual_seed(0)
    w = torch.nn.functional.normalize(torch.randn(1, 500, 1, n, K, generator=draw).double(), dim=-1)
    gate = Gate(w=w, beta=2 * torch.rand(1, 500, 1, n, generator=draw).double())
    few = gate.dense(torch.zeros(1, 500, 1, K))[1][0, :, 0]
    assert float(torch.linalg.matrix_norm(few - cycle, 2).min()) >= float(changes[n]) - 1e-12 > 1


def icosahedron() -> list[Tensor]:
    """Its sixty turns: those that a fifth of a turn round a corner and a cycle of the coordinates make."""
    golden = (1 + math.sqrt(5)) / 2
    axis = torch.tensor([0.0, 1.0, golden]).double() / math.sqrt(1 + golden**2)
    zero = torch.zeros(()).double()
    cross = torch.stack([zero, -axis[2], axis[1], axis[2], zero, -axis[0], -axis[1], axis[0], zero]).view(3, 3)
    makers = [torch.linalg.matrix_exp(2 * math.pi / 5 * cross), torch.eye(3).double().roll(1, 0)]
    found = [torch.eye(3).double()]
    for turn in found:  # it grows
        for made in (turn @ maker for maker in makers):
            if min(float((made - other).abs().max()) for other in found) > 0.1:
                found.append(made)
    return found


def places_of(turn: Tensor, frames: list[Tensor]) -> tuple[int, ...]:
    """Where a turn takes each of five frames of three axes at right angles; signs do not count."""
    same = [[bool(((b.mT @ turn @ a).abs() > 1 - 1e-9).sum() == 3) for b in frames] for a in frames]
    assert all(sum(row) == 1 for row in same)
    return tuple(row.index(True) for row in same)


def two_reflections(turn: Tensor) -> tuple[Tensor, Tensor]:
    """w ``[2, 3]`` and beta ``[2]`` of a turn of space."""
    moved = torch.eye(3) - turn
    first = moved[:, moved.norm(dim=0).argmax()]
    if first.norm() < 1e-9:
        return torch.eye(3).double()[:2], torch.zeros(2).double()
    first = first / first.norm()
    rest = torch.eye(3) - (turn - 2 * first[:, None] * (first @ turn))  # twice the second one's w w^T
    second = rest[:, rest.norm(dim=0).argmax()]
    return torch.stack([first, second / second.norm()]), torch.full((2,), 2.0).double()


def test_two_factors_follow_a5_in_three_channels() -> None:
    """The even permutations of five things are the turns of an icosahedron, and a turn is two reflections."""
    turns = icosahedron()
    frames = [torch.linalg.matrix_power(turns[1], i) for i in range(5)]
    letters = [places_of(turn, frames) for turn in turns]
    assert sorted(letters) == sorted(A5)
    index = torch.randint(60, (T,), generator=torch.Generator().manual_seed(2)).tolist()
    each = [two_reflections(turns[i]) for i in index]
    gate = Gate(
        w=torch.stack([w for w, _ in each])[None, :, None], beta=torch.stack([b for _, b in each])[None, :, None]
    )
    nothing, eye = torch.zeros(1, T, 1, 3).double(), torch.eye(3).double()
    read = [
        get("deltanet").extend(
            channel.expand(1, T, 1, 3), nothing, nothing, gate, RecurrentState(eye[None, None]), scale=1.0
        )[0][0, :, 0]
        for channel in eye
    ]
    state, place = torch.stack(read, -1), list(range(5))
    for t, i in enumerate(index):
        place = [place[j] for j in letters[i]]
        assert places_of(state[t], frames) == tuple(place)


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunk"])
def test_two_factors_turn_a_plane_as_an_angle_does(form: str) -> None:
    """Reflections along two directions at half an angle: the gate of RoPE on one pair of channels."""
    draw = torch.Generator().manual_seed(0)
    angle = torch.randn(1, T, 1, 1, generator=draw).double()
    q, k, v = (torch.randn(1, T, 1, 2, generator=draw).double() for _ in range(3))
    zero = torch.zeros_like(angle)
    first, second = (torch.cat([x.cos(), x.sin()], -1) for x in (angle / 2, zero))
    gate = Gate(w=torch.stack([first, second], 3), beta=torch.full((1, T, 1, 2), 2.0).double())
    assert relative_error(gate.dense(q)[1], Gate(angle=angle).dense(q)[1]) <= 1e-14
    turned = get("complex_linear").forms[form](q, k, v, Gate(angle=angle))
    assert relative_error(get("deltanet").forms[form](q, k, v, gate), turned) <= LIMIT


@pytest.mark.parametrize("form", ["recurrent", "parallel"])
def test_rope_is_path_with_two_factors_on_one_pair(form: str) -> None:
    draw = torch.Generator().manual_seed(1)
    angle = torch.randn(1, T, 1, 1, generator=draw).double()
    q, k, v = (torch.randn(1, T, 1, 2, generator=draw).double() for _ in range(3))
    first, second = (torch.cat([x.cos(), x.sin()], -1) for x in (angle / 2, torch.zeros_like(angle)))
    gate = Gate(w=torch.stack([first, second], 3), beta=torch.full((1, T, 1, 2), 2.0).double())
    expected = get("rope").forms[form](q, k, v, Gate(angle=angle))
    assert relative_error(get("path").forms[form](q, k, v, gate), expected) <= LIMIT
