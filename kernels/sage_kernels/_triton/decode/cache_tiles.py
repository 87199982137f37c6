"""Load key tiles of the INT8 KV cache: codes, scales, and V's codes converted to fp16."""

import triton
import triton.language as tl


# Two 16-bit words, each with the codes of an even and an odd channel of one value, become two fp16 numbers of the
# even channel and two of the odd one. For a code c, the byte c + 128 is the low byte of the fp16 number 1152 + c: that
# takes 5 instructions for 4 numbers, where conversion instructions run at a quarter of the rate.
_TO_FP16 = tl.constexpr("""{
    .reg .b32 bytes, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 $0, bytes, 0x64646464, 0x4240;
    prmt.b32 $1, bytes, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, offset;
    sub.f16x2 $1, $1, offset;
}""")


@triton.jit
def _load_tile(base, slots, stride, inside, WORDS: tl.constexpr, USED: tl.constexpr, MASKED: tl.constexpr,
               EVICTION: tl.constexpr):  # fmt: skip
    """Load words [BLOCK_N, WORDS] of the tokens in `slots`; only the first USED words of a token exist."""
    words = tl.arange(0, WORDS)[None, :]
    pointers = base + (slots * stride)[:, None] + words
    if MASKED:
        tile = tl.load(pointers, mask=inside[:, None] & (words < USED), other=0, eviction_policy=EVICTION)
    elif USED == WORDS:
        tile = tl.load(pointers, eviction_policy=EVICTION)
    else:
        tile = tl.load(pointers, mask=words < USED, other=0, eviction_policy=EVICTION)
    return tile


@triton.jit
def as_fp16(words, ASM: tl.constexpr):
    """Convert int16 words of two codes each to two fp16 tiles, of even and odd channels; exact."""
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            _TO_FP16, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = ((words << 8) >> 8).to(tl.float16)
        odd = (words >> 8).to(tl.float16)
    return even, odd


@triton.jit
def _slots(tile, first_slot, capacity, BLOCK_N: tl.constexpr, RING: tl.constexpr):
    """Return the cache slots of a key tile: a first slot (int64), and offsets from it [BLOCK_N]."""
    offs_n = tl.arange(0, BLOCK_N)
    if RING:
        slots = (tile * BLOCK_N + offs_n).to(tl.int64) + first_slot
        first, slots = tl.full([], 0, tl.int64), tl.where(slots >= capacity, slots - capacity, slots)
    else:
        first, slots = tl.full([], 0, tl.int64) + tile * BLOCK_N, offs_n
    return first, slots


@triton.jit
def load_codes(tile, n_keys, first_slot, capacity, k_base, v_base, stride_kn, stride_vn, HEAD_DIM: tl.constexpr,
                WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr,
                EVICTION: tl.constexpr):  # fmt: skip
    """Load a key tile: codes of K [BLOCK_N, WIDTH] int8, and words of V [BLOCK_N, WIDTH / 2] int16."""
    inside = tile * BLOCK_N + tl.arange(0, BLOCK_N) < n_keys
    first, slots = _slots(tile, first_slot, capacity, BLOCK_N, RING)
    k_base += first * stride_kn
    v_base += first * stride_vn
    k = _load_tile(k_base, slots, stride_kn, inside, WIDTH, HEAD_DIM, MASKED, EVICTION)
    v = _load_tile(v_base, slots, stride_vn, inside, WIDTH // 2, HEAD_DIM // 2, MASKED, EVICTION)
    return k, v


@triton.jit
def load_scales(tile, n_keys, first_slot, capacity, k_scales, v_scales, stride_ksn, stride_vsn,
                 BLOCK_N: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load the scales of K and V of a key tile, bf16 [BLOCK_N] each."""
    first, slots = _slots(tile, first_slot, capacity, BLOCK_N, RING)
    k_scales += first * stride_ksn
    v_scales += first * stride_vsn
    if MASKED:
        inside = tile * BLOCK_N + tl.arange(0, BLOCK_N) < n_keys
        k_scale = tl.load(k_scales + slots * stride_ksn, mask=inside, other=0.0)
        v_scale = tl.load(v_scales + slots * stride_vsn, mask=inside, other=1.0)
    else:
        k_scale = tl.load(k_scales + slots * stride_ksn)
        v_scale = tl.load(v_scales + slots * stride_vsn)
    return k_scale, v_scale
