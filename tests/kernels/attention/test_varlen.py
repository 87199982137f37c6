"""Packed sequences: each as it is alone, whatever lies beside it (cases S12 to S14)."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import sage_attention, sage_attention_varlen
from sage_kernels.facts.recipe import RECIPES
from sage_kernels.testing import exact_attention, relative_l2
from tests.kernels.attention.attention_cases import FP8, runs_fp8
from tests.kernels.attention.varlen_cases import (
    BEHIND_K,
    BEHIND_Q,
    K_LENGTHS,
    Q_LENGTHS,
    AttendPacked,
    ends,
    packed_inputs,
    slices,
)


PACKED = [name for name, recipe in RECIPES.items() if recipe.packed]


@pytest.fixture
def attend(tier, monkeypatch):
    return AttendPacked(tier, monkeypatch)


MASKED = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 20},
    "causal window": {"causal": True, "window": 17},
    "softcap": {"softcap": 3.0, "causal": True},
    "sinks": {"sinks": torch.tensor([0.0, 2.0, -1.0, 5.0]), "window": 9},
}


@pytest.mark.usefixtures("true_fp8")
@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize("masked", MASKED)
def test_S12_each_packed_sequence_matches_the_reference_of_it_alone(attend, masked, recipe):
    if recipe == FP8 and not runs_fp8(attend.tier):
        pytest.skip("this GPU has no FP8")
    options = MASKED[masked] | {"recipe": recipe}
    attend.check(*packed_inputs(), **options, scaling="per_block" if masked == "window" else "per_token")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"head_dim": 128, "kv_heads": 1}, {"causal": True, "scaling": "per_block"}),
        ({"head_dim": 40}, {"rotation": "hadamard"}),
        ({"head_dim": 64}, {"rotation": "hadamard", "causal": True, "window": 30, "return_lse": False}),
        ({"head_dim": 59, "heads": 2}, {"smooth_k": False, "causal": True}),
        ({"head_dim": 256, "heads": 2}, {"causal": True, "window": 70}),
    ],
)
def test_S12_head_dims_and_options(attend, shape, options):
    attend.check(*packed_inputs((3, 70, 0, 40), (80, 70, 5, 10), **shape), **options)


def test_S12_more_sequences_than_are_looked_up_at_a_time(attend):
    """140 of lengths 0 to 3: the search for a tile's sequence walks its list in pieces of 128."""
    q_lengths = [i % 4 for i in range(140)]
    k_lengths = [(i * 7) % 5 for i in range(140)]
    attend.check(*packed_inputs(q_lengths, k_lengths, heads=1, kv_heads=1), causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_S12_they_are_as_exact_as_alone(attend, causal):
    """Against fp64: the error of INT8 on N(0, 1), which kernels/README.md states, and nothing more."""
    q, k, v, cu_q, cu_k = packed_inputs()
    out, lse = attend(q, k, v, cu_q, cu_k, causal=causal)
    for rows, keys in zip(slices(cu_q), slices(cu_k), strict=True):
        seq_q, seq_kv = rows.stop - rows.start, keys.stop - keys.start
        if seq_q and seq_kv:
            mask = torch.ones(seq_q, seq_kv, dtype=torch.bool).tril(seq_kv - seq_q) if causal else None
            exact, exact_lse = exact_attention(q[None, rows], k[None, keys], v[None, keys], mask=mask)
            assert relative_l2(out[None, rows], exact) < 0.02
            assert (lse[None, rows] - exact_lse).abs().nan_to_num(0.0).max() < 0.05


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scaling": "per_block"}])
def test_S12_packed_is_bit_equal_to_the_call_alone_on_the_same_tiles(attend, options, monkeypatch):
    """Codes, scales and the order of sums are those of the sequence alone. (On Hopper a call alone runs another kernel
    on other tiles: there the reference's tolerance is what binds both.)"""
    q, k, v, cu_q, cu_k = packed_inputs()
    out, lse = attend(q, k, v, cu_q, cu_k, **options)
    if attend.tier != "reference":
        from sage_kernels._triton.attention import launch as launch_attention

        choose = launch_attention.device_tile
        monkeypatch.setattr(launch_attention, "device_tile", lambda *args: choose(*args, packed=True))
        monkeypatch.setattr("sage_kernels.ops.attention._try_replay", lambda *_, **__: (None, None))
        if attend.tier == "interpreter":
            monkeypatch.setattr("sage_kernels.reference.ref_attention", launch_attention.launch_attention_fwd)
    rule = {"causal": "bottom_right"} if "causal" in options else {}
    for rows, keys in zip(slices(cu_q), slices(cu_k), strict=True):
        if rows.stop > rows.start and keys.stop > keys.start:
            inputs = [x.to(attend.device) for x in (q[None, rows], k[None, keys], v[None, keys])]
            alone, its_lse = sage_attention(*inputs, return_lse=True, **(options | rule))
            assert torch.equal(out[None, rows], alone.cpu()) and torch.equal(lse[None, rows], its_lse.cpu())


@pytest.mark.usefixtures("true_fp8")
@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 17}, {"scaling": "per_block"}])
@pytest.mark.parametrize("poison", [float("nan"), pytest.param(1e4, marks=pytest.mark.slow("as the other one"))])
def test_S13_no_bit_of_a_sequence_hangs_on_its_neighbours(attend, recipe, options, poison):
    if recipe == FP8 and not runs_fp8(attend.tier):
        pytest.skip("this GPU has no FP8")
    q, k, v, cu_q, cu_k = packed_inputs(heads=2, kv_heads=1)
    out, lse = attend(q, k, v, cu_q, cu_k, recipe=recipe, **options)
    q_slices, k_slices = slices(cu_q), slices(cu_k)
    for kept in (2, 4):
        neighbours = [torch.full_like(x, poison) for x in (q, k, v)]
        for x, y, its in zip(neighbours, (q, k, v), (q_slices, k_slices, k_slices), strict=True):
            x[its[kept]] = y[its[kept]]
        its_out, its_lse = attend(*neighbours, cu_q, cu_k, recipe=recipe, **options)
        rows = q_slices[kept]
        assert torch.equal(its_out[rows], out[rows]) and torch.equal(its_lse[rows], lse[rows])
        for empty in (q_slices[3], slice(sum(Q_LENGTHS), None)):  # rows without keys, and behind the last sequence
            assert (its_out[empty] == 0).all() and (its_lse[empty] == -torch.inf).all()


