"""Gradients through INT8 attention: against exact attention's in fp64, and against the formula at the same output."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sage_kernels
from sage_kernels import compat, differentiable_attention, has_fused_backward
from sage_kernels.ops import backward
from sage_kernels.reference.backward import ref_attention_backward
from sage_kernels.testing import exact_attention, make_qkv, relative_l2


# How far gradients may be from exact attention's on N(0, 1). A forward off by ΔO and Δlse has, to first order,
# dS off by -Δlse · dS - P · rowsum(dO ∘ ΔO): both terms are relative errors of the forward, 0.7 to 1 % there, and what
# it rounds wrong in one row is independent of the next. 2 % is twice that.
NEAR = 0.02
SAME = 2e-6  # fp32 sums in another order


def leaves(*shape, kv_heads=None, seq_kv=None, dtype=torch.float32, device="cpu"):
    """q, k and v that need gradients, and the gradient of the output. shape: B, S_q, H, D."""
    batch, seq_q, heads, head_dim = shape
    sizes = batch, seq_q, seq_kv or seq_q, heads, kv_heads or heads, head_dim
    q, k, v = (x.requires_grad_() for x in make_qkv("normal", *sizes, dtype=dtype, device=device))
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(7)).to(device, dtype)
    return q, k, v, grad


def exact_gradients(q, k, v, grad, mask=None, **options):
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(exact_attention(q, k, v, mask=mask, **options)[0], (q, k, v), grad.double())


def errors(found, wanted):
    return [float(relative_l2(x.detach(), y.detach())) for x, y in zip(found, wanted, strict=True)]


def band(seq_q, seq_kv, causal, device="cpu"):
    rows, keys = torch.arange(seq_q, device=device)[:, None], torch.arange(seq_kv, device=device)
    return keys <= rows + (seq_kv - seq_q if causal == "bottom_right" else 0)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_T07_gradients_are_near_those_of_exact_attention(head_dim, causal, dtype, device):
    q, k, v, grad = leaves(2, 301, 2, head_dim, dtype=dtype, device=device)
    found = torch.autograd.grad(differentiable_attention(q, k, v, causal=causal), (q, k, v), grad)
    wanted = exact_gradients(q, k, v, grad, band(301, 301, "", device) if causal else None)
    assert max(errors(found, wanted)) < NEAR
    # by head, too, and where the row with the fewest keys weighs most
    worst = [relative_l2(x, y, dim=(1, 3)).max() for x, y in zip(found, wanted, strict=True)]
    assert max(worst) < 1.5 * NEAR


@pytest.mark.parametrize(
    ("recipe", "scaling"), [(r.name, s) for r in sage_kernels.RECIPES.values() for s in r.scalings]
)
def test_T07_gradients_are_of_the_output_and_the_sums_that_the_forward_returned(recipe, scaling):
    q, k, v, grad = leaves(1, 130, 4, 40, kv_heads=2)
    options = {"recipe": recipe, "scaling": scaling, "rotation": "hadamard", "causal": True, "scale": 0.3}
    out = differentiable_attention(q, k, v, **options)
    found = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        same, lse = sage_kernels.sage_attention(q, k, v, return_lse=True, **options)
    assert torch.equal(out, same)
    wide = [x.detach().double() for x in (grad, q, k, v, same, lse)]
    assert max(errors(found, ref_attention_backward(*wide, scale=0.3, causal="top_left"))) < SAME


def masked(kind, batch, heads, seq_q, seq_kv):
    generator = torch.Generator().manual_seed(3)
    by_key = "key" in kind
    mask = torch.rand(batch, 1 if by_key else heads, 1 if by_key else seq_q, seq_kv, generator=generator) > 0.3
    if kind == "rows":
        mask[:, :, 3:5] = False  # these see nothing
    if kind.endswith("_bias"):
        mask = torch.where(mask, 3 * torch.randn(mask.shape, generator=generator), -torch.inf)
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("lengths", "causal", "kind"),
    [
        ((70, 70), "top_left", None),
        ((50, 71), "top_left", None),
        ((71, 50), "top_left", None),
        ((50, 71), "bottom_right", None),
        ((71, 50), "bottom_right", None),
        ((71, 50), "", "keys"),
        ((71, 50), "", "keys_bias"),
        ((71, 50), "", "rows"),
        ((71, 50), "", "rows_bias"),
    ],
)
def test_T08_causality_of_two_lengths_masks_and_grouped_heads(lengths, causal, kind, fused, dtype, monkeypatch):
    if not fused:
        monkeypatch.setattr(compat, "flash_backward_for_cpu", None)
    q, k, v, grad = leaves(2, lengths[0], 4, 24, seq_kv=lengths[1], kv_heads=2, dtype=dtype)
    assert has_fused_backward(q) == fused
    mask = None if kind is None else masked(kind, 2, 4, *lengths)
    found = torch.autograd.grad(
        differentiable_attention(q, k, v, attn_mask=mask, causal=causal or False), (q, k, v), grad
    )
    assert [x.dtype for x in found] == [dtype] * 3
    seen = band(*lengths, causal) if causal else mask
    assert max(errors(found, exact_gradients(q, k, v, grad, seen))) < NEAR
    with torch.no_grad():
        out, lse = sage_kernels.sage_attention(q, k, v, attn_mask=mask, causal=causal or False, return_lse=True)
    wide = [x.detach().double() for x in (grad, q, k, v, out, lse)]
    wanted = ref_attention_backward(*wide, scale=24**-0.5, attn_mask=mask, causal=causal)
    # bf16: what the rounding of P, dS and of the result may take; each is 2^-9, and there are two sums of parts
    assert max(errors(found, wanted)) < (SAME if dtype == torch.float32 else 4 * 2**-9)
    if causal:  # rows and keys that see nothing of each other
        blind, unseen = ~seen.any(1), ~seen.any(0)
        assert found[0][:, blind].abs().sum() == found[1][:, unseen].abs().sum() == 0
        assert found[2][:, unseen].abs().sum() == 0
    elif kind == "rows":
        assert found[0][:, 3:5].abs().sum() == 0


@pytest.mark.parametrize("kind", ["keys", "keys_bias"])
def test_T08_hidden_keys_may_hold_anything_and_get_no_gradient(kind):
    q, k, v, grad = leaves(2, 40, 2, 16, seq_kv=33)
    mask = masked(kind, 2, 2, 40, 33)
    hidden = ~(mask if mask.dtype == torch.bool else mask > -torch.inf)[:, 0, 0]
    wanted = torch.autograd.grad(differentiable_attention(q, k, v, attn_mask=mask), (q, k, v), grad)
    with torch.no_grad():
        k[hidden], v[hidden] = torch.nan, torch.inf
    found = torch.autograd.grad(differentiable_attention(q, k, v, attn_mask=mask), (q, k, v), grad)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert found[1][hidden].abs().sum() == 0 and found[2][hidden].abs().sum() == 0


def test_T08_strides_do_not_matter():
    q, k, v, grad = leaves(2, 40, 2, 16, seq_kv=33)
    wanted = torch.autograd.grad(differentiable_attention(q, k, v), (q, k, v), grad)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(differentiable_attention(*strided), strided, grad.mT.contiguous().mT)
    assert max(errors(found, wanted)) < SAME
    expanded = torch.ones(()).expand(q.shape)
    out = differentiable_attention(*strided)
    assert (
        max(errors(torch.autograd.grad(out, strided, expanded), exact_gradients(q, k, v, torch.ones(q.shape)))[2:])
        < NEAR
    )


@pytest.mark.parametrize("head_dim", [36, 40, 64])
@pytest.mark.parametrize("causal", ["", "top_left", "bottom_right"])
def test_T08_the_call_on_a_gpu_fits_the_signature_of_its_kernel(causal, head_dim, monkeypatch):
    """Shapes and types alone, on a device without memory: the kernel is asked for heads of a multiple of 8."""
    asked, kernel = [], compat.flash_backward

    def recorded(*given, **options):
        asked.append(given[1].shape[3])
        return kernel(*given, **options)

    monkeypatch.setattr(compat, "flash_backward", recorded)
    monkeypatch.setattr(backward, "has_fused_backward", lambda q, mask=None: True)
    q, k = (torch.zeros(2, s, h, head_dim, dtype=torch.bfloat16, device="meta") for s, h in ((100, 4), (130, 2)))
    lse = torch.zeros(2, 100, 4, device="meta")
    found = backward.attention_backward(q, q, k, k, q, lse, scale=0.1, causal=causal)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape] and all(x.dtype == q.dtype for x in found)
    assert asked and all(channels == -(-head_dim // 8) * 8 for channels in asked)


def test_T08_ring_parts_of_the_keys_add_up():
    q, k, v, grad = (x.detach() for x in leaves(1, 60, 2, 32))
    out, lse = sage_kernels.sage_attention(q, k, v, return_lse=True)
    whole = backward.attention_backward(grad, q, k, v, out, lse, scale=0.2)
    first, second = (
        backward.attention_backward(grad, q, k[:, part], v[:, part], out, lse, scale=0.2)
        for part in (slice(0, 25), slice(25, None))
    )
    joined = first[0] + second[0], torch.cat([first[1], second[1]], 1), torch.cat([first[2], second[2]], 1)
    assert max(errors(joined, whole)) < SAME


@pytest.mark.slow("opcheck runs a call in many ways")
def test_T09_opcheck():
    q, k, v, grad = leaves(1, 20, 2, 16)
    op = torch.ops.sage_kernels.attention_training
    for mask in (None, torch.ones(1, 1, 1, 20, dtype=torch.bool)):
        arguments = (q, k, v, mask, 0.25, "per_token", True, "", "qk_int8_pv_bf16", "none")
        torch.library.opcheck(op.default, arguments)


def loss_of(attend, x, weight):
    q, k, v = (x @ weight).unflatten(-1, (3, 2, 16)).unbind(2)
    return attend(q, k, v).square().sum()


def test_T09_checkpointing_and_compilation_give_the_same_gradients():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 30, 8), torch.randn(8, 96, requires_grad=True)
    wanted = torch.autograd.grad(loss_of(differentiable_attention, x, weight), weight)[0]
    for reentrant in (False, True):
        loss = checkpoint(loss_of, differentiable_attention, x, weight, use_reentrant=reentrant)
        assert loss.requires_grad
        loss.backward()
        assert torch.equal(weight.grad, wanted)
        weight.grad = None
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(differentiable_attention, x, weight), weight)[0], wanted)
    with torch.no_grad():
        assert not compiled(differentiable_attention, x, weight).requires_grad


def test_T09_autocast_of_the_caller_changes_nothing():
    q, k, v, grad = leaves(1, 30, 2, 16)
    wanted = torch.autograd.grad(differentiable_attention(q, k, v), (q, k, v), grad)
    for missing in (False, True):  # the formula has matmuls of its own
        with pytest.MonkeyPatch.context() as patch:
            if missing:
                patch.setattr(compat, "flash_backward_for_cpu", None)
            with torch.autocast("cpu", torch.bfloat16):
                found = torch.autograd.grad(differentiable_attention(q, k, v), (q, k, v), grad)
        assert max(errors(found, wanted)) < SAME


def test_T10_what_has_no_derivative_is_refused():
    q, k, v, grad = leaves(1, 20, 2, 16)
    grad.requires_grad_()
    (first,) = torch.autograd.grad(differentiable_attention(q, k, v), q, grad, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated again.*scaled_dot_product_attention"):
        torch.autograd.grad(first.sum(), q)
    mask = torch.zeros(1, 1, 1, 20, requires_grad=True)
    with pytest.raises(NotImplementedError, match="attn_mask.*requires_grad"):
        differentiable_attention(q, k, v, attn_mask=mask)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="q: got a tangent"):
            differentiable_attention(dual, k, v)
    with pytest.raises(ValueError, match="heads"):
        differentiable_attention(q, k[:, :, :0], v[:, :, :0])


def test_T10_transforms_of_functions_are_refused():
    """By PyTorch, whose custom ops know none of them: loud, not a derivative of 0."""
    q, k, v, _ = (x.detach() for x in leaves(1, 20, 2, 16))
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: differentiable_attention(x, k, v).sum())(q)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 72, 128, 192])
@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "causal"),
    [(200, 333, ""), (200, 333, "top_left"), (333, 200, "bottom_right"), (257, 257, "top_left")],
)
def test_T08_on_a_gpu_the_fused_backward_is_that_of_the_formula(head_dim, seq_q, seq_kv, causal):
    q, k, v, grad = leaves(2, seq_q, 4, head_dim, seq_kv=seq_kv, kv_heads=2, dtype=torch.bfloat16, device="cuda")
    assert has_fused_backward(q)
    found = torch.autograd.grad(differentiable_attention(q, k, v, causal=causal or False), (q, k, v), grad)
    with torch.no_grad():
        out, lse = sage_kernels.sage_attention(q, k, v, causal=causal or False, return_lse=True)
    wide = [x.detach().double() for x in (grad, q, k, v, out, lse)]
    wanted = ref_attention_backward(*wide, scale=head_dim**-0.5, causal=causal)
    assert max(errors(found, wanted)) < 4 * 2**-9


@pytest.mark.gpu
def test_T08_on_a_gpu_what_has_no_fused_backward_is_said():
    x = torch.zeros(1, 20, 2, 64, dtype=torch.bfloat16, device="cuda")
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool, device="cuda")
    assert has_fused_backward(x) and not has_fused_backward(x, mask)
    assert not has_fused_backward(x.float()) and not has_fused_backward(x.new_zeros(1, 20, 2, 200))
