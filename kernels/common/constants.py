"""Numbers that the kernels of both families, their references and their launches agree on. No Triton here."""

from __future__ import annotations

from attnzoo.algebra.gate import CLOSED as CLOSED

LOG2E = 1.4426950408889634
ROW_UNIT = 128  # query rows that share one pruning boundary; every BT divides it
KEY_UNIT = 64  # boundaries are multiples of this many keys
NEAR_UNITS = 1  # key units before a row unit whose weights count towards the row's normaliser in the tail bound
SLACK = 1.0e-3  # log2 units added to the bound: covers the float32 rounding of norms and sums
GATE_NONE, GATE_CONST, GATE_FULL = 0, 1, 2
