"""Servers in processes of their own, as vLLM's is: the line once one answers, the end with who started it, refusals."""

import signal
import subprocess
import sys
import time
from http.client import HTTPConnection

import pytest

from attnzoo.errors import UnavailableError
from attnzoo.models.config import ModelConfig
from attnzoo.trained.serving import server
from attnzoo.trained.serving.server import Serving, listen
from attnzoo.training.config import TrainConfig
from attnzoo.training.recipe import to_yaml

SLOW = """
import http.server, sys, time
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
time.sleep(0.5)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_the_line_comes_once_the_server_answers_and_it_ends_with_the_process_that_started_it(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not asked
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    code = "from attnzoo.trained.serving.server import run_until_signal as run\n"
    code += f"for line in run([{sys.executable!r}, '-c', {SLOW!r}, '{port}'], 'http://127.0.0.1:{port}', 'it answers'):"
    code += " print(line, flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "it answers\n"
        HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/health")
        parent.kill()
        for _ in range(100):
            try:
                listen("127.0.0.1", port).close()
            except ValueError:
                time.sleep(0.05)
            else:
                break
        else:
            raise AssertionError("the server has outlived its parent")


def test_a_server_that_fails_before_it_answers_gives_no_line():
    lines = server.run_until_signal([sys.executable, "-c", "raise SystemExit(3)"], "http://127.0.0.1:9", "no")
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(UnavailableError, match="exit code 3"):
            next(lines)
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(each, handler)


def test_a_model_that_vllm_cannot_serve_is_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: object())
    for name, reason in (("fox", ""), ("path", "later tokens change its cached keys (w, beta)")):
        model = ModelConfig(attention=["nope", name], num_layers=2, hidden_size=16, num_heads=2)
        (tmp_path / "config.yaml").write_text(to_yaml(TrainConfig(model=model)))
        said = f"layer 1: expected one that vLLM can serve, got {name!r}: {reason}" if reason else ""
        assert Serving(tmp_path).against_vllm().startswith(said)
        assert bool(Serving(tmp_path).against_vllm()) == bool(reason)
