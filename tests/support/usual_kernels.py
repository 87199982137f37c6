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
from sage_kernels.facts.few_rows import WEIGHT_ONLY
from sage_kernels.facts.recipe import DEFAULT_RECIPE, FP8_RECIPE
from sage_kernels.ops import warm_up
from sage_kernels.ops.warm_up import CallKind, HeadsKind, LinearKind
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
    width, hidden = 3072, 12288
    layer = LinearKind(BF16, "int8", width, width, True)
    kinds = [layer, layer._replace(norm="layer"), layer._replace(norm="layer", columns=hidden, activation="gelu_tanh")]
    kinds += [layer._replace(depth=hidden, adds=True), layer._replace(adds=True)]
    kinds += [layer._replace(depth=hidden), layer._replace(columns=hidden)]
    # modulation, of one row: two, three and six vectors, each with a tile of its own
    kinds += [layer._replace(format=WEIGHT_ONLY, columns=vectors * width) for vectors in (2, 3, 6)]

    def joined():  # attention's and the feed-forward's results side by side, as in FLUX's single blocks
        x, beside = torch.empty(1, 4096, width, dtype=BF16), torch.empty(1, 4096, hidden, dtype=BF16)
        linear.launch_quantize_activation(
            x, format="int8", norm="none", weight=None, bias=None, eps=1e-6, gain=None, shift=None, balance=None,
            beside=beside,
        )  # fmt: skip

    # the numbers of rows: of each tile of the matmul, whole and with its last tiles shared
    calls = [call for kind in kinds for call in warm_up.linear_calls(kind, CPU, (4096, 4608, 512, 256))]
    return [*calls, joined, *warm_up.weight_calls(BF16, "int8", width, CPU)]


def usual_jobs() -> dict[tuple, ahead.Job]:
    """What is to be compiled, after `as_on_hopper`: attention of denoisers in bf16, planned, with both fast recipes;
    the heads' norm and rotary embedding in front of it; the end of a step; 8-bit linear layers; causal attention of
    language models."""
    kinds = [CallKind(BF16, width, recipe, keeps_rows=True) for width in HEAD_DIMS
             for recipe in (DEFAULT_RECIPE, FP8_RECIPE)]  # fmt: skip
    kinds += [
        CallKind(BF16, width, scaling="per_token", rotation="hadamard", causal="bottom_right") for width in HEAD_DIMS
    ]
    calls = [call for kind in kinds for call in warm_up._calls(kind, CPU)]
    for width in HEAD_DIMS:
        calls += [warm_up.heads_call(HeadsKind(BF16, width, norm, BF16 if norm else None, numbers, True, False), CPU)
                  for norm in (True, False) for numbers in (True, False)]  # fmt: skip
        normed = HeadsKind(BF16, width, True, BF16, True, True, False)
        for kind in (normed._replace(across_heads=True), normed._replace(rotates=False)):  # Wan, HunyuanVideo's text
            calls.append(warm_up.heads_call(kind, CPU))
        calls.append(_closing(width))
    return ahead.collect([*calls, *_linear_calls()])
