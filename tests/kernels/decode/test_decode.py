"""Attention over the INT8 cache: the kernel against the reference, the reference against exact attention."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import append_kv, sage_decode_attention
from sage_kernels.reference import ref_append_kv
from sage_kernels.testing import FAMILIES, FP32_ROUNDING, relative_l2, sqnr_db
from tests.kernels.decode.decode_cases import SPARE, Decode, arguments, exact, filled, inputs, length


@pytest.fixture
def decode(tier, monkeypatch):
    return Decode(tier, monkeypatch)


SHAPES = [  # batch, S_q, S_kv, H, H_kv, D: groups of 1, 4, 8; every width; odd lengths; more rows than a tile
    (2, 1, 131, 2, 2, 64),
    (1, 1, 197, 8, 2, 128),
    (1, 3, 70, 8, 1, 80),
    (1, 1, 99, 4, 1, 256),
    (1, 16, 65, 4, 1, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_matches_reference(decode, shape):
    for dtype in decode.dtypes[: 3 if decode.tier != "interpreter" else 2]:
        q, k, v = inputs(*shape, dtype=dtype)
        decode.check(q, filled(k, v), lengths=length(k), causal=True)


def test_decode_chunk_of_a_prompt_takes_more_tiles_of_rows(decode):
    q, k, v = inputs(1, 37, 113, 4, 1, 64)  # 148 rows
    out, _ = decode.check(q, filled(k, v), lengths=length(k), causal="bottom_right")
    mask = torch.ones(37, 113, dtype=torch.bool).tril(113 - 37)
    assert sqnr_db(out, exact(q, k, v, mask=mask)[0]) > 40


@pytest.mark.parametrize("family", FAMILIES)
def test_C02_recipe_against_exact_attention(decode, family):
    """What the cache's rounding costs. A token's scale is its largest element / 127, some 2.9 sigma / 127 here: 43 dB
    for K and for V. A channel that is large in Q but small in K has steps as wide as the others: 18 dB less.
    So are channels of K twenty times as large as the others, whose rotation the cache does not do: 20 dB less.
    """
    q, k, v = inputs(1, 2, 150, 8, 2, 64, family=family, dtype=torch.float16)
    out, lse = decode(q, filled(k, v), lengths=length(k))
    want, want_lse = exact(q, k, v)
    budget = 38 if "outlier" not in family else 18 if "varying" in family else 22
    for h in range(8):
        assert sqnr_db(out[:, :, h], want[:, :, h]) > budget, (family, h)
    assert (lse - want_lse).abs().max() < {38: 0.02, 22: 0.1, 18: 0.2}[budget]


def test_smoothing_is_what_saves_biased_keys(decode):
    q, k, v = inputs(1, 1, 150, 4, 1, 64)
    want = exact(q, k, v)[0]
    with_mean, without = (
        sqnr_db(decode(q, filled(k, v, mean=mean), lengths=length(k))[0], want) for mean in (True, False)
    )
    assert with_mean > without + 6


@pytest.mark.parametrize(
    "options",
    [
        {"window": 50},
        {"window": 7, "causal": True, "sinks": True},
        {"softcap": 5.0, "causal": True},
        {"softcap": 5.0, "sinks": True},
        {"scale": 0.0},
    ],
    ids=str,
)
def test_C04_window_sinks_softcap(decode, options):
    q, k, v = inputs(1, 3, 139, 8, 2, 64)
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-3, 6, 8)
    out, lse = decode.check(q, filled(k, v), lengths=length(k), **options)
    seen = torch.ones(3, 139, dtype=torch.bool)
    if options.get("causal"):
        seen = seen.tril(136)
    if "window" in options:
        seen = seen.triu(136 - options["window"] + 1)
    rest = {n: options[n] for n in ("softcap", "sinks", "scale") if n in options}
    want, want_lse = exact(q, k, v, mask=seen, **rest)
    assert sqnr_db(out, want) > 38
    assert (lse - want_lse).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["keys", "float keys", "rows", "heads", "expanded"])
def test_C04_masks_of_padded_batches(decode, kind):
    """The columns of a mask are the cache's slots; what lies beyond the length is hidden whatever the mask says."""
    q, k, v = inputs(2, 3, 133, 4, 2, 64)
    cache = filled(k, v)
    mask = torch.ones(2, 1, 1, 133 + SPARE, dtype=torch.bool)
    mask[0, ..., :70] = False  # left padding: a tile of 64 keys and a piece of the next
    mask[1, ..., 5:9] = False
    if kind == "float keys":
        bias = torch.randn(2, 1, 1, 138, generator=torch.Generator().manual_seed(2))
        mask = torch.where(mask, bias, -torch.inf).half()
    elif kind in ("rows", "heads"):
        mask = mask.expand(2, 4 if kind == "heads" else 1, 3, 138).clone()
        mask[:, :, 0, 80:] = False
        mask[1, -1, 2, ::3] = False
    elif kind == "expanded":
        mask = mask.expand(2, 4, 3, 138)
    out, lse = decode.check(q, cache, lengths=length(k), attn_mask=mask)
    want, want_lse = exact(q, k, v, mask=mask[..., :133])
    assert sqnr_db(out, want) > 38 and (lse - want_lse).abs().max() < 0.02


