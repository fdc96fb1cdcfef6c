"""`attnzoo serve` by our own engine: texts are the model's, bad requests name their field, nothing is left behind."""

import asyncio
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from http.client import HTTPConnection

import pytest
import torch
from tiny_runs import config_of, write_text

from attnzoo.data import decode, encode
from attnzoo.data.tokenizer import SETTINGS
from attnzoo.errors import NotFiniteError, UnavailableError
from attnzoo.models import Generator
from attnzoo.models.generation.sampling import Sampling
from attnzoo.trained.continuation import load_text_model
from attnzoo.trained.serving import server
from attnzoo.trained.serving.chat import chat_template
from attnzoo.trained.serving.server import Serving, exported, listen
from attnzoo.trained.serving.worker import WantedText, Worker
from attnzoo.training import train

PROMPTS = ["7 and one is", "12 and", "number"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Client:
    """A client of the server at a port of this machine."""

    def __init__(self, port):
        self.port = port

    def open(self, path, body=None):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, raw, {"Content-Type": "application/json"})
        return connection

    def ask(self, path, body=None):
        connection = self.open(path, body)
        response = connection.getresponse()
        status, content = response.status, response.read()
        connection.close()
        return status, json.loads(content)

    def events(self, path, body):
        connection = self.open(path, {**body, "stream": True})
        lines = connection.getresponse().read().decode().split("\n\n")
        connection.close()
        assert [line.partition(" ")[0] for line in lines[:-1]] == ["data:"] * (len(lines) - 1)
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line[6:]) for line in lines[:-2]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    write_text(folder)
    model = "model={hidden_size: 32, intermediate_size: 32, num_layers: 2, num_heads: 2, attention: [mamba2, fox]}"
    return train(config_of(folder, "fox", model, "model.attention_options={block: pro}"))


@pytest.fixture(scope="module")
def loaded(run):
    return load_text_model(run, "cpu")


@pytest.fixture(scope="module")
def served(run, loaded):
    """A server of two rows in a thread of this process; ends with its module, and nothing draws any more then."""
    serving = Serving(run, max_sequences=2, max_tokens=256, device="cpu")
    with listen("127.0.0.1", 0) as listening:
        port, server = listening.getsockname()[1], serving.own_server(loaded)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield server
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
    assert not [each for each in threading.enumerate() if each.name == "attnzoo-generator"]
    with pytest.raises(OSError, match="refused"):
        Client(port).ask("/health")


@pytest.fixture(scope="module")
def client(served):
    while not served.started:
        time.sleep(0.01)
    return Client(served.servers[0].sockets[0].getsockname()[1])


@pytest.fixture(scope="module")
def generator(served):
    return served.config.app.state.worker.generator


def greedy(loaded, prompt, number):
    tokens = loaded.model.generate(torch.tensor([encode(prompt)]), number, temperature=0)[0, len(encode(prompt)) :]
    return decode(tokens.tolist()[: tokens.tolist().index(0) if 0 in tokens else None])


def asked(prompt, number=12, **more):
    return {"prompt": prompt, "max_tokens": number, "temperature": 0, **more}


def until_idle(generator):
    for _ in range(500):
        if not any(generator.rows) and not generator.waiting and not generator.requests:
            return
        time.sleep(0.01)
    raise AssertionError("sequences are left")


def test_texts_are_the_models_own_whole_and_in_pieces(client, loaded, generator):
    expected = [greedy(loaded, prompt, 12) for prompt in PROMPTS]
    status, body = client.ask("/v1/completions", asked(PROMPTS, model="fox"))
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == expected
    assert {choice["finish_reason"] for choice in body["choices"]} <= {"length", "stop"}
    assert body["usage"]["prompt_tokens"] == sum(len(encode(prompt)) for prompt in PROMPTS)
    assert client.ask("/v1/completions", asked(encode(PROMPTS[0])))[1]["choices"][0]["text"] == expected[0]
    events = client.events("/v1/completions", asked(PROMPTS, stream_options={"include_usage": True}))
    usage = events.pop()["usage"]
    assert usage.pop("prompt_tokens_details") == {"cached_tokens": 0}  # prompts so short have no piece in common
    assert usage.items() <= body["usage"].items()
    choices = [event["choices"][0] for event in events]
    for index, text in enumerate(expected):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [bool(choice["finish_reason"]) for choice in own] == [False] * (len(own) - 1) + [True]
    assert len(choices) > 2 * len(PROMPTS)  # they come as they are drawn
    until_idle(generator)


