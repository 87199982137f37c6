"""Has torch.compile's Inductor run passes of ours on the graphs that it gets from Dynamo."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from types import ModuleType

import torch

from sage_kernels.compat import add_graph_pass

from . import graph_edits, graph_fusion


def fuse_in_compiled_code(change: Callable[[torch.fx.Graph], None] = graph_fusion.fuse, *needs: ModuleType) -> None:
    """Have change(graph) run on what is compiled from now on. Harmless when repeated.

    needs: modules that it works with: compiled code of other ones is not used again.
    """
    sources = (inspect.getmodule(change), graph_edits, *needs)
    add_graph_pass(change, hashlib.sha256("".join(map(inspect.getsource, sources)).encode()).digest())  # type: ignore