def test_S13_keys_that_no_row_of_a_window_sees_may_hold_anything(attend):
    q, k, v, cu_q, cu_k = packed_inputs()
    out, _ = attend(q, k, v, cu_q, cu_k, causal=True, window=4)
    last = slices(cu_k)[-1]
    for x in (k, v):
        x[last.start : last.stop - Q_LENGTHS[-1] - 3] = float("nan")
    again, _ = attend(q, k, v, cu_q, cu_k, causal=True, window=4)
    assert torch.equal(out, again)


def test_S12_strided_inputs_and_a_list_of_one_sequence(attend):
    q, k, v, *_ = packed_inputs((200,), (200,), heads=2)
    fused = torch.cat([x[: len(q)] for x in (q, k[: len(q)], v[: len(q)])], 2)
    strided = fused.chunk(3, 2)
    cu = ends((200,))
    out, lse = attend(*strided, cu, cu, causal=True)
    plain, plain_lse = attend(*(x.contiguous() for x in strided), cu, cu, causal=True)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    attend.check(*strided, cu, cu, causal=True)


def test_S12_without_lse_it_is_the_same(attend):
    inputs = packed_inputs()
    assert torch.equal(attend(*inputs, return_lse=False)[0], attend(*inputs)[0])


class Reach:
    """Fails at the first load or store of an interpreted kernel outside of the tensors that it was handed."""

    def __init__(self, patch):
        import numpy as np
        from triton.runtime import interpreter

        from sage_kernels._triton.attention import launch as launch_attention
        from sage_kernels._triton.prologue import prepare_values, prologue

        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store
        self.ranges = []

        def inside(ptrs, mask):
            chosen = np.asarray(mask if isinstance(mask, np.ndarray) else mask.data, dtype=bool)
            addresses = np.broadcast_to(ptrs.data, chosen.shape)[chosen].astype(np.int64).ravel()
            known = np.zeros(len(addresses), bool)
            for first, end in self.ranges:
                known |= (addresses >= first) & (addresses < end)
            assert known.all(), "an access outside of all tensors"

        def loaded(self_, ptrs, mask, *rest, **more):
            inside(ptrs, mask)
            return load(self_, ptrs, mask, *rest, **more)

        def stored(self_, ptrs, value, mask, *rest, **more):
            inside(ptrs, mask)
            return store(self_, ptrs, value, mask, *rest, **more)

        def launching(launch):
            def launched(kernel, programs, *arguments, **constants):
                for x in arguments:
                    tensor = getattr(x, "base", x)
                    if isinstance(tensor, torch.Tensor):
                        size = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                        self.ranges.append((tensor.data_ptr(), tensor.data_ptr() + size * tensor.element_size()))
                return launch(kernel, programs, *arguments, **constants)

            return launched

        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        for module in (launch_attention, prologue, prepare_values):
            patch.setattr(module, "launch", launching(module.launch))


