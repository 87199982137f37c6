"""Calls of the packed op: what it refuses, compilation, export, CUDA graphs (cases S15, T01, T03, T04 and E05)."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import sage_kernels
from sage_kernels import DEFAULT_RECIPE, sage_attention_varlen
from tests.kernels.attention.attention_cases import FP8, runs_fp8
from tests.kernels.attention.varlen_cases import ends, packed_inputs


CU = ends((3, 0, 5))
GOOD = {
    "q": torch.randn(9, 4, 16),
    "k": torch.randn(9, 2, 16),
    "v": torch.randn(9, 2, 16),
    "cu_seqlens_q": CU,
    "cu_seqlens_k": CU,
}
BAD = {
    "rank": ({"q": torch.randn(1, 9, 4, 16)}, ValueError, ["q", "rank 4", "[total, H, D]", "sage_attention"]),
    "not_a_tensor": ({"k": [1.0]}, TypeError, ["k", "list"]),
    "dtype": ({"v": GOOD["v"].double()}, TypeError, ["v", "float64"]),
    "heads": ({"k": torch.randn(9, 3, 16), "v": torch.randn(9, 3, 16)}, ValueError, ["heads", "q 4", "k 3"]),
    "tokens": ({"v": torch.randn(8, 2, 16)}, ValueError, ["v", "8 tokens", "k's 9"]),
    "gradient": ({"q": torch.randn(9, 4, 16, requires_grad=True)}, NotImplementedError, ["q", "requires_grad"]),
    "int64": ({"cu_seqlens_q": CU.long()}, TypeError, ["cu_seqlens_q", "int64", "int32", ".int()"]),
    "list": ({"cu_seqlens_k": [0, 3, 3, 8]}, TypeError, ["cu_seqlens_k", "list"]),
    "none": ({"cu_seqlens_k": None}, TypeError, ["cu_seqlens_k", "NoneType"]),
    "two_dims": ({"cu_seqlens_q": CU[None]}, ValueError, ["cu_seqlens_q", "(1, 4)"]),
    "no_sequence": ({"cu_seqlens_q": CU[:1]}, ValueError, ["cu_seqlens_q", "(1,)"]),
    "unlike_numbers": ({"cu_seqlens_k": CU[:3]}, ValueError, ["cu_seqlens_k", "3 numbers", "4"]),
    "strided": ({"cu_seqlens_q": CU.repeat_interleave(2)[::2]}, ValueError, ["cu_seqlens_q", "contiguous"]),
    "device": ({"cu_seqlens_q": CU.to("meta")}, ValueError, ["cu_seqlens_q", "meta", "cpu"]),
    "longest_tensor": ({"max_seqlen_q": torch.tensor(5)}, TypeError, ["max_seqlen_q", "Tensor"]),
    "longest_bool": ({"max_seqlen_k": True}, TypeError, ["max_seqlen_k", "bool"]),
    "longest_short": ({"max_seqlen_q": 4}, ValueError, ["max_seqlen_q", "4", "at least 5"]),
    "causal_rule": ({"causal": "bottom_right"}, TypeError, ["causal", "bottom_right", "bool"]),
    "window_zero": ({"window": 0}, ValueError, ["window", "0"]),
    "per_head": ({"scaling": "per_head"}, NotImplementedError, ["scaling", "per_head", "per_token", "sage_attention"]),
    "scaling": ({"scaling": "timestep"}, ValueError, ["scaling", "timestep"]),
    "recipe": ({"recipe": "int4"}, ValueError, ["recipe", "int4"]),
    "sinks": ({"sinks": torch.zeros(2)}, ValueError, ["sinks", "(2,)", "[4]"]),
}


@pytest.mark.parametrize("case", BAD)
def test_S15_a_bad_call_of_packed_sequences_raises_before_any_launch(case, monkeypatch):
    def launched(*_, **__):
        raise AssertionError("an op ran although the input is bad")

    monkeypatch.setattr("sage_kernels.ops.varlen._compute", launched)
    wrong, error, words = BAD[case]
    with pytest.raises(error) as caught:
        sage_attention_varlen(**(GOOD | wrong))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_S15_longest_sequences_are_taken_as_they_are_handed_over():
    expected = sage_attention_varlen(**GOOD)
    assert torch.equal(sage_attention_varlen(*GOOD.values(), 5, 5), expected)
    assert torch.equal(sage_attention_varlen(*GOOD.values(), max_seqlen_q=100, max_seqlen_k=100), expected)


def test_T01_no_derivative_forward_either():
    q, k, v, *lengths = GOOD.values()

    def call(x):
        return sage_attention_varlen(x, k, v, *lengths)

    with pytest.raises(NotImplementedError, match="tangent|forward-mode"):
        torch.func.jvp(call, (q,), (torch.ones_like(q),))


OPTIONS = {
    "plain": (None, 0.25, "per_token", True, False, None, 0.0),
    "per block, window": (None, 0.25, "per_block", False, False, 4, 0.0),
    "causal, sinks": (torch.zeros(4), 0.25, "per_token", True, True, 4, 5.0),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op", ["attention_varlen", "attention_varlen_lse"])
@pytest.mark.parametrize("options", OPTIONS)
def test_T03_opcheck_of_packed_sequences(options, op, device):
    given = [x.to(device) if isinstance(x, torch.Tensor) else x for x in OPTIONS[options]]
    inputs = [x.to(device) for x in packed_inputs((3, 0, 20), (3, 9, 20), head_dim=16)]
    for q, k, v in (inputs[:3], [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:3]]):
        arguments = (q, k, v, *inputs[3:], *given, DEFAULT_RECIPE, "none")
        torch.library.opcheck(getattr(torch.ops.sage_kernels, op).default, arguments)


def test_T04_new_lengths_of_packed_sequences_recompile_once():
    """New totals make the graph dynamic once; new values in cu_seqlens and new longest sequences never."""
    torch._dynamo.reset()

    def attention(q, k, v, cu_q, cu_k, longest):
        return sage_attention_varlen(q, k, v, cu_q, cu_k, longest, longest, causal=True, return_lse=True)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for i, lengths in enumerate(((20, 5, 30), (30, 5, 20), (40, 9, 3), (1, 0, 60), (7, 70, 7))):
        inputs = packed_inputs(lengths, lengths, head_dim=32)
        out, lse = compiled(*inputs, max(lengths))
        expected, expected_lse = attention(*inputs, max(lengths))
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert counter.frame_count <= min(i + 1, 2), lengths
    torch._dynamo.reset()


class Exported(torch.nn.Module):
    def forward(self, q, k, v, cu_q, cu_k):
        return sage_attention_varlen(q, k, v, cu_q, cu_k, causal=True, window=9)


def test_T04_packed_sequences_export_with_dynamic_totals_and_numbers_of_sequences():
    total, sequences = torch.export.Dim("total", min=2, max=500), torch.export.Dim("sequences", min=2, max=50)
    inputs = packed_inputs((20, 30), (20, 30), head_dim=32)
    q, k, v = (x[:50] for x in inputs[:3])
    shapes = ({0: total}, {0: total}, {0: total}, {0: sequences}, {0: sequences})
    program = torch.export.export(Exported(), (q, k, v, *inputs[3:]), dynamic_shapes=shapes)
    others = packed_inputs((7, 1, 0, 40), (7, 1, 0, 40), head_dim=32)
    others = (*(x[:48] for x in others[:3]), *others[3:])
    assert torch.equal(program.module()(*others), Exported()(*others))


def cuda(tensors):
    return [x.cuda() for x in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [DEFAULT_RECIPE, FP8])
@pytest.mark.parametrize("shared", [False, True])
def test_E05_a_cuda_graph_of_packed_sequences_replays_with_new_data_and_lengths(recipe, shared):
    """Lengths are read in the kernels: a graph serves any lengths of its shapes, bit for bit."""
    if recipe == FP8 and not runs_fp8("cuda"):
        pytest.skip("this GPU has no FP8")
    options = {"causal": True, "return_lse": True, "recipe": recipe}
    lengths = ((300, 0, 200), (100, 399, 1))
    calls = []
    for seed, its in enumerate(lengths):
        q, k, v, cu_q, cu_k = cuda(packed_inputs(its, its, dtype=torch.float16, seed=seed))
        q, k, v = (x[:500] for x in (q, k, v))
        calls.append([q, k, v, cu_q] if shared else [q, k, v, cu_q, cu_k])
    given = [x.clone() for x in calls[0]]

    def attend(tensors):
        return sage_attention_varlen(*tensors, *tensors[3:] * shared, **options)

    expected = [attend(tensors) for tensors in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(given)
    for tensors, wanted in zip(calls, expected, strict=True):
        for x, new in zip(given, tensors, strict=True):
            x.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.gpu
def test_E05_no_packed_call_waits_for_the_gpu():
    """Checks included, known and unknown calls."""
    inputs = cuda(packed_inputs())
    sage_attention_varlen(*inputs, 130, 200, causal=True)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for longest in ((130, 200), (None, None)):
            sage_attention_varlen(*inputs, *longest, causal=True)
        sage_kernels.ops.replay.forget()
        sage_attention_varlen(*inputs, 130, 200, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_T05_a_replayed_packed_call_is_bit_equal(shared):
    """The second call of a kind is launched from what the first one wrote down; so is one of other lengths."""
    sage_kernels.ops.replay.forget()
    for seed, lengths in enumerate(((300, 0, 200), (1, 498, 1), (500, 0, 0))):
        inputs = cuda(packed_inputs(lengths, lengths, seed=seed))
        q, k, v = (x[:500] for x in inputs[:3])
        given = (q, k, v, inputs[3], inputs[3] if shared else inputs[4])
        out = sage_attention_varlen(*given, causal=True)
        known = dict(sage_kernels.ops.replay.replays)
        assert len(known) == 1  # remembered, and found again
        sage_kernels.ops.replay.forget()
        assert torch.equal(sage_attention_varlen(*given, causal=True), out)
        sage_kernels.ops.replay.replays.clear()
        sage_kernels.ops.replay.replays.update(known)


@pytest.mark.gpu
def test_S12_packed_sequences_of_whole_models():
    """A long one beside many short ones, with the padding of a collator behind them: against the reference."""
    from tests.kernels.attention.varlen_cases import AttendPacked

    with pytest.MonkeyPatch.context() as patch:
        attend = AttendPacked("cuda", patch)
        lengths = (2000, *(i * 13 % 97 for i in range(40)), 600)
        for recipe in (DEFAULT_RECIPE, FP8) if runs_fp8("cuda") else (DEFAULT_RECIPE,):
            for options in ({"causal": True}, {"causal": True, "window": 300}, {"scaling": "per_block"}):
                inputs = packed_inputs(lengths, lengths, head_dim=128, dtype=torch.bfloat16)
                attend.check(*inputs, recipe=recipe, **options)
