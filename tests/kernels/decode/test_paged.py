"""INT8 pages: kernels against the reference, with lengths, tables and slots that a server has."""

from __future__ import annotations

import pytest
import torch

from sage_kernels.facts.masking import Masking
from sage_kernels.facts.paged import SCALE_BYTES, PagedKV, paged_kv
from sage_kernels.ops.paged import append_pages, paged_attention, read_pages
from sage_kernels.reference.paged import ref_append_pages, ref_newest_slots, ref_paged_attention, ref_read_pages
from sage_kernels.testing import FP32_ROUNDING, exact_attention, make_qkv, relative_l2, sqnr_db


PAGE = 16


def empty(number, heads, head_dim, page=PAGE, device="cpu") -> PagedKV:
    """Pages whose K and V alternate in memory, poisoned: codes 77, scales NaN."""
    memory = torch.full((number, 2, page, heads, head_dim + SCALE_BYTES), 77, dtype=torch.int8, device=device)
    pages = paged_kv(memory[:, 0], memory[:, 1])
    for scale in (pages.k_scale, pages.v_scale):
        scale.fill_(torch.nan)
    return pages


def filled(lengths, heads, head_dim, *, family="biased_keys", page=PAGE, dtype=torch.float16):
    """Pages with sequences of these lengths in shuffled pages, their tables and ends, and their tokens."""
    columns = max(-(-n // page) for n in lengths) + 1
    pages = empty(len(lengths) * columns, heads, head_dim, page)
    order = torch.randperm(len(lengths) * columns, generator=torch.Generator().manual_seed(3)).view(len(lengths), -1)
    table, tokens = torch.full((len(lengths), columns), -1, dtype=torch.int32), []
    for b, number in enumerate(lengths):
        _, k, v = make_qkv(family, 1, 1, max(number, 1), heads, heads, head_dim, seed=b)
        k, v = k[0, :number].to(dtype), (v[0, :number] / 100).to(dtype)
        used = -(-number // page)
        table[b, :used] = order[b, :used].int()
        slots = (table[b].long()[:, None] * page + torch.arange(page)).flatten()[:number]
        ref_append_pages(k, v, pages, slots)
        tokens.append((k, v))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return pages, table, ends, tokens


def on(device, *tensors):
    """The same pages, as views of the same form, and tensors on a device; the interpreter's own is the CPU."""
    pages, rest = tensors[0], [x.to(device) for x in tensors[1:]]
    number, page, heads, head_dim = pages.k_codes.shape
    copy = empty(number, heads, head_dim, page, device)
    for mine, x in zip(copy, pages, strict=True):
        mine.copy_(x)
    return copy, *rest


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (8, 128), (1, 80)])
def test_append_and_read_kernels_write_the_references_bits(kernel_device, heads, head_dim):
    from sage_kernels._triton.decode.paged import launch_append_pages, launch_read_pages

    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(6, heads, head_dim, generator=generator).half() for _ in range(2))
    packed = torch.stack([k, v], 1)  # strided inputs
    k[4, 0, 1] = torch.nan
    slots = torch.tensor([5, 40, 17, 18, 63, -1])
    want = empty(4, heads, head_dim)
    ref_append_pages(k, v, want, slots)
    got, there, k_there, v_there = on(kernel_device, empty(4, heads, head_dim), slots, packed[:, 0], packed[:, 1])
    launch_append_pages(k.to(kernel_device), v_there, got, there, None, None)
    for name, x, y in zip(PagedKV._fields, want, got, strict=True):
        assert torch.equal(x.nan_to_num(-9), y.cpu().nan_to_num(-9)), name
    assert (want.k_codes == 77).all((2, 3)).sum() == 4 * PAGE - 5  # nothing else was written
    read = launch_read_pages(got, there[:5].flip(0), torch.float16)
    for x, y in zip(ref_read_pages(want, slots[:5].flip(0), torch.float16), read, strict=True):
        assert torch.equal(x.nan_to_num(-9), y.cpu().nan_to_num(-9))
    assert k_there.shape == k.shape


def test_append_by_table_writes_each_sequences_last_token_alone(kernel_device):
    from sage_kernels._triton.decode.paged import launch_append_pages

    table = torch.tensor([[2, 0, -1], [3, -1, -1], [1, -1, -1], [-1, -1, -1], [1, 2, 3]], dtype=torch.int32)
    ends = (
        torch.tensor([17, 1, 0, 3, 49]).cumsum(0).int()
    )  # the third is padding, the fourth has no page, the last no room
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    k = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(2)).half()
    want = empty(4, 2, 64)
    slots = ref_newest_slots(want, table, ends)
    assert slots.tolist() == [0, 3 * PAGE, -1, -1, -1]
    ref_append_pages(k, -k, want, slots)
    got, table, ends, k = on(kernel_device, empty(4, 2, 64), table, ends, k)
    launch_append_pages(k, -k, got, None, table, ends)
    for x, y in zip(want, got, strict=True):
        assert torch.equal(x.nan_to_num(-9), y.cpu().nan_to_num(-9))


