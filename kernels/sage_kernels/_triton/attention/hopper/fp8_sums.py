"""Sums of 8-bit products of P and V: long ones are made of short ones.

The tensor cores add such products to a sum of some 14 bits, and cut off what is below. So their sum is added to one in
fp32, in shared memory, every few tiles (promotion): registers have no room for a second one of three warpgroups.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .types import ROWS


@gluon.jit
def packed(p, BLOCK_N: gl.constexpr):
    """P as e4m3 codes, [ROWS, BLOCK_N / 16, 4] words of four; keys permuted as V's: in_operand_order, ../operands.py.

    In the basic block of its exponentials, ptxas packs four numbers with two instructions, anywhere else with three.
    Words, as a loop would carry 8-bit numbers in a register each.
    """
    # keys of a tile of the tensor cores: two of eight, in each four lanes of two
    even, odd = gl.split(gl.reshape(p, (ROWS, BLOCK_N // 16, 2, 4, 2)))
    even_low, even_high = gl.split(gl.permute(even, (0, 1, 3, 2)))
    odd_low, odd_high = gl.split(gl.permute(odd, (0, 1, 3, 2)))
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [even_low, odd_low, even_high, odd_high],
        dtype=gl.uint32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def allocate_earlier(GROUPS: gl.constexpr, WIDTH: gl.constexpr):
    """Place for half of the channels of the sums of earlier tiles, fp32.

    For each warpgroup [ROWS, WIDTH / 2] sums as [WIDTH / 16, 128, 4]: its threads side by side, four numbers of each.
    The halves are allocated one by one: between writing to one and reading the other Triton then needs no barrier.
    """
    return gl.allocate_shared_memory(
        gl.float32, [GROUPS, WIDTH // 16, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )


@gluon.jit
def halves(acc, WIDTH: gl.constexpr):
    """[ROWS, WIDTH] as two of [ROWS, WIDTH / 2]; moves nothing."""
    return gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))


@gluon.jit
def store_earlier(place, half, WIDTH: gl.constexpr):
    """Half of the sums to where each thread keeps its own."""
    # rows: warps, two of a thread, eight of lanes; channels: of a thread, four of lanes, two of a thread
    half = gl.permute(gl.reshape(half, (4, 2, 8, WIDTH // 16, 4, 2)), (3, 0, 2, 4, 1, 5))
    place.store(gl.reshape(half, (WIDTH // 16, 128, 4)))


@gluon.jit
def load_earlier(place, WIDTH: gl.constexpr, OUT: gl.constexpr):
    """What `store_earlier` left there."""
    like, _ = halves(gl.zeros((ROWS, WIDTH), gl.float32, OUT), WIDTH)
    as_stored = gl.reshape(
        gl.permute(gl.reshape(like, (4, 2, 8, WIDTH // 16, 4, 2)), (3, 0, 2, 4, 1, 5)), (WIDTH // 16, 128, 4)
    )
    half = gl.reshape(place.load(as_stored.type.layout), (WIDTH // 16, 4, 8, 4, 2, 2))
    return gl.convert_layout(gl.reshape(gl.permute(half, (1, 4, 2, 0, 3, 5)), (ROWS, WIDTH // 2)), like.type.layout)


@gluon.jit
def _rescaled(earlier, earlier_reference, reference, REFERENCE: gl.constexpr):
    """Sums of exp2(score - earlier_reference) as sums of exp2(score - reference)."""
    if REFERENCE == "running":
        factor = gl.where(earlier_reference == float("-inf"), 0.0, gl.exp2(earlier_reference - reference))
        earlier = earlier * gl.convert_layout(factor, gl.SliceLayout(1, earlier.type.layout))[:, None]
    return earlier


@gluon.jit
def promote(
    acc, earlier, earlier_reference, reference, WIDTH: gl.constexpr, OUT: gl.constexpr, REFERENCE: gl.constexpr
):
    """Add acc, whose softmax reference is `reference`, to the sums of earlier tiles, which from then on is theirs too.

    earlier: places of the two halves. earlier_reference: theirs.
    """
    first, second = halves(acc, WIDTH)
    first += _rescaled(load_earlier(earlier[0], WIDTH, OUT), earlier_reference, reference, REFERENCE)
    second += _rescaled(load_earlier(earlier[1], WIDTH, OUT), earlier_reference, reference, REFERENCE)
    store_earlier(earlier[0], first, WIDTH)
    store_earlier(earlier[1], second, WIDTH)


@gluon.jit
def with_earlier(
    acc, earlier, earlier_reference, reference, WIDTH: gl.constexpr, OUT: gl.constexpr, REFERENCE: gl.constexpr
):
    """acc plus the sums of earlier tiles. Arguments as `promote`."""
    first, second = halves(acc, WIDTH)
    first += _rescaled(load_earlier(earlier[0], WIDTH, OUT), earlier_reference, reference, REFERENCE)
    second += _rescaled(load_earlier(earlier[1], WIDTH, OUT), earlier_reference, reference, REFERENCE)
    sums = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (ROWS, WIDTH))
    return gl.convert_layout(sums, OUT)
