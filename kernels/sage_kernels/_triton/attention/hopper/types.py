"""Structures that the functions of the Hopper kernel pass to each other.

They are NamedTuples, because a field may be a tensor in one variant of the kernel and a constant or a descriptor in
another. The ring, which has methods, is in ../../ring.py. Shapes: a warpgroup has R = ROWS query rows; a key tile has
N keys.
"""

from typing import NamedTuple

from triton.experimental.gluon import language as gl

from ...ring import KeyValueRing


ROWS = gl.constexpr(64)  # query rows of one warpgroup
# Numbers of each query row in shared memory: the quantisation scale; q·c, by which centring K lowered its scores (for
# the LSE); and q·(c - midrange), the step from its scores to those that row maxima are kept of
SCALE = gl.constexpr(0)
LOWERED = gl.constexpr(1)
TO_MIDRANGE = gl.constexpr(2)
ROW_FIELDS = gl.constexpr(3)


class MaskKind(NamedTuple):
    """The constants MASK, HAS_BIAS, HAS_LEFT and HAS_RIGHT of ../kernel.py."""

    mask: gl.constexpr
    has_bias: gl.constexpr
    has_left: gl.constexpr
    has_right: gl.constexpr


class Format(NamedTuple):
    """The constants SCALE_PER_KEY, PV and REFERENCE of ../kernel.py."""

    scale_per_key: gl.constexpr
    pv: gl.constexpr
    reference: gl.constexpr


class Kind(NamedTuple):
    """The constants that the kernel is compiled for.

    keeps_max: keep the rows' largest scores for a later call. splits: query tiles can be cut along the keys. slice:
    query rows that are quantised at a time. qk_dtype: type of Q and K in the score matmul; pv_dtype: of P and V in
    theirs. scale_early: read a key tile's quantisation scale as soon as the tile is there.
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
    """Register layouts of scores, P·V, P as an operand, and tile weights as one (int8_sums.py)."""

    scores: gl.constexpr
    out: gl.constexpr
    p_operand: gl.constexpr
    weights: gl.constexpr


class Inputs(NamedTuple):
    """Tensors that all warpgroups read and write.

    k_codes and v_tiles are descriptors; so is k_scales with a scale per key.
    """

    q_ptr: gl.tensor
    k_codes: gl.tensor
    v_tiles: gl.tensor
    k_scales: gl.tensor
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

    q_codes: codes of the query rows of each warpgroup. of_rows: ROW_FIELDS numbers of each of these rows. earlier:
    with FP8, sums of P·V over earlier tiles, as two halves of the channels; with INT8, memory for the corrections of
    int8_sums.py.

    Barriers: zeroed: hidden values are zeroed; finished: no warpgroup needs the ring any more; landed: two for each
    warpgroup that computes its rows again: its own copy of keys, or of values, has arrived; turns: one for each
    warpgroup: it is its turn (int8_loop.py).
    """

    q_codes: gl.shared_memory_descriptor
    of_rows: gl.shared_memory_descriptor
    earlier: gl.shared_memory_descriptor
    zeroed: gl.shared_memory_descriptor
    finished: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor


class Seen(NamedTuple):
    """The key tiles that come through the ring for a program.

    `visited` tiles in all; all rows see the first `full` of them completely. Without lists, `first` and `first_full`
    are as in `band_tiles` of ../operands.py, of the program's piece. With a list for each query tile, `first` is the
    place in the list where the piece begins (the piece may be empty), and `first_full` is how many tiles of the whole
    list are complete. left, right, offset: of the causal or sliding window. mask_ptr: of the head, with stride_mq
    elements from row to row; last_row: of the call. Others as in `tile_at` of ../operands.py.
    """

    reach: gl.tensor
    tiles_ptr: gl.tensor
    n_tiles: gl.tensor
    first: gl.tensor
    first_full: gl.tensor
    full: gl.tensor
    visited: gl.tensor
    left: gl.tensor
    right: gl.tensor
    offset: gl.tensor
    seq_kv: gl.tensor
    mask_ptr: gl.tensor
    stride_mq: gl.tensor
    last_row: gl.tensor


class Tile(NamedTuple):
    """The program's query tile.

    k_row: first row of its head among all codes of K. first, full, visited: of all its key tiles. `Seen` has only the
    tiles of this program's piece, which are fewer if the query tile is cut along the keys.
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
    """The program's piece of a query tile that is cut along the keys (split_keys.py)."""

    partials_ptr: gl.tensor
    arrived_ptr: gl.tensor
    slot: gl.tensor
    piece: gl.tensor
    pieces: gl.tensor


class Program(NamedTuple):
    """All arguments of a warpgroup."""

    inputs: Inputs
    recorded: Recorded
    shared: Shared
    ring: KeyValueRing
    seen: Seen
    tile: Tile
    split: Split


class Copied(NamedTuple):
    """Arguments of the producer warp.

    k_codes and v_tiles are descriptors; so is k_scales with a scale per key. v_head: number of the key/value head
    among all of the batch.
    """

    k_codes: gl.tensor
    v_tiles: gl.tensor
    k_scales: gl.tensor
    ring: KeyValueRing
    seen: Seen
    k_row: gl.tensor
    v_head: gl.tensor
    b: gl.tensor
    h_kv: gl.tensor


class Warpgroup(NamedTuple):
    """Values that are the same for all key tiles of one warpgroup.

    zero: [R, N] in the scores' type. row_scale: [R], Q's quantisation scale · softmax scale · log2(e). score_rows:
    [R], numbers of the query rows. earlier: the warpgroup's part of `Shared.earlier`. zeroed, turns: of `Shared`.
    """

    q_codes: gl.shared_memory_descriptor
    zero: gl.tensor
    row_scale: gl.tensor
    score_rows: gl.tensor
    earlier: gl.shared_memory_descriptor
    zeroed: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor
    ring: KeyValueRing
    seen: Seen


class Place(NamedTuple):
    """A warpgroup's position in its loop over key tiles.

    before, tile: the key tile before and this one, kept up only where a mask is read. zeroings: tiles so far whose
    hidden values were zeroed. slot, phase: of this tile in the
    ring, and of its barrier, which has been waited for. tile_scale: this tile's quantisation scale if it is read
    early.
    """

    before: gl.tensor
    tile: gl.tensor
    slot: gl.tensor
    phase: gl.tensor
    tile_scale: gl.tensor
    zeroings: gl.tensor


class Sums(NamedTuple):
    """One warpgroup's sums so far.

    acc: P·V. p: P of the tile before, whose product is still to come. reference: softmax reference, log2 [R].
    running_sum: sum of P, by lanes. top: bits of the largest P, by lanes (lagged reference). earlier_reference:
    softmax reference of the sums in `Shared.earlier` (FP8).
    """

    acc: gl.tensor
    p: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor
    top: gl.tensor
    earlier_reference: gl.tensor


class Total(NamedTuple):
    """Sums over all keys; running_sum and largest_p (bits of the largest P) are by rows."""

    acc: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor
    largest_p: gl.tensor
