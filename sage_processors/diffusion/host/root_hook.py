"""The hook before every forward of a denoiser: notices replaced processors, new devices and steps."""

from __future__ import annotations

import torch

from sage_kernels.compat import keep_out_of_dynamo


class RootHook:
    """Forward pre-hook of a denoiser. In a copy of the model it does nothing.

    torch.compile treats the hooks of a compiled model as functions of their own. This hook is kept out of it and runs
    on the host at every forward. Only if code around the model is compiled, the hook is compiled with it.
    """

    is_of_attention = True

    def __init__(self, handle=None, denoiser=None):
        self.handle, self.denoiser = handle, denoiser

    @property
    def is_leftover(self):
        """True in a copy of the model."""
        return self.handle is None

    def __call__(self, module, args, kwargs):
        handle, denoiser = self.handle, self.denoiser
        if handle is None:
            return
        if not torch.compiler.is_compiling():
            if denoiser.graphs is None or not denoiser.graphs.is_calling:
                _before_forward(handle, denoiser, args, kwargs)
        elif denoiser.follows_scheduler and denoiser.depends_on_steps:
            denoiser.forwards.count_compiled(denoiser.timestep_of(args, kwargs))
        if denoiser.state is not None and not denoiser.follows_scheduler:
            denoiser.follow_timestep(args, kwargs)

    def __reduce__(self):
        return RootHook, ()


@torch.compiler.disable
def _before_forward(handle, denoiser, args, kwargs):
    handle._before_forward(denoiser, args, kwargs)


keep_out_of_dynamo(RootHook.__call__)
