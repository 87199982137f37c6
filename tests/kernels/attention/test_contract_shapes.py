"""Sizes, head mappings, memory layouts and dtypes (cases S, L and D of the contract)."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import SCALINGS, new_head_state, sage_attention
from sage_kernels.testing import exact_attention, relative_l1
from tests.kernels.attention.attention_cases import key_padding, normal, without_interpreter


# the interpreter is numpy: it warns where a GPU returns inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BAR = 0.015  # relative L1 of the recipe on N(0, 1), per head


@pytest.mark.parametrize("shape", [(1, 0, 4, 2, 2, 8), (0, 4, 4, 2, 2, 8), (1, 4, 4, 0, 2, 8)])
def test_S01_no_queries_no_batch_or_no_heads_is_empty(shape, attend):
    batch, seq_q, seq_kv, heads, kv_heads, head_dim = shape
    q = torch.zeros(batch, seq_q, heads, head_dim).half()
    k = torch.zeros(batch, seq_kv, kv_heads, head_dim).half()
    out, lse = attend(q, k, k)
    assert out.shape == q.shape and lse.shape == q.shape[:3]


def test_S02_no_keys_give_zeros(attend):
    q, none = torch.randn(1, 4, 2, 8).half(), torch.zeros(1, 0, 2, 8).half()
    for options in ({}, {"causal": "bottom_right"}, {"attn_mask": torch.zeros(1, 0)}):
        out, lse = attend(q, none, none, **options)
        assert torch.equal(out, torch.zeros_like(q)) and (lse == -torch.inf).all()
    state = new_head_state(2, 8, attend.device)
    before = [x.clone() for x in state]
    attend(q, none, none, state=state)
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))  # nothing seen, nothing recorded


LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 1025)


@pytest.mark.parametrize("length", LENGTHS)
def test_S03_one_token_and_lengths_around_a_block(length, attend):
    q, k, v = normal(1, 65, length, 1, 1, 64)
    if attend.tier == "interpreter" and length > 300:  # slow there: one call, the other tiers make the rest
        attend.check(q, k, v)
        return
    for scaling in SCALINGS if length in (1, 65, 129) else ("per_token",):
        attend.check(q, k, v, scaling=scaling)
        attend.check(k, q, v[:, :1].expand_as(q), scaling=scaling)  # as many queries
    if length > 1:
        attend.check(k, k, v, causal=True)
    if length == 1:
        assert torch.equal(attend(q, k, v)[0], v.expand_as(q))
    attend.check(q, k, v, state=new_head_state(1, 64, attend.device))


HEAD_DIMS = (1, 8, 16, 40, 59, 64, 72, 80, 96, 111, 128, 160, 192, 256)
BETWEEN = pytest.mark.slow("head dims beside it are quick")
SOME = [x if x in (1, 16, 59, 80, 128, 160) else pytest.param(x, marks=BETWEEN) for x in HEAD_DIMS]


@pytest.mark.parametrize("head_dim", SOME)
def test_S04_any_head_dim_up_to_256_with_the_softmax_scale_of_that_dim(head_dim, attend):
    q, k, v = normal(1, 40, 100, 2, 1, head_dim)
    out, _ = attend.check(q, k, v)
    assert torch.equal(out, attend(q, k, v, scale=head_dim**-0.5)[0])
    attend.check(q, k, v, causal="bottom_right", scaling="per_block")
    attend.check(q, k, v, attn_mask=key_padding([77], 100), scaling="per_head")
    attend.check(q, k, v, state=attend.planned(q, k, v))
    exact, _ = exact_attention(q, k, v)
    # one channel has one sign and seven bits: its scores are exact or nearly so, but there is no averaging of errors
    assert relative_l1(out, exact, (1, 3)).max() <= (BAR if head_dim > 8 else 2 * BAR)
    wrong, _ = exact_attention(q, k, v, scale=max(64, 1 << (head_dim - 1).bit_length()) ** -0.5)
    if head_dim not in (64, 128, 256):  # the scale of the padded width would be another result
        assert relative_l1(wrong, exact) > 2 * BAR


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1), (3, 3)])
def test_S10_query_heads_read_their_key_value_head(heads, kv_heads, attend):
    """V is one-hot in its head's number, so the output names the head that was read: h // (H / H_kv), as torch's
    repeat_interleave, and not h % H_kv."""
    q, k, _ = normal(2, 20, 40, heads, kv_heads, 16)
    v = torch.eye(kv_heads, 16).half().expand(2, 40, -1, -1)
    for options in (
        {},
        {"attn_mask": key_padding([40, 30], 40)},
        {"state": new_head_state(kv_heads, 16, attend.device)},
    ):
        out, _ = attend(q, k, v, **options)
        read = torch.arange(heads) // (heads // kv_heads)
        assert (out.argmax(-1) == read).all()
        one_hot = torch.nn.functional.one_hot(read, 16).bool().expand_as(out)
        assert (out[~one_hot] == 0).all() and (out[one_hot] - 1).abs().max() <= 2.0**-10
    # and K: each group of query heads follows its own keys
    repeated = [x.repeat_interleave(heads // kv_heads, 2) for x in (k, v)]
    assert torch.equal(attend(q, k, v)[0], attend(q, *repeated)[0])


def strided(x, layout):
    """The values of x [B, S, H, D] in another memory layout."""
    if layout == "BHSD":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "last_stride":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "every_other_channel":
        return torch.stack([x, torch.full_like(x, 9.0)], -1).flatten(-2)[..., ::2]
    if layout == "every_other_token":
        return torch.stack([torch.full_like(x, 9.0), x], 2).flatten(1, 2)[:, 1::2]
    if layout == "one_element_off":  # no 16-byte alignment: neither the copy engine nor wide loads apply
        return torch.cat([x.new_full((1,), 9.0), x.flatten()])[1:].view(x.shape)
    if layout == "padded_rows":  # rows start at odd multiples of two bytes
        return torch.nn.functional.pad(x, (0, 3), value=9.0)[..., : x.shape[3]]
    raise ValueError(layout)


@pytest.fixture(scope="module")
def contiguous():
    """What calls on contiguous inputs gave: (tier, head_dim, call) → results, which all layouts are held against."""
    return {}


@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize(
    "layout",
    ["BHSD", "last_stride", "every_other_channel", "every_other_token", "one_element_off", "padded_rows", "packed"],
)
def test_L01_L03_L05_L09_strides_change_no_bit_and_inputs_stay_as_they_are(layout, head_dim, attend, contiguous):
    seq = 40 if attend.tier == "interpreter" else 200
    plain = [x.to(attend.device) for x in normal(2, seq, seq, 2, 2, head_dim)]
    if layout == "packed":
        inputs = torch.cat(plain, 3).chunk(3, 3)
        assert not inputs[1].is_contiguous()
    else:
        inputs = [strided(x, layout) for x in plain]
    kept = [x.clone() for x in inputs]
    mask = key_padding([seq, seq - 20], seq)
    for number, options in enumerate(({}, {"attn_mask": mask}, {"causal": True, "scaling": "per_block"})):
        call = attend.tier, head_dim, number
        if call not in contiguous:
            contiguous[call] = attend(*plain, **options)
        assert all(map(torch.equal, attend(*inputs, **options), contiguous[call])), options
    call = attend.tier, head_dim, "planned"
    if call not in contiguous:
        contiguous[call] = attend(*plain, state=attend.planned(*plain))
    assert all(map(torch.equal, attend(*inputs, state=attend.planned(*plain)), contiguous[call]))
    assert all(torch.equal(a, b) for a, b in zip(kept, inputs, strict=True))


@pytest.mark.parametrize("dims", [(0,), (2,), (0, 2), (0, 1, 2)])
def test_L02_expanded_keys_and_values_change_no_bit(dims, attend):
    q, k, v = (x.to(attend.device) for x in normal(2, 40, 70, 2, 2, 32))
    for dim in dims:
        k, v = k.narrow(dim, 0, 1), v.narrow(dim, 0, 1)
    k, v = k.expand(2, 70, 2, 32), v.expand(2, 70, 2, 32)
    assert 0 in k.stride()
    for options in ({}, {"causal": "bottom_right"}, {"scaling": "per_head"}):
        assert torch.equal(attend(q, k, v, **options)[0], attend(q, k.contiguous(), v.contiguous(), **options)[0])
    same_q = q[:, :1].expand_as(q)
    assert torch.equal(attend(same_q, k, v)[0], attend(same_q.contiguous(), k, v)[0])


def test_L04_dimensions_of_size_one_may_have_any_stride(attend):
    for sizes in ((1, 70, 1, 64), (1, 1, 2, 64), (2, 70, 1, 64), (1, 33, 2, 1)):
        x = [x.to(attend.device) for x in normal(sizes[0], sizes[1], sizes[1], sizes[2], sizes[2], sizes[3])]
        absurd = [
            t.as_strided(t.shape, [2**40 + 1 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])
            for t in x
        ]
        zero = [
            t.as_strided(t.shape, [0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]) for t in x
        ]
        for options in ({}, {"scaling": "per_block", "causal": True}):
            expected, _ = attend(*x, **options)
            assert torch.equal(attend(*absurd, **options)[0], expected), (sizes, options)
            assert torch.equal(attend(*zero, **options)[0], expected), (sizes, options)


def test_L08_nothing_is_written_outside_of_the_buffers(attend, monkeypatch):
    """The op allocates its output and work space by torch.empty: each gets zones of 512 elements before and behind it
    that no kernel may touch. What it leaves unwritten inside is NaN (conftest), and would be seen in the result."""
    zone, empty, buffers = 512, torch.empty, []
    patterns = {torch.float16: 9.0, torch.bfloat16: 9.0, torch.float32: 9.0, torch.int8: 77, torch.int32: 77}

    def guarded(*sizes, **options):
        if options.get("dtype", torch.float32) not in patterns or options.get("memory_format") is not None:
            return empty(*sizes, **options)
        shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        number = 1
        for size in shape:
            number *= size
        whole = empty(number + 2 * zone, **options)
        pattern = patterns[whole.dtype]
        whole[:zone] = whole[zone + number :] = pattern
        buffers.append((whole, number, pattern))
        return whole[zone : zone + number].view(shape)

    q, k, v = normal(1, 70, 100, 2, 1, 40)
    sinks, bias = torch.zeros(2), torch.zeros(70, 100)
    runs = [{"scaling": scaling} for scaling in SCALINGS]
    runs += [{"causal": "bottom_right", "sinks": sinks}, {"attn_mask": key_padding([77], 100)}, {"attn_mask": bias}]
    expected = [attend(q, k, v, **options)[0] for options in runs]
    state = attend.planned(q, k, v)
    monkeypatch.setattr(torch, "empty", guarded)
    for options, out in zip(runs, expected, strict=True):
        assert torch.equal(attend(q, k, v, **options)[0], out)
    assert torch.isfinite(attend(q, k, v, state=state)[0]).all()
    monkeypatch.setattr(torch, "empty", empty)
    assert len(buffers) > len(runs)
    for whole, number, pattern in buffers:
        assert (whole[:zone] == pattern).all() and (whole[zone + number :] == pattern).all()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("tier", ["cuda"], indirect=True)
@pytest.mark.parametrize("planned", [False, True])
def test_L06_strides_beyond_2_31_elements(planned, attend):
    """One token every 2^20 elements: the offsets of the last ones need 64 bits."""
    step, seq = 2**20, 2100
    buffer = torch.zeros(step * seq, dtype=torch.float16, device="cuda")
    assert step * (seq - 1) > 2**31
    plain = [x.to("cuda") for x in normal(1, seq, seq, 2, 2, 64)]
    far = [buffer.as_strided((1, seq, 2, 64), (1, step, 64, 1), 256 * i) for i in range(3)]
    for view, x in zip(far, plain, strict=True):
        view.copy_(x)
    options = [{"state": attend.planned(*plain)} if planned else {} for _ in range(2)]
    out, _ = attend(*far, **options[0])
    expected, _ = attend(*plain, **options[1])
    assert torch.equal(out[:, -64:], expected[:, -64:]) and torch.equal(out, expected)
    del buffer, far
    if not planned:
        mask = torch.zeros(step * seq, dtype=torch.float16, device="cuda").as_strided((seq, seq), (step, 1))
        mask.copy_(torch.randn(seq, seq))
        near = torch.zeros(seq, 2112, dtype=torch.float16, device="cuda")[:, :seq].copy_(mask)
        assert 2112 % 16 == 0 != seq % 16  # a kernel of its own: sums in another order
        far_out, near_out, packed_out = (sage_attention(*plain, attn_mask=x) for x in (mask, near, mask.contiguous()))
        assert torch.equal(far_out, near_out)
        torch.testing.assert_close(far_out, packed_out, rtol=2**-10, atol=2**-12)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("planned", [False, True])
def test_L06_L07_more_than_2_31_elements_and_65535_heads(planned):
    """B·H·N·D > 2^31 and B·H = 524 800: the last samples are those computed alone."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(8200, 64, 64, 64, dtype=torch.float16, device="cuda", generator=generator) for _ in range(3)
    )
    assert q.numel() > 2**31
    state = new_head_state(64, 64, "cuda") if planned else None
    out = sage_attention(q, k, v, state=state)
    alone = sage_attention(q[-2:], k[-2:], v[-2:], state=new_head_state(64, 64, "cuda") if planned else None)
    # an unplanned head samples its own sample only, so these bits do not depend on the batch either
    assert torch.equal(out[-2:], alone)
    assert torch.isfinite(out[4100]).all()
    causal = sage_attention(q, k, v, causal=True)
    assert torch.equal(causal[-2:], sage_attention(q[-2:], k[-2:], v[-2:], causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scaling": "per_block"}])
def test_L07_more_than_65536_tokens(options):
    q, k, v = (x.to("cuda") for x in normal(1, 70_000, 70_000, 1, 1, 64))
    out = sage_attention(q, k, v, **options)[:, -256:].cpu()
    exact, _ = exact_attention(q[:, -256:], k, v, mask=_last_rows(256, 70_000) if options.get("causal") else None)
    assert relative_l1(out, exact) <= BAR


def _last_rows(rows, seq):
    return torch.ones(rows, seq, dtype=torch.bool, device="cuda").tril(seq - rows)


@pytest.mark.gpu
def test_L07_one_token_in_70000_heads():
    q, k, v = (torch.randn(70_000, 1, 1, 64, dtype=torch.float16, device="cuda") for _ in range(3))
    assert torch.equal(sage_attention(q, k, v), v)  # one key: its value


@without_interpreter
def test_D03_fp32_inputs_run_p_and_v_in_bf16(attend):
    """The stated rule: quantised from fp32, P·V in bf16, output fp32."""
    q, k, v = normal(1, 70, 140, 2, 2, 64, dtype=torch.float32)
    out, _ = attend.check(q, k, v)
    assert out.dtype == torch.float32
    assert relative_l1(out, exact_attention(q, k, v)[0], (1, 3)).max() <= BAR


@pytest.mark.parametrize("scale", [0, 0.0, 1, 0.03])
def test_D04_any_softmax_scale_from_zero(scale, attend):
    q, k, v = normal(1, 40, 70, 1, 1, 32)
    out, lse = attend.check(q, k, v, scale=scale)
    if scale == 0:
        assert relative_l1(out, v.float().mean(1, keepdim=True).expand_as(q)) < 2.0**-10
        assert torch.allclose(lse, torch.full_like(lse, 70.0).log(), atol=1e-5)
    else:
        exact, _ = exact_attention(q, k, v, scale=scale)
        assert relative_l1(out, exact) <= (0.06 if scale == 1 else BAR)  # at 1 the scores, and INT8's error, are ×5.7
