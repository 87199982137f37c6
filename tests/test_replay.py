"""Calls made once more: the same launches with other addresses, and none where something else was computed."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels import attention, sage_attention
from sage_kernels.state import new_head_state


pytest.importorskip("triton", reason="triton is not installed")
from tests.recording_driver import run  # noqa: E402


# in a process of its own, with a driver that records what it is handed
SCRIPT = """
import torch, triton
from recording_driver import install

handed = install(device=None, stream=7)
from sage_kernels._triton import launch as launching, launch_attention
from sage_kernels._triton.tiles import Tile, choose_tile
from sage_kernels.masking import make_masking
from sage_kernels.recipe import RECIPES
from sage_kernels.state import new_head_state

launch_attention.device_tile = lambda device, width, scaling, masking, pv: choose_tile(90, width, scaling, pv=pv)

def tensors(seq_q, seq_kv, head_dim, dtype, planned):
    q, k, v = (torch.randn(2, s, 4, head_dim).to(dtype) for s in (seq_q, seq_kv, seq_kv))
    return (q, k, v, *(new_head_state(4, head_dim, "cpu") if planned else ()))

def call(given, planned, **options):
    masking, _ = make_masking(None, options.pop("causal", ""), None, 0.0, None, given[0].shape[1], given[1].shape[1])
    state = type(new_head_state(1, 8, "cpu"))(*given[3:]) if planned else None
    options = {"scale": 0.1, "smooth_k": True, "return_lse": False, "masking": masking, **options}
    out, lse = launch_attention.launch_attention_fwd(*given[:3], state=state, **options)
    return out if lse is None else (out, lse)

def named(given, results):
    # what was handed over, with names for addresses: of the given, of the results, and of buffers as they come
    names = {x.data_ptr(): f"given {i}" for i, x in enumerate(given)}
    names |= {x.data_ptr(): f"result {i}" for i, x in enumerate([results] if torch.is_tensor(results) else results)}
    launches = []
    for hash, grid, head, values in handed:
        line = []
        for x in values:
            if hasattr(x, "block_shape"):
                line.append(("described", list(x.shape), list(x.strides), list(x.block_shape), x.padding))
                x = x.base
            if hasattr(x, "data_ptr"):
                x = x.data_ptr()
            if type(x) is int and x in names or type(x) is int and x > 2**40:
                x = names.setdefault(x, f"buffer {len(names)}")
            line.append(x)
        launches.append((hash, grid, head, line))
    handed.clear()
    return launches

KINDS = {
    "fp8, planned": dict(planned=True, scaling="planned", recipe="qk_int8_pv_fp8"),
    "per_token, rotated, lse, two lengths": dict(
        scaling="per_token", rotation="hadamard", return_lse=True, seq_q=70, seq_kv=300
    ),
}
for name, kind in KINDS.items():
    kind = dict(kind)
    planned, dtype = kind.pop("planned", False), torch.bfloat16
    shape = kind.pop("seq_q", 200), kind.pop("seq_kv", 200), 64, dtype, planned
    first, second = tensors(*shape), tensors(*shape)
    results, again = launching.record(lambda: call(first, planned, **kind), first)
    assert again is not None, name
    recorded = named(first, results)
    made = again(second)
    replayed = named(second, made)
    assert replayed == recorded and len(recorded) > 1, (name, recorded, replayed)
    fresh = call(second, planned, **kind)
    assert named(second, fresh) == recorded, name
    for a, b in zip([made] if torch.is_tensor(made) else made, [fresh] if torch.is_tensor(fresh) else fresh):
        assert a.shape == b.shape and a.dtype == b.dtype and a.data_ptr() != b.data_ptr(), name
    # an address that Triton would compile anew for
    q = torch.empty(second[0].numel() + 1, dtype=dtype)[1:].view(second[0].shape)
    assert again((q, *second[1:])) is None and not handed, name

# calls that compute something beside their launches, or hand the same tensor over twice
import triton.language as tl

@triton.jit
def copy(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))

