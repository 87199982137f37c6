"""The kernels that most models need first on a Hopper GPU, found without one: those that come prebuilt.

For scripts in processes of their own: what attention takes the GPU for stays a Hopper one.
"""

from __future__ import annotations

import torch

from sage_kernels._triton.attention import launch as attention
from sage_kernels._triton.attention.tiles import choose_tile
from sage_kernels._triton.launch import ahead
from sage_kernels._triton.linear import launch as linear
from sage_kernels._triton.prologue import prologue
from sage_kernels._triton.prologue.plan_step import launch_plan_step
from sage_kernels.facts.recipe import DEFAULT_RECIPE, FP8_RECIPE
from sage_kernels.ops import warm_up
from sage_kernels.ops.warm_up import CallKind, HeadsKind
from sage_kernels.planning.state import ScaleState, Site
from tests.support.recording_driver import install


CPU = torch.device("cpu")
HEAD_DIMS = (128, 64)
BF16 = torch.bfloat16


def _hopper_tile(_, width, scaling, masking, pv="16bit", lagged=False, **others):
    return choose_tile(90, width, scaling, masking.by_row, pv, not lagged)


def as_on_hopper() -> None:
    install(device=0, stream=7)
    attention.device_tile = _hopper_tile
    attention.processors_of = prologue.processors_of = linear.processors_of = lambda device: 132
    linear.capability_of = lambda device: 90


def _closing(head_dim: int):
    """The launch that closes a denoising step."""
    state = ScaleState([Site("any", 1, head_dim)], device=CPU)
    level = state._noise_bins.of(1.0)
    return lambda: launch_plan_step(*state._launch_tensors(level, level), **state._launch_numbers())


def _linear_calls():
    """The 8-bit linear layers of FLUX and of others as wide: what they quantise, and their matmuls, with each tile."""
    return [call for rows in (8192, 4608, 512, 256) for call in _linear_calls_of(rows)]


def _linear_calls_of(rows: int):
    width, hidden = 3072, 12288

    def tensor(*shape, dtype=BF16):
        return torch.empty(shape, dtype=dtype)

    def quantize(columns, norm="none", modulated=False, beside=None):
        gain, shift = (tensor(1, 1, columns) if modulated else None for _ in range(2))
        return lambda: linear.launch_quantize_activation(
            tensor(1, rows, columns), format="int8", norm=norm, weight=None, bias=None, eps=1e-6, gain=gain,
            shift=shift, balance=None, beside=None if beside is None else tensor(1, rows, beside),
        )  # fmt: skip

    def matmul(depth, columns, activation="none", adds=False):
        codes, weight = (tensor(*shape, dtype=torch.int8) for shape in ((1, rows, depth), (columns, depth)))
        scales = [tensor(1, rows, dtype=torch.float32), tensor(columns, dtype=torch.float32)]
        gate, residual = (tensor(1, 1, columns), tensor(1, rows, columns)) if adds else (None, None)
        return lambda: linear.launch_quantized_linear(
            codes, scales[0], weight, scales[1], tensor(columns), activation=activation, gate=gate,
            residual=residual, dtype=BF16,
        )  # fmt: skip

    return [
        quantize(width, "layer", modulated=True), quantize(width), quantize(hidden), quantize(width, beside=hidden),
        matmul(width, width), matmul(width, hidden, "gelu_tanh"), matmul(hidden, width, adds=True),
    ]  # fmt: skip


def usual_jobs() -> dict[tuple, ahead.Job]:
    """What is to be compiled, after `as_on_hopper`: attention of denoisers in bf16, planned, with both fast recipes;
    the heads' norm and rotary embedding in front of it; the end of a step; 8-bit linear layers; causal attention of
    language models."""
    kinds = [CallKind(BF16, width, recipe, keeps_rows=True) for width in HEAD_DIMS
             for recipe in (DEFAULT_RECIPE, FP8_RECIPE)]  # fmt: skip
    kinds += [CallKind(BF16, width, scaling="per_token", causal="bottom_right") for width in HEAD_DIMS]
    calls = [call for kind in kinds for call in warm_up._calls(kind, CPU)]
    for width in HEAD_DIMS:
        calls += [warm_up.heads_call(HeadsKind(BF16, width, norm, BF16 if norm else None, numbers, True), CPU)
                  for norm in (True, False) for numbers in (True, False)]  # fmt: skip
        calls.append(_closing(width))
    return ahead.collect([*calls, *_linear_calls()])
