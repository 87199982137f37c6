"""The recipe qk_int8_pv_int8: V less its center in INT8 per channel, P in INT8 against each tile's largest score."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import new_head_state, sage_attention
from sage_kernels.facts.numerics import quantize_centered_values, value_center
from sage_kernels.facts.state import COUNT_CLIPPED, STAT_V_AMAX, HeadState
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.reference import ref_attention
from sage_kernels.testing import exact_attention, make_biased, relative_l1, relative_l2
from tests.kernels.attention.attention_cases import normal, running, stored_values
from tests.kernels.attention.test_softmax_reference import LOGITS, climbing


# the interpreter is numpy: it warns where a GPU returns inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, INF = float("nan"), float("inf")
INT8 = "qk_int8_pv_int8"
BAR = 0.02  # relative L1 of the recipe on N(0, 1)
BIASED_BAR = 0.022  # the same of the output less the mean of V, on biased inputs with loud channels


@pytest.fixture
def int8(attend):
    """`attend`, running this recipe."""
    return running(attend, INT8)


def call(attend, q, k, v, **options):
    return attend(q, k, v, recipe=INT8, **options)


# --- V ---


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("shape", [(1, 330, 2, 64), (2, 17, 1, 40), (1, 129, 1, 160)])
def test_v_is_stored_transposed_and_permuted_with_the_codes_of_the_reference(shape, hidden, stateful, kernel_device):
    seq, heads, head_dim = shape[1:]
    state = new_head_state(heads, head_dim, kernel_device) if stateful else None
    scaling = "planned" if stateful else "per_block"
    options = {"scaling": scaling, "smooth_k": True, "state": state}
    v, seen, stored, numbers = stored_values(kernel_device, shape, hidden, "int8", 5.0, **options)
    wanted, scale, center = quantize_centered_values(v.transpose(1, 2).float(), seen, seen)
    assert torch.equal(numbers[:, :, 0, :head_dim], scale[:, :, 0])
    first_sum = 2 + -(-stored.shape[3] // 128 // 4)
    sampled = value_center(v.transpose(1, 2).float(), seen)
    assert torch.equal(numbers[:, :, 1, :head_dim], sampled[:, :, 0])
    found = numbers[:, :, 1:first_sum, :head_dim].sum(2)
    torch.testing.assert_close(found, center[:, :, 0], rtol=2**-21, atol=0, equal_nan=True)  # a mean, in any order
    assert center.isnan().sum() == 2 and not scale.isnan().any()
    assert torch.equal(stored[:, :, :head_dim, :seq], wanted.mT.to(torch.int8))
    assert (stored[:, :, head_dim:] == 0).all() and (stored[..., seq:] == 0).all()
    # what P's codes, which are 128 less than P, take from each tile of 64 keys; and 1.5·2^23, see `sums_of`
    sums = stored.float().unflatten(3, (-1, 64)).sum(4).mT
    assert torch.equal(numbers[:, :, first_sum:], 128 * sums - 1.5 * 2**23)


def test_a_loud_channel_and_a_large_mean_cost_the_others_nothing(int8):
    q, k, v = normal(1, 64, 256, 1, 1, 64)
    quiet, _ = int8.check(q, k, v)
    exact, _ = exact_attention(q, k, v)
    v[..., 5] *= 1000
    v[..., 9] += 4
    out, _ = int8.check(q, k, v)
    others = [d for d in range(64) if d not in (5, 9)]
    assert torch.equal(out[..., others], quiet[..., others])
    error = (out.double() - exact_attention(q, k, v)[0])[..., 9].abs().mean() / exact[..., 9].abs().mean()
    assert error <= 3 * BAR  # of what moves about the mean; fp16 has steps of 1/256 there


# --- the whole recipe ---


@pytest.fixture(params=["converts", "adds_bits"])
def tiles(request, int8, monkeypatch):
    """`int8` with the tile that there is, and with that of GPUs without wgmma: integers become floats by an addition,
    P·V follows its softmax, and channels are multiplied in halves."""
    if int8.tier == "reference":
        pytest.skip("the reference has no such tiles")
    from sage_kernels._triton.attention import launch as launch_attention
    from sage_kernels._triton.attention.tiles import Tile

    choose = launch_attention.device_tile

    def chosen(*args, **kwargs):
        tile = choose(*args, **kwargs)
        if request.param == "adds_bits" and not args[3].by_row:
            tile = Tile(64, 128, 4, 2, "pointers", adds_bits=True, parts=1 if args[1] == 64 else 4)
            int8.blocks, int8.first_max = {"block_q": 64, "block_k": 128}, False
        return tile

    monkeypatch.setattr(launch_attention, "device_tile", chosen)
    return int8


@pytest.mark.parametrize("name", ["late_sink", "falls", "grows_beyond_every_format", "large_and_mixed", "enormous"])
def test_tiles_far_above_or_below_each_other_stay_finite_and_right(name, tiles):
    """Each tile has its own softmax reference, up and down: what sums are rescaled by may not outgrow fp32."""
    q, k, v = climbing(LOGITS[name])
    for options in ({}, {"state": tiles.planned(q, k, v)}):
        out, _ = tiles.check(q, k, v, exponent=2.0**19 if name == "enormous" else 2.0**13, **options)
        exact, _ = exact_attention(q, k, v)
        # of the same tiles: where codes are too coarse for such scores, which keys win is another thing in others
        if "state" in options:
            options = {"state": HeadState(*(x.cpu().clone() for x in options["state"]))}
        scores_alone = relative_l2(ref_attention(q, k, v, **options, **tiles.blocks)[0], exact)  # P·V in 16 bit
        assert torch.isfinite(out).all() and relative_l2(out, exact) <= 1.2 * scores_alone + 1.5 * BAR


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_tile_matches_the_reference(head_dim, tiles):
    q, k, v = normal(1, 70, 300, 2, 1, head_dim)
    for options in ({}, {"scaling": "per_block"}, {"state": tiles.planned(q, k, v)}, {"causal": "bottom_right"}):
        tiles.check(q, k, v, **options)


# --- accuracy ---


def centred_l1(out, exact, v) -> float:
    """Relative L1 of what moves about V's mean, which a large mean must not hide."""
    exact = exact.double()
    size = (exact - v.double().mean(1, keepdim=True)).abs().sum()
    return float((out.to(exact) - exact).abs().sum() / size)


