"""Compile every kernel of the tile table for GPUs that are not here, and read what came out.

A program of its own, because a process whose kernels are interpreted can't compile. `codegen.py TARGET [KEY ...]`
prints a JSON line a kernel, for test_aot.py; `--write FILE` makes the table that is committed (`make codegen`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.backends.nvidia
from compiled_from import compiled_from
from sass import MATRIX_OPS, main_loops, undefined_uniforms
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from sage_kernels._triton.attention.compensate import _AT_ONCE, _compensate_kernel, _pool_tiles_kernel
from sage_kernels._triton.attention.kernel import _attention_fwd_kernel
from sage_kernels._triton.attention.skip_tiles import ROWS as MEASURED_ROWS
from sage_kernels._triton.attention.skip_tiles import _choose_tiles_kernel, _measure_tiles_kernel
from sage_kernels._triton.attention.tiles import Tile, choose_tile, query_slice
from sage_kernels._triton.decode.append_kv import _append_kv_kernel
from sage_kernels._triton.decode.combine import _combine_kernel
from sage_kernels._triton.decode.kernel import _decode_attention_kernel
from sage_kernels._triton.decode.paged import _append_pages_kernel, _paged_attention_kernel, _read_pages_kernel
from sage_kernels._triton.decode.tiles import LONG, decode_tile
from sage_kernels._triton.heads.qk_norm_rope import _HEADS, _TOKENS, _qk_norm_rope_kernel
from sage_kernels._triton.linear.launch import _GROUP, quantize_shape
from sage_kernels._triton.linear.matmul import STRIP, _add_parts_kernel, _linear_kernel
from sage_kernels._triton.linear.quantize_rows import _quantize_rows_kernel
from sage_kernels._triton.linear.quantize_weight import _quantize_weight_kernel
from sage_kernels._triton.linear.tiles import POINTERS, choose_linear_tile, choose_weight_only_tile
from sage_kernels._triton.linear.weight_only import _weight_only_kernel, prefetch_instruction
from sage_kernels._triton.mixed.kernel import _mixed_attention_kernel
from sage_kernels._triton.mixed.launch import CHUNK, SPAN, preparing_warps, stages_of
from sage_kernels._triton.mixed.launch import warps_of as mixed_warps
from sage_kernels._triton.mixed.prepare import _prepare_mixed_kernel
from sage_kernels._triton.mixed.select import _select_blocks_kernel
from sage_kernels._triton.prologue.mask_tiles import _key_mask_kernel, _row_mask_kernel
from sage_kernels._triton.prologue.plan_step import _plan_step_kernel
from sage_kernels._triton.prologue.pre_balance import _ROWS as PRE_BALANCE_ROWS
from sage_kernels._triton.prologue.pre_balance import _pre_balance_kernel
from sage_kernels._triton.prologue.prepare_value_codes import _value_reach_kernel
from sage_kernels._triton.prologue.prepare_values import _value_amax_kernel
from sage_kernels._triton.prologue.prologue import _REGISTERS, _prologue_kernel, constants_of, warps_of
from sage_kernels._triton.prologue.rotate import MAX_WIDTH, MIN_WIDTH, ROWS, TILES, _rotate_kernel
from sage_kernels.facts.recipe import BLOCK, GATED, SHRINKS


TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
TARGETS = {f"sm_{cc}": GPUTarget("cuda", cc, 32) for cc in (80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
SCALINGS = ("planned", "per_token")
WIDTHS = (64, 128, 256)
MASKS = ("keys", "rows", "causal")
FULL_TARGETS = ("sm_80", "sm_90")  # the others compile a part: each kernel takes seconds
OVERLAPPING = ("sm_90", "sm_100", "sm_120")  # a launch may begin before the one before ends
# element type of V as the kernels read it, and of codes of K
VALUES = {"16bit": "bf16", "fp8_e4m3": "fp8e4nv", "int8": "i8", "int8_tensor": "i8"}
KEYS = {"int8": "i8", "fp8_e4m3": "fp8e4nv"}
FP8_TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120")
# what the Hopper kernel can do besides what the tile table has it do
HOPPER = (
    (128, "planned", "running", "16bit", Tile(128, 128, 4, 3, "hopper")),
    (128, "per_token", "running", "16bit", Tile(128, 128, 4, 3, "hopper")),
    (128, "per_token", "running", "fp8_e4m3", Tile(128, 128, 4, 3, "hopper")),
    (64, "planned", "running", "16bit", Tile(192, 64, 4, 6, "hopper")),
)
PAGES = {"k_codes_ptr": "*i8", "k_scale_ptr": "*bf16", "v_scale_ptr": "*bf16", "table_ptr": "*i32", "ends_ptr": "*i32"}
SEQUENCES = {"cu_q_ptr": "*i32", "cu_k_ptr": "*i32"}
FP8_MATRIX = re.compile(
    r"wgmma\.\S*\.f32\.e4m3\.e4m3|mma\.sync\S*\.f32\.e4m3\.e4m3\.f32|tcgen05\.mma\S*\.kind::f8f6f4"
)
# block-scaled products of e2m1: of consumer Blackwell (mma.sync) and of data centre Blackwell (tcgen05)
FP4_MATRIX = re.compile(r"mma\.sync\S*\.kind::mxf4nvf4\.block_scale|tcgen05\.mma\S*\.kind::mxf4\S*\.block_scale")
FP4_TARGETS = ("sm_100", "sm_120")
INT8_MATRIX = re.compile(r"wgmma\.\S*\.s32\.s8\.s8|mma\.sync\S*\.s32\.s8\.s8\.s32|v_mfma_i32\S*_i8")


def signature(kernel, constants, types, multiples=()):
    """Types of the parameters and the ones divisible by 16, as at run time: pointers, strides, and `multiples`."""
    kinds, divisible = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            kinds[name] = "constexpr"
            continue
        if name in types:
            kinds[name] = types[name]
        elif name.endswith("_ptr"):
            kinds[name] = "*fp32"
        else:
            kinds[name] = (
                "i64" if name.startswith("stride") else "fp32" if name in ("softmax_scale", "softcap") else "i32"
            )
        if kinds[name].startswith("*") or name.startswith("stride") or name in multiples:
            divisible[(i,)] = [["tt.divisibility", 16]]
    return kinds, divisible


def build(kernel, constants, types, target, multiples=(), **options):
    kinds, divisible = signature(kernel, constants, types, multiples)
    source = ASTSource
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource as source
    options = {"enable_fp_fusion": False, **options}
    return triton_compile(source(kernel, kinds, constants, divisible), target=target, options=options)


def read(compiled):
    """Registers, spills and matrix instructions of one compiled kernel."""
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    facts = {"shared": compiled.metadata.shared, "int8_matrix": bool(INT8_MATRIX.search(text))}
    if FP8_MATRIX.search(text):
        facts["fp8_matrix"] = True
    if FP4_MATRIX.search(text):
        facts["fp4_matrix"] = True
    if "mbarrier.init" in text:  # and those that stay in memory which is then used for something else
        facts["barriers"], facts["barriers_left"] = (
            text.count("mbarrier.init"),
            text.count("mbarrier.init") - text.count("mbarrier.inval"),
        )
    if "griddepcontrol" in text:  # the launch before may not have ended yet, the next one may begin
        facts["waits"] = text.count("griddepcontrol.wait")
        facts["lets_begin"] = text.count("griddepcontrol.launch_dependents")
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
            )
            sass = subprocess.run(
                [TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
            ).stdout
        facts["registers"] = int(re.search(r"REG:(\d+)", usage.stdout + usage.stderr).group(1))
        facts["stack"] = int(re.search(r"STACK:(\d+)", usage.stdout + usage.stderr).group(1))
        if re.search(r"\.target sm_[89]", text):  # Blackwell's code has other instructions, and no such descriptors
            facts["undefined"] = len(undefined_uniforms(sass))
        loops = main_loops(sass)
        facts["loops"] = [
            {"instructions": sum(c.values()), "spills": c["LDL"] + c["STL"], "matrix": sum(c[op] for op in MATRIX_OPS)}
            for c in loops
        ]
        if "fp8_matrix" in facts and loops:
            facts["shuffles"] = loops[0]["SHFL"]
    return facts


def row(label: str, kernel, name: str, constants: dict, types: dict, multiples=(), **options):
    """What compiles a kernel for a target, once it is called, and reads what came out."""
    return lambda: {"kernel": label, **read(build(kernel, constants, types, TARGETS[name], multiples, **options))}


def attention(
    name: str, width: int, scaling: str, mask: str = "none", reference: str = "", pv: str = "16bit", tile=None,
    keys: int = 16384, packed: bool = False, qk: str = "int8",
):  # fmt: skip
    """mask: "none", "keys", "rows", "tiles" or "causal"; reference: of the softmax, "" for
    the tile table's choice; tile: None for the tile table's. keys: how many there are. packed: of sequences, as
    `device_tile` has it."""
    capability = _capability(name)
    rows, running = mask == "rows", reference != "lagged"
    tile = tile or choose_tile(capability, width, scaling, rows, pv, running, by_mask=rows)
    if packed and tile.kernel == "hopper":
        tile = choose_tile(capability, width, scaling, True, pv, True)
    if pv == "int8" and tile.kernel != "hopper":
        reference = "tile"
    reference = reference or ("first" if tile.keep_first_max else "running")
    constants = {"HEAD_DIM": width, "WIDTH": width, "BLOCK_N": tile.block_n, "SCALING": scaling, "RETURN_LSE": False}
    kind = "none" if mask == "causal" else mask
    causal = mask == "causal"
    constants |= {"MASK": kind, "HAS_BIAS": mask == "rows"}
    constants |= {"HAS_LEFT": False, "HAS_RIGHT": causal, "REFERENCE": reference, "PV": pv}
    constants["KEEPS_MAX"] = (qk, pv) == ("int8", "fp8_e4m3") and scaling == "planned" and mask != "rows"
    types = {"q_ptr": "*bf16", "out_ptr": "*bf16", "row_ptr": "*i32", "counts_ptr": "*i32"}
    types["keys"] = f"*{KEYS[qk]}"
    types["values"] = f"*{VALUES[pv]}"
    types |= {"mask_ptr": "*bf16", "tiles_ptr": "*i32", "numbers_ptr": "*i32", "arrived_ptr": "*i32"}
    types |= SEQUENCES
    if tile.kernel == "hopper":
        from triton.experimental.gluon import language as gl

        from sage_kernels._triton.attention.hopper.kernel import attention_fwd_hopper_kernel as kernel

        codes = ("i8", gl.int8) if qk == "int8" else ("fp8e4nv", gl.float8e4nv)
        blocks = [("keys", codes[0], [tile.block_n, width], codes[1])]
        if pv == "16bit":
            blocks += [("values", "bf16", [1, tile.block_n, 1, width], gl.bfloat16)]
        else:
            value_type = gl.int8 if pv == "int8" else gl.float8e4nv
            blocks += [("values", VALUES[pv], [width, tile.block_n], value_type)]
        types |= {"key_scales": "*fp32"}
        if scaling == "per_token":
            blocks += [("key_scales", "fp32", [1, tile.block_n], gl.float32)]
        for argument, kind, block, dtype in blocks:
            types[argument] = f"tensordesc<{kind}{block},{gl.NVMMASharedLayout.get_default_for(block, dtype)}>"
        constants |= {
            "NUM_BUFFERS": tile.num_stages,
            "GROUPS": tile.block_m // 64,
            "SLICE": query_slice(keys, causal, mask in ("keys", "rows"), reference == "lagged"),
            "SPLIT": mask in ("none", "tiles"),
        }
        options = {"num_warps": 4}
    else:
        kernel = _attention_fwd_kernel
        if tile.kernel == "tma":
            types["keys"] = f"tensordesc<{KEYS[qk]}[{tile.block_n}, {width}]>"
            block = f"[1, {tile.block_n}, 1, {width}]" if pv == "16bit" else f"[{width}, {tile.block_n}]"
            types["values"] = f"tensordesc<{VALUES[pv]}{block}>"
        constants |= {"BLOCK_M": tile.block_m, "STAGES": tile.num_stages, "USE_TMA": tile.kernel == "tma"}
        constants |= {
            "SOFTCAP": False,
            "HAS_SINKS": False,
            "TILE_ADDS_BITS": tile.adds_bits,
            "PACKED": packed,
            "PARTS": tile.parts,
            "ASM": tile.asm,
            "QK": qk,
            "SUMS_CODES": pv == "int8_tensor",
        }
        options = {"num_warps": tile.num_warps}
    return row(tile.kernel, kernel, name, constants, types, **options)


def prepare(
    name: str, width: int, scaling: str, mask: str = "none", pv: str = "16bit", packed: bool = False, qk: str = "int8"
):
    target = TARGETS[name]
    capability = target.arch if target.backend == "cuda" else 0
    tile = choose_tile(capability, width, scaling, pv=pv, running=scaling != "planned")
    if packed and tile.kernel == "hopper":
        tile = choose_tile(capability, width, scaling, True, pv, True)
    num_warps = warps_of(tile.block_n, width)
    constants = {
        "HEAD_DIM": width, "WIDTH": width, "BLOCK_N": tile.block_n, "PACKED": packed, "HAS_LEFT": False,
        "SCALING": scaling, "SMOOTH": pv != "int8_tensor", "PV": pv, "STORE_CENTER": False, "HAS_MASK": mask != "none",
        "HAS_VALUES": pv != "16bit", "OVERLAP": tile.kernel == "hopper",
    } | constants_of(num_warps, width)  # fmt: skip
    types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "k_int_ptr": f"*{KEYS[qk]}", "counts_ptr": "*i32", "row_ptr": "*i32"}
    types |= (
        SEQUENCES
        | {"extent_ptr": "*i32"}
        | ({} if pv == "16bit" else {"v_ptr": "*bf16", "v_codes_ptr": f"*{VALUES[pv]}"})
    )
    options = {"num_warps": num_warps}
    if target.backend == "cuda":
        options["maxnreg"] = _REGISTERS
    return row("prepare", _prologue_kernel, name, constants, types, **options)


def value_amax(name: str, width: int, packed: bool = False):
    constants = {"HEAD_DIM": width, "WIDTH": width, "HAS_MASK": not packed, "PACKED": packed, "HAS_LEFT": packed}
    types = SEQUENCES | {"v_ptr": "*bf16"}
    return row("value_amax", _value_amax_kernel, name, constants, types, num_warps=8)


def value_reach(name: str, width: int):
    constants = {"HEAD_DIM": width, "WIDTH": width, "HAS_MASK": True}
    types = {"v_ptr": "*bf16"}
    return row("value_reach", _value_reach_kernel, name, constants, types, num_warps=8)


def mask_tiles(name: str, kind: str):
    """The kernels that read a mask: nothing to count but that they compile without spilling."""
    kernel, warps = (_key_mask_kernel, 8) if kind == "keys" else (_row_mask_kernel, 4)
    constants = {"BLOCK_N": 128} | ({} if kind == "keys" else {"BLOCK_M": 64})
    types = {"mask_ptr": "*u8", "extent_ptr": "*i32", "tiles_ptr": "*i32", "numbers_ptr": "*i32", "kinds_ptr": "*i8"}
    return row("mask_tiles", kernel, name, constants, types, num_warps=warps)


def skipping(name: str, width: int = 128):
    """As `kernels`, of a call whose lists leave out key tiles: attention, and what measures tiles and chooses them."""
    yield f"{name}/skipping/{width}/planned", attention(name, width, "planned", "tiles")
    recipes = ("16bit", "fp8_e4m3") if name in FP8_TARGETS else ("16bit",)
    for pv in recipes:
        tile = choose_tile(_capability(name), width, "planned", False, pv, False)
        if pv != "16bit":
            for reference in ("running", "lagged"):
                facts = attention(name, width, "planned", "tiles", reference, pv, tile)
                yield f"{name}/skipping_fp8/{width}/planned/{reference}", facts
        rows = min(MEASURED_ROWS, tile.block_m)
        constants = {"ROWS": rows, "PARTS": tile.block_m // rows, "BLOCK_N": tile.block_n}
        types = dict.fromkeys(("lists_ptr", "alarms_ptr", "clock_ptr", "now_ptr", "due_ptr", "left_out_ptr"), "*i32")
        types |= dict.fromkeys(("tiles_ptr", "numbers_ptr"), "*i32") | {"totals_ptr": "*i64", "levels_ptr": "*u8"}
        types |= {"q_ptr": "*bf16", "codes_ptr": "*i8"}
        measured = constants | {"HEAD_DIM": width, "WIDTH": width}
        warps = 4 if width <= 128 else 8
        measuring = row("measure_tiles", _measure_tiles_kernel, name, measured, types, num_warps=warps)
        yield f"{name}/measure_tiles/{width}/{pv}", measuring
        for kind, compensates in (("", False), ("/compensated", True)):
            chosen = constants | {"AT_ONCE": 64, "COMPENSATES": compensates}
            choosing = row("choose_tiles", _choose_tiles_kernel, name, chosen, types, num_warps=2)
            yield f"{name}/choose_tiles/{width}/{pv}{kind}", choosing
        types |= {"keys_ptr": "*fp16"} | dict.fromkeys(("v_ptr", "values_ptr", "out_ptr"), "*bf16")
        pooled = {"HEAD_DIM": width, "WIDTH": width, "BLOCK_N": tile.block_n}
        yield (
            f"{name}/pool_tiles/{width}/{pv}",
            row("pool_tiles", _pool_tiles_kernel, name, pooled, types, num_warps=4),
        )
        compensated = measured | {"AT_ONCE": _AT_ONCE, "STAGES": 2}
        facts = row("compensate", _compensate_kernel, name, compensated, types, num_warps=4)
        yield f"{name}/compensate/{width}/{pv}", facts


def _capability(name: str) -> int:
    target = TARGETS[name]
    return target.arch if target.backend == "cuda" else 0


def pre_balance(name: str, width: int):
    """Centre and balance of heads before they are rotated."""
    constants = {"HEAD_DIM": width, "WIDTH": width, "ROWS": PRE_BALANCE_ROWS, "HAS_MASK": False, "CENTERED": True}
    constants |= {"PACKED": False, "HAS_LEFT": False}
    types = SEQUENCES | {"q_ptr": "*bf16", "k_ptr": "*bf16", "extent_ptr": "*i32"}
    return row("pre_balance", _pre_balance_kernel, name, constants, types, num_warps=16)


def rotate(name: str, block: int, fp32: bool = False, balanced: bool = False):
    """The Hadamard pre-pass, of packed channels; balanced: with a centre and a balance before it."""
    width = min(block, MAX_WIDTH)
    constants = {
        "BLOCKS": 1, "BLOCK": width, "HALVES": block // width, "WIDTH": max(width, MIN_WIDTH), "SCALE": block**-0.5,
        "ROWS": ROWS, "TILES": TILES, "SPLIT": fp32, "stride_qd": 1, "stride_kd": 1, "BALANCED": balanced,
        "VECTOR": width if balanced else 1, "PACKED": False,
    }  # fmt: skip
    types = SEQUENCES | dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "*fp32" if fp32 else "*bf16")
    return row("rotate", _rotate_kernel, name, constants, types, num_warps=8 if fp32 or balanced else 4)


def decode(name: str, width: int, rows: int, mask: str = "none", tokens: int = 0):
    """Attention over the INT8 cache: of one token (8 rows, split keys) or of a chunk of a prompt (32 rows, causal)."""
    target, few = TARGETS[name], rows == 8
    tile = decode_tile(width, rows, tokens, target.arch)
    constants = {
        "GROUP": 4, "HEAD_DIM": width, "WIDTH": width, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages, "MASK": mask, "HAS_BIAS": False, "HAS_LEFT": False, "HAS_RIGHT": not few,
        "SOFTCAP": False, "HAS_MEAN": True, "HAS_BALANCE": True, "HAS_LENGTHS": False, "HAS_SINKS": False,
        "RING": False, "PARTIAL": few, "RETURN_LSE": False, "ASM": target.backend == "cuda",
        "EVICTION": "evict_first" if tile.read_once else "", "OVERLAP": few and name in OVERLAPPING,
        "stride_ksn": 1, "stride_vsn": 1, "stride_mk": 1,
    }  # fmt: skip
    types = {"q_ptr": "*bf16", "k_codes_ptr": "*i8", "v_words_ptr": "*i16", "k_scale_ptr": "*bf16"}
    types |= {"v_scale_ptr": "*bf16", "lengths_ptr": "*i64", "mask_ptr": "*u8"}
    types["out_ptr"] = "*fp32" if few else "*bf16"
    limit = {"maxnreg": tile.max_registers} if tile.max_registers else {}
    return row("decode", _decode_attention_kernel, name, constants, types, num_warps=tile.num_warps, **limit)


def paged(name: str, width: int):
    """Attention of one token a sequence over INT8 pages, in several chunks."""
    target = TARGETS[name]
    tile = decode_tile(width, 4, 0, target.arch)
    constants = {
        "GROUP": 4, "KV_HEADS": 8, "HEAD_DIM": width, "WIDTH": width, "ROW_TILES": 1, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "STAGES": tile.num_stages, "SOFTCAP": False, "HAS_SINKS": False, "PARTIAL": True,
        "ASM": target.backend == "cuda",
    }  # fmt: skip
    types = {"q_ptr": "*bf16", **PAGES, "v_words_ptr": "*i16", "sinks_ptr": "*bf16"}
    limit = {"maxnreg": tile.max_registers} if tile.max_registers else {}
    return row("paged", _paged_attention_kernel, name, constants, types, num_warps=tile.num_warps, **limit)


def paged_tokens(name: str, kernel, **more):
    """Tokens written into INT8 pages, or read back."""
    constants = {"HEADS": 8, "HEADS_2": 8, "HEAD_DIM": 128, "WIDTH": 128, **more}
    types = {"k_ptr": "*bf16", "v_ptr": "*bf16", "slots_ptr": "*i64", "v_codes_ptr": "*i8", **PAGES}
    return row("paged_tokens", kernel, name, constants, types, num_warps=4)


def combine(name: str, width: int):
    """The combine step of more than 16 splits."""
    constants = {"HEAD_DIM": width, "WIDTH": width, "BLOCK_S": 64, "BLOCK_D": width // 4, "RETURN_LSE": False}
    constants["OVERLAP"] = name in OVERLAPPING
    return row("combine", _combine_kernel, name, constants, {"out_ptr": "*bf16"}, num_warps=1)


def plan_step(name: str, width: int):
    integers = ("counts_ptr", "table_run_ptr", "run_ptr", "frozen_ptr", "frozen_keys_ptr", "begins_ptr")
    numbers = ("margin", "grown", "lowest", "highest", "v_lowest", "v_highest", "move", "steady", "v_floor")
    types = dict.fromkeys(integers, "*i32") | dict.fromkeys(numbers, "fp32") | {"totals_ptr": "*i64"}
    types |= {"is_channel_ptr": "*u8", "finished_ptr": "*i64", "next_ptr": "*i64"}
    constants = {"ADAPTS": False, "WIDTH": width, "FIELDS": 16, "BINS": 16}
    return row("plan_step", _plan_step_kernel, name, constants, types, num_warps=1)


def heads(name: str, width: int, pairs: bool, across: bool = False):
    """Norm and rotary embedding of Q and K, with angles [S, D] that lie one after the other, or [S, D / 2] of Wan."""
    constants = {
        "HEAD_DIM": width, "HALF": width // 2, "TOKENS": _TOKENS, "HEADS": _HEADS, "PAIRS": pairs, "NORM": True,
        "HAS_WEIGHT": True, "ACROSS_HEADS": across, "ROTARY": True, "HALF_TABLE": across,
    }  # fmt: skip
    constants |= {} if across else {"stride_cc": 1, "stride_sc": 1}
    types = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
    return row("qk_norm_rope", _qk_norm_rope_kernel, name, constants, types | {"eps": "fp32"}, num_warps=4)


def append(name: str, width: int, tokens: int):
    constants = {
        "HEAD_DIM": width,
        "WIDTH": width,
        "BLOCK_T": tokens,
        "HAS_MEAN": True,
        "HAS_BALANCE": True,
        "ON_DEVICE": True,
    }
    constants |= {"RING": False, "stride_ksn": 1, "stride_vsn": 1}
    types = {"k_ptr": "*bf16", "v_ptr": "*bf16", "k_codes_ptr": "*i8", "v_codes_ptr": "*i8", "k_scale_ptr": "*bf16"}
    types |= {"v_scale_ptr": "*bf16", "position_ptr": "*i64"}
    return row("append", _append_kv_kernel, name, constants, types, num_warps=1 if tokens == 1 else 4)


def quantize_rows(name: str, columns: int, norm: str = "none", fp8: bool = False):
    """Rows of an activation in 8 bit; after a LayerNorm modulated by adaLN's vectors, after an RMSNorm by its own; of
    two tensors beside each other."""
    _, width, pieces, rows, warps = quantize_shape(columns)
    is_modulated = norm == "layer"
    constants = {
        "WIDTH": width, "PIECES": pieces, "ROWS": rows, "NORM": "none" if norm == "beside" else norm,
        "HAS_WEIGHT": norm == "rms", "HAS_BIAS": False,
        "HAS_GAIN": is_modulated, "HAS_SHIFT": is_modulated, "HAS_BALANCE": False, "HAS_BESIDE": norm == "beside",
        "FP8": fp8, "OVERLAP": name == "sm_90",
    }  # fmt: skip
    types = dict.fromkeys(("x_ptr", "beside_ptr", "weight_ptr", "gain_ptr", "shift_ptr"), "*bf16") | {"eps": "fp32"}
    types["codes_ptr"] = "*fp8e4nv" if fp8 else "*i8"
    return row("quantize_rows", _quantize_rows_kernel, name, constants, types, ("count",), num_warps=warps)


def quantize_weight(name: str, fp8: bool = False):
    """Rows of a weight in 8 bit."""
    constants = {"WIDTH": 1024, "SHRINKS": SHRINKS, "HAS_BALANCE": False, "FP8": fp8}
    types = {"w_ptr": "*bf16", "codes_ptr": "*fp8e4nv" if fp8 else "*i8"}
    sizes = ("depth", "stride_w", "stride_codes")
    return row("quantize_weight", _quantize_weight_kernel, name, constants, types, sizes, num_warps=4)


# of an 8-bit matmul: rows, columns, activation function, the gate of gate · y + residual: one of each row, one for
# all, or none of it. Few rows of text or of a vector, few tiles, many
LINEARS = {
    "16": (16, 3072, "none", "none"),
    "64": (64, 3072, "none", "none"),
    "few": (512, 3072, "none", "none"),
    "many": (32768, 3072, "none", "none"),
    "many/gelu_tanh": (32768, 12288, "gelu_tanh", "none"),
    "many/swiglu": (32768, 12288, "swiglu", "none"),
    "many/gate_residual": (32768, 3072, "none", "row"),
    "many/one_gate_residual": (32768, 3072, "none", "all"),
}


def linear(name: str, kind: str, fp8: bool = False, copied: bool = True, out: str = "bf16", split: bool = False):
    """An 8-bit matmul with a bias and what follows. copied: by the copy engine, where the table says so. out: type of
    the output and of the residual. split: programs share the last tiles."""
    target, (rows, columns, activation, gate) = TARGETS[name], LINEARS[kind]
    capability = target.arch if target.backend == "cuda" else 0
    tile = choose_linear_tile(capability, rows, columns)
    if tile.kernel == "hopper" and not copied:
        tile = POINTERS
    is_pair = activation in GATED
    constants = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP": _GROUP,
        "ACTIVATION": GATED.get(activation, activation), "GATED": is_pair, "HAS_BIAS": True,
        "GATE": gate, "HAS_RESIDUAL": gate != "none", "FP8": fp8,
    }  # fmt: skip
    code = "fp8e4nv" if fp8 else "i8"
    types = {"x_ptr": f"*{code}", "w_ptr": f"*{code}"} | dict.fromkeys(("out_ptr", "residual_ptr"), f"*{out}")
    types |= dict.fromkeys(("bias_ptr", "gate_ptr"), "*bf16")
    if tile.kernel == "hopper":
        from triton.experimental.gluon import language as gl

        from sage_kernels._triton.linear.hopper.kernel import linear_hopper_kernel as kernel
        from sage_kernels._triton.linear.hopper.types import PART

        half, size = tile.block_m // 2, 4 if out == "fp32" else 2
        codes, outs = gl.float8e4nv if fp8 else gl.int8, {"bf16": gl.bfloat16, "fp32": gl.float32}[out]
        for argument, kind, block, dtype in (
            ("x_desc", code, [half, tile.block_k], codes),
            ("w_desc", code, [tile.block_n, tile.block_k], codes),
            ("out_desc", out, [half, PART.value], outs),
            ("residual_desc", out, [half, tile.block_k // size], outs),
        ):
            types[argument] = f"tensordesc<{kind}{block},{gl.NVMMASharedLayout.get_default_for(block, dtype)}>"
        constants |= {"SLOTS": tile.num_stages, "BUFFERS": 4 // size, "SPLIT": split}
        types["sums_ptr"] = "*i32" if split and not fp8 else "*fp32"
        options = {"num_warps": tile.num_warps}
    else:
        kernel = _linear_kernel
        constants |= {"BLOCK_K": tile.block_k, "STAGES": tile.num_stages, "ASM": target.backend == "cuda"}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return row(
        f"linear_{tile.kernel}", kernel, name, constants, types, ("columns", "columns_out", "depth"),
        enable_fp_fusion=True, **options,
    )  # fmt: skip


def add_parts(name: str, kind: str, fp8: bool = False):
    """The sums of tiles that programs shared, with a bias and what follows."""
    _, _, activation, gate = LINEARS[kind]
    constants = {
        "BLOCK_M": 256, "BLOCK_N": 128, "STRIP": STRIP, "GROUP": _GROUP, "HAS_BIAS": True,
        "ACTIVATION": GATED.get(activation, activation), "GATED": activation in GATED,
        "GATE": gate, "HAS_RESIDUAL": gate != "none", "ASM": True, "OVERLAP": True, "HAS_X_SCALE": True,
        "SCALE_STEP": 1,
    }  # fmt: skip
    types = {"sums_ptr": "*fp32" if fp8 else "*i32"}
    types |= dict.fromkeys(("out_ptr", "residual_ptr", "bias_ptr", "gate_ptr"), "*bf16")
    return row("add_parts", _add_parts_kernel, name, constants, types, ("columns", "columns_out"), num_warps=4)


WEIGHT_ONLY_ROWS = {"few": 1, "sixteen": 16, "many": 64}


def weight_only(name: str, kind: str, dtype: str = "bf16", fp8: bool = False):
    """A matmul of rows in 16 bit, or fp32, and an 8-bit weight, with a bias."""
    target, fp32 = TARGETS[name], dtype == "fp32"
    capability = target.arch if target.backend == "cuda" else 0
    tile = choose_weight_only_tile(capability, WEIGHT_ONLY_ROWS[kind], 4096, fp32=fp32)
    constants = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "LANES": tile.lanes,
        "PARTS": tile.parts, "GROUP": _GROUP, "STAGES": tile.num_stages, "ACTIVATION": "none", "GATED": False,
        "HAS_BIAS": True, "GATE": "none", "HAS_RESIDUAL": False, "FP32": fp32, "ASM": target.backend == "cuda",
        "OVERLAP": name in OVERLAPPING, "SCALE_STEP": 1, "PREFETCH": tile.prefetch,
        "PREFETCH_ASM": prefetch_instruction(tile.prefetch),
    }  # fmt: skip
    names = ("x_ptr", "out_ptr", "bias_ptr", "residual_ptr", "gate_ptr")
    types = {"w_ptr": "*fp8e4nv" if fp8 else "*i8"} | dict.fromkeys(names, f"*{dtype}")
    return row(
        "weight_only", _weight_only_kernel, name, constants, types, ("columns", "columns_out", "depth"),
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def linears(name: str):
    """As `kernels`, of the 8-bit linear layers."""
    for columns, norm in ((3072, "layer"), (3072, "none"), (15360, "none"), (15360, "beside"), (100, "rms")):
        yield f"{name}/quantize_rows/int8/{columns}/{norm}", quantize_rows(name, columns, norm)
    yield f"{name}/quantize_weight/int8", quantize_weight(name)
    kinds = LINEARS if name == "sm_90" else [kind for kind in LINEARS if kind != "few"]  # which have one tile there
    for kind in kinds:
        yield f"{name}/linear/int8/{kind}", linear(name, kind)
    for kind in WEIGHT_ONLY_ROWS:
        yield f"{name}/weight_only/bf16/{kind}", weight_only(name, kind)
    if name in FULL_TARGETS:
        for dtype in ("fp16", "fp32"):
            yield f"{name}/weight_only/{dtype}/few", weight_only(name, "few", dtype)
    if name in FP8_TARGETS:
        yield f"{name}/quantize_rows/fp8/3072/layer", quantize_rows(name, 3072, "layer", fp8=True)
        yield f"{name}/quantize_weight/fp8", quantize_weight(name, fp8=True)
        yield f"{name}/weight_only/fp8/few", weight_only(name, "few", fp8=True)
        for kind in ("16", "64", "many", "many/gate_residual"):
            yield f"{name}/linear/fp8/{kind}", linear(name, kind, fp8=True)
    if name == "sm_90":  # rows that the copy engine can't read
        for kind in ("many", "many/gate_residual"):
            yield f"{name}/linear/int8/{kind}/pointers", linear(name, kind, copied=False)
        for kind in ("few", "many", "many/gelu_tanh", "many/one_gate_residual", "many/gate_residual"):
            for format in ("int8", "fp8"):
                yield f"{name}/linear/{format}/split/{kind}", linear(name, kind, fp8=format == "fp8", split=True)
                yield f"{name}/add_parts/{format}/{kind}", add_parts(name, kind, fp8=format == "fp8")


def mixed(name: str, width: int, base: str, causal: bool = False):
    """Mixed attention: FP4 as the target multiplies it."""
    packed_fp4 = base in ("mxfp4", "nvfp4") and name in FP4_TARGETS
    constants = mixed_shape(width) | {"STAGES": stages_of(width, base), "BASE": base, "CAUSAL": causal}
    constants |= {"PROMOTES": True, "RETURN_LSE": False, "PACKED_FP4": packed_fp4}
    block_q = 128 if packed_fp4 and name == "sm_100" else BLOCK
    constants["BLOCK_Q"] = block_q
    types = mixed_types(base, packed_fp4)
    return row("mixed", _mixed_attention_kernel, name, constants, types, num_warps=mixed_warps(width, block_q))


def mixed_shape(width: int):
    return {"HEAD_DIM": width, "WIDTH": width, "BLOCK": BLOCK}


def mixed_types(base: str, packed_fp4: bool):
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    types["codes_ptr"] = "*u8" if packed_fp4 else "*i8" if base.startswith("int") else "*fp16"
    types["group_scale_ptr"] = ("*fp8e4nv" if base == "nvfp4" else "*u8") if packed_fp4 else "*fp32"
    return types | {
        "lists_ptr": "*i16",
        "numbers_ptr": "*i32",
        "scores_ptr": "*i32",
        "chosen_ptr": "*i8",
    }


def mixed_prepare(name: str, width: int, base: str, selector: str = "block_mean"):
    packed_fp4 = base in ("mxfp4", "nvfp4") and name in FP4_TARGETS
    constants = mixed_shape(width) | {"SAMPLED": 32 if width == 256 else 64, "BASE": base, "SELECTOR": selector}
    constants["PACKED_FP4"] = packed_fp4
    types = mixed_types(base, packed_fp4)
    return row("mixed_prepare", _prepare_mixed_kernel, name, constants, types, num_warps=preparing_warps(width, base))


def mixed_select(name: str, width: int, selector: str = "block_mean", skips: bool = False):
    constants = mixed_shape(width) | {"CHUNK": CHUNK[width], "SPAN": SPAN, "SELECTOR": selector, "SKIPS": skips}
    constants |= {"CAUSAL": True, "STORE_CHOSEN": False, "BLOCK_Q": BLOCK}
    return row("mixed_select", _select_blocks_kernel, name, constants, mixed_types("int8", False), num_warps=4)


def selective(name: str):
    """As `kernels`, of mixed attention."""
    bases = ("int8", "mxfp4", "nvfp4")  # INT4 has the code of INT8
    for base in bases:
        for width in WIDTHS if base == "int8" else (128,):
            yield f"{name}/mixed/{width}/{base}", mixed(name, width, base)
        yield f"{name}/mixed_prepare/128/{base}", mixed_prepare(name, 128, base)
    yield f"{name}/mixed/128/int8/causal", mixed(name, 128, "int8", causal=True)
    yield f"{name}/mixed_select/128/block_mean", mixed_select(name, 128)
    if name in FULL_TARGETS:
        yield f"{name}/mixed_prepare/128/int8/quest", mixed_prepare(name, 128, "int8", "quest")
        yield f"{name}/mixed_select/128/quest/skip", mixed_select(name, 128, "quest", skips=True)


def int8_values(name: str):
    """As `kernels`, of the recipe with P and V in INT8."""
    for width in WIDTHS:
        yield f"{name}/attention_int8/{width}/planned", attention(name, width, "planned", pv="int8")
    yield f"{name}/attention_int8/128/per_token", attention(name, 128, "per_token", pv="int8")
    if name in FULL_TARGETS:
        for mask in MASKS:
            yield f"{name}/attention_int8/128/planned/{mask}", attention(name, 128, "planned", mask, pv="int8")
        yield f"{name}/prepare_int8/128/planned", prepare(name, 128, "planned", pv="int8")
        yield f"{name}/value_reach/128", value_reach(name, 128)


def compared(name: str):
    """As `kernels`, of the recipes to compare with: INT-FlashAttention's full one, and scores in FP8."""
    for width in WIDTHS if name in FULL_TARGETS else WIDTHS[:2]:
        yield f"{name}/int_flash_full/{width}", attention(name, width, "per_token", pv="int8_tensor")
    if name in FULL_TARGETS:
        for mask in MASKS:
            yield f"{name}/int_flash_full/128/{mask}", attention(name, 128, "per_token", mask, pv="int8_tensor")
        yield f"{name}/int_flash_prepare/128", prepare(name, 128, "per_token", pv="int8_tensor")
    if name not in FP8_TARGETS:
        return
    fp8 = {"pv": "fp8_e4m3", "qk": "fp8_e4m3"}
    for width in WIDTHS if name == "sm_90" else WIDTHS[:2]:
        yield f"{name}/fp8_scores/{width}/per_token", attention(name, width, "per_token", **fp8)
    yield f"{name}/fp8_scores/128/planned", attention(name, 128, "planned", **fp8)
    if name == "sm_90":
        yield "sm_90/fp8_scores_prepare/128", prepare(name, 128, "planned", **fp8)


