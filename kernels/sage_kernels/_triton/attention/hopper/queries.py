"""Query rows of one warpgroup: load them, quantise them into shared memory, record their range."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....facts.recipe import E4M3_OF_INT8
from ....facts.state import STAT_FIELDS, STAT_K_MAX, STAT_K_MIN, STAT_Q_AMAX
from ...hopper_primitives import reinterpret
from .types import LOWERED, ROW_FIELDS, ROWS, SCALE, TO_MIDRANGE


_STATS = gl.constexpr(STAT_FIELDS)
_STAT_Q_AMAX = gl.constexpr(STAT_Q_AMAX)
_STAT_K_MAX = gl.constexpr(STAT_K_MAX)
_STAT_K_MIN = gl.constexpr(STAT_K_MIN)
_LOG2_E = gl.constexpr(1.4426950408889634)
_AMAX_FLOOR = gl.constexpr(1e-30)
_E4M3_OF_INT8 = gl.constexpr(E4M3_OF_INT8)
_ROUND_MAGIC = gl.constexpr(12582912.0)  # as in primitives.round_to_int8
_ROUND_MAGIC_BITS = gl.constexpr(0x4B400000)
_RELAXED = gl.constexpr("relaxed")  # see primitives.RELAXED


@gluon.jit
def _load_queries(q_base, stride_qs, first, seq_q, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, SLICE: gl.constexpr,
                  LAYOUT: gl.constexpr):  # fmt: skip
    """Load SLICE query rows from `first` on, fp32, zero beyond the sequence and head_dim."""
    rows = first + gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (rows < seq_q)[:, None] & (channels < HEAD_DIM)[None, :]
    q = gl.load(q_base + rows.to(gl.int64)[:, None] * stride_qs + channels[None, :], mask=inside, other=0.0)
    return q.to(gl.float32)


@gluon.jit
def _to_midrange(center, recorded, h_kv, channels, HEAD_DIM: gl.constexpr):
    """Return K's centre less the midrange of each channel of K in this call, [WIDTH].

    It is `to_midrange` of ../operands.py for Gluon.
    """
    is_channel = channels < HEAD_DIM
    stat = recorded.stats_ptr + (gl.load(recorded.row_ptr) + h_kv) * (_STATS * recorded.state_width) + channels
    high = gl.load(stat + _STAT_K_MAX * recorded.state_width, mask=is_channel, other=0.0)
    low = gl.load(stat + _STAT_K_MIN * recorded.state_width, mask=is_channel, other=0.0)
    return center - (high * 0.5 + low * 0.5)


@gluon.jit
def _record_amax(stat, amax, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr):
    """Raise the state's amax of each channel of Q: `record_amax` of primitives.py for Gluon.

    Neighbouring channels are in neighbouring lanes, so the L2 takes eight at a time: all programs of a head meet
    there.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    bits = gl.convert_layout(gl.where(amax == amax, amax, 0.0).to(gl.int32, bitcast=True), LINE)
    channels = gl.arange(0, WIDTH, LINE)
    at = stat.to(gl.pointer_type(gl.int32), bitcast=True) + channels
    gl.atomic_max(at, bits, mask=channels < HEAD_DIM, sem=_RELAXED)


