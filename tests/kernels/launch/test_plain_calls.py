"""Eager calls skip the dispatcher: the same bits, and whoever looks on still sees the op."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sage_kernels import new_head_state, sage_attention
from sage_kernels.ops import attention, replay
from sage_kernels.testing import make_qkv


OP = "sage_kernels::attention"


@pytest.fixture
def qkv():
    return make_qkv("normal", 1, 40, 50, 2, 1, 16, dtype=torch.bfloat16)


def is_plain(*tensors):
    return replay.is_plain_call(*tensors)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right", "window": 7}])
def test_the_same_bits_with_and_without_the_dispatcher(planned, return_lse, autocast, options, qkv, monkeypatch):
    def run():
        state = new_head_state(1, 16, "cpu") if planned else None
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            out = sage_attention(*qkv, return_lse=return_lse, state=state, **options)
        return [*(out if return_lse else (out,)), *(state or ())]

    assert is_plain(*qkv)
    direct = run()
    monkeypatch.setattr(attention, "is_plain_call", lambda *tensors: False)
    assert all(torch.equal(a, b) for a, b in zip(direct, run(), strict=True))


def test_behind_the_dispatcher_only_the_class_of_a_tensor_is_asked_for(qkv):
    """There a profiler, a mode and negative bits have been seen to; a subclass may be anything."""

    class Own(torch.Tensor):
        pass

    assert replay.is_usual((*qkv, None), True) and replay.is_usual((torch.nn.Parameter(qkv[0]),), True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not replay.is_usual(qkv, False) and replay.is_usual(qkv, True)
    assert not replay.is_usual((*qkv, qkv[0].as_subclass(Own)), True)


def test_a_dispatch_mode_sees_the_op(qkv):
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op.name())
            return op(*args, **(kwargs or {}))

    with Recorder():
        sage_attention(*qkv)
    assert seen == [OP]


def test_a_function_mode_sees_the_op(qkv):
    seen = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    with Recorder():
        sage_attention(*qkv)
    assert any("sage_kernels.attention" in name for name in seen)


def test_a_profiler_sees_the_op(qkv):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sage_attention(*qkv)
    assert OP in {event.key for event in profile.key_averages()}


def test_a_tracer_records_the_op(qkv):
    with torch.no_grad():
        traced = torch.jit.trace(lambda q, k, v: sage_attention(q, k, v), qkv, check_trace=False)
    assert OP in str(traced.graph)
    changed = [x + 1 for x in qkv]
    assert torch.equal(traced(*changed), sage_attention(*changed))


def test_fake_tensors_run_nothing(qkv, monkeypatch):
    monkeypatch.setattr(attention, "_compute", lambda *_, **__: pytest.fail("computed"))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in qkv]
        assert sage_attention(*fake).shape == qkv[0].shape
    assert sage_attention(*fake).shape == qkv[0].shape  # also where the mode is left


def test_transforms_and_subclasses_are_not_plain(qkv):
    class Tagged(torch.Tensor):
        pass

    assert is_plain(torch.nn.Parameter(qkv[0]), None) and not is_plain(qkv[0].as_subclass(Tagged))
    seen = []
    torch.func.vmap(lambda x: (seen.append(is_plain(x)), x)[1])(qkv[0])
    assert seen == [False]
