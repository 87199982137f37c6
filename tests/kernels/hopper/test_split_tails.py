"""The last programs of a launch of the Hopper kernel, cut along the keys so that no SM is idle."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import sage_attention
from sage_kernels._triton.attention.tiles import MAX_PIECES, Tail, Tile, choose_tail
from sage_kernels.facts.masking import NO_MASKING
from sage_kernels.facts.state import COUNT_REDONE, COUNT_TRIED
from sage_kernels.planning.state import ScaleState, Site
from tests.kernels.attention.attention_cases import FP8, normal
from tests.kernels.hopper.test_hopper_kernel import ITS_RECIPES, rounded_like, skip_what_is_the_same


H200 = 132  # SMs


# --- which are cut ---


def test_launches_that_fill_all_sms_to_the_end_stay_whole():
    for tiles in (0, H200, 16 * H200):
        assert choose_tail(tiles, 16896, H200) is None
    assert choose_tail(H200 - 1, 65536, H200) is None  # two pieces each would take two rounds
    for keys in (1, 77, 512, 1023):  # nothing to cut
        assert choose_tail(8, keys, H200) is None


@pytest.mark.parametrize(
    ("tiles", "keys", "pieces"),
    [
        (
            24 * 24,
            4608,
            2,
        ),  # FLUX at 1024²: 48 of 576 tiles are left after four rounds, and 96 pieces take half of one
        (62 * 132 + 8, 16384, 8),  # eight tiles are left
        (12 * 171, 32760, 5),  # Wan: 72 are left, which take three rounds of a fifth
    ],
)
def test_tails_of_known_models(tiles, keys, pieces):
    assert choose_tail(tiles, keys, H200) == Tail(tiles // H200 * H200, pieces)


def test_a_cut_tail_is_shorter_and_every_piece_has_keys():
    for processors in (114, 132):
        for tiles in range(1, 3 * processors):
            for keys in (1024, 1500, 4096, 32768):
                tail = choose_tail(tiles, keys, processors)
                if tail is None:
                    continue
                rest = tiles - tail.whole
                assert tail.whole % processors == 0 and 0 < rest < processors and 2 <= tail.pieces <= MAX_PIECES
                assert -(-rest * tail.pieces // processors) < tail.pieces  # rounds of a piece, for one round of a tile
                assert keys // tail.pieces >= 512


def test_only_tiles_of_one_length_in_the_hopper_kernel_are_cut():
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.attention.launch import can_be_cut
    from sage_kernels._triton.prologue.mask_tiles import MaskTiles

    none, keys = (MaskTiles(kind, *(None,) * (len(MaskTiles._fields) - 1)) for kind in ("none", "keys"))
    hopper, other = Tile(192, 64, 4, 6, "hopper"), Tile(64, 128, 4, 3, "tma")
    assert can_be_cut(hopper, NO_MASKING, none) and not can_be_cut(other, NO_MASKING, none)
    assert not can_be_cut(hopper, NO_MASKING, keys)
    assert not can_be_cut(hopper, NO_MASKING._replace(right=0), none)
    assert not can_be_cut(hopper, NO_MASKING._replace(left=40), none)


def test_fp8_runs_in_the_hopper_kernel_with_a_running_max_on_larger_tiles(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.attention.launch import device_tile

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    band = NO_MASKING._replace(right=0)
    for masking in (NO_MASKING, band):
        lagged, running = (
            device_tile(torch.device("cuda"), 128, "planned", masking, "fp8_e4m3", known) for known in (True, False)
        )
        assert lagged.kernel == running.kernel == "hopper"
        assert (lagged.block_m, lagged.block_n) == (192, 64) and (running.block_m, running.block_n) == (128, 128)
    assert device_tile(torch.device("cuda"), 128, "planned", band).kernel == "hopper"


# --- what comes out ---

TAILS = {"all_in_two": (0, 2), "half_in_three": (2, 3), "last_in_eight": (1, 8)}


@pytest.fixture
def hopper(hopper, monkeypatch):
    """The op whose calls take the Hopper kernel; `cut` says how their tails are cut."""
    from sage_kernels._triton.attention import launch as launch_attention

    def cut(kind):
        def chosen(tiles, *_):
            if kind is None:
                return None
            share, pieces = TAILS[kind]
            return Tail({0: 0, 1: tiles - 1, 2: tiles // 2}[share], pieces)

        monkeypatch.setattr(launch_attention, "choose_tail", chosen)

    hopper.cut = cut
    return hopper


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(113, 1100), (300, 2049)])
@pytest.mark.parametrize("scaling", ["per_token", "per_block", "per_head"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_matches_the_reference(recipe, tail, scaling, lengths, hopper):
    skip_what_is_the_same(hopper, recipe)
    hopper.cut(tail)
    q, k, v = normal(2, *lengths, 4, 2, hopper.head_dim, dtype=torch.bfloat16)
    hopper.check(q, k, v, recipe=recipe, scaling=scaling)


def planned_steps(hopper, recipe, tail):
    """Outputs, LSE, counts and kept maxima of four steps, the third like nothing before."""
    hopper.cut(tail)
    q, k, v = normal(1, 300, 2049, 4, 2, hopper.head_dim, dtype=torch.bfloat16)
    scales = ScaleState([Site("a", 2, hopper.head_dim)], device="cuda")
    state = scales.head_state(0)
    rows = torch.full((1, 4, 300), -torch.inf, device="cuda")
    for step in range(4):
        if step == 2:
            q = 30 * q
        if recipe == FP8:
            state = state.keeping(rows, known=step > 0)
        out, lse = hopper.check(q, k, v, recipe=recipe, state=state, exponent=rounded_like(2000.0, recipe))
        counts = state.counts.sum(0)
        yield (
            out,
            lse,
            (int(counts[COUNT_TRIED]), int(counts[COUNT_REDONE])),
            rows.clone(),
            state.stats.clone(),
        )
        scales.advance(1.0 - step / 4, 0.9 - step / 4)


@pytest.mark.gpu
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_planned_steps_match_the_reference_and_what_whole_tiles_leave(recipe, tail, hopper):
    skip_what_is_the_same(hopper, recipe)
    whole = list(planned_steps(hopper, recipe, None))
    cut = list(planned_steps(hopper, recipe, tail))
    for step, (a, b) in enumerate(zip(whole, cut, strict=True)):
        assert torch.equal(a[4], b[4])
        # a tile counts once, whatever it is cut into; pieces that take their own first tile as a reference may outgrow
        # it where the whole did not, and the other way round
        assert a[2][0] == b[2][0], step
        if recipe == FP8:
            assert a[2][1] == b[2][1], step
            torch.testing.assert_close(a[3], b[3], rtol=1e-6, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_pieces_that_outgrow_their_reference_are_done_again(recipe, tail, hopper):
    """Keys that grow towards the end, by more than any format of P holds, a row of NaN, and one that is far above."""
    skip_what_is_the_same(hopper, recipe)
    hopper.cut(tail)
    q, k, v = normal(1, 200, 2049, 2, 2, hopper.head_dim, dtype=torch.bfloat16)
    k *= torch.linspace(0, 40, 2049)[None, :, None, None]
    k[0, 2000, 1] = 60 * q[0, 7, 1]
    out, _ = hopper.check(q, k, v, recipe=recipe, scaling="per_token", exponent=rounded_like(20000.0, recipe))
    assert out.isfinite().all()
    q[0, 70, 1] = torch.nan
    out, lse = hopper(q, k, v, recipe=recipe, scaling="per_token")
    assert out[0, 70, 1].isnan().all() and int(out.isnan().sum()) == hopper.head_dim and int(lse.isnan().sum()) == 1


@pytest.mark.gpu
def test_sums_of_pieces_that_just_fit_fit_together(hopper):
    """Each piece's sum of P, on the terms of its own first tile, is near the end of fp32's range."""
    if not hopper.tile.keep_first_max:
        pytest.skip("a running max keeps sums small")
    hopper.cut("last_in_eight")
    q, k, v = normal(1, 64, 4096, 1, 1, hopper.head_dim, dtype=torch.bfloat16)
    q[...] = 1.0
    in_first_tile = torch.arange(4096) % 512 < hopper.tile.block_n
    for bits in (100.0, 115.0, 118.0):  # 2^118 · 384 keys or more, eight times
        k[...] = torch.where(in_first_tile, 0.0, bits / (0.5 * hopper.head_dim * 1.4426950408889634))[
            None, :, None, None
        ]
        out, lse = hopper.check(q, k, v, scaling="per_token", exponent=20000.0, scale=0.5)
        assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("recipe", ITS_RECIPES)
def test_results_are_bitwise_repeatable(recipe, tail, hopper):
    """Whichever piece comes last."""
    skip_what_is_the_same(hopper, recipe)
    hopper.cut(tail)
    q, k, v = (x.cuda() for x in normal(4, 500, 4100, 8, 4, hopper.head_dim, dtype=torch.bfloat16))
    first = sage_attention(q, k, v, recipe=recipe, scaling="per_block")
    assert all(torch.equal(first, sage_attention(q, k, v, recipe=recipe, scaling="per_block")) for _ in range(50))