def packed(name: str):
    """As `kernels`, of packed sequences: what attention and its prologue are compiled to with them."""
    for width in WIDTHS if name in FULL_TARGETS else (128,):
        yield f"{name}/packed/{width}/per_token", attention(name, width, "per_token", packed=True)
    yield f"{name}/packed/128/per_token/causal", attention(name, 128, "per_token", "causal", packed=True)
    if name in FULL_TARGETS:
        yield f"{name}/packed/128/per_block", attention(name, 128, "per_block", packed=True)
        yield f"{name}/packed_prepare/128/per_token", prepare(name, 128, "per_token", packed=True)
    if name in FP8_TARGETS:
        yield f"{name}/packed_fp8/128/per_token", attention(name, 128, "per_token", pv="fp8_e4m3", packed=True)
    if name == "sm_90":
        yield "sm_90/packed_prepare_fp8/128", prepare(name, 128, "per_token", pv="fp8_e4m3", packed=True)
        yield "sm_90/packed_value_amax/128", value_amax(name, 128, packed=True)


def kernels(name: str):
    """(key of the table, what makes its facts) of every kernel that is looked at on one target."""
    for width in WIDTHS:
        for scaling in SCALINGS:
            yield f"{name}/attention/{width}/{scaling}", attention(name, width, scaling)
            if width == 128 or name in FULL_TARGETS:
                yield f"{name}/prepare/{width}/{scaling}", prepare(name, width, scaling)
        for rows in (8, 32) if width == 128 or name in FULL_TARGETS else ():
            yield f"{name}/decode/{width}/{rows}", decode(name, width, rows)
    yield from int8_values(name)
    if name in FP8_TARGETS:
        for width in WIDTHS if name == "sm_90" else (128,):
            for reference in ("running", "lagged") if name == "sm_90" else ("lagged",):
                facts = attention(name, width, "planned", reference=reference, pv="fp8_e4m3")
                yield f"{name}/attention_fp8/{width}/planned/{reference}", facts
    if name == "sm_90":
        yield "sm_90/decode/128/8/long", decode(name, 128, 8, tokens=LONG)
        yield "sm_90/attention_fp8/128/planned/rows", attention(name, 128, "planned", "rows", pv="fp8_e4m3")
        for reference in ("running", "lagged"):
            facts = attention(name, 128, "planned", "causal", reference, "fp8_e4m3")
            yield f"sm_90/attention_fp8/128/planned/{reference}/causal", facts
        for width, scaling, reference, pv, tile in HOPPER:
            facts = attention(name, width, scaling, reference=reference, pv=pv, tile=tile)
            yield f"sm_90/attention_hopper/{width}/{scaling}/{reference}/{pv}", facts
        for scaling in SCALINGS:
            yield f"sm_90/prepare_fp8/128/{scaling}", prepare(name, 128, scaling, pv="fp8_e4m3")
        yield "sm_90/prepare_fp8/128/planned/keys", prepare(name, 128, "planned", "keys", "fp8_e4m3")
        yield "sm_90/value_amax/128", value_amax(name, 128)
        for width in (64, 128):
            yield f"sm_90/attention/{width}/planned/short", attention(name, width, "planned", keys=4096)
    yield from compared(name)
    yield from packed(name)
    yield from selective(name)
    yield from skipping(name)
    yield from linears(name)
    yield f"{name}/combine/128", combine(name, 128)
    yield f"{name}/plan_step/128", plan_step(name, 128)
    yield f"{name}/rotate/128", rotate(name, 128)
    yield f"{name}/rotate/128/balanced", rotate(name, 128, balanced=True)
    yield f"{name}/pre_balance/128", pre_balance(name, 128)
    for pairs in (True, False):
        yield f"{name}/qk_norm_rope/128/{'pairs' if pairs else 'halves'}", heads(name, 128, pairs)
    yield f"{name}/qk_norm_rope/128/across_heads", heads(name, 128, True, across=True)
    if name in FULL_TARGETS:
        for block in (8, 64, 256):
            yield f"{name}/rotate/{block}", rotate(name, block)
        yield f"{name}/rotate/128/fp32", rotate(name, 128, fp32=True)
        yield f"{name}/decode/128/8/keys", decode(name, 128, 8, "keys")
    yield f"{name}/paged/128", paged(name, 128)
    yield f"{name}/append_pages/128", paged_tokens(name, _append_pages_kernel, FROM_TABLE=True)
    yield f"{name}/read_pages/128", paged_tokens(name, _read_pages_kernel)
    for tokens in (1, 16):
        yield f"{name}/append/128/{tokens}", append(name, 128, tokens)
    if name not in FULL_TARGETS:
        return
    for scaling in SCALINGS:  # what the tile table does not choose
        other = "running" if choose_tile(TARGETS[name].arch, 128, scaling).keep_first_max else "first"
        yield f"{name}/attention/128/{scaling}/{other}_max", attention(name, 128, scaling, reference=other)
    for mask in MASKS:
        yield f"{name}/attention/128/planned/{mask}", attention(name, 128, "planned", mask)
        if mask != "causal":
            yield f"{name}/prepare/128/planned/{mask}", prepare(name, 128, "planned", mask)
            yield f"{name}/mask_tiles/{mask}", mask_tiles(name, mask)


def main() -> None:
    """Print a line a kernel, or write the table of all targets."""
    if sys.argv[1:2] == ["--write"]:
        rows = {key: made() for name in TARGETS for key, made in kernels(name)}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(facts)}" for key, facts in rows.items())
        meta = json.dumps(compiled_from(rows))
        Path(sys.argv[2]).write_text(f'{{\n "meta": {meta},\n "kernels": {{\n{lines}\n }}\n}}\n')
        return
    name, *wanted = sys.argv[1:]
    for key, made in kernels(name):
        if not wanted or key in wanted:
            print(json.dumps([key, made()]), flush=True)


if __name__ == "__main__":
    main()
