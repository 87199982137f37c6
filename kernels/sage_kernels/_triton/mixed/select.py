"""Choose which key blocks to promote or skip, as a list for each block of query rows."""

import triton
import triton.language as tl

from ..primitives import load_tokens


@triton.jit
def _ordered(score):
    """Return int32 numbers in the same order as these fp32 numbers."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def block_range(row, seq_q, seq_kv, offset, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Return which key blocks the query rows of block `row` see, as three int32 numbers.

    visible: how many blocks they see, from the first on; full: how many of these they all see completely (no mask
    needed); own: the first block with a key of the rows themselves.
    """
    n_tiles = tl.cdiv(seq_kv, BLOCK)
    visible = n_tiles
    full = seq_kv // BLOCK
    own = n_tiles
    if CAUSAL:
        first_row = row * BLOCK_Q + offset
        last_row = tl.minimum((row + 1) * BLOCK_Q, seq_q) - 1 + offset
        # maxima with 0, because integer division rounds towards zero
        visible = tl.minimum(tl.maximum(last_row + BLOCK, 0) // BLOCK, n_tiles)
        full = tl.minimum(tl.maximum(first_row + 1, 0) // BLOCK, full)
        own = tl.minimum(tl.maximum(first_row, 0) // BLOCK, tl.maximum(visible - 1, 0))
    return visible, full, own


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "heads", "group", "offset", "keep", "millionths", "rows"])
def _select_blocks_kernel(
    q_ptr, blocks_ptr, scores_ptr, lists_ptr, numbers_ptr, chosen_ptr, stride_qb, stride_qs, stride_qh,
    seq_q, seq_kv, heads, group, offset, keep, millionths, rows,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    SPAN: tl.constexpr, SELECTOR: tl.constexpr, SKIPS: tl.constexpr, CAUSAL: tl.constexpr,
    STORE_CHOSEN: tl.constexpr,
):  # fmt: skip
    """Choose key blocks for every programs-th block of query rows of all heads, from program_id on.

    scores_ptr: int32 [programs, blocks padded to SPAN], scratch memory of each program. lists_ptr: int16 [B·H·row
    blocks, blocks]: ordinary blocks in order from the front, promoted ones from the end. numbers_ptr: int32 [B·H·row
    blocks, 3]: ordinary blocks that need no mask, all ordinary blocks, promoted blocks. chosen_ptr: int8, shape as
    lists_ptr: 1 for chosen blocks.
    """
    n_tiles = tl.cdiv(seq_kv, BLOCK)
    m_tiles = tl.cdiv(seq_q, BLOCK_Q)
    channels = tl.arange(0, WIDTH)
    scores = scores_ptr + tl.program_id(0).to(tl.int64) * (tl.cdiv(n_tiles, SPAN) * SPAN)
    programs = tl.num_programs(0)
    for turn in range(0, tl.cdiv(rows - tl.program_id(0), programs)):
        place = tl.program_id(0) + turn * programs
        row = place % m_tiles
        head_of_batch = place // m_tiles
        b = (head_of_batch // heads).to(tl.int64)
        h = head_of_batch % heads
        visible, full, own = block_range(row, seq_q, seq_kv, offset, BLOCK_Q, BLOCK, CAUSAL)

        # rank blocks by importance, as integers of the same order
        first = place * 0
        if SELECTOR == "local":
            near = row * n_tiles // m_tiles
            if CAUSAL:
                near = visible - 1
            for start in range(0, n_tiles, SPAN):
                j = start + tl.arange(0, SPAN)
                score = _ordered(-tl.abs(j - near).to(tl.float32))
                tl.store(scores + j, -score if SKIPS else score)
        else:
            q_base = q_ptr + b * stride_qb + h.to(tl.int64) * stride_qh
            mean = tl.zeros([WIDTH], tl.float32)
            for part in tl.static_range(BLOCK_Q // BLOCK):
                tokens = row * BLOCK_Q + part * BLOCK + tl.arange(0, BLOCK)
                q = load_tokens(q_base, tokens, stride_qs, seq_q, HEAD_DIM, WIDTH, True).to(tl.float32)
                mean += tl.sum(q, 0)
            number = tl.minimum(seq_q - row * BLOCK_Q, BLOCK_Q).to(tl.float32)
            mean = tl.div_rn(mean, mean * 0.0 + number)
            kv_head = b * (heads // group) + h // group
            blocks = blocks_ptr + kv_head * n_tiles * (2 * WIDTH)
            for start in range(0, n_tiles, CHUNK):
                j = start + tl.arange(0, CHUNK)
                at = blocks + j[:, None] * (2 * WIDTH) + channels[None, :]
                inside = (j < n_tiles)[:, None] & (channels < WIDTH)[None, :]
                of_block = tl.load(at, mask=inside, other=0.0)
                if SELECTOR == "quest":
                    low = tl.load(at + WIDTH, mask=inside, other=0.0)
                    of_block = tl.where((mean >= 0)[None, :], of_block, low)
                score = tl.sum(of_block * mean[None, :], 1)
                score = _ordered(-score if SKIPS else score)
                tl.store(scores + j, score, mask=j < n_tiles)
        tl.debug_barrier()

        # how many blocks are chosen, and from which
        candidates = visible
        wanted = tl.minimum(visible, keep)
        if SKIPS:
            wanted = (visible.to(tl.int64) * millionths // 1000000).to(tl.int32)
            wanted = tl.minimum(wanted, visible - 1)
            if CAUSAL:
                candidates = own
                wanted = tl.minimum(wanted, own)
            wanted = tl.maximum(wanted, 0)
        # bisection: the largest number that at least `wanted` scores reach
        least = tl.full([], -(2**31), tl.int64)
        most = tl.full([], 2**31 - 1, tl.int64)
        for _ in range(32):
            middle = (least + most + 1) >> 1
            reached = first
            for start in range(0, n_tiles, SPAN):
                j = start + tl.arange(0, SPAN)
                score = tl.load(scores + j, mask=j < candidates, other=-(2**31))
                above = (score.to(tl.int64) >= middle) & (j < candidates)
                reached += tl.sum(above.to(tl.int32), 0)
            enough = reached >= wanted
            least = tl.where(enough, middle, least)
            most = tl.where(enough, most, middle - 1)
        beyond = first
        for start in range(0, n_tiles, SPAN):
            j = start + tl.arange(0, SPAN)
            score = tl.load(scores + j, mask=j < candidates, other=-(2**31))
            beyond += tl.sum(((score.to(tl.int64) > least) & (j < candidates)).to(tl.int32), 0)

        # write lists in the order of the keys; of equal scores the first are chosen
        lists = lists_ptr + place.to(tl.int64) * n_tiles
        equals, ordinary, ordinary_full, promoted = first, first, first, first
        for start in range(0, n_tiles, SPAN):
            j = start + tl.arange(0, SPAN)
            score = tl.load(scores + j, mask=j < candidates, other=-(2**31)).to(tl.int64)
            equal = ((score == least) & (j < candidates)).to(tl.int32)
            earlier = equals + tl.cumsum(equal, 0) - equal
            chosen = (score > least) & (j < candidates) | (equal != 0) & (earlier < wanted - beyond)
            chosen = chosen & (wanted > 0)
            equals += tl.sum(equal, 0)
            kept = ((chosen == 0) & (j < visible)).to(tl.int32)
            tl.store(lists + ordinary + tl.cumsum(kept, 0) - 1, j.to(tl.int16), mask=kept != 0)
            ordinary += tl.sum(kept, 0)
            ordinary_full += tl.sum(tl.where(j < full, kept, 0), 0)
            taken = chosen.to(tl.int32)
            if not SKIPS:
                tl.store(lists + n_tiles - promoted - tl.cumsum(taken, 0), j.to(tl.int16), mask=taken != 0)
                promoted += tl.sum(taken, 0)
            if STORE_CHOSEN:
                tl.store(chosen_ptr + place.to(tl.int64) * n_tiles + j, taken.to(tl.int8), mask=j < n_tiles)
        tl.store(numbers_ptr + place * 3, ordinary_full)
        tl.store(numbers_ptr + place * 3 + 1, ordinary)
        tl.store(numbers_ptr + place * 3 + 2, promoted)
        tl.debug_barrier()
