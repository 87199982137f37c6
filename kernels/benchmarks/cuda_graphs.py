"""Functions from CUDA graphs, and what such a graph launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from sage_kernels.testing import graph_nodes


def captured(function: Callable, *inputs) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A call of `function` as a graph, and where a replay leaves its result.

    The call has been made once before, so that nothing is compiled meanwhile; it is made on what `inputs` hold then.
    """
    function(*inputs)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = function(*inputs)
    graph.instantiate()
    return graph, out


class Replayed:
    """`function` from CUDA graphs, one for each of `sets` of inputs, which are told apart by their first tensor.

    Attributes: launched: {kind of node: how many} of one graph, as `graph_nodes` has it.
    """

    def __init__(self, function: Callable, sets):
        self._function = function  # its tensors live as long as the graphs that read and write them
        self._graphs = {inputs[0].data_ptr(): captured(function, *inputs) for inputs in sets}
        self.launched: Counter[str] = graph_nodes(next(iter(self._graphs.values()))[0])

    def __call__(self, *inputs) -> torch.Tensor:
        graph, out = self._graphs[inputs[0].data_ptr()]
        graph.replay()
        return out


def replayed(forward: Callable, inputs: dict) -> Callable:
    """`forward` from a CUDA graph; where its inputs lie is where every later call copies its own to."""
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