def test_C04_mask_with_causal_and_window(decode):
    q, k, v = inputs(2, 4, 90, 4, 1, 64)
    mask = torch.ones(2, 1, 1, 95, dtype=torch.bool)
    mask[0, ..., :40] = False
    out, _ = decode.check(q, filled(k, v), lengths=length(k), attn_mask=mask, causal=True, window=60)
    seen = torch.ones(4, 90, dtype=torch.bool).tril(86).triu(86 - 59) & mask[..., :90]
    assert sqnr_db(out, exact(q, k, v, mask=seen)[0]) > 38


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_C04_a_row_that_sees_nothing_is_zero(decode, dtype):
    q, k, v = inputs(2, 1, 67, 4, 2, 64)
    mask = torch.ones(2, 1, 1, 72, dtype=torch.bool)
    mask[0] = False
    given = mask if dtype == torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
    out, lse = decode(q, filled(k, v), lengths=length(k), attn_mask=given)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all() and (out[1] != 0).any()


def test_C02_hidden_keys_and_free_slots_may_hold_anything(decode):
    q, k, v = inputs(1, 2, 100, 4, 1, 64)
    mask = torch.ones(1, 1, 1, 105, dtype=torch.bool)
    mask[..., 10:30] = False
    cache = filled(k, v, capacity=105)
    clean = [x if x is None else torch.where(x.isnan(), torch.zeros_like(x), x) for x in cache]
    dirty = [x.clone() for x in cache]
    for scale, bad in ((dirty[1], torch.nan), (dirty[3], torch.inf)):
        scale[:, :, 10:20], scale[:, :, 20:30] = bad, 1e30
    results = [decode(q, x, lengths=length(k), attn_mask=mask) for x in (clean, cache, dirty)]
    assert all(torch.equal(x, y) for result in results[1:] for x, y in zip(results[0], result, strict=True))


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_token_that_is_not_finite_poisons_the_rows_that_see_it(decode, which):
    q, k, v = inputs(1, 3, 80, 4, 2, 64)
    (k if which == "k" else v)[0, 1, 78, 3] = torch.nan
    cache = filled(k, v)
    cache[4] = torch.zeros_like(cache[4])
    ref_append_kv(k, v, cache[4], *cache[:4], position=0, ring=False)
    out, _ = decode(q, cache, lengths=length(k), causal=True)
    bad = torch.zeros(3, 4, dtype=torch.bool)
    bad[1:, 2:] = True  # rows 1 and 2 see token 78; heads 2 and 3 read its head
    assert torch.equal(out[0].isnan().all(-1), bad) and torch.equal(out[0].isnan().any(-1), bad)


def test_extreme_values_do_not_leave_fp16(decode):
    """P is fp16 relative to its tile: huge and tiny values side by side, and a sink token with almost no value."""
    q, k, v = inputs(1, 1, 200, 2, 1, 64, dtype=torch.float32)
    v[:, :, 0] *= 1e-6
    v[:, :, 150:] *= 1e9
    k[:, :, 0] += 3 * q[0, 0, :1]  # token 0 takes nearly all of the probability
    out, _ = decode.check(q, filled(k, v), lengths=length(k))
    assert sqnr_db(out, exact(q, k, v)[0]) > 25


