"""Functions replayed from CUDA graphs, and counts of their launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from sage_kernels.testing import graph_nodes


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


class Replayed:
    """A function replayed from CUDA graphs, one for each set of inputs.

    Sets are told apart by the address of their first tensor.

    Attributes: launched: {kind of node: count} of one graph, as from `graph_nodes`.
    """

    def __init__(self, function: Callable, sets):
        self._function = function  # keeps its tensors alive, which the graphs read and write
        self._graphs = {inputs[0].data_ptr(): captured(function, *inputs) for inputs in sets}
        self.launched: Counter[str] = graph_nodes(next(iter(self._graphs.values()))[0])

    def __call__(self, *inputs) -> torch.Tensor:
        graph, out = self._graphs[inputs[0].data_ptr()]
        graph.replay()
        return out


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
