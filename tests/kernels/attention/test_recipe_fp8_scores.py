"""The recipe qk_fp8_pv_fp8: all four of Q, K, P and V in e4m3, sums in fp32."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import RECIPES, SCALINGS, new_skip_state, sage_attention
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.reference import ref_quantize
from sage_kernels.testing import exact_attention, relative_l2
from tests.kernels.attention.attention_cases import normal, running


pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("true_fp8")]

NAN = float("nan")
FP8 = "qk_fp8_pv_fp8"
BAR = 0.07  # relative L2 on N(0, 1): one rounding to e4m3 is off by 2.6 %, of Q, K, P and V


@pytest.fixture
def fp8(attend):
    """`attend`, running this recipe."""
    return running(attend, FP8)


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


def test_plans_follow_values_that_grow_and_count_them(fp8):
    q, k, v = normal(1, 70, 200, 2, 2, 40)
    state = ScaleState([Site("a", 2, 40)], device=fp8.device)
    for step, factor in enumerate((1.0, 0.5, 2.0)):
        out, _ = fp8.check(q, k * factor, v, state=state.head_state(0))
        assert relative_l2(out, exact_attention(q, k * factor, v)[0]) <= 1.5 * BAR
        state.advance(1 - step / 3, 1 - (step + 1) / 3)
    assert state.summary()[0]["known"]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_error_is_what_it_is_said_to_be(scaling):
    """A format with a floating point hardly minds a coarse scale; what it costs is its 4 bits."""
    q, k, v = normal(1, 256, 1024, 2, 2, 128, dtype=torch.float32)
    exact, _ = exact_attention(q, k, v)
    error = relative_l2(sage_attention(q, k, v, recipe=FP8, scaling=scaling), exact)
    assert 0.04 <= error <= BAR


def test_what_it_has_not_is_refused():
    q, k, v = normal(1, 64, 64, 1, 1, 64)
    state = ScaleState([Site("a", 1, 64)], device=torch.device("cpu")).head_state(0)
    with pytest.raises(
        NotImplementedError, match=f"skip: got lists with recipe '{FP8}', expected one with Q and K in"
    ):
        sage_attention(q, k, v, recipe=FP8, state=state, skip=new_skip_state(1, 1, 64, 64, 64, "cpu", recipe=FP8))


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
