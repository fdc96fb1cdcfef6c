"""The OpenAI-compatible server under mixed load: nothing is lost, no token is wrong, memory stays level."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from families import VOCABULARY, build, export, wrong

from attnzoo.data.tokenizer import byte_tokenizer, tokenizer_files
from attnzoo.models import LanguageModel

pytest.importorskip("vllm", reason="vLLM is not installed (make test-vllm)")
httpx = pytest.importorskip("httpx")

LONGEST = 320
AT_ONCE = 12
BAD: tuple[dict[str, Any], ...] = (
    {"prompt": [VOCABULARY]}, {"prompt": [3, -1]}, {"prompt": [1] * (LONGEST + 1)}, {"prompt": []}, {"max_tokens": -1},
    {"temperature": -1.0}, {"top_p": 2.0}, {"model": "another"}, {"n": 0}, {"prompt": {"a": 1}},
)  # fmt: skip


@dataclass
class Served:
    process: subprocess.Popen[bytes]
    url: str
    folder: str
    log: Path

    def memory(self) -> int:
        """The bytes of the server's processes."""
        import psutil

        own = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in (own, *own.children(recursive=True)))

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


@contextmanager
def serving(folder: str, log: Path) -> Iterator[Served]:
    """The server of `vllm serve FOLDER`, on loopback; killed at the end, with all its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", folder, "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(LONGEST), "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "64", "--block-size", "32", "--num-gpu-blocks-override", "60"),
        "--disable-uvicorn-access-log",
    ]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    served = Served(process, f"http://127.0.0.1:{port}", folder, log)
    try:
        wait(served)
        yield served
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(served: Served) -> None:
    for _ in range(300):
        assert served.process.poll() is None, served.log.read_text()[-4000:]
        try:
            if httpx.get(f"{served.url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise AssertionError(served.log.read_text()[-4000:])


async def load(served: Served, model: LanguageModel, requests: int, seed: int) -> dict[str, int]:
    """How many requests of each kind came back as they should; one that did not raises."""
    rng, counts = random.Random(seed), {"whole": 0, "cancelled": 0, "refused": 0, "sampled": 0}
    gate = asyncio.Semaphore(AT_ONCE)
    shared = [rng.randrange(VOCABULARY) for _ in range(128)]
    fresh = httpx.Limits(max_keepalive_connections=0)  # a server drops idle ones while answers are checked
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=fresh) as client:

        async def one(number: int) -> None:
            body: dict[str, Any] = {
                "model": served.folder, "temperature": 0, "return_token_ids": True, "ignore_eos": True,
                "prompt": [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 200))],
                "max_tokens": rng.randint(1, 60),
            }  # fmt: skip
            if rng.random() < 0.2:
                body["prompt"] = shared + body["prompt"][:90]
            kind, bad = rng.random(), rng.choice(BAD)
            async with gate:
                if kind < 0.1:
                    reply = await client.post("/v1/completions", json={**body, **bad})
                    assert 400 <= reply.status_code < 500, (bad, reply.status_code, reply.text)
                    counts["refused"] += 1
                elif kind < 0.25:
                    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
                        assert reply.status_code == 200
                        async for _ in reply.aiter_lines():
                            break
                    counts["cancelled"] += 1
                elif kind < 0.35:
                    options = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "n": 2, "logprobs": 2}
                    reply = await client.post("/v1/completions", json={**body, **options})
                    assert reply.status_code == 200, reply.text
                    assert [len(c["token_ids"]) for c in reply.json()["choices"]] == [body["max_tokens"]] * 2
                    counts["sampled"] += 1
                else:
                    reply = await client.post("/v1/completions", json=body)
                    assert reply.status_code == 200, reply.text
                    (choice,) = reply.json()["choices"]
                    assert len(choice["token_ids"]) == body["max_tokens"]
                    found = wrong(model, body["prompt"], choice["token_ids"])
                    assert not found, (number, found)
                    counts["whole"] += 1

        await asyncio.gather(*(one(number) for number in range(requests)))
    return counts


def test_a_server_loses_nothing_under_mixed_load(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, requests = build("fox_pro"), request.config.getoption("--requests")
    seed = 3 * request.config.getoption("--load-seed")
    folder = export(model, tmp_path / "model", eos_token_id=0)
    for name, content in tokenizer_files(byte_tokenizer()).items():
        (tmp_path / "model" / name).write_bytes(content)
    with serving(folder, tmp_path / "log") as served:
        start = time.monotonic()
        text = httpx.post(f"{served.url}/v1/completions", json={"model": folder, "prompt": "Once", "max_tokens": 9})
        assert text.status_code == 200, text.text
        assert isinstance(text.json()["choices"][0]["text"], str)
        counts = asyncio.run(load(served, model, requests // 2, seed))
        assert sum(counts.values()) == requests // 2
        before = served.memory()
        counts = asyncio.run(load(served, model, requests - requests // 2, seed + 1))
        print(counts, f"{time.monotonic() - start:.0f} s, MB before and after:", before >> 20, served.memory() >> 20)
        assert served.memory() < before * 1.05 + 2**25
        for _ in range(50):
            waiting = served.metric("num_requests_running") + served.metric("num_requests_waiting")
            if not waiting and not served.metric("kv_cache_usage_perc"):
                break
            time.sleep(0.2)
        assert served.metric("num_requests_running") == served.metric("num_requests_waiting") == 0
        assert served.metric("kv_cache_usage_perc") == 0  # pages that nobody holds stay as a prefix cache
        os.killpg(served.process.pid, signal.SIGKILL)
    with serving(folder, tmp_path / "log") as served:  # started again
        assert sum(asyncio.run(load(served, model, requests // 10, seed + 2)).values()) == requests // 10
