"""Functions replayed from CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(function: Callable, *inputs) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture a call of `function`. Returns the graph and the tensor that holds a replay's result.

    The function is called once before, so that nothing is compiled during the capture.
    """
    function(*inputs)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = function(*inputs)
    graph.instantiate()
    return graph, out


def replayed(forward: Callable, inputs: dict) -> Callable:
    """Capture `forward` in a CUDA graph. Returns a function that copies its inputs into place and replays."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward(inputs)

    def replay(others):
        for name, place in inputs.items():
            if isinstance(place, torch.Tensor) and others is not inputs:
                place.copy_(others[name])
        graph.replay()
        return output

    return replay
