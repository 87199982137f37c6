"""Long sums of 8-bit products of P and V, made of short ones.

The tensor cores add 8-bit products to a sum of about 14 bits and cut off what is below. So every few tiles their sum
is added to a second one, in fp32. That one is in shared memory: with three warpgroups, registers have no room for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .types import ROWS


@gluon.jit
def packed(p, BLOCK_N: gl.constexpr):
    """Round P to e4m3 codes, [ROWS, BLOCK_N / 16, 4] words of four codes.

    The keys of P are permuted like those of V, see `in_operand_order` of ../operands.py. It returns words because
    8-bit numbers would take a register each from one turn of the loop to the next. In the basic block of its
    exponentials, ptxas packs four numbers with two instructions, elsewhere with three.
    """
    # 16 keys of a tensor-core tile: two groups of eight keys, in each of them four lanes with two keys
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
    """Allocate shared memory for half of the channels of the sums of earlier tiles, fp32.

    Each warpgroup's [ROWS, WIDTH / 2] sums are stored as [WIDTH / 16, 128, 4]: its threads side by side, four numbers
    of each. The two halves are allocated one by one: then Triton needs no barrier between writing one and reading the
    other.
    """
    return gl.allocate_shared_memory(
        gl.float32, [GROUPS, WIDTH // 16, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )


@gluon.jit
def halves(acc, WIDTH: gl.constexpr):
    """Split [ROWS, WIDTH] into two halves of the channels, [ROWS, WIDTH / 2]; moves nothing."""
    return gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))


@gluon.jit
def store_earlier(place, half, WIDTH: gl.constexpr):
    """Store half of the sums; each thread keeps its own numbers."""
    # split rows by 4 warps, 2 of a thread, 8 lanes; and channels by WIDTH / 16 of a thread, 4 lanes, 2 of a thread
    half = gl.permute(gl.reshape(half, (4, 2, 8, WIDTH // 16, 4, 2)), (3, 0, 2, 4, 1, 5))
    place.store(gl.reshape(half, (WIDTH // 16, 128, 4)))


@gluon.jit
def load_earlier(place, WIDTH: gl.constexpr, OUT: gl.constexpr):
    """Load the half of the sums that `store_earlier` stored."""
    like, _ = halves(gl.zeros((ROWS, WIDTH), gl.float32, OUT), WIDTH)
    as_stored = gl.reshape(
        gl.permute(gl.reshape(like, (4, 2, 8, WIDTH // 16, 4, 2)), (3, 0, 2, 4, 1, 5)), (WIDTH // 16, 128, 4)
    )
    half = gl.reshape(place.load(as_stored.type.layout), (WIDTH // 16, 4, 8, 4, 2, 2))
    return gl.convert_layout(gl.reshape(gl.permute(half, (1, 4, 2, 0, 3, 5)), (ROWS, WIDTH // 2)), like.type.layout)


@gluon.jit
def _rescaled(earlier, earlier_reference, reference, REFERENCE: gl.constexpr):
    """Rescale sums of exp2(score - earlier_reference) to sums of exp2(score - reference)."""
    if REFERENCE == "running":
        factor = gl.where(earlier_reference == float("-inf"), 0.0, gl.exp2(earlier_reference - reference))
        earlier = earlier * gl.convert_layout(factor, gl.SliceLayout(1, earlier.type.layout))[:, None]
    return earlier


@gluon.jit
def add_to_earlier(
    acc, earlier, earlier_reference, reference, WIDTH: gl.constexpr, OUT: gl.constexpr, REFERENCE: gl.constexpr
):
    """Add acc to the sums of earlier tiles.

    reference: softmax reference of acc, and from then on of these sums. earlier: their two halves in shared memory;
    earlier_reference: their softmax reference so far.
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
    """Return acc plus the sums of earlier tiles. Arguments as in `add_to_earlier`."""
    first, second = halves(acc, WIDTH)
    first += _rescaled(load_earlier(earlier[0], WIDTH, OUT), earlier_reference, reference, REFERENCE)
    second += _rescaled(load_earlier(earlier[1], WIDTH, OUT), earlier_reference, reference, REFERENCE)
    sums = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (ROWS, WIDTH))
    return gl.convert_layout(sums, OUT)
