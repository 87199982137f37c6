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
from codegen import TARGETS, TOOLS, build
from sass import main_loops


sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels" / "benchmarks"))

from conversion_ways import WAYS, conversion_kernel  # noqa: E402


# Instructions that turn an integer into a float, and that take a maximum, of floats and of integers
CONVERTS, FLOAT_MAX, INTEGER_MAX = ("I2F", "I2FP"), ("FMNMX", "FMNMX3"), ("VIMNMX", "VIMNMX3", "IMNMX")


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
