"""The softmax whose reference stays the first key tile's max: right whatever the scores do after that tile. And that
with a running max, whose integer scores become floats by an addition."""

import pytest
import torch

from sage_kernels.testing import exact_attention, relative_l2
from tests.kernels.attention.attention_cases import key_padding, normal


SEQ_Q, SEQ_KV, HEADS, HEAD_DIM = 70, 330, 2, 64
FP16_RANGE = 16  # log2 of where fp16 ends: P that far above the reference is inf


@pytest.fixture(params=["keep_first_max", "running_max", "adds_bits"])
def kernels(request, attend, monkeypatch):
    """`attend` with and without the first tile's max as the reference, on the kernels only; and with a running max
    beside which scores become floats by an addition, as GPUs without wgmma have it."""
    if attend.tier == "reference":
        pytest.skip("the reference has no key tiles")
    from sage_kernels._triton.attention import launch as launch_attention
    from sage_kernels._triton.attention.tiles import Tile

    choose = launch_attention.device_tile

    def chosen(*args, **kwargs):
        tile = choose(*args, **kwargs)  # what `attend` remembers
        if request.param == "adds_bits":
            assert (tile.scale_rows, tile.block_n) == (64, 64)
            attend.first_max = True  # here, too, the largest P of a row is not 1 but something that is rounded
            return Tile(64, 64, 4, 2, "pointers" if attend.tier == "cuda" else "tma", adds_bits=True)
        return tile._replace(keep_first_max=request.param == "keep_first_max")

    monkeypatch.setattr(launch_attention, "device_tile", chosen)
    return attend


def climbing(logits, dtype=torch.float16, seed=0):
    """q, k, v whose score of key j is about logits[j] (base 2) for every row, beside some noise."""
    q, k, v = normal(1, SEQ_Q, len(logits), HEADS, HEADS, HEAD_DIM, dtype=torch.float32, seed=seed)
    direction = torch.nn.functional.normalize(torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(1)), dim=0)
    q, k = 0.2 * q + 8 * direction, 0.2 * k
    # score = q·k · D^-0.5 · log2(e) = 8 · |k along direction| · 0.125 · 1.4427
    k += (logits / 1.4427)[None, :, None, None] * direction
    return q.to(dtype), k.to(dtype), v.to(dtype)


def growth(q, k):
    """Largest amount, base 2, by which a row's largest score lies above that of its first 64 keys."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * HEAD_DIM**-0.5 * 1.4427
    return float((scores.amax(-1) - scores[..., :64].amax(-1)).max())


RAMP = torch.linspace(0, 1, SEQ_KV)
LATE = torch.zeros(SEQ_KV)
LATE[-40] = 1.0
LOGITS = {
    "grows_within_fp16": 12 * RAMP,
    "grows_beyond_fp16": 40 * RAMP,
    "grows_beyond_every_format": 600 * RAMP,
    "late_sink": 60 * LATE,
    "falls": -300 * RAMP,
    "constant": 0 * RAMP,
    "large_and_mixed": 4000 * torch.sin(40 * RAMP),
    "enormous": 1e5 * torch.sin(40 * RAMP),  # a code is worth 1.1 and more: too much for added bits
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("scaling", ["per_token", "per_block"])
def test_scores_of_any_course_match_the_reference(scaling, name, dtype, kernels):
    if dtype not in kernels.dtypes:
        pytest.skip("the interpreter's bf16 dot is broken")
    q, k, v = climbing(LOGITS[name], dtype)
    if "beyond" in name or name == "late_sink":
        assert growth(q, k) > FP16_RANGE + 1
    kernels.check(q, k, v, scaling=scaling, exponent=max(64.0, 4 * float(LOGITS[name].abs().max())))


@pytest.mark.parametrize(
    "options", [{"causal": "top_left"}, {"causal": "bottom_right"}, {"causal": "bottom_right", "window": 200}]
)
def test_bands_after_the_plain_tiles_go_on_from_the_reference(options, kernels):
    q, k, v = climbing(40 * RAMP)
    kernels.check(q, k, v, exponent=160.0, **options)


def test_hidden_keys_stay_hidden_when_it_is_done_again(kernels):
    q, k, v = climbing(40 * RAMP)
    k[:, 250:] = torch.nan
    v[:, 250:] = torch.nan
    mask = key_padding([250], SEQ_KV)
    out, _ = kernels.check(q, k, v, exponent=160.0, attn_mask=mask)
    assert torch.isfinite(out).all()


def test_planned_scales_match_too(kernels):
    q, k, v = climbing(40 * RAMP)
    kernels.check(q, k, v, state=kernels.planned(q, k, v), exponent=160.0)


def test_large_values_that_overflow_beside_a_grown_score(kernels):
    """P stays in its format, P·V leaves fp32: bf16's values may be as large as fp32's."""
    if torch.bfloat16 not in kernels.dtypes:
        pytest.skip("the interpreter's bf16 dot is broken")
    q, k, v = climbing(40 * RAMP, torch.bfloat16)
    v = v * 1e36
    out, _ = kernels(q, k, v)
    exact, _ = exact_attention(q, k, v)
    assert torch.isfinite(out).all()
    assert (out.double() - exact).abs().max() <= 0.05 * exact.abs().max()


def test_nan_and_inf_stay_in_their_rows_and_columns(kernels):
    q, k, v = climbing(40 * RAMP)
    clean, _ = kernels(q, k, v)
    # a row of NaN has no say in the head's balance, as one of zeros has none: bit for bit
    q[:, 3, 0] = 0
    without, _ = kernels(q, k, v)
    q[:, 3, 0] = torch.nan
    v[:, 200, 1, 5] = torch.inf
    out, _ = kernels(q, k, v)
    assert out[:, 3, 0].isnan().all()
    rows, columns = torch.arange(SEQ_Q) != 3, torch.arange(HEAD_DIM) != 5
    assert torch.equal(out[:, rows, 0], without[:, rows, 0])
    assert torch.equal(out[:, :, 1, columns], clean[:, :, 1, columns])
    assert not out[:, :, 1, 5].isfinite().any()


def test_scales_too_large_for_added_bits_are_converted(attend):
    """At 100 a code, 1.5·2^23 of them leave the reference 2^6 off and more: P would be inf, or nothing."""
    if attend.tier == "reference":
        pytest.skip("the reference has no key tiles")
    from sage_kernels._triton.attention.launch import launch_attention_fwd
    from sage_kernels._triton.attention.tiles import Tile

    q, k, v = (x.to(attend.device) for x in normal(1, SEQ_Q, SEQ_KV, HEADS, HEADS, HEAD_DIM))
    options = {"scale": HEAD_DIM**-0.5, "scaling": "per_block", "smooth_k": True, "state": None, "return_lse": True}
    tile = Tile(64, 64, 4, 2, "pointers" if attend.tier == "cuda" else "tma")
    for size in (1.0, 1000.0):
        inputs = (size * q, size * k, v)
        expected, expected_lse = launch_attention_fwd(*inputs, **options, tile=tile)
        out, lse = launch_attention_fwd(*inputs, **options, tile=tile._replace(adds_bits=True))
        assert relative_l2(out, expected) < 1e-3
        torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-3)
        assert size > 1 or not torch.equal(out, expected)  # or nothing would be added