@gluon.jit
def quantize_queries(program, group_index, KIND: gl.constexpr, ROW: gl.constexpr):
    """Quantise one warpgroup's query rows into shared memory; return the rows' scales [ROWS].

    Also writes their ROW_FIELDS numbers. It works slice by slice (SLICE rows): the code runs once, so most of its time
    is fetching instructions, and a loop has fewer.
    """
    HEAD_DIM: gl.constexpr = KIND.head_dim
    WIDTH: gl.constexpr = KIND.width
    SCALING: gl.constexpr = KIND.scaling
    RETURN_LSE: gl.constexpr = KIND.return_lse
    SLICE: gl.constexpr = KIND.slice
    SLICES: gl.constexpr = ROWS // SLICE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    CODE: gl.constexpr = KIND.qk_dtype
    CODES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SLICE, WIDTH], CODE)
    inputs = program.inputs
    recorded = program.recorded
    of_rows = program.shared.of_rows
    tile = program.tile
    h_kv = tile.h // tile.group
    kv_head_of_batch = tile.b * (tile.heads // tile.group) + h_kv
    q_base = inputs.q_ptr + tile.b.to(gl.int64) * inputs.stride_qb + tile.h.to(gl.int64) * inputs.stride_qh
    first = tile.first_row + group_index * ROWS
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if SLICES == 1:
        slices = 1
    else:  # SLICES, in a form the compiler can't see through: no unrolling
        slices = gl.minimum(tile.seq_q + SLICES, SLICES)
    q_slices = reinterpret(program.shared.q_codes, CODE, [KIND.groups * SLICES, SLICE, WIDTH], CODES)
    of_slices = reinterpret(of_rows, gl.float32, [KIND.groups * ROW_FIELDS * SLICES, SLICE], of_rows.layout)
    fields = group_index * ROW_FIELDS * SLICES
    weight = gl.load(recorded.q_weight_ptr + kv_head_of_batch * WIDTH + channels)[None, :]
    if SCALING == "planned":
        row = gl.load(recorded.row_ptr) + h_kv
        q_amax = gl.zeros((SLICE, WIDTH), gl.float32, LAYOUT)
    if SCALING == "per_head":
        amax_of_all = gl.load(inputs.q_amax_ptr + tile.b * tile.heads + tile.h)
    if SCALING == "per_block":
        top = gl.zeros((SLICE, WIDTH), gl.float32, LAYOUT)
        for i in range(slices):
            q = _load_queries(q_base, inputs.stride_qs, first + i * SLICE, tile.seq_q, HEAD_DIM, WIDTH, SLICE, LAYOUT)
            top = gl.maximum(top, gl.abs(q * weight))
        amax_of_all = gl.max(gl.max(top, 1), 0)
    if RETURN_LSE or KIND.keeps_max:
        center = gl.load(inputs.center_ptr + kv_head_of_batch * WIDTH + channels)
    if KIND.keeps_max:
        to_midrange = _to_midrange(center, recorded, h_kv, channels, HEAD_DIM)
    row_scale = gl.full([ROWS], 0.0, gl.float32, ROW)
    ahead = _load_queries(q_base, inputs.stride_qs, first, tile.seq_q, HEAD_DIM, WIDTH, SLICE, LAYOUT)
    for i in range(slices):
        q = ahead
        if SLICES > 1:
            after = first + gl.minimum(i + 1, SLICES - 1) * SLICE
            ahead = _load_queries(q_base, inputs.stride_qs, after, tile.seq_q, HEAD_DIM, WIDTH, SLICE, LAYOUT)
        x = q * weight
        if SCALING == "planned" or SCALING == "per_token":
            amax = gl.max(gl.abs(x), 1)
        else:
            amax = gl.full([SLICE], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT)) + amax_of_all
        amax = gl.maximum(amax, _AMAX_FLOOR)
        inverse = gl.div_rn(gl.full_like(amax, 127.0), amax)
        if CODE == gl.int8:
            codes = (x * inverse[:, None] + _ROUND_MAGIC).to(gl.int32, bitcast=True) - _ROUND_MAGIC_BITS
        else:
            codes = x * inverse[:, None] * _E4M3_OF_INT8
        q_slices.index(group_index * SLICES + i).store(codes.to(CODE))
        # max() dropped a NaN of the row, and a code can't hold it: so the row's scale becomes NaN
        scale = (amax * (1.0 / 127.0) + gl.sum(q * 0.0, 1)) * (inputs.softmax_scale * _LOG2_E)
        if CODE != gl.int8:  # the scales of Q and K are those of INT8 codes
            scale = scale * (1.0 / (_E4M3_OF_INT8 * _E4M3_OF_INT8))
        if SLICES == 1:
            # not through shared memory: the loop beside a mask of keys then spilled 20 registers (Triton 3.7.1)
            row_scale = gl.convert_layout(scale, ROW)
        else:
            of_slices.index(fields + SCALE * SLICES + i).store(scale)
        if SCALING == "planned":
            q_amax = gl.maximum(q_amax, gl.abs(q))
        # centring K lowered every score of a row by q·c: the LSE gets it back
        if RETURN_LSE:
            lowered = gl.sum(q * center[None, :], 1) * inputs.softmax_scale
            of_slices.index(fields + LOWERED * SLICES + i).store(lowered)
        if KIND.keeps_max:
            shift = gl.sum(q * to_midrange[None, :], 1) * (inputs.softmax_scale * _LOG2_E)
            of_slices.index(fields + TO_MIDRANGE * SLICES + i).store(shift)
    fence_async_shared()
    if SCALING == "planned":  # behind the fence, which would wait for these atomics
        stat = recorded.stats_ptr + (row * _STATS + _STAT_Q_AMAX) * recorded.state_width
        _record_amax(stat, gl.max(q_amax, 0), HEAD_DIM, WIDTH)
    if SLICES > 1:
        row_scale = of_rows.index(group_index * ROW_FIELDS + SCALE).load(ROW)
    return row_scale
