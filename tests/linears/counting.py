"""What tests of 8-bit linear layers share: counts of ops, the error that quantising alone makes, small models."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sage_kernels
from sage_processors.linears.weights.linear_state import linear_state


def ops_of(function) -> tuple[bool, bool]:
    """Whether calling it quantises an activation, and whether it multiplies one by a weight."""
    name, both = str(function), "sage_kernels.dynamic_linear" in str(function)
    return both or "sage_kernels.quantize_activation" in name, both or "sage_kernels.quantized_linear" in name


class OpCounter(TorchDispatchMode):
    """Counts calls of the two ops while it is on; one that does both counts as both."""

    def __init__(self):
        super().__init__()
        self.quantized = self.multiplied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        quantized, multiplied = ops_of(func)
        self.quantized, self.multiplied = self.quantized + quantized, self.multiplied + multiplied
        return func(*args, **(kwargs or {}))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 norm of the difference over that of `expected`."""
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / expected.norm()).item()


def rounding(x: torch.Tensor, rows: sage_kernels.QuantizedRows) -> float:
    """Relative L2 error of the codes of x."""
    return relative_error(rows.codes.float() * rows.scale[..., None], x.float())


def expected_error(x: torch.Tensor, *weights: torch.Tensor, format: str = "int8") -> float:
    """Relative L2 error of x · weightᵀ from rounding x and the weight to 8 bit: both independent."""
    parts = [rounding(x, sage_kernels.quantize_activation(x, format=format))]
    parts += [max(rounding(w, sage_kernels.quantize_weight(w, format=format)) for w in weights)] if weights else []
    return sum(part**2 for part in parts) ** 0.5


@torch.no_grad()
def run(model, inputs: dict) -> torch.Tensor:
    """Output of a model of diffusers."""
    return model(**inputs, return_dict=False)[0]


def layers(seed: int = 0) -> nn.Sequential:
    """A norm and two layers, with GELU between."""
    torch.manual_seed(seed)
    stack = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return stack.eval().requires_grad_(False)


def set_least_work(model, work: int) -> None:
    """Calls of fewer multiply-adds than `work` are short for the swapped layers of a model."""
    for module in model.modules():
        if linear_state(module) is not None:
            module._sage.shared.least_work = work
            module._sage.find_short()
