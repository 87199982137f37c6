"""Two GPUs: context parallelism with NCCL, a model spread over both, training on the one that is not current."""

from __future__ import annotations

import pytest
import torch

import sage_processors as sp
from sage_kernels import differentiable_attention
from sage_kernels.testing import make_qkv, relative_l2, sqnr_db
from tests.diffusion.calls.test_parallel_models import AS_ALONE_DB, EVERY
from tests.support.tiny_models import MODELS
from tests.support.two_processes import two_processes


pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]


@pytest.fixture(autouse=True)
def _two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """{(kind, case): one row of each process}."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    found: dict = {}
    for row in two_processes("diffusion/calls/parallel_models", tmp_path_factory, "cuda"):
        found.setdefault((row["kind"], row["case"]), []).append(row)
    return found


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_P60_two_gpus_draw_what_one_draws(rows, kind, name):
    pair = rows[kind, name]
    assert len(pair) == 2 and pair[0]["sum"] == pair[1]["sum"]
    for row in pair:
        assert row["to_alone"] > row["alone_to_exact"] - AS_ALONE_DB and row["calls"] > 0
        assert row["reported_bytes"] == row["sent_bytes"] > 0


def test_P66_two_gpus_replay_graphs_with_collectives(tmp_path_factory):
    found: dict = {}
    for row in two_processes("diffusion/calls/parallel_peers", tmp_path_factory, "cuda"):
        found.setdefault(row["case"], []).append(row)
    assert [row["live"] for row in found.pop("end")] == [[1, 0], [1, 0]]
    assert len(found) == 8
    for case, pair in found.items():
        assert pair[0]["replays"] == pair[1]["replays"] > 0, case
        assert all(all(row["same"]) for row in pair), case
        assert "alike" not in case or set(pair[0]["eager"]) == {"warm_up"}


def test_E03_a_model_whose_blocks_are_on_two_gpus():
    """What device_map="balanced" of one model leaves: accelerate moves activations between the blocks."""
    from accelerate import dispatch_model

    model, inputs = MODELS["flux"]()
    inputs = {name: x.to("cuda:0") for name, x in inputs.items()}
    with torch.no_grad():
        stock = model.to("cuda:0")(**inputs, return_dict=False)[0]
        places = {name: 0 for name, _ in model.named_children()} | {"single_transformer_blocks": 1}
        model = dispatch_model(model, places)
        with sp.apply(model, sp.SageAttnProcessor(min_tokens=0, on_unsupported="raise")) as handle:
            for _ in range(2):
                out = model(**inputs, return_dict=False)[0]
            report = handle.report()
    assert report.calls == 2 * len(report.rows) and not report.fallbacks
    assert out.device == stock.device and sqnr_db(out, stock) > 30


def test_E03_gradients_on_a_gpu_that_is_not_the_current_one():
    q, k, v = make_qkv("normal", 1, 200, 200, 2, 2, 64, dtype=torch.bfloat16)
    grads = []
    for device in ("cuda:0", "cuda:1"):
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        out = differentiable_attention(*leaves, causal=True)
        grads.append([x.cpu() for x in torch.autograd.grad(out.float().square().sum(), leaves)])
        assert torch.cuda.current_device() == 0
    assert max(relative_l2(x, y) for x, y in zip(*grads, strict=True)) < 2**-7
