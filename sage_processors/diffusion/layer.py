"""One attention module of a denoiser, with the processor it had and the one it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .calls.processor_state import ProcessorState


@dataclass
class Layer:
    """One attention module, with its original processor and our Sage processor."""

    name: str
    module: nn.Module
    original: Any
    sage: Any
    site_indices: list = field(default_factory=list)  # into the ScaleState, one per call site; None: unplanned

    def __post_init__(self):
        self._attributes = dict(self.original.__dict__)

    @property
    def own(self) -> ProcessorState:
        """The state that our processor keeps beside the attributes of the original."""
        state: ProcessorState = self.sage._sage
        return state

    def give_back(self):
        """Return the original processor, with the attributes that were set on ours since the swap."""
        for name, value in self.sage.__dict__.items():  # such as the attention back end, an IP-Adapter's scale
            if name != "_sage" and self._attributes.get(name, self) is not value:
                self.original.__dict__[name] = value
        return self.original
