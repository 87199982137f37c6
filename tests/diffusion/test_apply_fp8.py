"""The recipe qk_int8_pv_fp8 in a pipeline: row maxima are kept from step to step, and the report shows what ran."""

import dataclasses

import pytest
import torch

import sage_processors as sp
from sage_kernels.planning import row_maxima
from sage_kernels.planning.row_maxima import RowMaxima
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import make_qkv
from sage_processors.diffusion.calls.row_maxima_op import attention_keeping, keep_rows_of
from tests.diffusion.calls.test_processors import sqnr_db
from tests.support.tiny_pipelines import ddpm_pipe


FP8 = sp.SageAttnProcessor(recipe="qk_int8_pv_fp8", min_tokens=1)
CPU = torch.device("cpu")


@pytest.fixture
def near(monkeypatch):
    """Steps that are near each other from the first on."""
    monkeypatch.setattr(row_maxima, "FIRST_STEPS", 0)


@pytest.mark.parametrize("config", [FP8, dataclasses.replace(FP8, scaling="per_token")])
def test_pipeline_runs_in_fp8_and_says_so(config, near):
    pipe, run = ddpm_pipe()
    stock = run()
    with pipe.set_attn_processor(config) as handle:
        ours = run()
        rows = [row for row in handle.report().rows if row["status"] == "active"]
        state = handle._denoisers[0].state
        lagged = [] if state is None else [site["lagged"] for site in state.summary()]
        again = run()
    assert rows and all(row["recipe"] == "qk_int8_pv_fp8" and row["calls"] == 4 for row in rows)
    assert 20 < sqnr_db(ours, stock) < 70  # FP8's noise, and something did change
    for row in rows:
        assert (0 <= row["redone_fraction"] < 1) if config is FP8 else row["redone_fraction"] == 0
        assert row["redone_fraction"] == 0 or "done again" in row["note"]
    # three steps of four; without a state there is nothing to keep
    assert all(tiles > 0 and tiles % 3 == 0 for tiles in lagged) and bool(lagged) == (config is FP8)
    assert torch.isfinite(again).all()


def test_row_maxima_are_kept_by_shape_and_place_in_the_step(near):
    kept = RowMaxima()
    calls = [kept.of(site, (1, 2, 8), CPU) for site in (0, 0, 1)]
    first, second, _ = (rows for rows, known in calls if not known)
    assert len({rows.data_ptr() for rows, _ in calls}) == 3
    kept.next_step()
    for rows in (first, second):
        again, known = kept.of(0, (1, 2, 8), CPU)
        assert again is rows and known
    assert kept.of(0, (2, 2, 8), CPU)[0].shape == (2, 2, 8)
    assert kept.nbytes == 4 * 16 * 5
    kept.next_step()  # site 1 was not called, and its rows went with the step before
    kept.next_step()
    assert kept.nbytes == 0
    kept.of(0, (1, 2, 8), CPU)
    kept.clear()
    assert kept.nbytes == 0 and kept.of(0, (1, 2, 8), CPU)[1] is False


def test_row_maxima_stay_within_their_limit(near):
    kept = RowMaxima(limit=4 * 16)
    assert kept.of(0, (1, 2, 8), CPU)[0].shape == (1, 2, 8)
    assert kept.of(1, (1, 2, 8), CPU) is None  # a running max
    assert kept.nbytes == 4 * 16


def test_nothing_is_kept_while_steps_pass_in_compiled_code(near):
    """Nobody could say of which step rows are: each call would seem one more of the same step."""
    kept = RowMaxima()

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        kept.next_step()
        return x + 1

    for _ in range(3):
        step(torch.zeros(1))
        assert kept.of(0, (1, 2, 8), CPU) is None
    kept.clear()  # a run that is not compiled
    assert kept.nbytes == 0 and kept.of(0, (1, 2, 8), CPU) is not None


def test_compiled_calls_find_the_row_maxima_of_their_site(near):
    """By their state's own tensors; what is gone is not asked, and a state that nobody registered runs as it is."""
    q, k, v = make_qkv("normal", 1, 40, 70, 2, 1, 64)
    options = {"attn_mask": None, "causal": False, "recipe": FP8.recipe, "scaling": "per_block", "rotation": "none"}
    scales = [ScaleState([Site("a", 1, 64)], device="cpu") for _ in range(2)]

    def call(which):
        return attention_keeping(q, k, v, **options, scale=None, state=scales[which].head_state(0))

    keep_rows_of(scales[0].head_state(0), scales[0].kept.row_maxima, 0)
    for step in range(2):
        outs = [call(which) for which in range(2)]
        torch.testing.assert_close(*outs, rtol=0, atol=0.05)
        assert [x.summary()[0]["lagged"] > 0 for x in scales] == [step > 0, False]
        for x in scales:
            x.advance(1.0, 0.9)
    assert scales[0].kept.row_maxima.nbytes == 4 * 2 * 40 and scales[1].kept.row_maxima.nbytes == 0
    before, scales[0].kept.row_maxima = scales[0].summary()[0]["lagged"], RowMaxima()  # the old one is gone
    call(0)
    assert scales[0].summary()[0]["lagged"] == before