def copied(x, y, through=lambda x: x, result=lambda x: x):
    out = launching.buffer(64, device="cpu", returned=True)
    launching.launch(copy, 1, through(x), y, out, BLOCK=64)
    return result(out)

x, y = torch.randn(65), torch.randn(64)
first, shifted = x[:64], x[1:]
assert launching.record(lambda: copied(first, y), (first, y))[1] is not None
for name, call, given in (
    ("computed between", lambda: copied(first, y, through=torch.clone), (first, y)),
    ("computed after", lambda: copied(first, y, result=torch.clone), (first, y)),
    ("a tensor that is not given", lambda: copied(first, y), (first,)),
    ("the same twice", lambda: copied(y, y), (y, y)),
    ("an address that is compiled for alone", lambda: copied(shifted, y), (shifted, y)),
    ("no launch", lambda: launching.buffer(64, device="cpu", returned=True), (first, y)),
):
    results, again = launching.record(call, given)
    assert again is None and torch.is_tensor(results), name
print("all made again alike")
"""


def test_a_call_made_again_launches_what_a_new_one_would(tmp_path):
    done = run(SCRIPT, tmp_path)
    assert done.stdout == "all made again alike\n", done.stderr[-3000:]


def inputs(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (2, 384, 4, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "return_lse": True}, {"rotation": "hadamard"}, {"softcap": 5.0}]
)
@pytest.mark.parametrize("recipe", sorted(sage_kernels.RECIPES))
@pytest.mark.parametrize("planned", [False, True])
def test_calls_made_again_give_the_same_bits(options, recipe, planned):
    attention._made.clear()
    states = [new_head_state(4, 64, "cuda") if planned else None for _ in range(4)]
    new = []
    for seed in (0, 1):
        attention._made.clear()
        new.append(sage_attention(*inputs(seed), recipe=recipe, state=states[seed], **options))
    assert len(attention._made) == 1
    again = next(iter(attention._made.values()))
    calls = []
    attention._made[next(iter(attention._made))] = lambda given: calls.append(1) or again(given)
    for seed in (0, 1):
        poison = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(3)]  # what buffers then hold
        del poison
        old = sage_attention(*inputs(seed), recipe=recipe, state=states[2 + seed], **options)
        for a, b in zip(as_tuple(old), as_tuple(new[seed]), strict=True):
            assert torch.equal(a, b)
        if planned:
            for name, a, b in zip(states[0]._fields, states[seed], states[2 + seed], strict=True):
                assert torch.equal(a, b), name
    assert len(calls) == 2


@pytest.mark.gpu
def test_a_known_call_still_meets_its_checks():
    attention._made.clear()
    q, k, v = inputs(0)
    state = new_head_state(4, 64, "cuda")
    out = sage_attention(q, k, v, state=state)
    sage_attention(q, k, v, state=state)
    assert len(attention._made) == 1
    with pytest.raises(NotImplementedError):
        sage_attention(q.requires_grad_(), k, v, state=state)
    q.requires_grad_(False)
    with pytest.raises(ValueError):
        sage_attention(q, k, v, state=state._replace(plan_scale=torch.zeros(3, device="cuda")))
    with pytest.raises(TypeError):
        sage_attention(q, k, v, window=True)
    with pytest.raises(ValueError):
        sage_attention(q, k, v, causal="")
    # an address off by two bytes goes its own way
    shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert torch.equal(sage_attention(shifted, k, v, state=new_head_state(4, 64, "cuda")), out)


@pytest.mark.gpu
def test_a_call_made_again_is_captured_and_runs_on_the_current_stream():
    attention._made.clear()
    q, k, v = inputs(0)
    other = inputs(1)
    wanted = sage_attention(*other)
    sage_attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(other[0]), k.copy_(other[1]), v.copy_(other[2])
        out = sage_attention(q, k, v)  # on another stream it would read what q, k and v held before
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    q, k, v = inputs(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sage_attention(q, k, v)
    q.copy_(other[0]), k.copy_(other[1]), v.copy_(other[2])
    graph.replay()
    assert torch.equal(out, wanted)
