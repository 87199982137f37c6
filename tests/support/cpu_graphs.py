"""Stand-ins for CUDA captures on a CPU.

`Recorder`: its replays compute what was captured, on its tensors. `frozen`: its replays leave what was computed at the
capture, so that one too many shows.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import sage_processors as sp
from sage_processors.diffusion.graphs.model_graphs import ModelGraphs


class Recorder:
    """In the place of CUDA. Attributes: captures: so far. is_recording. error: added to what replays compute."""

    def __init__(self, error=0.0):
        self.captures, self.is_recording, self.error = 0, False, error

    def __call__(self, run, device=None):
        self.captures += 1
        self.is_recording = True
        try:
            results = tree_map_only(torch.Tensor, torch.clone, run())
        finally:
            self.is_recording = False

        def replay():
            for place, result in zip(tree_leaves(results), tree_leaves(self.again(run)), strict=True):
                if isinstance(place, torch.Tensor):
                    place.copy_(result + self.error)

        return results, replay

    def again(self, run):
        """What a replay computes."""
        return run()

    def wait(self):
        """As code that waits for the GPU: it can't be captured."""
        if self.is_recording:
            raise RuntimeError("operation not permitted when stream is capturing")

    def waits_in(self, module):
        """Let the forward of a module wait for the GPU."""
        forward = module.forward

        def waiting(*args, **kwargs):
            self.wait()
            return forward(*args, **kwargs)

        module.forward = waiting


class AsOnGpu(TorchDispatchMode):
    """Refuses what waits for values on a GPU: sizes or Python numbers that follow from them. Attributes: refused."""

    WAITING = ("nonzero", "masked_select", "_local_scalar_dense", "_unique2", "equal")

    def __init__(self):
        super().__init__()
        self.refused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.partition("::")[2] in self.WAITING:
            self.refused += 1
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return func(*args, **(kwargs or {}))


class StrictRecorder(Recorder):
    """A Recorder in which what waits for the GPU fails, in captures and in replays."""

    def __init__(self):
        super().__init__()
        self.mode = AsOnGpu()

    def __call__(self, run, device=None):
        def strict():
            with self.mode:
                return run()

        return super().__call__(strict)


class OnCpu(ModelGraphs):
    """ModelGraphs whose graphs are what `record` makes."""

    device_type = "cpu"

    def __init__(self, handle, denoiser, record):
        super().__init__(handle, denoiser)
        self.record = record


def frozen(run):
    """In the place of CUDA: every replay leaves what was computed when it was captured."""
    results = run()
    return results, lambda: None


def captures(handle, index=0, recorder=None) -> tuple[ModelGraphs, Recorder]:
    """As graphs="auto", with a recorder."""
    recorder = recorder or Recorder()
    graphs = OnCpu(handle, handle._denoisers[index], recorder)
    handle._denoisers[index].use_graphs(graphs)
    return graphs, recorder


def options(**kwargs):
    """Options of a swap in which no attention call is short."""
    return sp.SageAttnProcessor(min_tokens=1, **kwargs)
