"""What the functions of the Hopper kernel hand each other, by name.

NamedTuples, as a field may be a tensor in one variant of the kernel and a constant or a descriptor in another; the
ring, which has methods, is in ../../ring.py. Shapes: a warpgroup has ROWS query rows; R of them, N keys of a tile.
"""

from typing import NamedTuple

from triton.experimental.gluon import language as gl

from ...ring import KeyValueRing


ROWS = gl.constexpr(64)  # query rows of one warpgroup
# What shared memory holds of each query row of a warpgroup: the scale of its codes; q·c, which smoothing took from its
# scores (LSE); and q·(c - midrange), which leads from its scores to those that row maxima are kept of
SCALE = gl.constexpr(0)
LOWERED = gl.constexpr(1)
TO_MIDRANGE = gl.constexpr(2)
ROW_FIELDS = gl.constexpr(3)


class MaskKind(NamedTuple):
    """MASK, HAS_BIAS, HAS_LEFT and HAS_RIGHT of ../kernel.py."""

    mask: gl.constexpr
    has_bias: gl.constexpr
    has_left: gl.constexpr
    has_right: gl.constexpr


class Format(NamedTuple):
    """SCALE_PER_KEY, PV and REFERENCE of ../kernel.py."""

    scale_per_key: gl.constexpr
    pv: gl.constexpr
    reference: gl.constexpr


class Kind(NamedTuple):
    """What the kernel is compiled for.

    keeps_max: the rows' largest scores are kept for a later call; splits: tiles of query rows can be cut along the
    keys; slice: query rows that are quantised together; qk_dtype, pv_dtype: of Q and K, and of P and V, as operands;
    scale_early: a tile's scale is read as soon as it is there.
    """

    head_dim: gl.constexpr
    width: gl.constexpr
    block_n: gl.constexpr
    scaling: gl.constexpr
    return_lse: gl.constexpr
    keeps_max: gl.constexpr
    groups: gl.constexpr
    splits: gl.constexpr
    slice: gl.constexpr
    masking: gl.constexpr
    format: gl.constexpr
    qk_dtype: gl.constexpr
    pv_dtype: gl.constexpr
    scale_early: gl.constexpr


class Layouts(NamedTuple):
    """Registers of scores, of P·V, of P as its operand, and of weights as one (int8_sums.py)."""

    scores: gl.constexpr
    out: gl.constexpr
    p_operand: gl.constexpr
    weights: gl.constexpr


class Inputs(NamedTuple):
    """Tensors that all warpgroups read and write. k_codes, v_tiles and, one a key, k_scales are descriptors, and so is
    k_half, as of `Copied`.
    """

    q_ptr: gl.tensor
    k_codes: gl.tensor
    v_tiles: gl.tensor
    k_scales: gl.tensor
    k_half: gl.tensor
    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    center_ptr: gl.tensor
    q_amax_ptr: gl.tensor
    v_scale_ptr: gl.tensor
    stride_qb: gl.tensor
    stride_qs: gl.tensor
    stride_qh: gl.tensor
    softmax_scale: gl.tensor


class Recorded(NamedTuple):
    """Tensors of the HeadState. state_width: channels of its vectors."""

    stats_ptr: gl.tensor
    row_ptr: gl.tensor
    counts_ptr: gl.tensor
    row_max_ptr: gl.tensor
    q_weight_ptr: gl.tensor
    state_width: gl.tensor


class Shared(NamedTuple):
    """Shared memory beside the ring.

    q_codes, of_rows: codes of the query rows of each warpgroup, and ROW_FIELDS numbers of each row. q_half: these rows
    in 16 bit, for promoted tiles (promoted.py).
    earlier: sums of P·V over earlier tiles (FP8): two halves of the channels; or places for what they lack (INT8).
    zeroed, finished, landed: barriers: hidden values are zeroed; nobody needs the ring any more; a warpgroup's own
    keys, or values, have arrived (where it does its rows again). turns: one of each warpgroup, whose turn it is
    (int8_loop.py).
    """

    q_codes: gl.shared_memory_descriptor
    q_half: gl.shared_memory_descriptor
    of_rows: gl.shared_memory_descriptor
    earlier: gl.shared_memory_descriptor
    zeroed: gl.shared_memory_descriptor
    finished: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor


class Seen(NamedTuple):
    """The key tiles that a program visits: `visited` of them from `first` on, or those of a list; the first `full` are
    seen wholly. left, right, offset: of the band; the rest as in ../key_tiles.py. Of a list for each tile of query
    rows, `first` is the place where the program's piece begins, and `first_full` how many the list has wholly; a piece
    may be empty. promoted, ordinary: of mixed attention, where promoted ones that are seen wholly end in the order of
    visits, and where the other ordinary ones do (key_tiles.py).
    """

    reach: gl.tensor
    tiles_ptr: gl.tensor
    n_tiles: gl.tensor
    first: gl.tensor
    first_full: gl.tensor
    full: gl.tensor
    promoted: gl.tensor
    ordinary: gl.tensor
    visited: gl.tensor
    left: gl.tensor
    right: gl.tensor
    offset: gl.tensor
    seq_kv: gl.tensor


class Tile(NamedTuple):
    """The program's tile of query rows. k_row: first row of its head among all codes of K.

    first, full, visited: of all its key tiles. Those of `Seen` are the ones that come through the ring, which are
    fewer where the tile is cut along the keys.
    """

    seq_q: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    b: gl.tensor
    h: gl.tensor
    first_row: gl.tensor
    k_row: gl.tensor
    first: gl.tensor
    full: gl.tensor
    visited: gl.tensor


class Split(NamedTuple):
    """Which piece of a tile that is cut along the keys; see split_keys.py."""

    partials_ptr: gl.tensor
    arrived_ptr: gl.tensor
    slot: gl.tensor
    piece: gl.tensor
    pieces: gl.tensor


class Program(NamedTuple):
    """All that a warpgroup is started with."""

    inputs: Inputs
    recorded: Recorded
    shared: Shared
    ring: KeyValueRing
    seen: Seen
    tile: Tile
    split: Split


class Copied(NamedTuple):
    """What the producer is started with. k_codes, v_tiles and, one a key, k_scales are descriptors, and k_half, of
    half of the channels of promoted keys; v_head: the number of the key/value head among all of the batch.
    """

    k_codes: gl.tensor
    v_tiles: gl.tensor
    k_scales: gl.tensor
    k_half: gl.tensor
    ring: KeyValueRing
    seen: Seen
    k_row: gl.tensor
    v_head: gl.tensor
    b: gl.tensor
    h_kv: gl.tensor


class Warpgroup(NamedTuple):
    """What all key tiles of one warpgroup share. zero: [R, N] in the scores' type; row_scale, score_rows: [R], the
    scale and the number of each query row; earlier: the warpgroup's part of `Shared.earlier`; zeroed, turns: of
    `Shared`; q_half, lowered: of `Shared.q_half`, and q·c of each row in shared memory (promoted.py).
    """

    q_codes: gl.shared_memory_descriptor
    q_half: gl.shared_memory_descriptor
    lowered: gl.shared_memory_descriptor
    softmax_scale: gl.tensor
    zero: gl.tensor
    row_scale: gl.tensor
    score_rows: gl.tensor
    earlier: gl.shared_memory_descriptor
    zeroed: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor
    ring: KeyValueRing
    seen: Seen


class Place(NamedTuple):
    """Where a warpgroup is: the key tile before and this one (where a mask is read), this one's slot of the ring and
    the phase of its barrier, which has been waited for. tile_scale: of this tile, where it is read at once.
    """

    before: gl.tensor
    tile: gl.tensor
    slot: gl.tensor
    phase: gl.tensor
    tile_scale: gl.tensor


class Sums(NamedTuple):
    """One warpgroup's sums so far.

    acc: P·V; p: P of the tile before, whose product is still to come; reference: of the softmax, log2 [R];
    running_sum: of P, by lanes; top: bits of the largest P, by lanes (lagged reference); earlier_reference: the
    reference that the sums in `Shared.earlier` were taken against (8-bit P).
    """

    acc: gl.tensor
    p: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor
    top: gl.tensor
    earlier_reference: gl.tensor


class Total(NamedTuple):
    """Sums over all keys; running_sum and the bits of the largest P by rows."""

    acc: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor
    largest_p: gl.tensor
