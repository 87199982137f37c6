"""The Hadamard rotation: orthogonal, the same in kernel and reference, good against outliers that vary by token."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import new_head_state, sage_attention
from sage_kernels.facts.numerics import padded_head_dim, rotation_block
from sage_kernels.facts.state import COUNT_CALLS, COUNT_DYNAMIC
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.reference import ref_rotate
from sage_kernels.reference.quantize import ref_pre_balance
from sage_kernels.testing import FAMILIES, exact_attention, make_qkv, relative_l2, sqnr_db
from tests.kernels.attention.attention_cases import band_mask, key_padding, normal
from tests.support.outliers import varying_outliers
from tests.support.plans import calls_without_a_plan
from tests.support.repository import ROOT


HEAD_DIMS = (5, 8, 40, 59, 64, 80, 96, 128, 160, 256)


def matrix(head_dim: int) -> torch.Tensor:
    """By its definition: [channels, channels] fp64."""
    block, channels = rotation_block(head_dim), padded_head_dim(head_dim)
    assert channels % block == 0 and block & (block - 1) == 0 and channels % (2 * block)
    h = torch.zeros(channels, channels, dtype=torch.float64)
    for i in range(channels):
        for j in range(channels):
            if i // block == j // block:
                h[i, j] = (-1.0) ** ((i % block) & (j % block)).bit_count() / block**0.5
    return h


# --- the matrix ---


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_reference_is_one_orthogonal_matrix(head_dim):
    h = matrix(head_dim)
    torch.testing.assert_close(h @ h.T, torch.eye(len(h), dtype=torch.float64), atol=1e-12, rtol=0)
    q, k, _ = normal(2, 3, 5, 2, 2, head_dim, dtype=torch.float32)
    for x in (q, k):
        torch.testing.assert_close(ref_rotate(x).double(), x.double() @ h[:head_dim], atol=2e-6, rtol=0)
    scores, rotated = (torch.einsum("bshd,bthd->bhst", a, b) for a, b in ((q, k), (ref_rotate(q), ref_rotate(k))))
    torch.testing.assert_close(rotated, scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 256])
def test_kernel_rotates_as_the_reference_from_any_strides(head_dim, kernel_device):
    from sage_kernels._triton.prologue.rotate import launch_rotate

    dtypes = (torch.float16, torch.float32) + ((torch.bfloat16,) if kernel_device.type == "cuda" else ())
    for dtype in dtypes:
        packed = torch.randn(2, 37, 5, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
        q, k = packed[:, :, :3], packed[:, 5:, 3:]
        layouts = {
            "packed": (q, k),
            "[B, H, S, D]": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)),
            "channels first": tuple(x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k)),
            "expanded": (q[:1].expand(2, -1, -1, -1), k),
        }
        for name, inputs in layouts.items():
            for x, out in zip(inputs, launch_rotate(*(x.to(kernel_device) for x in inputs)), strict=True):
                assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
                # half a step of the dtype, and fp32 sums in whatever order
                exact = ref_rotate(x.float()).double()
                step = 0.5 * torch.finfo(dtype).eps * exact.abs().clamp_min(torch.finfo(dtype).tiny)
                block = rotation_block(head_dim)
                sums = x.double().abs().unflatten(3, (-1, block)).sum(-1).repeat_interleave(block, 3)
                assert ((out.cpu().double() - exact).abs() <= step + 2.0**-23 * sums).all(), name


def test_what_is_no_number_stays_in_its_token(kernel_device):
    from sage_kernels._triton.prologue.rotate import launch_rotate

    q, k, _ = normal(1, 70, 70, 2, 2, 40)
    k[0, 3, 1, 7] = float("nan")
    k[0, 60, 0, 39] = float("inf")
    _, out = launch_rotate(q.to(kernel_device), k.to(kernel_device))
    bad = ~torch.isfinite(out.cpu())
    assert bad[0, 3, 1].any() and bad[0, 60, 0].any() and bad[0, 3, 1].sum() + bad[0, 60, 0].sum() == bad.sum()


# --- attention ---


OPTIONS = {
    "per_token": {},
    "per_block": {"scaling": "per_block"},
    "per_head": {"scaling": "per_head"},
    "not smoothed": {"smooth_k": False},
    "causal": {"causal": True},
    "window, sinks": {"causal": "bottom_right", "window": 9, "sinks": torch.tensor([0.5, -1.0])},
    "softcap": {"softcap": 4.0},
    "key mask": {"attn_mask": key_padding([70, 41], 70)},
    "bias": {"attn_mask": torch.linspace(-2, 2, 70).expand(2, 1, 50, 70)},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_rotated_attention_matches_the_reference_and_exact_attention(attend, options):
    options = OPTIONS[options]
    q, k, v = make_qkv("biased_varying_outliers", 2, 50, 70, 2, 2, 64, dtype=torch.float16)
    if options.get("causal") is True:
        q = torch.cat([q, q[:, :20]], 1)
    out, lse = attend.check(q, k, v, rotation="hadamard", **options)
    mask = options.get("attn_mask")
    if "causal" in options:
        mask = band_mask(q.shape[1], 70, options["causal"], options.get("window"))
    exact, exact_lse = exact_attention(
        q, k, v, mask=mask, softcap=options.get("softcap", 0.0), sinks=options.get("sinks")
    )
    coarse = options.get("scaling") == "per_head" or not options.get("smooth_k", True)
    assert sqnr_db(out, exact) > (20 if coarse else 28)
    alone, _ = attend.check(q, k, v, rotation="hadamard", return_lse=False, **options)  # K may be centred before
    assert sqnr_db(alone, exact) > (20 if coarse else 28)
    # the bias of K alone shifts the log-sum-exp by several
    assert (lse - exact_lse).abs().max() < (0.8 if coarse else 0.25)


@pytest.mark.parametrize("head_dim", [5, 40, 59, 80, 128, 256])
def test_rotated_head_dims_with_and_without_a_plan(attend, head_dim):
    q, k, v = normal(1, 35, 70, 4, 2, head_dim)
    attend.check(q, k, v, rotation="hadamard")
    state = ScaleState([Site("other", 1, 256), Site("this", 2, head_dim, "hadamard")], device=attend.device)
    for step in range(2):
        out, _ = attend.check(q, k, v, rotation="hadamard", state=state.head_state(1))
        state.advance(1.0 - step / 2, 0.5)
    exact, _ = exact_attention(q, k, v)
    assert sqnr_db(out, exact) > 34
    assert state.summary()[1]["dynamic_calls"] == 1  # the second call had a plan


# --- plans ---


def test_a_plan_never_serves_a_call_of_the_other_rotation(attend):
    """The weights of a plan are those of its own channels."""
    q, k, v = make_qkv("varying_outliers", 1, 40, 96, 2, 2, 64, dtype=torch.float16)
    exact, _ = exact_attention(q, k, v)
    state = attend.planned(q, k, v)
    for rotation, dynamic in (("none", 0), ("hadamard", 1), ("none", 0)):
        before = state.counts.clone()
        out, _ = attend.check(q, k, v, state=state, rotation=rotation)
        assert (state.counts - before)[:, [COUNT_CALLS, COUNT_DYNAMIC]].tolist() == [[1, dynamic]] * 2
        assert sqnr_db(out, exact) > 26


def test_a_site_that_changes_its_rotation_forgets_what_it_learnt():
    state = ScaleState([Site("a", 2, 59), Site("b", 1, 64)], device="cpu")
    inputs = [normal(1, 40, 96, 2, 2, 59, dtype=torch.float32), normal(1, 40, 96, 1, 1, 64, dtype=torch.float32)]

    def step(rotation, u=0.5):
        for index, (given, own) in enumerate(zip(inputs, (rotation, "none"), strict=True)):
            out = sage_attention(*given, state=state.head_state(index), rotation=own)
            assert sqnr_db(out, exact_attention(*given)[0]) > 34
        state.advance(u, u)

    for _ in range(2):
        state.begin_run(0.5)
        step("none")
    tensors = [*state.head_state(0)]
    state.set_rotation(0, "hadamard")
    assert all(a is b for a, b in zip(tensors, state.head_state(0), strict=True))  # compiled models hold them
    assert state.sites == [Site("a", 2, 59, "hadamard"), Site("b", 1, 64)]
    assert [row["known"] for row in state.summary()] == [False, True]
    learnt = state.snapshot()
    assert not learnt["table_run"][:, :2].any() and learnt["table_run"][:, 2].any()
    assert not learnt["table"][:, :2].any() and not learnt["plan"][:2].any()
    for _ in range(2):
        step("hadamard")
    # one call each without a plan: the first of each of two runs, and the first in the other channels
    assert [calls_without_a_plan(row) for row in state.summary()] == [3, 2]
    state.set_rotation(0, "none")
    step("none")
    assert [calls_without_a_plan(row) for row in state.summary()] == [4, 2]


# --- what it is for ---


def measured(family, mode, rotation, dtype=torch.bfloat16, head_dim=128):
    """SQNR in dB against exact attention of the given inputs, of the second step."""
    site = Site("a", 2, head_dim, rotation)
    state = ScaleState([site], device="cpu") if mode == "planned" else None
    for seed in range(2 if state else 1, 0, -1):
        q, k, v = make_qkv(family, 1, 256, 1024, 2, 2, head_dim, dtype=dtype, seed=seed)
        options = {"state": state.head_state(0)} if state else {"scaling": mode}
        out = sage_attention(q, k, v, rotation=rotation, **options)
        if state:
            state.advance(0.5, 0.5)
    return sqnr_db(out, exact_attention(q, k, v)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["varying_outliers", "biased_varying_outliers"])
def test_rotation_reaches_29_db_on_outliers_that_vary_by_token(family, dtype):
    """The balance of channels alone reaches it where the channels of a head are always the same ones."""
    plain, rotated = (measured(family, "per_token", rotation, dtype) for rotation in ("none", "hadamard"))
    assert plain >= 29 and rotated >= 29, (plain, rotated)
    q, k, v = normal(1, 256, 512, 2, 2, 64, dtype=torch.float32)
    q, k, v = (x.to(dtype) for x in (varying_outliers(q, 16.0), varying_outliers(k, 16.0), v))
    exact, _ = exact_attention(q, k, v)
    plain, rotated = (sqnr_db(sage_attention(q, k, v, rotation=name), exact) for name in ("none", "hadamard"))
    assert plain < 27 and rotated >= 29 and rotated > plain + 6, (plain, rotated)


def turning(dtype):
    """Keys with a mean that turns slowly, as rotary embeddings of a low frequency make of a bias, and loud queries."""
    q, k, v = normal(2, 96, 96, 4, 2, 32, dtype=torch.float32)
    angle = torch.arange(96) / 60
    k[..., 3] += 60 * angle.cos()[None, :, None]
    k[..., 19] += 60 * angle.sin()[None, :, None]
    q[..., [3, 19]] /= 20
    return [x.to(dtype) for x in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_plan_a_rotation_never_loses(dtype):
    """A sixth for what two samples of channels differ by; bf16 rounds Q and K twice more than INT8 alone."""
    moving = normal(2, 96, 96, 4, 2, 32, dtype=torch.float32)
    moving = [x.to(dtype) for x in (varying_outliers(moving[0], 12.0), varying_outliers(moving[1], 12.0), moving[2])]
    for (q, k, v), share in ((moving, 0.6), (turning(dtype), 7 / 6)):
        exact, _ = exact_attention(q, k, v, mask=band_mask(96, 96, True))
        plain, rotated = (
            relative_l2(sage_attention(q, k, v, causal=True, rotation=name).double(), exact)
            for name in ("none", "hadamard")
        )
        assert rotated < share * plain


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_balance_before_a_rotation_changes_scores_by_a_constant_of_each_row(dtype, centered):
    q, k, _ = turning(dtype)
    k[:, :, 1] = 1.0  # a head without range once its centre is gone
    one, other = (
        torch.einsum("bshd,bthd->bhst", x.double(), y.repeat_interleave(2, 2).double())
        for x, y in ((q, k), ref_pre_balance(q, k, None, centered))
    )
    change = other - one
    if centered:
        change = change - change.mean(-1, keepdim=True)
    assert change.isfinite().all() and change.abs().max() <= 16 * torch.finfo(dtype).eps * one.abs().max()


@pytest.mark.parametrize("mode", ["per_token", "per_block", "planned"])
def test_rotation_costs_little_where_nothing_is_wrong(mode):
    plain, rotated = (measured("normal", mode, rotation) for rotation in ("none", "hadamard"))
    assert rotated > plain - 0.5, (plain, rotated)


@pytest.mark.slow("measures a table")
def test_the_table_of_the_documentation_is_what_is_measured():
    """kernels/README.md, section 7: a row a family, a cell "without → with" for each scaling."""
    readme = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    rows = [
        line.replace("*", "").split("|")[1:-1]
        for line in readme.splitlines()
        if line[:1] == "|" and line.count(" → ") == 3
    ]
    assert {row[0].split(":")[0].strip() for row in rows} <= set(FAMILIES) and len(rows) >= 6
    for name, *cells in rows:
        for mode, cell in zip(("per_token", "per_block", "planned"), cells, strict=True):
            for rotation, written in zip(("none", "hadamard"), cell.split("→"), strict=True):
                found = measured(name.split(":")[0].strip(), mode, rotation)
                assert found == pytest.approx(float(written), abs=0.15), (name, mode, rotation)


def test_rotation_is_an_option_that_is_checked():
    q, k, v = normal(1, 8, 8, 1, 1, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="rotation: got 'givens', expected one of"):
        sage_attention(q, k, v, rotation="givens")
    state = new_head_state(1, 16, "cpu")
    assert torch.equal(sage_attention(q, k, v, rotation="none"), sage_attention(q, k, v)) and not torch.equal(
        sage_attention(q, k, v, rotation="hadamard", state=state), sage_attention(q, k, v)
    )