def test_samples_depend_on_the_seed_and_texts_end_before_a_stop(client, loaded):
    sampled = {"prompt": PROMPTS[0], "max_tokens": 8, "seed": 3, "top_k": 50, "top_p": 0.95, "n": 2}
    first, again = (client.ask("/v1/completions", sampled)[1]["choices"] for _ in range(2))
    assert first == again
    assert first[0]["text"] != first[1]["text"]
    text = greedy(loaded, PROMPTS[0], 12)
    (choice,) = client.ask("/v1/completions", asked(PROMPTS[0], stop=[text[5:8]]))[1]["choices"]
    assert choice["text"] == text[: text.index(text[5:8])]
    assert choice["finish_reason"] == "stop"


def test_what_prompts_have_in_common_is_read_once(client, loaded):
    first, second = PROMPTS[0] * 8, PROMPTS[0] * 8 + PROMPTS[1]
    client.ask("/v1/completions", asked(first, 1))
    _, body = client.ask("/v1/completions", asked(second))
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": len(encode(first))}
    assert body["choices"][0]["text"] == greedy(loaded, second, 12)


def test_a_draft_changes_no_text_and_takes_its_memory_at_the_start(run, loaded, monkeypatch):
    small = train(config_of(run.parent, "small", "model={hidden_size: 16, num_layers: 1, attention: mamba2}"))
    server = Serving(run, max_sequences=2, max_tokens=256, device="cpu", draft=small, draft_tokens=3).own_server(loaded)
    worker = server.config.app.state.worker
    memory, requests, asked = worker.generator.batch.draft, worker.generator.requests, []
    propose = memory.propose
    monkeypatch.setattr(memory, "propose", lambda *given: (asked.append(given[2]), propose(*given)))

    async def text(prompt):
        return "".join([one.text async for one in worker.pieces([WantedText(encode(prompt), 12, Sampling(0.0), ())])])

    worker.start()
    try:
        assert [asyncio.run(text(prompt)) for prompt in PROMPTS] == [greedy(loaded, prompt, 12) for prompt in PROMPTS]
    finally:
        worker.close()
    assert 3 in asked
    assert worker.generator.batch.draft is memory
    assert memory.model is worker.draft.model
    assert not requests
    assert Serving(run, draft=small).against_vllm() == "vLLM has no --draft"
    with pytest.raises(ValueError, match="--draft-tokens: expected none without --draft, got 3"):
        next(Serving(run, draft_tokens=3).run())


