"""A server from its start to its end: the port, the engine that draws, and what it says of itself."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib.util
import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from attnzoo.errors import UnavailableError

if TYPE_CHECKING:
    from uvicorn import Server

    from attnzoo.trained.model import TrainedModel

PATIENCE = 5  # seconds at the end for requests under way
PREFIXES = 256  # MiB
DIFFERENCE = "vLLM schedules many users; our engine has certified pruning, eviction of keys, and all variants"


@dataclass(frozen=True)
class Serving:
    """A model to serve, and how.

    Args:
        source: the folder of a run, or a model folder.
        engine: "vllm", "attnzoo", or "auto" for vLLM where it is installed and can.
        host, port: the address to listen at; port 0 takes a free one.
        max_sequences: drawn at a time.
        max_tokens: of the longest sequence, its prompt included.
        prefix_cache: MiB beside the pages of keys for what prompts have in common, see
            :meth:`~attnzoo.models.generation.engine.Generator.remember`; None for 256 where keys are not given up.
        evict, budget, kv_dtype: see :class:`~attnzoo.models.generation.engine.Generator`.
        draft: the folder of a run or model that proposes tokens to our engine, or None.
        draft_tokens: how many it proposes at a time; None for 5.
        device: auto, cpu or cuda.
        dtype: of the weights; None keeps that of the files.
    """

    source: Path
    engine: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    max_sequences: int = 8
    max_tokens: int = 2048
    prefix_cache: int | None = None
    evict: float | str | None = None
    budget: int | str | None = None
    kv_dtype: str | None = None
    draft: Path | None = None
    draft_tokens: int | None = None
    device: str = "auto"
    dtype: str | None = None

    @property
    def name(self) -> str:
        """The model's name in requests: that of its folder."""
        return self.source.resolve().name

    def run(self) -> Iterator[str]:
        """Serve until a signal ends it, after lines that say what runs and how to ask it.

        Raises:
            ValueError: a port in use, ``draft_tokens`` without a draft; or as the engine.
            UnavailableError: vLLM was asked for, and is not installed or cannot.
            ModuleNotFoundError: a package of the extra `serve` is not installed.
        """
        from attnzoo.trained.continuation import check_draft

        check_draft(self.draft, self.draft_tokens)
        listening = listen(self.host, self.port)
        with listening:
            reason = self.against_vllm()
            if self.engine == "vllm" and reason:
                raise UnavailableError(f"--engine vllm: {reason}")
            if self.engine == "attnzoo" or reason:
                yield from self._run_own(listening, reason or "as --engine attnzoo asks")
                return
            folder, port = exported(self.source), listening.getsockname()[1]
        yield f"vLLM serves {self.name} once it has started. {DIFFERENCE}: --engine attnzoo."
        yield from run_until_signal(self.vllm_words(folder, port), self.address(port), self.curl(port))

    def against_vllm(self) -> str:
        """Why vLLM does not serve this; empty where it does."""
        own = {
            "--evict": self.evict, "--budget": self.budget, "--kv-dtype": self.kv_dtype,
            "--prefix-cache": self.prefix_cache, "--draft": self.draft,
            "--device": None if self.device == "auto" else self.device,
        }  # fmt: skip
        if named := next((name for name, value in own.items() if value is not None), None):
            return f"vLLM has no {named}"
        if not self.source.exists():  # a small model's name
            return "vLLM serves folders"
        return "vLLM is not installed" if importlib.util.find_spec("vllm") is None else self._unserved()

    def _unserved(self) -> str:
        """The reason why vLLM cannot serve one of the model's layers, or ""."""
        import torch

        from attnzoo.models.vllm.refusals import unserved
        from attnzoo.models.vllm.storage import layers_of
        from attnzoo.trained.exchange import recipe_of

        dtype = getattr(torch, self.dtype or dtype_of(self.source))
        return unserved(layers_of(recipe_of(self.source).model), dtype)

    def vllm_words(self, folder: Path, port: int) -> list[str]:
        """The command that serves a folder by vLLM."""
        limits: dict[str, object] = {"max-model-len": self.max_tokens, "max-num-seqs": self.max_sequences}
        limits["dtype"] = self.dtype or dtype_of(folder)
        given = {"host": self.host, "port": port, "served-model-name": self.name, **limits}
        words = [f"--{name}={value}" for name, value in given.items()]
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *words]

    def curl(self, port: int) -> str:
        """A command line that asks the server."""
        body = json.dumps({"model": self.name, "prompt": "Once upon a time", "max_tokens": 40}, ensure_ascii=False)
        words = [f"{self.address(port)}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
        return shlex.join(["curl", *words])

    def address(self, port: int) -> str:
        """The server's address for a program on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _run_own(self, listening: socket.socket, reason: str) -> Iterator[str]:
        import torch
        import uvicorn  # noqa: F401  raises before the model is read

        from attnzoo.trained.continuation import load_text_model
        from attnzoo.trained.model import device_named

        dtype = getattr(torch, self.dtype) if self.dtype else None
        loaded = load_text_model(self.source, device_named(self.device), dtype)
        server = self.own_server(loaded)
        yield (
            f"attnzoo's own engine serves {self.name} on {loaded.model.embedding.weight.device}, at most "
            f"{self.max_sequences} sequences of {self.max_tokens} tokens at a time ({reason}). {DIFFERENCE}."
        )
        yield self.curl(listening.getsockname()[1])
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again at the end, by these handlers
                signal.signal(each, lambda *_: None)
        server.run(sockets=[listening])
        yield "the server has ended"

    def own_server(self, loaded: TrainedModel) -> Server:
        """Our engine's server of a model, not started yet.

        Raises:
            ValueError, MemoryError: as :class:`~attnzoo.models.generation.engine.Generator`, its ``remember``, and
                :func:`~attnzoo.trained.continuation.draft_of`; a draft beside a budget of all layers.
        """
        import uvicorn

        from attnzoo.models.generation.engine import Generator
        from attnzoo.trained.continuation import draft_of, load_text_model
        from attnzoo.trained.serving.app import application
        from attnzoo.trained.serving.asked import Reader
        from attnzoo.trained.serving.chat import chat_template
        from attnzoo.trained.serving.worker import Worker

        place = loaded.model.embedding.weight
        every = 1 if place.device.type == "cpu" else 4  # steps between two pieces of text
        generator = Generator(
            loaded.model, self.max_sequences, self.max_tokens, check_every=every, evict=self.evict, budget=self.budget,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip
        default = 0 if generator.prefill.whole() else PREFIXES
        generator.remember(default if self.prefix_cache is None else self.prefix_cache)
        draft = None
        if self.draft is not None:
            if generator.batch.total:
                raise ValueError(f"--draft: expected none with a budget of all layers, {self.budget!r}, got one")
            draft = draft_of(loaded, load_text_model(self.draft, str(place.device), place.dtype), self.draft_tokens)
            if draft.joins(loaded.model, self.max_tokens):
                generator.batch.follow(draft.model, [])  # takes its memory now
        reader = Reader(loaded, self.name, self.max_tokens, chat_template(loaded.files))
        app = application(Worker(loaded, generator, draft), reader)
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=PATIENCE)
        return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        ValueError: a port in use, or an address of no interface of this machine.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ValueError(f"--port: expected one that is free, got {port}: {error.strerror}") from error
        raise ValueError(f"--host: expected an address of this machine, got {host!r}: {error.strerror}") from error


def exported(source: Path) -> Path:
    """The model folder of a run's newest checkpoint, written into the run at first use; a model folder as it is.

    Raises:
        FileNotFoundError: neither a run nor a model folder.
    """
    from attnzoo.trained.exchange import export_run
    from attnzoo.training.checkpoint import identity, usable_checkpoint
    from attnzoo.training.digests import MODEL

    if not (source / "config.yaml").is_file():
        return source
    checkpoint = usable_checkpoint(source, MODEL)
    said = "" if checkpoint is None else identity(checkpoint)
    folder = source / "served" / hashlib.sha256(said.encode()).hexdigest()[:16]
    return folder if folder.is_dir() else export_run(source, folder)


def dtype_of(source: Path) -> str:
    """The dtype of the weights of a run or a model folder, which vLLM by itself would not keep where it is float32."""
    from attnzoo.models.peers import read_settings

    if (source / "config.yaml").is_file():
        return "float32"
    fields = read_settings(source)
    return str(fields.get("dtype") or fields.get("torch_dtype") or "float32")


def run_until_signal(words: list[str], address: str, line: str) -> Iterator[str]:
    """Run a server, to which the signals that end this process are handed on; ``line`` comes once it answers.

    It is ended with this process, also where this one is killed.

    Raises:
        UnavailableError: it has failed.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # of Linux; looked up before the fork, where no thread has a lock
    end_with_parent = None if prctl is None else lambda: prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    with subprocess.Popen(words, preexec_fn=end_with_parent) as process:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, _: process.send_signal(number))
        while process.poll() is None and not _answers(address):
            time.sleep(0.5)
        if process.returncode is None:
            yield line
        code = process.wait()
    if code not in (0, -signal.SIGINT, -signal.SIGTERM, 130):
        raise UnavailableError(f"vLLM has ended with exit code {code}")


def _answers(address: str) -> bool:
    alone = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment is for others
    try:
        with alone.open(f"{address}/health", timeout=5) as reply:
            return bool(reply.status == HTTPStatus.OK)
    except (OSError, HTTPException):
        return False
