"""The home page's FoX, driven by hand, against the library: it computes what the model does, gate by gate."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from driven import slide, tensor

from attnzoo import Gate

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.fixture(scope="module")
def fox():
    """The home page's model, in float64, by its side."""
    script = (FIGURES.parent / "interactive" / "fox_weights.js").read_text(encoding="utf-8")
    sys.path.insert(0, str(FIGURES))
    import home

    yield {side: home.read(script, variant)[0].double() for side, variant in (("softmax", "fox"), ("linear", "mamba2"))}
    sys.path.remove(str(FIGURES))


@torch.inference_mode()
def read_by(model, tokens, moved=None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits `[T, 256]` and the log gates `[T, H]` of each layer, with one gate moved as the page moves it."""
    gates = []

    def move(layer, gate) -> Gate:
        g = gate.log_decay.clone()
        if moved is not None and moved.get("layer", layer) == layer:
            g[0, moved["token"], moved.get("head", slice(None))] = math.log(moved["f"]) if moved["f"] else -math.inf
        gates.append(g[0])
        return Gate(log_decay=g)

    hooks = [
        attention.gate.register_forward_hook(lambda _, given, out, n=n: (move(n, out[0]), out[1]))
        for n, attention in enumerate(model.attentions())
    ]
    try:
        return model(torch.tensor([tokens])).logits[0], gates
    finally:
        for hook in hooks:
            hook.remove()


TAP = """(button) => {
    button.dispatchEvent(new PointerEvent("pointerenter", { pointerType: "touch" }));
    button.click();
}"""


@pytest.fixture
def live(reader):
    page = reader.open("index.html")
    page.locator("#live[data-ready]").wait_for()
    yield page
    assert reader.complaints == []


@pytest.mark.parametrize("side", ["softmax", "linear"])
def test_home_page_evaluates_its_fox_as_the_library_does(live, fox, side):
    """The linear side is the recurrence of the same weights."""
    given, other = live.evaluate("foxLive.read().bytes"), list("é = 1\n".encode())
    for tokens, moved in (
        (given, None),
        (other, {"token": 3, "f": 0}),
        (other, {"token": 5, "f": 0.4, "layer": 1, "head": 2}),
    ):
        logits = live.evaluate(
            "(given) => Array.from(foxModel.run(foxModel.open(foxWeights), ...given).logits)",
            [tokens, {"readout": side, "moved": moved}],
        )
        shown = tensor(logits).view(-1, 256)[: len(tokens)]
        torch.testing.assert_close(shown, read_by(fox[side], tokens, moved)[0], rtol=0, atol=1e-9)


def check_live(page, fox) -> dict:
    """What the home page shows now, held against its model."""
    now = page.evaluate("foxLive.read()")
    layer, head = map(int, now["head"].split("."))
    place = {} if now["where"] == "all" else {"layer": layer, "head": head}
    moved = None if now["moved"] is None else {"token": now["gate"], "f": now["moved"], **place}
    t = now["query"]
    logits, gates = read_by(fox[now["side"]], now["bytes"], moved)
    torch.testing.assert_close(tensor(now["next"]), logits[t].softmax(-1), rtol=1e-9, atol=1e-12)
    cost = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(now["bytes"][1:])) / math.log(2)
    assert now["bits"] == pytest.approx(float(cost), rel=1e-9)
    g, s = tensor(now["g"]), tensor(now["s"])
    torch.testing.assert_close(g, gates[layer][:, head], rtol=1e-9, atol=1e-12)
    d = torch.stack([g[j + 1 : t + 1].sum() for j in range(t + 1)])
    weights = (s + d).softmax(0) if now["side"] == "softmax" else s * d.exp()
    torch.testing.assert_close(tensor(now["w"]), weights, rtol=1e-9, atol=1e-12)
    likeliest = logits[t].softmax(-1).topk(5).values
    said = page.locator("[data-guesses] span:last-child").all_inner_texts()
    assert said == [f"{100 * float(p):.1f}%" for p in likeliest]
    return now


def test_home_page_moves_one_gate_of_a_trained_fox(live, fox):
    first = check_live(live, fox)
    text = bytes(first["bytes"])
    assert first["query"] == first["gate"] == text.index(b"\n\n")
    word = text.index(b"return")
    assert sum(first["w"][word : word + len("return ")]) > 0.7
    assert first["w"].index(max(first["w"])) == word + len("return")  # the blank behind it, as the page says
    assert max(range(256), key=lambda byte: first["next"][byte]) == ord("\n")
    slide(live, "f", "Home")
    forgotten = check_live(live, fox)
    assert forgotten["w"] == [0] * first["query"] + [1]
    assert max(range(256), key=lambda byte: forgotten["next"][byte]) == ord(" ")
    live.get_by_role("button", name="reset").click()
    live.locator("#live .code button").nth(50).hover()
    before = check_live(live, fox)
    assert (before["query"], before["moved"]) == (50, None)
    live.locator("#live .code button").nth(9).evaluate(TAP)
    assert check_live(live, fox)["gate"] == before["gate"]
    slide(live, "f", "End PageDown")
    assert 0 < check_live(live, fox)["moved"] < 1
    slide(live, "f", "Home")
    live.locator("#live .code button").last.hover()
    behind = check_live(live, fox)
    assert all(weight == 0 for weight in behind["w"][: behind["gate"]])
    live.get_by_label("this head").check()
    assert check_live(live, fox)["next"] != behind["next"]
    live.locator("#live .code button").last.evaluate(TAP)
    assert check_live(live, fox)["gate"] == len(before["bytes"]) - 1
    live.get_by_label("linear, its dual").check()
    live.locator("#live select").select_option("2.0")
    last = check_live(live, fox)
    assert (last["side"], last["head"], last["where"]) == ("linear", "2.0", "one")


def test_home_page_reads_a_text_of_the_visitor(live, reader, fox):
    live.locator("#live summary").click()
    live.mouse.move(1, 1)  # buttons of other texts would come to lie under the pointer, which chooses them
    live.locator("#live textarea").fill("é=" + "x, " * 60)
    long = check_live(live, fox)
    assert len(long["bytes"]) == 160
    assert live.locator("[data-length]").inner_text() == "160 of 160 bytes"
    live.locator("#live textarea").fill("if a & b:\n c=1\n")
    live.locator("#live .code button").last.press("Home")
    slide(live, "f", "PageUp")
    live.get_by_label("linear, its dual").check()
    live.get_by_label("this head").check()
    live.locator("#live select").select_option("1.3")
    typed = check_live(live, fox)
    assert bytes(typed["bytes"]) == b"if a & b:\n c=1\n"
    assert [typed[name] for name in ("query", "gate", "side", "where", "head")] == [0, 9, "linear", "one", "1.3"]
    assert typed["moved"] is not None
    address = live.evaluate("location.hash")
    live.goto("about:blank")
    reader.open(f"index.html{address}").locator("#live[data-ready]").wait_for()
    assert check_live(live, fox) == typed
