"""Five ways from INT32 scores to the exponent of the softmax, compiled for GPUs that are not here, and counted.

`conversions.py --write FILE` makes the table that is committed; `conversions.py target ...` prints a line a kernel.
The loop is attention's: 64 rows by 64 keys of INT8, one scale a tile, a running max, P·V in bf16.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from codegen import TARGETS, TOOLS, build
from sass import main_loops


WAYS = ("native", "added", "folded", "integer_max", "folded_integer_max", "dual")
# Instructions that turn an integer into a float, and that take a maximum, of floats and of integers
CONVERTS, FLOAT_MAX, INTEGER_MAX = ("I2F", "I2FP"), ("FMNMX", "FMNMX3"), ("VIMNMX", "VIMNMX3", "IMNMX")
MAGIC, MAGIC_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)


@triton.jit
def _step(q, k, scale, WAY: tl.constexpr):
    """Scores as this way has them, and the largest of each row in base 2.

    Bits are added once, to the sums themselves: the compiler then begins the matrix unit's sums with them, which costs
    nothing where these are in registers.
    """
    ADDS: tl.constexpr = WAY == "added" or WAY == "folded" or WAY == "folded_integer_max"
    scores = tl.dot(q, k, out_dtype=tl.int32)
    if ADDS:
        scores += MAGIC_BITS
        values = scores.to(tl.float32, bitcast=True)
    else:
        values = scores.to(tl.float32)
    if WAY == "added":
        values -= MAGIC
    if WAY == "integer_max":
        top = tl.max(scores, 1).to(tl.float32)
    elif WAY == "folded_integer_max":
        top = (tl.max(scores, 1) - MAGIC_BITS).to(tl.float32)
    elif WAY == "folded":
        top = tl.max(values, 1) - MAGIC
    else:
        top = tl.max(values, 1)
    return values, top * scale


@triton.jit
def _powers(values, scale, reference, WAY: tl.constexpr):
    against = reference
    if WAY == "folded" or WAY == "folded_integer_max":
        against = tl.fma(scale, MAGIC, reference)
    return tl.exp2(tl.fma(values, scale[:, None], -against[:, None]))


@triton.jit
def conversion_kernel(q_ptr, k_ptr, v_ptr, k_scale_ptr, out_ptr, q_scale, tiles, WAY: tl.constexpr, D: tl.constexpr,
                      M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    rows, channels = tl.arange(0, M), tl.arange(0, D)
    HALF: tl.constexpr = N // 2
    q = tl.load(q_ptr + rows[:, None] * D + channels[None, :])
    reference = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for tile in tl.range(0, tiles, num_stages=2):
        scale = tl.zeros([M], tl.float32) + tl.load(k_scale_ptr + tile) * q_scale
        if WAY == "dual":  # one half by floats, the other by integers
            keys = tile * N + tl.arange(0, HALF)
            k = tl.load(k_ptr + keys[None, :] * D + channels[:, None])
            a, top = _step(q, k, scale, "native")
            k = tl.load(k_ptr + (keys + HALF)[None, :] * D + channels[:, None])
            b, top_b = _step(q, k, scale, "folded_integer_max")
            new = tl.maximum(reference, tl.maximum(top, top_b))
            p = _powers(a, scale, new, "native")
            p_b = _powers(b, scale, new, "folded")
            rescale = tl.exp2(reference - new)
            total = tl.fma(total, rescale, tl.sum(p, 1) + tl.sum(p_b, 1))
            acc = acc * rescale[:, None]
            v = tl.load(v_ptr + keys[:, None] * D + channels[None, :])
            acc = tl.dot(p.to(tl.bfloat16), v, acc)
            v = tl.load(v_ptr + (keys + HALF)[:, None] * D + channels[None, :])
            acc = tl.dot(p_b.to(tl.bfloat16), v, acc)
        else:
            keys = tile * N + tl.arange(0, N)
            k = tl.load(k_ptr + keys[None, :] * D + channels[:, None])
            values, top = _step(q, k, scale, WAY)
            new = tl.maximum(reference, top)
            p = _powers(values, scale, new, WAY)
            rescale = tl.exp2(reference - new)
            total = tl.fma(total, rescale, tl.sum(p, 1))
            acc = acc * rescale[:, None]
            v = tl.load(v_ptr + keys[:, None] * D + channels[None, :])
            acc = tl.dot(p.to(tl.bfloat16), v, acc)
        reference = new
    tl.store(out_ptr + rows[:, None] * D + channels[None, :], acc / total[:, None])


def count(name: str, way: str) -> dict:
    """Of one turn of the loop: all instructions, those that convert and take maxima. On AMD, of the whole kernel."""
    types = {"q_ptr": "*i8", "k_ptr": "*i8", "v_ptr": "*bf16", "q_scale": "fp32"}
    constants = {"WAY": way, "D": 64, "M": 64, "N": 64}
    compiled = build(conversion_kernel, constants, types, TARGETS[name], num_warps=4)
    if "cubin" not in compiled.asm:
        text = re.findall(r"^\s+([a-z]\w+)", compiled.asm["amdgcn"], re.MULTILINE)
        converts = sum(op.startswith("v_cvt_f32_i32") for op in text)
        integer = sum(op.startswith(("v_max_i32", "v_max3_i32")) for op in text)
        return {
            "converts": converts,
            "float_max": sum("max" in x and "_f32" in x for x in text),
            "integer_max": integer,
        }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    (loop,) = main_loops(sass)
    facts = {"instructions": sum(loop.values()), "spills": loop["LDL"] + loop["STL"]}
    for key, ops in (("converts", CONVERTS), ("float_max", FLOAT_MAX), ("integer_max", INTEGER_MAX)):
        facts[key] = sum(loop[op] for op in ops)
    return facts


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        rows = {f"{name}/{way}": count(name, way) for name in TARGETS for way in WAYS}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(facts)}" for key, facts in rows.items())
        meta = json.dumps({"triton": triton.__version__})
        Path(sys.argv[2]).write_text(f'{{\n "meta": {meta},\n "kernels": {{\n{lines}\n }}\n}}\n')
        return
    for name in sys.argv[1:] or TARGETS:
        for way in WAYS:
            print(json.dumps([f"{name}/{way}", count(name, way)]), flush=True)


if __name__ == "__main__":
    main()