def test_models_and_health_are_told(client):
    assert client.ask("/health") == (200, {"status": "ok"})
    (model,) = client.ask("/v1/models")[1]["data"]
    assert (model["id"], model["max_model_len"]) == ("fox", 256)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b"{", "body", "not readable as JSON"),
        ([1], "body", "expected a JSON object, got list"),
        ({}, "prompt", "got none"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": {"a": 1}}, "prompt", "expected a text"),
        ({"prompt": [1, 999]}, "prompt", "got 999"),
        ({"prompt": "a" * 300}, "prompt", "expected at most 255 tokens (--max-tokens 256), got 300"),
        ({"prompt": "a\ud800"}, "prompt", "half of a surrogate pair"),
        ({"prompt": "a", "max_tokens": 256}, "max_tokens", "expected from 1 to 255 after 1 tokens"),
        ({"prompt": "a", "max_tokens": "7"}, "max_tokens", "expected a whole number"),
        ({"prompt": "a", "temperature": -1}, "temperature", "at least 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
        ({"prompt": "a", "seed": -1}, "seed", "at least 0"),
        ({"prompt": "a", "n": 0}, "n", "expected 1 to 128"),
        ({"prompt": "a", "stop": [""]}, "stop", "at least one character"),
        ({"prompt": "a", "stream": 1}, "stream", "True or False"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "without"),
        ({"prompt": "a", "logprobs": 0}, "logprobs", "expected False"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty", "nothing else is served"),
        ({"prompt": "a", "temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"prompt": "a", "messages": []}, "messages", "/v1/chat/completions takes messages"),
    ],
)
def test_a_bad_request_gets_400_and_one_line_that_names_the_field(client, body, param, said):
    status, answer = client.ask("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(param)
    assert said in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_unknown_models_and_paths_are_404_and_chat_needs_a_template(client):
    status, answer = client.ask("/v1/completions", asked("a", model="fix"))
    assert (status, answer["error"]["message"]) == (404, "model: expected 'fox', got 'fix'")
    status, answer = client.ask("/v1/embeddings", {})
    assert status == 404
    assert "/v1/completions" in answer["error"]["message"]
    assert client.ask("/v1/completions")[0] == 405
    status, answer = client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "no chat template" in answer["error"]["message"]


def test_those_who_go_free_their_rows(client, loaded, generator):
    """Two that fill the batch and one that waits hang up, in a stream and before any answer; the next is served."""
    long = {"temperature": 0, "max_tokens": 200}
    streams = [client.open("/v1/completions", {**long, "prompt": "one", "stream": True}) for _ in range(2)]
    for each in streams:
        assert each.getresponse().read(20)
    silent = [client.open("/v1/completions", {**long, "prompt": "two"}) for _ in range(2)]
    while len(drawn := list(generator.requests.values())) < 4:
        time.sleep(0.01)
    for each in (*streams, *silent):
        each.sock.shutdown(socket.SHUT_RDWR)
        each.close()
    until_idle(generator)
    assert all(len(request.tokens) < 200 for request in drawn)
    assert client.ask("/v1/completions", asked(PROMPTS[0]))[1]["choices"][0]["text"] == greedy(loaded, PROMPTS[0], 12)


def test_a_sequence_without_memory_ends_alone(client, loaded, generator, monkeypatch):
    real, given = generator.batch.step, []

    def step(*arguments):
        if not given:
            given.append(arguments)
            raise MemoryError("no page is left")
        return real(*arguments)

    monkeypatch.setattr(generator.batch, "step", step)
    status, answer = client.ask("/v1/completions", asked("one"))
    assert (status, answer["error"]["message"]) == (503, "no page is left")
    assert client.ask("/v1/completions", asked("one"))[1]["choices"][0]["text"] == greedy(loaded, "one", 12)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_after_which_no_logit_is_finite_fails_alone(stream, client, loaded, monkeypatch):
    logits, given = loaded.model.logits, []

    def first_is_broken(x):
        given.append(x)
        return logits(x) / (len(given) > 1)

    monkeypatch.setattr(loaded.model, "logits", first_is_broken)
    status, answer = client.ask("/v1/completions", asked("one", stream=stream))
    assert status == 503
    assert answer["error"]["message"].startswith("logits: expected finite numbers after the prompt, got inf or nan")
    assert client.ask("/v1/completions", asked("one"))[1]["choices"][0]["text"] == greedy(loaded, "one", 12)


def test_the_last_token_of_another_comes_beside_a_prompt_that_fails(loaded, monkeypatch):
    logits, given = loaded.model.logits, []
    monkeypatch.setattr(loaded.model, "logits", lambda x: logits(x) / (given.append(x) is None and len(given) > 1))

    async def ask(worker):
        async def text(prompt):
            pieces = worker.pieces([WantedText(encode(prompt), 1, Sampling(0.0), ())])
            return "".join([one.text async for one in pieces])

        both = asyncio.gather(text("one"), text("two"), return_exceptions=True)
        await asyncio.sleep(0)  # both have asked
        worker.start()
        return await asyncio.wait_for(both, 20)

    worker = Worker(loaded, Generator(loaded.model, 2, 64, check_every=4))
    try:
        failed, text = asyncio.run(ask(worker))
    finally:
        worker.close()
    assert isinstance(failed, NotFiniteError)
    assert text == greedy(loaded, "two", 1)


def test_a_server_outlives_any_number_of_prompts_that_fail_in_a_row(loaded, monkeypatch):
    left = [NotFiniteError([])] * 2000  # more than Python calls within calls

    def step(draft):
        if left:
            raise left.pop()
        return {}

    worker = Worker(loaded, Generator(loaded.model, 1, 64))
    monkeypatch.setattr(worker.generator, "step", step)
    worker._step()
    assert not left


def test_a_generator_that_fails_is_told_to_all_who_ask(loaded, monkeypatch):
    async def ask(worker):
        wanted = [WantedText(encode(prompt), 4, Sampling(0.0), ()) for prompt in PROMPTS]
        async for _ in worker.pieces(wanted):
            pass

    def fail(*_):
        raise RuntimeError("the device is gone")

    class Slowly(dict):
        def values(self):
            for live in super().values():
                yield live
                time.sleep(0.2)  # who was told has gone

    worker, missed = Worker(loaded, generator := Generator(loaded.model, 1, 64)), []
    monkeypatch.setattr(generator, "step", fail)
    monkeypatch.setattr(worker, "_live", Slowly())
    monkeypatch.setattr(threading, "excepthook", missed.append)
    worker.start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the generator has failed: the device is gone"):
            asyncio.run(ask(worker))
    worker.close()
    assert not missed


def test_chat_messages_become_a_prompt_by_the_tokenizers_template(run, loaded):
    from attnzoo.trained.serving.asked import FieldError, Reader

    settings = json.dumps({"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}).encode()
    template = chat_template({SETTINGS: settings})
    assert template([{"role": "user", "content": "hi"}]) == "<s>user: hi\nassistant: "
    assert chat_template({}) is None
    source = load_text_model(exported(run), "cpu")
    assert exported(run) == source.folder  # written once
    reader = Reader(source, "fox", 256, chat_template({SETTINGS: settings}))
    (wanted,) = reader.chat({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}).wanted
    assert loaded.decode(wanted.prompt) == "<s>user: hi\nassistant: "
    assert wanted.max_tokens == 256 - len(wanted.prompt)
    refusing = chat_template({"chat_template.jinja": b"{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(FieldError, match="messages: the chat template refuses them: roles must alternate"):
        refusing([])
    with pytest.raises(ValueError, match="chat template: expected Jinja"):
        chat_template({"chat_template.jinja": b"{% for"})


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_printed_line_works_as_printed_and_a_signal_ends_the_server(run, loaded, ending):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    lines, answers = [], []

    def client():
        words = shlex.split(lines[-1])
        assert words[0] == "curl"
        port, path = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.*)", words[1]).groups()
        answers.append(Client(port).ask(path, words[words.index("-d") + 1].encode()))
        os.kill(os.getpid(), ending)

    try:
        for line in Serving(run, "attnzoo", port=0, device="cpu", max_tokens=128).run():
            lines.append(line)
            if line.startswith("curl"):
                (thread := threading.Thread(target=client)).start()
        thread.join()
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(each, handler)
    ((status, body),) = answers
    assert (status, body["model"]) == (200, "fox")
    assert lines[0].startswith("attnzoo's own engine serves fox on cpu")
    assert "vLLM schedules" in lines[0]
    assert lines[-1] == "the server has ended"


def test_a_port_in_use_and_an_engine_that_is_not_there_are_one_line(run):
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(ValueError, match=r"--port: expected one that is free, got \d+"),
    ):
        list(Serving(run, port=taken.getsockname()[1]).run())
    with pytest.raises(ValueError, match="--host: expected an address of this machine"):
        listen("192.0.2.1", 0)
    with pytest.raises(UnavailableError, match="--engine vllm: vLLM has no --evict"):
        list(Serving(run, "vllm", port=0, evict=1e-4).run())
    assert Serving(run, kv_dtype="fp8").against_vllm() == "vLLM has no --kv-dtype"


def test_vllm_is_told_of_the_folder_the_dtype_as_stored_and_the_limits(run, monkeypatch):
    asked, real = [], importlib.util.find_spec
    monkeypatch.setattr(server, "run_until_signal", lambda *given: asked.append(given) or [given[-1]])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: real("sys" if name == "vllm" else name, *of))
    lines = list(Serving(run, port=0, max_tokens=64).run())
    assert lines[0].startswith("vLLM serves fox once it has started. ")
    assert lines[1].startswith("curl http://127.0.0.1:")
    ((words, address, _),) = asked
    assert lines[1].startswith(f"curl {address}/")
    told = {"serve", str(exported(run)), "--dtype=float32", "--served-model-name=fox", "--max-model-len=64"}
    assert told <= {*words}