CASES = [  # lengths, H, H_kv, D, page: splits of one chunk and of several, rows beyond a tile, odd lengths, padding
    ((131, 1, 0, 16, 64), 4, 2, 64, 16),
    ((200, 129), 8, 2, 128, 64),
    ((33,), 40, 1, 80, 32),
]


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "page"), CASES, ids=str)
@pytest.mark.parametrize("more", ["", "sinks", "softcap"])
def test_attention_kernel_matches_the_reference(kernel_device, lengths, heads, kv_heads, head_dim, page, more):
    from sage_kernels._triton.decode.paged import launch_paged_attention

    pages, table, ends, _ = filled(lengths, kv_heads, head_dim, page=page)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(len(lengths), heads, head_dim, generator=generator).half()
    sinks = torch.randn(heads, generator=generator) if more == "sinks" else None
    masking = Masking(softcap=3.0 if more == "softcap" else 0.0, sinks=sinks)
    rounded, exactly = (
        ref_paged_attention(x, pages, table, ends, masking=masking, scale=0.1, round_p=x is q) for x in (q, q.float())
    )
    given = on(kernel_device, pages, table, ends)
    for chunk in (64, 512):
        out = launch_paged_attention(
            q.to(kernel_device), *given, softcap=masking.softcap, scale=0.1, chunk=chunk,
            sinks=None if sinks is None else sinks.to(kernel_device),
        ).cpu()  # fmt: skip
        valid = torch.tensor(lengths) > 0
        assert (out[~valid] == 0).all()
        floor = relative_l2(rounded[valid], exactly[valid], -1).max()
        error = relative_l2(out[valid], exactly[valid], -1).max()
        assert error <= 2 * floor + 64 * FP32_ROUNDING, (chunk, error, floor)


def test_no_sequence_reaches_another(tier, monkeypatch):
    """NaN in one sequence, and other sequences beside it, change no bit of the others. A table too small gives NaN."""
    device = torch.device("cuda" if tier == "cuda" else "cpu")
    attend = paged_attention
    if tier == "interpreter":
        from sage_kernels._triton.decode.paged import launch_paged_attention

        def attend(*given, scale):
            return launch_paged_attention(*given, softcap=0.0, sinks=None, scale=scale)

    pages, table, ends, _ = filled((70, 40, 9), 2, 64)
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(5)).half().to(device)
    given = on(device, pages, table, ends)
    want = attend(q, *given, scale=0.1)
    given[0].k_scale[table[1, 0].item(), 3] = torch.nan
    poisoned = attend(q, *given, scale=0.1)
    assert poisoned[1].isnan().all()
    assert torch.equal(poisoned[[0, 2]], want[[0, 2]])
    alone = attend(q[2:], given[0], given[1][2:], torch.tensor([0, 9], dtype=torch.int32, device=device), scale=0.1)
    assert torch.equal(alone[0], want[2])
    small = attend(q[:1], given[0], given[1][:1, :2], given[2][:2], scale=0.1)
    assert small.isnan().all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_C02_pages_against_exact_attention(device):
    """The cache's rounding is all: 43 dB for K and V of even channels (see test_decode), less what no centre costs."""
    lengths = (150, 33)
    pages, table, ends, tokens = filled(lengths, 2, 64, family="normal")
    q = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(9)).half()
    out = paged_attention(q.to(device), *on(device, pages, table, ends)).cpu()
    for b, (k, v) in enumerate(tokens):
        want = exact_attention(q[b][None, None], k[None], v[None])
        want = want[0] if isinstance(want, tuple) else want
        assert sqnr_db(out[b], want[0, 0]) > 38
    slots = torch.arange(20, device=device)
    empty_pages = empty(2, 2, 64, device=device)
    append_pages(tokens[0][0][:20].to(device), tokens[0][1][:20].to(device), empty_pages, slots=slots)
    k, _ = read_pages(empty_pages, slots, torch.float32)
    assert (k.cpu() - tokens[0][0][:20].float()).abs().max() <= tokens[0][0].abs().max() / 127 * 0.51


def test_ops_refuse_what_they_cannot_do():
    pages = empty(2, 2, 64)
    k, table, ends = torch.zeros(1, 2, 64), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]).int()
    with pytest.raises(ValueError, match=r"k: got shape \(1, 3, 64\)"):
        append_pages(torch.zeros(1, 3, 64), k, pages, slots=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(TypeError, match="slots: got it together"):
        append_pages(k, k, pages)
    with pytest.raises(TypeError, match="q: got torch.int8"):
        paged_attention(k.char(), pages, table, ends)
    with pytest.raises(ValueError, match="table: got torch.int64"):
        paged_attention(k, pages, table.long(), ends)
    with pytest.raises(NotImplementedError, match="head_dim: got 7"):
        paged_attention(torch.zeros(1, 2, 7), empty(2, 2, 7), table, ends)
