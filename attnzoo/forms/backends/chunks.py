"""The ``triton`` form of a scalar decay: kernels of chunks in training and prefill, the fused recurrence in steps."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import UnavailableError
from attnzoo.forms.backends.fla import Operation, Prepared, prepared_inputs
from attnzoo.forms.backends.recurrent import HONOURED, explain, extend, refuses
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.options import LinearOptions
from attnzoo.forms.protocol import Call, Kernel

IN_FLOAT32 = "its exact products of float32 take longer than PyTorch's (impl='triton' runs them)"


def chunk_kernel(operation: Operation, *parts: str) -> Kernel:
    """The form that runs an operation on whole sequences, packed or padded, and after a state; a few tokens after one
    run on the fused recurrence, where no gradient is expected.

    Args:
        operation: :func:`decay_chunks`, or one made of it.
        parts: the gate parts that it reads; with others than ``log_decay`` it takes keys and values of each head.
    """
    shares = parts == ("log_decay",)

    def by_chunks(call: Call, given: LinearOptions) -> tuple[Tensor, Tensor | None]:
        heads = 1 if given.write is None else given.write.shape[2]
        ready = prepared_inputs(call, given, heads if shares else call.q.shape[2])
        ready.options["prune"] = given.prune
        return operation(ready)

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: LinearOptions) -> Tensor:
        """The output of the chunk kernels of a scalar decay (``attnzoo.kernels.linear``).

        Raises:
            UnavailableError: tensors that the kernels do not take.
        """
        call = Call(q, k, v, gate, options=given)
        reason = refuses_chunks(call)
        if reason:
            raise UnavailableError(f"form 'triton': {reason}; use the 'chunk' form")
        return by_chunks(call, given)[0]

    def go_on(
        q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: RecurrentState | None, given: LinearOptions
    ) -> tuple[Tensor, RecurrentState]:
        """The output after a state, and the new state."""
        call = Call(q, k, v, gate, state, True, given)
        if not refuses(call):
            return extend(q, k, v, gate, state, given)
        o, matrix = by_chunks(call, given)
        return o, RecurrentState(cast(Tensor, matrix), (0 if state is None else len(state)) + q.shape[1])

    return Kernel(
        run, go_on, refuses_chunks, explain_chunks, parts=frozenset(parts), doubts=doubts, steps_whole=True,
        honours=(HONOURED | {"cu_seqlens", "prune"}) - {"delta_rule"},
    )  # fmt: skip


def decay_chunks(x: Prepared) -> tuple[Tensor, Tensor | None]:
    """The output by :func:`attnzoo.kernels.linear.linear_chunks`."""
    from attnzoo.kernels.linear import linear_chunks

    g, given = x.gate.log_decay, x.options
    return linear_chunks(
        x.q, x.k, x.v, None if g is None else g.float(), given["initial_state"], scale=given["scale"],
        cu_seqlens=given["cu_seqlens"], keeps_state=given["output_final_state"], prune=given.get("prune"),
        layout="bthd",
    )  # fmt: skip


def refuses_chunks(call: Call) -> str:
    """The reason why neither the chunk kernels nor the fused recurrence can serve a call, or ""."""
    from attnzoo.kernels.linear import chunks_unavailable

    if call.keeps_state and not refuses(call):
        return ""
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"expected one dtype of q, k and v, got {call.q.dtype}, {call.k.dtype} and {call.v.dtype}"
    return chunks_unavailable(call.q, call.v)


def explain_chunks(call: Call) -> tuple[str, str]:
    """The kernels' description, and no reason, as there are no faster kernels."""
    return explain(call) if call.keeps_state and not refuses(call) else ("chunks", "")


def doubts(call: Call) -> str:
    """The reason why ``auto`` does not take the chunk kernels, or ""."""
    return IN_FLOAT32 if call.q.dtype == torch.float32 and not (call.keeps_state and not refuses(call)) else ""


SCALAR_DECAY = chunk_kernel(decay_chunks, "log_decay")
