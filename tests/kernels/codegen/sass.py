"""Reads machine code of NVIDIA GPUs, as nvdisasm prints it: loops with matrix instructions, lost uniform registers."""

from __future__ import annotations

import re
from collections import Counter


MATRIX_OPS = ("HMMA", "IMMA", "HGMMA", "IGMMA", "QMMA", "QGMMA", "OMMA", "UTCOMMA")
_LABEL = re.compile(r"^\s*(\.L_x?_?\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(@!?U?P[\dT]+\s+)?([A-Z][\w.]*)(.*?);?\s*(?:/\*|$)")
_TARGET = re.compile(r"`\(([^)]+)\)")
_WAIT, _ARRIVAL = "SYNCS.PHASECHK", "SYNCS.ARRIVE"  # at a barrier in shared memory
# instructions that write the uniform register that is their first operand
_WRITES = re.compile(r"U(?!TMA|BLK)\w+|R2UR|S2UR|VOTEU|LDCU|REDUX")


def _rows(sass: str) -> tuple[list, dict]:
    """(address, predicate, operation, operands) of each instruction, and where the labels stand."""
    rows, labels = [], {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(rows)
        elif found := _INSTRUCTION.match(line):
            rows.append(found.groups())
    return rows, labels


def main_loops(sass: str) -> list[Counter]:
    """Instruction counts of the innermost loops that hold matrix instructions."""
    rows, labels = _rows(sass)
    names = [op.split(".")[0] for _, _, op, _ in rows]
    spans = []
    for end, (_, _, op, rest) in enumerate(rows):
        if op.startswith("BRA") and (jump := _TARGET.search(rest)):
            start = labels.get(jump[1], len(rows))
            if start <= end and any(name in MATRIX_OPS for name in names[start : end + 1]):
                spans.append((start, end))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [Counter(names[start : end + 1]) for start, end in inner]


def undefined_uniforms(sass: str) -> list[str]:
    """Reads of a uniform register (UR) that nothing has written on some path to it: an error of the compiler.

    ptxas 12.8 and 13 hoist descriptors of matrix operands out of two loops into the path to the first one only. Where
    that loop is skipped, the second multiplies whatever the registers hold.
    """
    rows, labels = _rows(sass)
    effects = [_uniforms(op, rest) for _, _, op, rest in rows]
    everything = 2**64 - 1
    written = [everything] * len(rows)  # on every path that leads to a row
    reached, todo = {0}, [0]
    written[0] = 0
    while todo:
        i = todo.pop()
        after = written[i] | sum(1 << register for register in effects[i][0])
        for following in _followers(i, rows, labels):
            known = written[following] & after
            if following not in reached or known != written[following]:
                written[following] = known
                reached.add(following)
                todo.append(following)
    return [
        f"{rows[i][0]} {rows[i][2]} UR{register}"
        for i in sorted(reached)
        for register in effects[i][1]
        if register < 63 and not written[i] >> register & 1  # UR63 is zero
    ]


def is_ordered_by_the_block(sass: str, read: int, write: int) -> bool:
    """Whether the instructions at two addresses, a load from shared memory and a store, have barriers of the whole
    block between them: the last barrier before the load is one and the next one after it, and the next one after the
    store.

    So it is with what Triton hands to specialised warps: their number and their arguments.
    """
    rows, _ = _rows(sass)
    at = _load_and_store(rows, read, write)
    if at is None:
        return False
    # without a number of threads, as the barriers of a group of warps have it, BAR.SYNC waits for all of the block
    barriers = {i: "," not in rest for i, (_, _, op, rest) in enumerate(rows) if op.startswith("BAR.")}
    before = max((i for i in barriers if i < at[0]), default=None)
    after = [min((i for i in barriers if i > x), default=None) for x in at]
    return all(barriers.get(i, False) for i in (before, *after))


def is_ordered_by_the_ring(sass: str, read: int, write: int) -> bool:
    """Whether a load from shared memory is over before its warps say that its place is free, and a store waits for
    that: on all paths from the load a barrier of its warps comes before the next arrival at a barrier in memory, and
    on all paths to the store a wait for one comes last.

    So it is with what the producer leaves in the ring for the consumers.
    """
    rows, labels = _rows(sass)
    at = _load_and_store(rows, read, write)
    if at is None:
        return False
    followers = [_followers(i, rows, labels) for i in range(len(rows))]
    precedents = [[] for _ in rows]
    for i, following in enumerate(followers):
        for j in following:
            precedents[j].append(i)

    def every_path_meets(wanted: str, start: int, ways: list) -> bool:
        """Before an arrival, and before the kernel's begin."""
        todo, seen = [start], {start}
        while todo:
            i = todo.pop()
            if wanted == _WAIT and not ways[i]:
                return False
            for j in ways[i]:
                _, predicate, op, _ = rows[j]
                if op.startswith(_ARRIVAL):
                    return False
                if j not in seen and (predicate or not op.startswith(wanted)):
                    todo.append(j)
                seen.add(j)
        return True

    return every_path_meets("BAR.", at[0], followers) and every_path_meets(_WAIT, at[1], precedents)


def _load_and_store(rows: list, read: int, write: int) -> tuple[int, int] | None:
    """Where the instructions of two addresses stand; None if they are not a load from shared memory and a store."""
    at = {int(address, 16): i for i, (address, *_) in enumerate(rows)}
    found = at.get(read), at.get(write)
    if None in found or [rows[i][2][:3] for i in found] != ["LDS", "STS"]:
        return None
    return found


def _followers(i: int, rows: list, labels: dict) -> list[int]:
    _, predicate, op, rest = rows[i]
    falls_through = [i + 1] if i + 1 < len(rows) else []
    if op.split(".")[0] == "BRA" and (target := _TARGET.search(rest)):
        jump = [labels[target[1]]] if target[1] in labels else []
        return jump + (falls_through if predicate else [])
    if op == "BRX":  # by a table: how specialised warps come to their code
        jumps = [labels[target] for target in re.findall(r"\.L_\w+", rest) if target in labels]
        return jumps + (falls_through if predicate else [])
    return falls_through if predicate or op.split(".")[0] not in ("EXIT", "RET") else []


def _uniforms(op: str, rest: str) -> tuple[set[int], list[int]]:
    """Uniform registers that an instruction writes (a predicated write counts) and those that it reads."""
    operands = [x.strip() for x in re.split(r",(?![^\[]*\])", rest)]
    written = set()
    if _WRITES.fullmatch(op.split(".")[0]) and re.fullmatch(r"UR\d+", operands[0]):
        first = int(operands.pop(0)[2:])
        written = set(range(first, first + (2 if re.search(r"\.(64|WIDE)", op) else 1)))
    read = []
    for number, operand in enumerate(operands):
        if found := re.search(r"gdesc\[UR(\d+)\]", operand):
            # four registers describe both operands; where the left one is in ordinary registers, only the last two do
            first = int(found[1])
            read += range(first + (2 if number == 2 else 0), first + 4)
        else:
            read += [int(x) for x in re.findall(r"\bUR(\d+)\b", operand)]
    return written, read
