"""The forms and kernels that every variant would run on here, with reasons why none is faster: ``attnzoo doctor``.

Each variant's layer is called, and the call that reaches its core is passed, on empty GPU tensors, to the functions
that choose form and kernels.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnzoo.errors import UnavailableError
from attnzoo.forms.backends import fla, fla_kernels, fla_steps
from attnzoo.forms.protocol import REFERENCE, Call
from attnzoo.kernels import norms
from attnzoo.kernels.common.device import ON, device_unavailable, installed_triton
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.convolution.api import MOST_TOKENS
from attnzoo.layer.attention import Attention
from attnzoo.layer.build import build_attention
from attnzoo.layer.dispatch import KERNELS, choose, expected, on_gpu, passed_over
from attnzoo.registry import get, list_variants
from attnzoo.registry.variant import Variant
from attnzoo.terminal import wrapped

PACKAGES = ("attnzoo", "torch", "triton", "flash-linear-attention")
WHEN = ("prefill", "training", "padded training", "packed training", "cached step")
Situation = tuple[str, str, str, tuple[str, ...]]  # when, form, kernels, reasons why none is faster
# Environment variables that slow a GPU down -> their effect.
SETTINGS = {
    "TRITON_INTERPRET": "kernels run in Triton's interpreter, which is for tests",
    "CUDA_LAUNCH_BLOCKING": "Python waits for every kernel",
    "ATTNZOO_VALIDATE": "Python waits for the GPU to check values",
    "ATTNZOO_FLA_TUNING": "flash-linear-attention measures all tiles that it knows, which takes minutes",
    "TRITON_ALWAYS_COMPILE": "Triton compiles every kernel again in each process",
}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # lists of a process's visible GPUs
NOTHING = "nothing"  # stands for a missing form
_HEADS, _TOKENS = 2, 320  # enough tokens for the kernels of long sequences


@dataclass(frozen=True)
class Row:
    """The form and kernels of one variant's layer in one situation.

    Attributes:
        when: one of ``WHEN``, or "always" where there is no such layer.
        form: a kernel's or "reference"; "nothing" where there is no such layer, or none of its forms serves it.
        kernels: the kernels of the triton form.
        why: reasons why none is faster.
    """

    variant: str
    when: str
    form: str
    kernels: str = ""
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A report on the machine, its versions, and the forms of each variant.

    Attributes:
        gpus: the GPUs, or the reason why there are none.
        slow: other causes of slowness in this setup, with remedies.
        parts: what short convolutions, norms and log decays of layers run on.
        splits: which long texts recurrences of a scalar decay split, or "".
    """

    system: str
    gpus: tuple[str, ...]
    versions: dict[str, str]
    layer: str
    rows: tuple[Row, ...]
    slow: tuple[str, ...] = ()
    parts: str = ""
    splits: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self, width: int = 80) -> str:
        """The report in Markdown, in lines of ``width`` columns; reasons that occur often are notes below the list."""
        notes: dict[str, int] = {}
        lines = [f"- {self.system}", *(f"- {gpu}" for gpu in self.gpus)]
        lines += [f"- {name} {found}" for name, found in self.versions.items()]
        lines += [f"- {line}" for line in (self.parts, self.splits) if line]
        lines += [f"- slow: {why}" for why in self.slow]
        lines += ["", f"{self.layer}:", ""]
        for names, situations in _grouped(self.rows):
            said = []
            for when, form, kernels, why in situations:
                marks = (f" [{notes.setdefault(reason, len(notes) + 1)}]" for reason in why)
                runs_on = f"{form} ({kernels})" if kernels else form
                said.append((when, runs_on + "".join(marks)))
            every = f"- {', '.join(names)}:"
            always = len(said) == 1
            lines += [f"{every} {said[0][1]}"] if always else [every, *(f"  - {when}: {what}" for when, what in said)]
        lines += ["", *(f"[{number}] {note}" for note, number in notes.items())]
        return "\n".join(part for line in lines for part in wrapped(line, width) or [""]).rstrip() + "\n"