@pytest.mark.parametrize("seq", [1024, pytest.param(16384, marks=pytest.mark.slow("16,384 keys on a CPU"))])
def test_error_stays_below_the_bars_at_any_length(seq):
    """The bars: 2 % on N(0, 1) at 1k and at 16k, where a P rounded against the running max grows to 4 %."""
    q, k, v = normal(1, 256, seq, 2, 2, 128, dtype=torch.float32)
    exact, _ = exact_attention(q, k, v)
    assert relative_l1(sage_attention(q, k, v, recipe=INT8), exact) <= BAR
    assert relative_l1(sage_attention(q, k, v), exact) <= 0.01  # P·V in 16 bit: the scores' share of it
    q, k, v = make_biased(seq)
    exact, _ = exact_attention(q, k, v)
    for block_k in (64, 128):
        out, _ = ref_attention(q, k, v, recipe=INT8, block_k=block_k)
        assert relative_l1(out, exact) <= BIASED_BAR and centred_l1(out, exact, v) <= BIASED_BAR, block_k


def test_what_rounding_takes_from_16_bit_values_averages_out_in_every_channel(int8):
    """Their grid and that of the codes agree in part, and then all of a channel are rounded to one side."""
    q, k, v = normal(1, 64, 4096, 1, 1, 128, dtype=torch.bfloat16)
    error = call(int8, q, k, v)[0].double() - exact_attention(q, k, v)[0].double()
    of_channels = error.square().mean((0, 1, 2)).sqrt()
    assert of_channels.max() <= 1.8 * of_channels.median()


def test_many_keys_of_one_small_weight_count_together(int8):
    """Each is a quarter of a code: rounded alike, all of them would be nothing, or four times what they are."""
    weights = torch.full((4, 64), 2.0**-40)  # other tiles, where V is another
    weights[0], weights[0, 17] = 2.0**-10, 1.0
    q, k, v = (torch.zeros(1, seq, 1, 64, dtype=torch.float16) for seq in (8, 256, 256))
    q[..., 0] = 8.0
    k[0, :, 0, 0] = weights.flatten().log2() / 1.4426950408889634  # one channel: its codes are exact
    v[0, :, 0] = torch.where(weights.flatten() == 2.0**-10, 1.0, -1.0)[:, None]
    out, _ = call(int8, q, k, v)
    exact, _ = exact_attention(q, k, v)
    tail = 63 * 2.0**-10  # of all weights, 0.06
    assert (out - exact).abs().max() <= 0.1 * 2 * tail


# --- with a state ---


def test_values_that_grow_beside_a_plan_are_not_clipped(int8):
    """K's scales are planned, V's never: INT8 has no room for a value that grew."""
    q, k, v = normal(1, 70, 200, 2, 2, 40)
    state = ScaleState([Site("a", 2, 40)], device=int8.device)
    for step, factor in enumerate((1.0, 3.0, 50.0)):
        out, _ = int8.check(q, k, v * factor + step, state=state.head_state(0))
        assert relative_l2(out, exact_attention(q, k, v * factor + step)[0]) <= 1.5 * BAR
        counts, stats = state.head_state(0).counts, state.head_state(0).stats
        assert int(counts[:, COUNT_CLIPPED].sum()) == 0 and float(stats[:, STAT_V_AMAX].abs().sum()) == 0
        state.advance(1 - step / 3, 1 - (step + 1) / 3)
    assert state.summary()[0]["known"]


def test_hoppers_own_kernel_has_it_up_to_128_channels_and_without_masks_of_rows():
    pytest.importorskip("triton")
    from sage_kernels._triton.attention.tiles import choose_tile

    for scaling in ("planned", "per_block", "per_token"):
        assert [choose_tile(90, width, scaling, pv="int8").kernel for width in (64, 128)] == ["hopper"] * 2
        assert choose_tile(90, 256, scaling, pv="int8").kernel == "tma"
        assert choose_tile(90, 128, scaling, by_row=True, pv="int8").kernel == "tma"


def test_the_hopper_kernel_is_refused_before_anything_is_launched(monkeypatch):
    """For the same recipe as printed, Hopper's tile table has no such tile; a benchmark that asks for one is told."""
    pytest.importorskip("triton")
    from sage_kernels._triton.attention import launch as launch_attention
    from sage_kernels._triton.attention.tiles import Tile, choose_tile

    for width in (64, 128, 256):
        for scaling in ("planned", "per_token"):
            assert choose_tile(90, width, scaling, pv="int8_tensor").kernel == "tma"
    monkeypatch.setattr(launch_attention, "launch", None)
    q, k, v = normal(1, 64, 64, 1, 1, 64)
    with pytest.raises(NotImplementedError, match="tile: got .*hopper.* for int_flash_full, expected one of the gen"):
        launch_attention.launch_attention_fwd(
            q, k, v, scale=0.1, scaling="per_token", smooth_k=True, state=None, return_lse=False,
            recipe="int_flash_full", tile=Tile(192, 64, 4, 4, "hopper"),
        )  # fmt: skip