@pytest.mark.usefixtures("true_fp8")
@pytest.mark.parametrize("recipe", PACKED)
def test_S12_pointers_read_what_the_copy_engine_reads(recipe, kernel_device):
    """Bit for bit: tiles that end inside of the next sequence are cut off by either, each in its own way."""
    from sage_kernels._triton import compat
    from sage_kernels._triton.attention import launch as launch_attention
    from sage_kernels.facts.masking import packed_masking

    if compat.TensorDescriptor is None or (recipe == FP8 and not runs_fp8(kernel_device.type)):
        pytest.skip("no descriptors, or no FP8")
    tile = launch_attention.device_tile(kernel_device, 64, "per_token", packed=True)
    q, k, v, *lengths = (x.to(kernel_device) for x in packed_inputs())
    results = []
    for kernel in ("tma", "pointers"):
        found = launch_attention.launch_attention_fwd(
            q[None], k[None], v[None], scale=0.1, scaling="per_token", smooth_k=True, state=None, return_lse=True,
            recipe=recipe, masking=packed_masking(True, 40, 0.0, None, len(q), len(k)), packed=tuple(lengths),
            tile=tile._replace(kernel=kernel),
        )  # fmt: skip
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


WRONG = {
    "falling": [0, 90, 20, 150],
    "below and beyond": [-7, 40, 5000, 100],
    "the ends of int32": [-(2**31), 2**31 - 1, -(2**31), 2**31 - 1],
    "from the end": [200, 200, 200, 200],
    "beyond": [0, 100, 200, 300],
}


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("recipe", PACKED)
@pytest.mark.parametrize("wrong", [*WRONG, "right"])
def test_S14_whatever_cu_seqlens_holds_nothing_outside_is_touched(wrong, recipe, use_tma, monkeypatch):
    """In the interpreter, where every address is looked at; of the right ones, too."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter was not chosen: there is a GPU")
    from sage_kernels._triton import compat
    from sage_kernels._triton.attention import launch as launch_attention
    from sage_kernels._triton.sequences import Packed
    from sage_kernels.facts.masking import packed_masking

    if use_tma and compat.TensorDescriptor is None:
        pytest.skip("this Triton has no descriptors")
    Reach(monkeypatch)
    tile = launch_attention.device_tile(torch.device("cpu"), 64, "per_token")
    tile = tile._replace(kernel="tma" if use_tma else "pointers")
    inputs = [torch.randn(1, n, 1, 64, dtype=torch.float16) for n in (150, 170, 170)]
    cu = torch.tensor(WRONG.get(wrong, [0, 20, 20, 150]), dtype=torch.int32)
    full, band = (False, None), (True, 9)
    for q_ends, k_ends, bands in (
        (cu, cu, (full, band)),
        (ends((50, 50, 50)), cu, (band,)),
        (cu, ends((100, 0, 70)), (full,)),
    ):
        for causal, window in bands:
            launch_attention.launch_attention_fwd(
                *inputs, scale=0.1, scaling="per_token", smooth_k=True, state=None, return_lse=True, recipe=recipe,
                masking=packed_masking(causal, window, 0.0, None, 150, 170), packed=Packed(q_ends, k_ends), tile=tile,
            )  # fmt: skip


@pytest.mark.parametrize("numbers", [[0, 90, 20, 150], [-1, 3, 4, 5], [1, 3, 4, 5], [0, 100, 200, 300]])
def test_S14_wrong_lengths_raise_on_a_cpu(numbers):
    cu, right = torch.tensor(numbers, dtype=torch.int32), ends((50, 50, 50))
    q, k, v = (torch.randn(n, 1, 8) for n in (150, 170, 170))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        sage_attention_varlen(q, k, v, cu, right)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        sage_attention_varlen(q, k, v, right, cu)


def test_S12_a_batch_of_equal_sequences_is_that_batch(attend):
    """The same tokens as [B, S, H, D]: within the reference's rule of both, which S12 holds each to alone."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, 100, 2, 64, generator=generator).half() for _ in range(3))
    cu = ends((100, 100, 100))
    out, _ = attend(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, causal=True)
    batch = sage_attention(*(x.to(attend.device) for x in (q, k, v)), causal=True).cpu()
    assert relative_l2(out.view(batch.shape), batch) < 2e-3


def test_S12_nothing_to_attend_to(attend):
    q, k, v, *_ = packed_inputs((0,), (0,))
    none = ends((0, 0))
    out, lse = attend(q, k, v, none, none)
    assert out.shape[0] == BEHIND_Q and (out == 0).all() and (lse == -torch.inf).all()
    out, lse = attend(q, k[:0], v[:0], none, none, sinks=torch.ones(4))
    assert (out == 0).all() and (lse == 1).all()
    assert attend(q[:0], k, v, none, ends((2, BEHIND_K - 2)))[0].shape == (0, 4, 64)
    assert K_LENGTHS[3] == 0 and Q_LENGTHS[1] == 0  # what the other tests rely on