def test_C04_ring_keeps_the_last_tokens(decode):
    """A ring of 40 after 103 tokens; the mask's columns are in order of age."""
    q, k, v = inputs(2, 1, 103, 4, 2, 64)
    cache = filled(k, v, capacity=40, ring=True)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[0, ..., :11] = False
    options = {"lengths": length(k), "ring": True}
    for given in (None, mask):
        out, _ = decode.check(q, cache, attn_mask=given, **options)
        want, _ = exact(q, k[:, :, 63:], v[:, :, 63:], mask=given)
        assert sqnr_db(out, want) > 38
    half_full = filled(k[:, :, :25], v[:, :, :25], capacity=40, ring=True)
    out, _ = decode.check(q, half_full, lengths=torch.tensor(25), ring=True)
    assert sqnr_db(out, exact(q, k[:, :, :25], v[:, :, :25])[0]) > 38


def test_lengths_of_each_sample(decode):
    q, k, v = inputs(3, 2, 90, 4, 2, 64)
    numbers = torch.tensor([90, 0, 33], dtype=torch.int32)
    out, lse = decode.check(q, filled(k, v), lengths=numbers, causal=True)
    mask = torch.ones(2, 33, dtype=torch.bool).tril(31)
    want, _ = exact(q[2:], k[2:, :, :33], v[2:, :, :33], mask=mask)
    assert sqnr_db(out[2:], want) > 38
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


def test_C03_more_tokens_than_slots_give_nan(decode):
    q, k, v = inputs(2, 1, 60, 4, 2, 64)
    out, lse = decode(q, filled(k, v, capacity=60), lengths=torch.tensor([61, 60]))
    assert out[0].isnan().all() and lse[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("tier", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_number_of_splits_changes_rounding_only(decode):
    q, k, v = inputs(1, 2, 330, 4, 2, 64, dtype=torch.float32)
    cache, sinks = filled(k, v), torch.tensor([2.0, -1.0, 0.0, 4.0])
    results = []
    for decode.splits in (1, 2, 3, 6, 9, 3, 20, 70):  # 6 tiles: from 9 on some have nothing
        results.append(decode(q, cache, lengths=length(k), causal=True, sinks=sinks))
    for out, lse in results[1:]:
        # a tile's P is fp16 relative to the tile, so only fp32 sums are in another order
        assert relative_l2(out, results[0][0]) < 32 * FP32_ROUNDING
        assert (lse - results[0][1]).abs().max() < 1e-5
    assert all(torch.equal(x, y) for x, y in zip(results[2], results[5], strict=True))


def test_lse_merges_two_parts_of_the_keys(decode):
    """What ring attention does: two calls over halves of the keys, merged by their LSEs, are one call over all."""
    q, k, v = inputs(1, 2, 150, 4, 2, 64, dtype=torch.float32)
    whole = filled(k, v, capacity=150)
    parts = [[x if x is whole[4] else x[:, :, part] for x in whole] for part in (slice(0, 83), slice(83, 150))]
    out, lse = decode(q, whole)
    (out_a, lse_a), (out_b, lse_b) = (decode(q, part) for part in parts)
    weight = torch.sigmoid(lse_b - lse_a)[..., None]
    # each part rounds P by itself, to 11 bits
    assert relative_l2(out_a + weight * (out_b - out_a), out) < 2**-11
    assert (torch.logaddexp(lse_a, lse_b) - lse).abs().max() < 1e-4


def test_C02_strided_buffers_give_the_bits_of_contiguous_ones(decode):
    q, k, v = inputs(2, 1, 75, 4, 2, 64)
    cache = filled(k, v)
    strided = []
    for x in cache[:4]:
        room = torch.full((2, 2, 96, 3, *x.shape[3:]), 77, dtype=x.dtype)
        view = room[:, :, 7 : 7 + x.shape[2], 1]
        view.copy_(x)
        strided.append(view)
    packed = torch.zeros(2, 1, 8, 64, dtype=q.dtype)[:, :, ::2]
    packed.copy_(q)
    want = decode(q, cache, lengths=length(k))
    got = decode(packed, [*strided, cache[4]], lengths=length(k))
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))


