"""The recipe qk_fp8_pv_fp8: all four of Q, K, P and V in e4m3, sums in fp32."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import RECIPES, SCALINGS, sage_attention
from sage_kernels.reference import ref_quantize
from sage_kernels.testing import exact_attention, relative_l2
from tests.kernels.attention.attention_cases import normal


pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("true_fp8")]

FP8 = "qk_fp8_pv_fp8"
BAR = 0.07  # relative L2 on N(0, 1): one rounding to e4m3 is off by 2.6 %, of Q, K, P and V


def test_codes_are_e4m3_of_the_int8_scale():
    x = torch.randn(1, 2, 50, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = ref_quantize(x, 1, qk="fp8_e4m3")
    assert torch.equal(codes, codes.to(torch.float8_e4m3fn).float()) and codes.abs().max() == 128
    torch.testing.assert_close(128 * scale, 127 * ref_quantize(x, 1)[1])
    largest = x.abs() == x.abs().amax(-1, keepdim=True)
    torch.testing.assert_close((codes * scale)[largest], x[largest], rtol=1e-6, atol=0)  # it is not rounded
    error = (codes * scale - x).abs()
    # half a step of 2^-3 of the power of two below, or of the smallest number's
    assert (error <= x.abs() * 2.0**-4 + scale * 2.0**-10).all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_error_is_what_it_is_said_to_be(scaling):
    """A format with a floating point hardly minds a coarse scale; what it costs is its 4 bits."""
    q, k, v = normal(1, 256, 1024, 2, 2, 128, dtype=torch.float32)
    exact, _ = exact_attention(q, k, v)
    error = relative_l2(sage_attention(q, k, v, recipe=FP8, scaling=scaling), exact)
    assert 0.04 <= error <= BAR


@pytest.mark.parametrize("width", [64, 128, 256])
def test_hopper_s_own_kernel_runs_it_but_at_width_256(width, monkeypatch):
    pytest.importorskip("triton")
    from sage_kernels._triton.attention import launch as launch_attention

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    device = torch.device("cuda")
    for lagged in (False, True):
        for scaling in ("planned", "per_token"):
            tile = launch_attention.device_tile(device, width, scaling, pv="fp8_e4m3", lagged=lagged)
            assert (tile.kernel == "hopper") is (width <= 128)
    assert RECIPES[FP8].hopper
