"""Products of P and V in INT8, one for each key tile: exact integer sums, added up as floats.

P's codes are stored 128 too small. So a product lacks, in each channel, 128 times the sum of the tile's values
(`sums_of` of the prologue), times the tile's weight in the row. This correction is a matrix product of weights and
sums, added for many tiles at once. The tensor cores take each number as two bf16 numbers, the second of which is the
first one's rounding error. The product of two second numbers, 2^-18 of the whole, is left out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...hopper_primitives import barrier, reinterpret
from ...primitives import ROUND_MAGIC
from ...prologue.prepare_value_codes import sums_of
from .operands import as_operand, seen_tile
from .types import ROWS


TILES = gl.constexpr(16)  # tiles corrected at a time: the depth of a bf16 product of the tensor cores
KEPT_TILES = gl.constexpr(64)  # tiles whose weights are kept until their corrections are added
_ROUND_MAGIC = gl.constexpr(ROUND_MAGIC.value)
_ROUND_AND_PACK = gl.constexpr(
    """{
    .reg .b32 a, b, c, d, high;
    cvt.rni.s32.f32 a, $1;
    cvt.rni.s32.f32 b, $2;
    cvt.rni.s32.f32 c, $3;
    cvt.rni.s32.f32 d, $4;
    cvt.pack.sat.u8.s32.b32 high, d, c, 0;
    cvt.pack.sat.u8.s32.b32 $0, b, a, high;
    }"""
)


@gluon.jit
def packed_codes(p, SCORES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Round P [ROWS, BLOCK_N], 0 to 254.5, to codes from 0 to 255, in words of four.

    Words are as in `packed` of fp8_sums.py. P is rounded down after a step that differs from key to key is added: see
    P_CODE_EXPONENT in facts/recipe.py.
    """
    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    # a thread has two of the eight steps: see `_codes_of` of ../operands.py
    step = 0.0625 - 0.5 + 0.5 * ((j ^ j // 8) % 2).to(gl.float32)
    step += 0.25 * (j // 2 % 2).to(gl.float32) + 0.125 * (j // 4 % 2).to(gl.float32)
    p = p + step[None, :]
    even, odd = gl.split(gl.reshape(p, (ROWS, BLOCK_N // 16, 2, 4, 2)))
    even_low, even_high = gl.split(gl.permute(even, (0, 1, 3, 2)))
    odd_low, odd_high = gl.split(gl.permute(odd, (0, 1, 3, 2)))
    return gl.inline_asm_elementwise(
        _ROUND_AND_PACK, "=r,f,f,f,f", [even_low, odd_low, even_high, odd_high], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def less_128(words):
    """Subtract 128 from each code of `packed_codes`, which makes them an INT8 operand.

    Done behind the wait for the product before: if an operand is made while a product is under way, the compiler lets
    no product run beside other code.
    """
    return words ^ 0x80808080


@gluon.jit
def sum_of_codes(words, lanes, BLOCK_N: gl.constexpr):
    """Return each row's exact sum of P's codes over the keys of one thread, [ROWS, 4].

    lanes: a tensor of that shape and layout.
    """
    fours = gl.inline_asm_elementwise(
        "dp4a.u32.u32 $0, $1, $2, 0;", "=r,r,r", [words, gl.full_like(words, 0x01010101)], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip
    total = gl.sum(fours, 1)
    return gl.convert_layout(total.to(gl.float32), lanes.type.layout)


@gluon.jit
def value_sums(program, KIND: gl.constexpr):
    """Return the pointer that `sums_of` has for the program's head."""
    tile = program.tile
    v_head = tile.b * (tile.heads // tile.group) + tile.h // tile.group
    return sums_of(program.inputs.v_scale_ptr, v_head, program.seen.seq_kv, KIND.block_n, KIND.width)


@gluon.jit
def code_product(words, v_tile, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Start the product of P's codes and a value tile."""
    operand = as_operand(words, KIND.pv_dtype, LAYOUTS.p_operand, KIND.block_n)
    nothing = gl.zeros((ROWS, KIND.width), gl.int32, LAYOUTS.out)
    return warpgroup_mma(operand, v_tile, nothing, use_acc=False, is_async=True)


@gluon.jit
def add_product(acc, product, weight, LAYOUTS: gl.constexpr):
    """Return acc plus the product times the tile's weights of the rows."""
    weight = gl.convert_layout(weight, gl.SliceLayout(1, LAYOUTS.out))
    return gl.fma(product.to(gl.float32), weight[:, None], acc)


@gluon.jit
def add_lacking(acc, weight, sums, tile, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Return acc plus the correction of one tile's product.

    sums: the head's `sums_of`.
    """
    at = sums + tile * KIND.width + gl.arange(0, KIND.width, gl.SliceLayout(0, LAYOUTS.out))
    weight = gl.convert_layout(weight, gl.SliceLayout(1, LAYOUTS.out))
    return gl.fma((gl.load(at) + _ROUND_MAGIC)[None, :], weight[:, None], acc)


@gluon.jit
def allocate_lacking(GROUPS: gl.constexpr, WIDTH: gl.constexpr):
    """Allocate shared memory for the corrections of each warpgroup.

    It holds the rows' weights of KEPT_TILES tiles, and two halves (high and low bf16) of the sums of TILES tiles.
    """
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HALVES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILES, WIDTH], gl.bfloat16)
    weights = gl.allocate_shared_memory(gl.float32, [GROUPS * KEPT_TILES, ROWS], WEIGHTS)
    return weights, gl.allocate_shared_memory(gl.bfloat16, [GROUPS * 2, TILES, WIDTH], HALVES)


@gluon.jit
def keep_weight(weight, place, group_index, group):
    """Keep the rows' weights of one tile, at `place` among KEPT_TILES."""
    group.earlier[0].index(group_index * KEPT_TILES + place).store(weight)


@gluon.jit
def _lacking(first, sums, group, KIND: gl.constexpr, LOADED: gl.constexpr):
    """Return the corrections of TILES tiles from the first-th on, for a weight of 1: [TILES, WIDTH]."""
    seen = group.seen
    i = gl.minimum(first + gl.arange(0, TILES, gl.SliceLayout(1, LOADED)), seen.visited - 1)
    channels = gl.arange(0, KIND.width, gl.SliceLayout(0, LOADED))
    at = seen_tile(i, seen, KIND.masking)[:, None] * KIND.width + channels[None, :]
    return gl.load(sums + at) + _ROUND_MAGIC


@gluon.jit
def add_all_lacking(acc, first, number, sums, group_index, group, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Return acc plus the corrections of `number` visited tiles from the first-th on.

    Their weights are kept from place 0 on. No product into acc may be under way.
    """
    WIDTH: gl.constexpr = KIND.width
    LOADED: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [4, 1], [1, 0])
    high_half = group.earlier[1].index(group_index * 2)
    low_half = group.earlier[1].index(group_index * 2 + 1)
    CHUNK: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    chunks = reinterpret(group.earlier[0], gl.float32, [KIND.groups * KEPT_TILES // TILES, TILES, ROWS], CHUNK)
    acc = gl.convert_layout(acc, LAYOUTS.weights.parent)
    after = _lacking(first, sums, group, KIND, LOADED)
    for start in range(0, number, TILES):
        high = after.to(gl.bfloat16)
        high_half.store(high)
        low_half.store((after - high.to(gl.float32)).to(gl.bfloat16))
        fence_async_shared()
        after = _lacking(first + start + TILES, sums, group, KIND, LOADED)  # loads while the products run
        chunk = chunks.index(group_index * (KEPT_TILES // TILES) + start // TILES)
        weights = chunk.permute((1, 0)).load(LAYOUTS.weights)
        is_kept = start + gl.arange(0, TILES, gl.SliceLayout(0, LAYOUTS.weights)) < number
        weights = gl.where(is_kept[None, :], weights, 0.0)
        high_weights = weights.to(gl.bfloat16)
        low_weights = (weights - high_weights.to(gl.float32)).to(gl.bfloat16)
        barrier()
        acc = warpgroup_mma(high_weights, high_half, acc, is_async=True)
        acc = warpgroup_mma(low_weights, high_half, acc, is_async=True)
        acc = warpgroup_mma(high_weights, low_half, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        barrier()
    return gl.convert_layout(acc, LAYOUTS.out)
