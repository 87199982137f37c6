"""Quantising tokens into the INT8 cache: the kernel writes what the reference writes, and nothing else."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import append_kv
from sage_kernels.reference import ref_append_kv, ref_quantize_tokens


BATCH, HEADS = 2, 3
GUARD = -99  # what the tests put where nothing may be written


def tokens(number, head_dim, dtype=torch.float16, seed=0):
    """k with a bias and v a hundred times smaller: their scales can't be mistaken for each other."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(BATCH, HEADS, number, head_dim, generator=generator) + 3
    v = torch.randn(BATCH, HEADS, number, head_dim, generator=generator) / 100
    return k.to(dtype), v.to(dtype)


def buffers(capacity, head_dim, device="cpu"):
    codes = torch.full((2, BATCH, HEADS, capacity, head_dim), GUARD, dtype=torch.int8, device=device)
    scales = torch.full((2, BATCH, HEADS, capacity), GUARD, dtype=torch.bfloat16, device=device)
    return [codes[0], scales[0], codes[1], scales[1]]


def mean_of(k):
    return k.float().mean(2)


def launch(k, v, mean, cache, position, ring):
    """The kernel itself: on CPU tensors the op would run the reference."""
    from sage_kernels._triton.decode.append_kv import launch_append_kv

    device = cache[0].device
    on_device = isinstance(position, torch.Tensor)
    launch_append_kv(
        k.to(device), v.to(device), None if mean is None else mean.to(device), *cache,
        position=position.to(device) if on_device else None, start=0 if on_device else position, ring=ring,
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 7])
@pytest.mark.parametrize(("number", "position", "ring"), [(1, 12, False), (17, 0, False), (5, 31, True)])
def test_append_kernel_writes_the_references_bits(kernel_device, head_dim, number, position, ring):
    k, v = tokens(number, head_dim)
    capacity = 33
    for mean in (mean_of(k), None):
        for where in (position, torch.tensor(position)):
            want, got = buffers(capacity, head_dim), buffers(capacity, head_dim, kernel_device)
            ref_append_kv(k, v, mean, *want, position=position, ring=ring)
            launch(k, v, mean, got, where, ring)
            for name, x, y in zip(("k codes", "k scale", "v codes", "v scale"), want, got, strict=True):
                assert torch.equal(x, y.cpu()), name
    written = want[1] != GUARD
    assert written.sum() == BATCH * HEADS * number  # and the guards are where they were
    assert written[0, 0].nonzero()[:, 0].tolist() == sorted((position + i) % capacity for i in range(number))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_append_kernel_reads_strided_inputs_of_every_dtype(kernel_device, dtype):
    k, v = tokens(19, 64, dtype)
    packed = torch.stack([k, v], 3).transpose(1, 2).contiguous().transpose(1, 2)  # [B, H, N, 2, D], heads inside
    want, got = buffers(40, 64), buffers(40, 64, kernel_device)
    ref_append_kv(k, v, mean_of(k), *want, position=3, ring=False)
    packed = packed.to(kernel_device)
    launch(packed[..., 0, :], packed[..., 1, :], mean_of(k), got, 3, False)
    assert all(torch.equal(x, y.cpu()) for x, y in zip(want, got, strict=True))


def test_C02_append_kernel_writes_padded_pages(kernel_device):
    """Scales are strided like codes: rows and heads of the buffers need not touch each other."""
    k, v = tokens(9, 64)
    want = buffers(16, 64)
    ref_append_kv(k, v, mean_of(k), *want, position=2, ring=False)
    codes = torch.full((BATCH, HEADS, 24, 2, 96), GUARD, dtype=torch.int8, device=kernel_device)
    scales = torch.full((BATCH, HEADS, 24, 3), GUARD, dtype=torch.bfloat16, device=kernel_device)
    got = [codes[:, :, 4:20, 0, 16:80], scales[:, :, 4:20, 0], codes[:, :, 4:20, 1, 16:80], scales[:, :, 4:20, 2]]
    launch(k, v, mean_of(k), got, 2, False)
    assert all(torch.equal(x, y.cpu()) for x, y in zip(want, got, strict=True))
    assert (codes != GUARD).sum() <= 2 * BATCH * HEADS * 9 * 64
    assert (scales[..., 1] == GUARD).all()


def test_C03_append_kernel_drops_what_lies_beyond(kernel_device):
    """The position is on the device, so nobody can refuse: the tokens that fit are written, the others are not."""
    k, v = tokens(5, 64)
    room = buffers(16 + 8, 64, kernel_device)
    cache = [x[:, :, :16] for x in room]
    launch(k, v, None, cache, torch.tensor(14), False)
    want = buffers(16, 64)
    ref_append_kv(k, v, None, *want, position=14, ring=False)
    assert all(torch.equal(x, y.cpu()) for x, y in zip(want, cache, strict=True))
    assert all((x[:, :, 16:] == GUARD).all() for x in room)


