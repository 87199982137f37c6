"""The recipe "mixed" in a pipeline: what runs, what stays exact, what the report says, what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import sage_processors as sp
from sage_kernels import Mixed
from sage_processors.calibration.policy_files import read_policy, write_policy
from tests.diffusion.calls.test_processors import sqnr_db
from tests.support.tiny_pipelines import ddpm_pipe


NVFP4 = sp.SageAttnProcessor(recipe="mixed", mixed={"base": "nvfp4", "budget": 0.3, "keep_blocks": True}, min_tokens=1)


def test_a_pipeline_runs_in_two_precisions_and_says_so():
    pipe, run = ddpm_pipe()
    stock = run()
    with pipe.set_attn_processor(NVFP4) as handle:
        ours = run()
        report = handle.report()
        assert handle._denoisers[0].state is None  # nothing is planned
    rows = [row for row in report.rows if row["status"] == "active"]
    assert rows and 10 < sqnr_db(ours, stock) < 70
    for row in rows:
        facts = row["mixed"]
        assert row["calls"] == row["dynamic_calls"] == 4 and not row["fallbacks"]
        assert (row["recipe"], row["scaling"]) == ("mixed", "per_token")
        assert facts["base"] == "nvfp4" and facts["selector"] == "block_mean"
        chosen = [x for line in facts["block_map"] for x in line]
        assert sum(chosen) / len(chosen) == pytest.approx(facts["share"], abs=1e-3)
        assert "of its blocks promoted to 16 bit, the others in nvfp4 (block_mean)" in row["note"]
    assert "promoted to 16 bit" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["rows"][0]["mixed"]["block_map"]


def test_calls_with_masks_stay_exact_and_are_counted():
    pipe, _ = ddpm_pipe()
    with sp.apply(
        pipe, dataclasses.replace(NVFP4, mixed=dataclasses.replace(NVFP4.mixed, keep_blocks=False))
    ) as handle:
        layer = handle._denoisers[0].layers[0]
        x, mask = torch.randn(1, 12, layer.module.to_q.in_features), torch.zeros(1, 1, 12)
        with torch.no_grad():
            layer.module(x, attention_mask=mask)
        row = next(row for row in handle.report().rows if row["layer"].endswith(layer.name))
        assert row["fallbacks"] == {"mixed_mask": 1} and row["calls"] == 0
        assert row["mixed"]["block_map"] is None
    with sp.apply(pipe, dataclasses.replace(NVFP4, on_unsupported="raise")) as handle, torch.no_grad():
        layer = handle._denoisers[0].layers[0]
        with pytest.raises(sp.UnsupportedAttentionError, match="mixed_mask"):
            layer.module(x, attention_mask=mask)


def test_options_are_read_back_from_a_policy(tmp_path):
    path = tmp_path / "policy.json"
    budget, result = {"target_psnr": 30.0}, {"psnr_db": 31.0}
    write_policy(path, NVFP4, [], budget=budget, result=result, curve=[])
    assert read_policy(path)[0] == NVFP4
    assert NVFP4.mixed == Mixed("nvfp4", budget=0.3, keep_blocks=True)


def test_one_layer_in_two_precisions_the_others_as_they_are():
    pipe, run = ddpm_pipe()
    handle = sp.apply(pipe, sp.SageAttnProcessor(min_tokens=1, layers={"*mid_block*": {"recipe": "mixed"}}))
    run()
    recipes = {row["layer"]: row["recipe"] for row in handle.report().rows if row["status"] == "active"}
    handle.remove()
    assert {("mid_block" in layer, recipe) for layer, recipe in recipes.items()} == {
        (True, "mixed"), (False, "qk_int8_pv_bf16")
    }  # fmt: skip


def test_who_can_not_run_it_refuses_it():
    with pytest.raises(ValueError, match="recipe: got 'mixed'"):
        sp.register_diffusers_backend(recipe="mixed")
    pipe, _ = ddpm_pipe()
    with pytest.raises(NotImplementedError, match="recipes: got 'mixed'"):
        sp.calibrate(pipe, ["an owl"], target_psnr=30, recipes=["mixed"])
