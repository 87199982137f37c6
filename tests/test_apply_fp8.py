"""The recipe qk_int8_pv_fp8 in a pipeline: row maxima kept from step to step, and a report of what ran."""

import dataclasses

import pytest
import torch

import sage_processors as sp
from sage_processors.row_maxima import RowMaxima
from tests.test_apply_pipelines import ddpm_pipe
from tests.test_processors import sqnr_db


FP8 = sp.SageAttnProcessor(recipe="qk_int8_pv_fp8", min_tokens=1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("config", [FP8, dataclasses.replace(FP8, scaling="per_token")])
def test_pipeline_runs_in_fp8_and_says_so(config):
    pipe, run = ddpm_pipe()
    stock = run()
    with pipe.set_attn_processor(config) as handle:
        ours = run()
        rows = [row for row in handle.report().rows if row["status"] == "active"]
        again = run()
    assert rows and all(row["recipe"] == "qk_int8_pv_fp8" and row["calls"] == 4 for row in rows)
    assert 20 < sqnr_db(ours, stock) < 70  # FP8's noise, and something did change
    for row in rows:
        # steps of 4 that were done again: the first, and a few tiles; without a state there is nothing to keep
        assert (0.25 <= row["redone_fraction"] < 1) if config is FP8 else row["redone_fraction"] == 0
        assert row["redone_fraction"] == 0 or "done again" in row["note"]
    assert torch.isfinite(again).all()


def test_row_maxima_are_kept_by_shape_and_place_in_the_step():
    kept = RowMaxima()
    first, second, other = kept.of(0, (1, 2, 8), CPU), kept.of(0, (1, 2, 8), CPU), kept.of(1, (1, 2, 8), CPU)
    assert len({x.data_ptr() for x in (first, second, other)}) == 3 and (first == -torch.inf).all()
    kept.next_step()
    assert kept.of(0, (1, 2, 8), CPU) is first and kept.of(0, (1, 2, 8), CPU) is second
    assert kept.of(0, (2, 2, 8), CPU).shape == (2, 2, 8)
    assert kept.nbytes == 4 * 16 * 5
    kept.next_step()  # site 1 was not called, and its rows went with the step before
    kept.next_step()
    assert kept.nbytes == 0
    kept.of(0, (1, 2, 8), CPU)
    kept.clear()
    assert kept.nbytes == 0 and (kept.of(0, (1, 2, 8), CPU) == -torch.inf).all()


def test_row_maxima_stay_within_their_limit():
    kept = RowMaxima(limit=4 * 16)
    assert kept.of(0, (1, 2, 8), CPU).shape == (1, 2, 8)
    assert kept.of(1, (1, 2, 8), CPU).shape == (0,)  # a running max
    assert kept.nbytes == 4 * 16


def test_row_maxima_can_be_written_outside_of_inference_mode():
    kept = RowMaxima()
    with torch.inference_mode():
        rows = kept.of(0, (1, 2, 8), CPU)
    assert not rows.is_inference()
