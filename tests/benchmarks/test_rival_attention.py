"""Other packages' attention is timed beside ours in the same run, in place of the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sage_kernels.results import read_rows


pytest.importorskip("diffusers")
TINY = ["--tiny", "--device", "cpu", "--case", "flux_1024", "--rival", "sageattention_2", "--csv"]


@pytest.fixture(scope="module")
def bench(on_the_path):
    import bench_end_to_end

    return bench_end_to_end


@pytest.fixture
def rivals(bench):
    import rival_attention

    return rival_attention


def test_a_rival_runs_in_place_of_the_models_attention(bench, sageattention, tmp_path):
    assert bench.main([*TINY, str(tmp_path / "rows.csv")]) == 0
    rows = {(r["provider"], r["metric"]): r for r in read_rows(tmp_path / "rows.csv")}
    time, error = (rows["sageattention_2.2.0", metric] for metric in ("time", "rel_l1"))
    assert time["includes_quantization"] == "True" and float(time["ratio_vs_cudnn"]) > 0 and sageattention
    assert 1e-5 < float(error["median"]) < 0.02
    assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention


class Attention(nn.Module):
    def forward(self, query, key, value, **options):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)


def test_masks_shared_heads_and_wide_heads_stay_with_pytorch(rivals, sageattention):
    (rival,) = rivals.imported(["sageattention_2", "sageattention_1", "flash_attn_3"])
    q, k, mask = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16), torch.ones(8, 8, dtype=torch.bool).tril()
    wide = torch.randn(1, 1, 8, 512)  # of a VAE
    model = Attention()
    with rivals.rival_attention(rival, model):
        assert torch.equal(model(wide, wide, wide), scaled_dot_product_attention(wide, wide, wide))
        for options in ({"attn_mask": mask}, {"enable_gqa": True}):
            key = k if "enable_gqa" in options else q
            assert torch.equal(model(q, key, key, **options), scaled_dot_product_attention(q, key, key, **options))
        assert not sageattention
        torch.nn.functional.scaled_dot_product_attention(q, q, q)  # of another model
        assert not sageattention
        assert not torch.equal(model(q, q, q), scaled_dot_product_attention(q, q, q)) and sageattention
    assert "forward" not in model.__dict__
