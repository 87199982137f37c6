"""A back end of torch.compile that leaves its results where CUDA graphs leave theirs, on a CPU."""

from __future__ import annotations

import torch


class Replaying:
    """Each graph's results are in the same tensors at every call, and no counter tells that they were written to.

    As PyTorch's mode="reduce-overhead": a graph for each set of parameters and of other tensors that stay where they
    are, which gives out the tensors that it gave out before.

    Attributes: replays: calls that found such tensors.
    """

    def __init__(self):
        self.replays = 0

    def __call__(self, graph, inputs):
        results: dict = {}

        def run(*inputs):
            key = tuple(x.data_ptr() for x in inputs if _stays(x))
            made = graph(*inputs)
            if key not in results:
                results[key] = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in made)
                return results[key]
            self.replays += 1
            for place, x in zip(results[key], made, strict=True):
                if isinstance(x, torch.Tensor):
                    version = place._version
                    place.data.copy_(x)
                    assert place._version == version
            return results[key]

        return run


def _stays(x) -> bool:
    return isinstance(x, torch.nn.Parameter) or hasattr(x, "_dynamo_static_input_type")
