"""The ``triton`` form of the linear side: one fused kernel for a few tokens after a state, as in generation."""

from __future__ import annotations

from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import UnavailableError
from attnzoo.forms.backends.fox_path import records_any
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.options import LinearOptions
from attnzoo.forms.protocol import Call, Kernel


def run(q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: LinearOptions) -> Tensor:
    """The output of the fused recurrence (``attnzoo.kernels.linear``) over short sequences, without a gradient.

    Raises:
        UnavailableError: more tokens than the kernel takes, or a gradient is expected.
    """
    reason = refuses(Call(q, k, v, gate, options=given))
    if reason:
        raise UnavailableError(f"form 'triton': {reason}; use the 'chunk' form")
    return extend(q, k, v, gate, None, given)[0]


def extend(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, state: RecurrentState | None, given: LinearOptions
) -> tuple[Tensor, RecurrentState]:
    """The output after a state, and the new state."""
    from attnzoo.kernels.linear import linear_steps

    past, seen = (None, 0) if state is None else (state.matrix.float(), len(state))
    write = gate.beta if given.delta_rule else given.write
    in_place = state is not None and state.disposable
    o, matrix = linear_steps(q, k, v, gate, past, scale=given.scale, write=write, valid=given.valid, in_place=in_place)
    return o, RecurrentState(matrix, seen + q.shape[1])


def refuses(call: Call) -> str:
    """The reason why the kernel cannot serve a call, or ""."""
    from attnzoo.kernels.linear import triton_unavailable

    state = None if call.state is None else call.state.matrix
    if records_any(call, call.options.get("write"), state):
        return "the fused recurrence has no gradient (run it under torch.no_grad())"
    return triton_unavailable(call.q, call.v)


def explain(call: Call) -> tuple[str, str]:
    """The kernel's description, and no reason, as there is no faster kernel."""
    return "one fused kernel", ""


PARTS_READ = frozenset({"log_decay", "log_diag", "angle", "w", "beta"})
HONOURED = frozenset(LinearOptions.__match_args__) - {"cu_seqlens", "prune"}
FEW_TOKENS = Kernel(run, extend, refuses, explain, brief=True, parts=PARTS_READ, honours=HONOURED, steps_whole=True)
