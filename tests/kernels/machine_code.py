"""What is wrong with machine code that ptxas made (as ``cuobjdump -sass`` prints it).

ptxas 12.8, which Triton 3.6 and 3.7 bring, has left out the instruction that a product's descriptor begins with: the
product then reads whatever address an earlier kernel left in a uniform register.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)\s*(.*?)\s*;")
_UNIFORM = re.compile(r"(?<![A-Z])UR(\d+)(\.64)?")
_PAIR = re.compile(r"(?<!i)desc\[")  # of memory, or of shared memory for a product; that of a product's shape is one
_PREDICATE, _COMPARES = re.compile(r"!?U?P(T|\d+)"), re.compile("SETP|PLOP|CHK")
# What has no result, or writes it to memory; of the others the first operand is the result.
_NO_RESULT = re.compile(
    r"ST|RED[GS]?$|BAR|BRA|EXIT|MEMBAR|SYNCS|UTMA|UTC\w*MMA|UBLK|WARP|LDGSTS|CALL|RET|ARRIVES|UCGABAR|CCTL"
)


def unset_registers(sass: str) -> list[str]:
    """Reads of uniform registers that no instruction before has written, as "address: instruction: register".

    In the order of addresses, in which code that runs first comes first; ptxas keeps no uniform register across calls.
    """
    written: set[int] = set()
    found = []
    for line in sass.splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        at, name, kind, rest = match.groups()
        if kind.endswith((".SPILL", ".FILL")):  # set aside and put back, set or not
            continue
        operands = [x.strip() for x in rest.split(",")]
        n_results = 0
        if not _NO_RESULT.match(name):
            while n_results < len(operands) and _PREDICATE.fullmatch(operands[n_results]):
                n_results += 1
            n_results += not _COMPARES.search(name)
        result = operands[:n_results]
        reads: set[int] = set()
        for x in operands[n_results:]:
            for first, wide in _UNIFORM.findall(x):
                n = int(first)
                if "gdesc[" in x and not name.startswith("UTC"):  # of both operands; the first one may be in registers
                    in_registers = operands[n_results].startswith("R")
                    reads |= set(range(n + 2 * in_registers, n + 4))
                else:
                    pair = wide or _PAIR.search(x) or (name[0] == "U" and kind.startswith(".64"))
                    reads |= {n, n + 1} if pair else {n}
        width = 1
        if name[0] == "U" or name == "LDCU":
            width = 4 if ".128" in kind else 2 if ".64" in kind or ".WIDE" in kind else 1
        sets = {int(first) + i for x in result for first, _ in _UNIFORM.findall(x) for i in range(width)}
        if name == "UMOV" and reads - written:  # a copy of what nothing has written is no harm until it is read
            written -= sets
            continue
        found += [f"{at}: {name}{kind} {rest}: UR{n}" for n in sorted(reads - written)]
        written |= sets
    return found