@pytest.mark.alone
@pytest.mark.parametrize("tier", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_offsets_beyond_32_bits(decode):
    """The second sample lies 3 GB behind the first (the interpreter would copy them for every launch)."""
    q, k, v = inputs(2, 1, 70, 2, 2, 64)
    cache = filled(k, v)
    far = torch.zeros(3 * 2**30 + 2 * cache[0][0].numel(), dtype=torch.int8, device=decode.device)
    strides = (3 * 2**30, *cache[0].stride()[1:])
    codes = [far.as_strided(cache[0].shape, strides, i * cache[0][0].numel()) for i in range(2)]
    codes[0].copy_(cache[0])
    codes[1].copy_(cache[2])
    want = decode(q, cache, lengths=length(k))
    got = decode(q, [codes[0], cache[1], codes[1], cache[3], cache[4]], lengths=length(k))
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))


def test_odd_head_dim(decode):
    q, k, v = inputs(1, 1, 40, 2, 1, 7, family="normal")
    out, _ = decode.check(q, filled(k, v), lengths=length(k))
    assert sqnr_db(out, exact(q, k, v)[0]) > 30


def test_empty_cache_and_empty_batch(decode):
    q, k, v = inputs(2, 1, 8, 2, 2, 64)
    out, lse = decode(q, [x if x.dim() == 3 and x.dtype == torch.float32 else x[:, :, :0] for x in filled(k, v)])
    assert (out == 0).all() and (lse == -torch.inf).all()
    out, _ = decode(q[:0], [x[:0] for x in filled(k, v)])
    assert out.shape == (0, 1, 2, 64)


def test_splits_are_few_and_leave_nothing_idle():
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.decode.tiles import choose_splits

    slots = 132 * 4
    for programs in (1, 8, 64, 256, 600, 5000):
        for tiles in (1, 3, 16, 512, 2048):
            splits = choose_splits(programs, tiles, slots)
            assert 1 <= splits <= tiles
            assert splits == 1 or programs * splits <= slots or programs > slots // 2  # a second wave is a last resort
            if tiles == 2048:  # long contexts keep the GPU busy whatever the batch
                waves = -(-programs * splits // slots)
                assert programs * tiles / (waves * slots * -(-tiles // splits)) > (0.8 if programs >= 8 else 0.4)
    assert choose_splits(5000, 16, slots) <= 4
    # more waves fill the GPU better, but every program begins and ends
    assert choose_splits(600, 16, slots) <= 2 and choose_splits(1000, 512, slots) == 1


def test_the_tile_of_long_caches_is_that_of_the_gpu_it_was_timed_on():
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.decode.tiles import LONG, decode_tile

    usual = decode_tile(128, 4)
    assert len({decode_tile(128, 4, LONG, 90), decode_tile(128, 4, LONG - 1, 90), usual}) == 3
    for other in ((128, 4, LONG, 80), (128, 4, LONG - 1, 80), (128, 4, LONG, 0)):
        assert decode_tile(*other) == usual
    assert decode_tile(64, 4, LONG, 90) == decode_tile(64, 4) and decode_tile(128, 9, LONG, 90) == decode_tile(
        128, 9, 0, 90
    )


@pytest.mark.parametrize("name", ["decode_attention", "decode_attention_lse"])
def test_decode_op_registration(name):
    given = list(arguments().values())
    torch.library.opcheck(
        getattr(torch.ops.sage_kernels, name), (*given, None, None, False, True, None, 0.0, 0.125, None)
    )


def test_append_and_decode_compile_to_one_graph():
    """The length stays on the device: no step compiles anew, and none differs from eager."""
    import torch._dynamo.testing

    q, k, v = inputs(2, 1, 12, 4, 2, 64, dtype=torch.float32)

    def step(cache, seen, q, k, v):
        append_kv(k, v, cache[4], *cache[:4], position=seen)
        seen.add_(1)
        return sage_decode_attention(q, *cache, lengths=seen)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(step, backend=counter, fullgraph=True)
    caches = [filled(k[:, :, :4], v[:, :, :4], capacity=20) for _ in range(2)]
    lengths = [torch.tensor(4), torch.tensor(4)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(4, 12):
            new = (k[:, :, t : t + 1], v[:, :, t : t + 1])
            want, got = step(caches[0], lengths[0], q, *new), fast(caches[1], lengths[1], q, *new)
            assert torch.equal(want, got)
    assert counter.frame_count == 1
    assert torch.equal(caches[0][0], caches[1][0]) and lengths[1] == 12