class _Asked(BaseException):
    """An exception that carries a call of the core out of a layer."""

    def __init__(self, call: Call):
        self.call = call


@dataclass(frozen=True)
class _Listener:
    """A stand-in for a layer's variant, which raises :class:`_Asked` with the call as soon as a form is chosen."""

    variant: Variant

    def refuses(self, form: str, call: Call) -> str:
        raise _Asked(call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.variant, name)


def examine(head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Report:
    """The report for this machine, with every variant's default layer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [row for name in (*list_variants(), *list_variants("other")) for row in _rows(name, head_dim, dtype, device)]
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else [_no_gpu()]
    where = " on cuda:0" if len(gpus) > 1 else ""
    return Report(
        f"{platform.platform()}, Python {platform.python_version()}", tuple(gpus),
        {name: _version(name) for name in PACKAGES},
        f"layers with heads of {head_dim}, {str(dtype).removeprefix('torch.')}{where}", tuple(rows),
        tuple(_slow()) if device.type == "cuda" else (), _parts(device, dtype), _splits(device, head_dim),
    )  # fmt: skip


def _parts(device: torch.device, dtype: torch.dtype) -> str:
    """The implementation of short convolutions, norms and log decays, with the reason why no kernel runs."""
    with FakeTensorMode():
        why = norms.triton_unavailable(torch.empty(1, 1, 1, 1, dtype=dtype, device=device))
    if device.type == "cpu":
        why = why or "auto looks for kernels only on a GPU"
    parts = f"short convolutions (of up to {MOST_TOKENS} tokens), norms and log decays of layers"
    return f"{parts} run on {f'PyTorch: {why}' if why else 'triton'}"


def _splits(device: torch.device, head_dim: int) -> str:
    """The texts over which recurrences of a scalar decay are split, and acp leaves out states."""
    with FakeTensorMode():
        if device.type == "cpu" or device_unavailable(torch.empty(0, device=device)):
            return ""
    from attnzoo.kernels.linear.chunks import CHUNK, TILES
    from attnzoo.kernels.linear.segments import splits_from

    programs, chunks = splits_from(device)
    heads = programs // (cdiv(head_dim, TILES["states"].BK) * cdiv(head_dim, TILES["states"].BV))
    return (
        f"recurrences of a scalar decay split texts from {chunks * CHUNK} tokens on where batch times heads are at "
        f"most {heads}, half in training (acp leaves out states there)"
    )


def _rows(name: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Iterator[Row]:
    try:
        variant = get(name)
        attn = build_attention(name, hidden_size=_HEADS * head_dim, num_heads=_HEADS).to(dtype)
    except (UnavailableError, TypeError, ValueError) as error:
        yield Row(name, "always", NOTHING, why=(f"no layer: {error}",))
        return
    attn.variant = _Listener(variant)  # type: ignore[assignment]
    for when in situations(variant):
        with torch.set_grad_enabled("training" in when):
            call = _asked(attn, when, dtype)
            if when == "cached step":
                call = replace(call, state=_state(attn, dtype))
            yield _row(variant, when, _moved(call, device))


def situations(variant: Variant) -> tuple[str, ...]:
    """The situations that a variant knows: none after a cache where outputs change with later tokens."""
    return tuple(when for when in WHEN if variant.causal or "cached" not in when)


def _asked(attn: Attention, when: str, dtype: torch.dtype) -> Call:
    """The call of a layer's core."""
    tokens = 1 if when == "cached step" else _TOKENS
    x = torch.zeros(1, tokens, attn.config.hidden_size, dtype=dtype)
    mask = borders = cache = None
    if "padded" in when:
        mask = torch.arange(tokens)[None] > 0
    if "packed" in when:
        borders = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    if "cached" in when:
        cache = attn.new_cache()
    try:
        attn(x, cu_seqlens=borders, attention_mask=mask, cache=cache)
    except _Asked as asked:
        return asked.call
    raise AssertionError("the layer asked for no form")


def _state(attn: Attention, dtype: torch.dtype) -> Any:
    """The state that a cached call goes on from, after as many tokens as the other calls have."""
    call = _asked(attn, "cached", dtype)
    return attn.variant.form_set.extend(call.q, call.k, call.v, call.gate, **call.options)[1]


def _moved(call: Call, device: torch.device) -> Call:
    """The call with empty tensors on a device."""
    with FakeTensorMode():

        def moved(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return torch.empty(x.shape, dtype=x.dtype, device=device, requires_grad=x.requires_grad)

        gate = replace(call.gate, **{part: moved(getattr(call.gate, part)) for part in call.gate.parts})
        options = {name: moved(value) for name, value in call.options.items()}
        return replace(call, q=moved(call.q), k=moved(call.k), v=moved(call.v), gate=gate, options=options)


def _row(variant: Variant, when: str, call: Call) -> Row:
    try:
        form = choose(variant, "auto", call)
    except UnavailableError:  # third-party forms may refuse padding, for example
        form = NOTHING
    faster = KERNELS[: KERNELS.index(form)] if form in KERNELS else KERNELS
    offered = [name for name in expected(variant, call) if name in faster]
    against = passed_over if on_gpu(call.q) else Variant.refuses
    why = [f"{name}: {against(variant, name, call) or 'auto takes it only on a GPU'}" for name in offered]
    if form == NOTHING:
        why.append(f"{REFERENCE}: {variant.refuses(REFERENCE, call)}")
    if form == REFERENCE and not offered:
        why = ["it has no kernel: neither ours nor flash-linear-attention's serves its gate"]
    kernels = ""
    kernel = getattr(variant.form_set, "kernels", {}).get(form)
    if kernel is not None and kernel.explain is not None:
        kernels, slow = kernel.explain(call)
        why += [slow] if slow else []
    return Row(variant.name, when, form, kernels, tuple(why))


def _grouped(rows: tuple[Row, ...]) -> list[tuple[list[str], tuple[Situation, ...]]]:
    """Groups of variants with the same rows in all situations, and the situations."""
    found: dict[tuple[Situation, ...], list[str]] = {}
    for name in dict.fromkeys(row.variant for row in rows):
        mine = [row for row in rows if row.variant == name]
        seen: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
        for row in mine:
            seen.setdefault((row.form, row.kernels, row.why), []).append(row.when)
        when = ("always" if len(x) == len(mine) else ", ".join(x) for x in seen.values())
        found.setdefault(tuple((x, *key) for x, key in zip(when, seen, strict=True)), []).append(name)
    return [(names, situations) for situations, names in found.items()]


def _gpu(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"cuda:{index}: {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"


def _no_gpu() -> str:
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return "no CUDA GPU: this torch is built without CUDA (https://pytorch.org/get-started has one with it)"
    hidden = "".join(f", or {name}={os.environ[name]!r} hides it (unset it)" for name in VISIBLE if name in os.environ)
    why = f"finds no driver or none that is new enough (nvidia-smi){hidden}"
    return f"no CUDA GPU: this torch is built for {built}, and {why}"


def _slow() -> Iterator[str]:
    for name, effect in SETTINGS.items():
        value = os.environ.get(name, "")
        if value == "full" if name == "ATTNZOO_FLA_TUNING" else value.lower() in ON:
            yield f"{name}={value}: {effect} (unset it)"
    if fla_steps.been_read(fla.VERSION):
        for cause, remedy in fla_steps.unheard().items():
            yield f"{cause}: training steps on flash-linear-attention always run its Python code ({remedy})"
    if not (os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")):
        yield "no C compiler, without which Triton launches no kernel (install gcc, or set CC)"
    if not (Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h").exists():
        yield "no headers of Python, without which Triton launches no kernel (install python3-dev)"


def _version(package: str) -> str:
    if package == "triton" and installed_triton():
        return installed_triton()
    if package == "flash-linear-attention" and fla.VERSION:  # its kernels may be installed alone, as fla-core
        return fla_kernels.described(fla.VERSION)
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"
