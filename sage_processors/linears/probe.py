"""Measures the error of 8-bit linear layers per layer and step, while a model runs.

In a probed step some rows of a layer's output are computed again in fp32 from the layer's own input and weight. The
squared sums of this output and of the difference are added up on the device. `data` reads them back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sage_kernels import QuantizedRows
from sage_kernels.compat import mark_static_address

from ..postponed.tensor import Postponed
from ..reporting.layer_report import ratios
from .postponed.linear import product
from .weights.storage import bits_of


SLOTS = 256  # steps with sums of their own; later steps share the last slot
_SIGNAL, _NOISE, _ROWS = range(3)


class LinearProbe:
    """Error sums of one swapped layer. Everything that it computes stays on the device.

    Attributes:
        shared: settings of a probe for all layers: `on`, `rows` to compare in a call, `slot(device)` of the step.
        sums: fp64 [SLOTS, 3]: squared sum of the output, squared sum of the error, number of rows.
    """

    def __init__(self, shared: Any, device: torch.device | str) -> None:
        self.shared = shared
        with torch.inference_mode(False):
            self.sums = torch.zeros(SLOTS, 3, dtype=torch.float64, device=device)
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        """Move the sums to the model's device."""
        self.sums = self.sums.to(device)
        self.slot = self.shared.slot(device)
        mark_static_address(self.sums, guard=False)

    def compare(self, module: Any, x: torch.Tensor, rows: QuantizedRows) -> None:
        """Add the error of one call. x: [..., K], ordinary or postponed; rows: its codes and scales."""
        state = module._sage_linear
        if state.dropped:  # no 16-bit weight to compare with
            return
        if not torch.compiler.is_compiling() and self.sums.device != x.device:
            self.to(x.device)
        tokens = x.numel() // x.shape[-1]
        count = min(self.shared.rows, tokens)
        some = torch.arange(count, device=x.device) * tokens // count
        weight, bias = module._parameters["weight"].detach(), module._parameters.get("bias")
        stock = F.linear((x.value() if isinstance(x, Postponed) else x).flatten(0, -2)[some].float(), weight.float())
        picked = QuantizedRows(_aligned(rows.codes.flatten(0, -2), some), rows.scale.flatten()[some])
        out = product(module, picked, None, dtype=torch.float32)
        error = out - stock
        if bias is not None:  # a part of the output, without error in both
            stock = stock + bias.detach().float()
        found = torch.stack([stock.double().square().sum(), error.double().square().sum()])
        sums = torch.cat([found, found.new_full((1,), float(count))])
        self.sums.index_add_(0, self.slot, sums[None])


def _aligned(codes: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
    """Pick rows [R, K] of codes, with a row stride of a multiple of 16 bytes, as the kernel needs."""
    columns = codes.shape[-1]
    picked = bits_of(codes)[some]
    return F.pad(picked, (0, -columns % 16))[:, :columns].view(codes.dtype)


class LinearProbes:
    """Error sums of all swapped layers that a probe watches, by name."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._layers: dict[str, LinearProbe] = {}

    def attach(self, swap: Any, device: torch.device | str) -> None:
        """Watch the layers of a LinearSwap. Call it again for layers that were swapped later."""
        for state in swap.states():
            if state.label not in self._layers:
                self._layers[state.label] = LinearProbe(self._shared, device)
            state.probe = self._layers[state.label]

    def detach(self, swap: Any) -> None:
        """Stop comparing. The sums stay."""
        for state in swap.states():
            if state.probe is not None and self._layers.get(state.label) is state.probe:
                state.probe = None

    def reset(self) -> None:
        """Set all sums to zero."""
        for layer in self._layers.values():
            layer.sums.zero_()

    def data(self) -> list[dict[str, Any]]:
        """Return a dict for each layer and step that was compared, as in `Probe.linears`. Syncs."""
        found = []
        for name, layer in self._layers.items():
            sums = layer.sums.cpu()
            for step in sums[:, _ROWS].nonzero()[:, 0].tolist():
                signal, noise, rows = sums[step].tolist()
                found.append({"layer": name, "step": step, "rows": int(rows)} | ratios(signal, noise))
        return found


def relative_error(probe: LinearProbe | None) -> float | None:
    """Return the relative L2 error of all compared rows, or None if there are none. Syncs."""
    if probe is None:
        return None
    signal, noise, rows = probe.sums.sum(0).tolist()
    error: float = ratios(signal, noise)["rel_l2"]
    return error if rows else None
