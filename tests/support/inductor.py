"""Inductor without its code: its passes run over a graph, ours among them, and PyTorch runs what they leave of it."""

from __future__ import annotations

from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx


def passes_alone(graph, inputs):
    """A back end of torch.compile: as "inductor", in a fraction of the time, but for what lowers graphs to code."""
    return compile_fx(graph, inputs, inner_compile=lambda graph, *_, **options: make_boxed_func(graph.forward))