@pytest.mark.parametrize("number", [1, 20])
def test_append_kernel_marks_tokens_that_are_not_finite(kernel_device, number):
    k, v = tokens(number, 64)
    k[0, 1, 0, 5], v[1, 2, 0, 6] = torch.nan, torch.inf
    cache = buffers(24, 64, kernel_device)
    launch(k, v, None, cache, 0, False)
    k_codes, k_scale, v_codes, v_scale = (x.cpu() for x in cache)
    assert k_scale[0, 1, 0].isnan() and v_scale[1, 2, 0].isnan()
    assert k_scale.isnan().sum() == v_scale.isnan().sum() == 1
    assert (k_codes[0, 1, 0] == 0).all() and (v_codes[1, 2, 0] == 0).all()


def test_codes_stay_in_range_and_within_half_a_step():
    """The scale is rounded to bf16 first: at most 2^-8 too small, and 127.5 is never reached."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 32, generator=generator).double()
    exponents = torch.linspace(-98, 100, 4096, dtype=torch.float64)  # of 2, from the floor to what bf16 ends at
    x = (x / x.abs().amax(-1, keepdim=True) * 2 ** exponents[:, None]).float()
    x[:2048, 0] = x[:2048].abs().amax(-1) * torch.linspace(1, 1 + 2**-7, 2048)  # every rounding of the scale
    codes, scale = ref_quantize_tokens(x)
    assert codes.abs().max() == 127
    error = (x.double() - codes.double() * scale.double()[:, None]).abs()
    assert (error <= scale.double()[:, None] * (0.5 + 2**-20)).all()


def test_a_token_of_zeros_is_zeros():
    codes, scale = ref_quantize_tokens(torch.zeros(3, 64))
    assert (codes == 0).all() and (scale > 0).all() and scale.isfinite().all()


def cache_with(**changes):
    k, v = tokens(4, 64)
    names = ("k_codes", "k_scale", "v_codes", "v_scale")
    arguments = {"k": k, "v": v, "k_mean": mean_of(k), "position": 0, "ring": False}
    arguments |= dict(zip(names, buffers(8, 64), strict=True)) | changes
    return arguments


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"position": 5}, ValueError, "capacity"),
        ({"position": -1}, ValueError, "position: got -1"),
        ({"position": 1.5}, TypeError, "position"),
        ({"position": torch.tensor([1])}, ValueError, "position"),
        ({"k": torch.zeros(1, HEADS, 4, 64)}, ValueError, "k: got shape"),
        ({"v": torch.zeros(BATCH, 1, 4, 64)}, ValueError, "v: got shape"),
        ({"k": torch.zeros(BATCH, HEADS, 4, 32)}, ValueError, "k: got shape"),
        ({"k": torch.zeros(BATCH, HEADS, 4, 64, dtype=torch.int32)}, TypeError, "k: got torch.int32"),
        ({"k": torch.zeros(BATCH, HEADS, 4, 64, requires_grad=True)}, NotImplementedError, "no_grad"),
        ({"k": torch.zeros(BATCH, HEADS, 4, 64, device="meta")}, ValueError, "device"),
        ({"k_mean": torch.zeros(BATCH, HEADS, 32)}, ValueError, "k_mean"),
        ({"k_mean": torch.zeros(BATCH, HEADS, 64, dtype=torch.float16)}, TypeError, "k_mean"),
        ({"k_codes": torch.zeros(BATCH, HEADS, 8, 64)}, TypeError, "k_codes"),
        ({"v_scale": torch.zeros(BATCH, HEADS, 8)}, TypeError, "v_scale"),
        ({"v_scale": torch.zeros(BATCH, HEADS, 9, dtype=torch.bfloat16)}, ValueError, "v_scale"),
        ({"v_codes": torch.zeros(BATCH, HEADS, 8, 32, dtype=torch.int8)}, ValueError, "v_codes"),
    ],
)
def test_C03_bad_input_raises_and_writes_nothing(changes, error, message):
    arguments = cache_with(**changes)
    before = {n: x.clone() for n, x in arguments.items() if n.endswith(("codes", "scale"))}
    with pytest.raises(error, match=message):
        append_kv(**arguments)
    assert all(torch.equal(arguments[n], x) for n, x in before.items())


def test_a_ring_takes_no_more_than_it_holds():
    k, v = tokens(9, 64)
    with pytest.raises(ValueError, match="ring's capacity"):
        append_kv(k, v, None, *buffers(8, 64), position=0, ring=True)


def test_append_op_registration():
    arguments = cache_with()
    cache = [arguments[n] for n in ("k_codes", "k_scale", "v_codes", "v_scale")]
    inputs = (arguments["k"], arguments["v"], arguments["k_mean"], *cache, torch.tensor(1), 0, False, None)
    torch.library.opcheck(torch.ops.sage_kernels.append_kv, inputs)
