"""How far 8-bit linear layers are from 16-bit ones: per layer and step, measured while a model runs.

On a probed step some rows of a layer's output are computed again in fp32 from the input and weight that the layer got,
and the energies of result and difference are added up on the device. Nothing is read back before `data`.
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


SLOTS = 256  # steps told apart; later ones share the last
_SIGNAL, _NOISE, _ROWS = range(3)


class LinearProbe:
    """The sums of one swapped layer. Read by modules.py; everything it computes stays on the device.

    Attributes: shared: of all layers of a probe: `on` (host) and `rows`, `slot(device)`.
    """

    def __init__(self, shared: Any, device: torch.device | str) -> None:
        self.shared = shared
        with torch.inference_mode(False):
            self.sums = torch.zeros(SLOTS, 3, dtype=torch.float64, device=device)
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        """Follow the model."""
        self.sums = self.sums.to(device)
        self.slot = self.shared.slot(device)
        mark_static_address(self.sums, guard=False)

    def compare(self, module: Any, x: torch.Tensor, rows: QuantizedRows) -> None:
        """Add one call: x [..., K], ordinary or postponed, whose codes and scales are `rows`."""
        state = module._sage_linear
        if state.dropped:  # there is nothing to compare with
            return
        if not torch.compiler.is_compiling() and self.sums.device != x.device:
            self.to(x.device)
        tokens = x.numel() // x.shape[-1]
        count = min(self.shared.rows, tokens)
        some = torch.arange(count, device=x.device) * tokens // count
        weight, bias = module._parameters["weight"].detach(), module._parameters.get("bias")
        exact = F.linear((x.value() if isinstance(x, Postponed) else x).flatten(0, -2)[some].float(), weight.float())
        picked = QuantizedRows(_aligned(rows.codes.flatten(0, -2), some), rows.scale.flatten()[some])
        out = product(module, picked, None, dtype=torch.float32)
        error = out - exact
        if bias is not None:  # a part of the layer's output, exact in both
            exact = exact + bias.detach().float()
        found = torch.stack([exact.double().square().sum(), error.double().square().sum()])
        sums = torch.cat([found, found.new_full((1,), float(count))])
        self.sums.index_add_(0, self.slot, sums[None])


def _aligned(codes: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
    """Some rows [R, K], a multiple of 16 bytes apart as the kernel wants them."""
    columns = codes.shape[-1]
    picked = bits_of(codes)[some]
    return F.pad(picked, (0, -columns % 16))[:, :columns].view(codes.dtype)


class LinearProbes:
    """The sums of all swapped layers that a probe watches, by name."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._layers: dict[str, LinearProbe] = {}

    def attach(self, swap: Any, device: torch.device | str) -> None:
        """Watch the layers of a LinearSwap, also those swapped since."""
        for state in swap.states():
            if state.label not in self._layers:
                self._layers[state.label] = LinearProbe(self._shared, device)
            state.probe = self._layers[state.label]

    def detach(self, swap: Any) -> None:
        """Compare no more; the sums stay."""
        for state in swap.states():
            if state.probe is not None and self._layers.get(state.label) is state.probe:
                state.probe = None

    def reset(self) -> None:
        """Forget all sums."""
        for layer in self._layers.values():
            layer.sums.zero_()

    def data(self) -> list[dict[str, Any]]:
        """One dict per layer and step that was compared, with the keys of `diffusion.probe.Probe.linears`. Syncs."""
        found = []
        for name, layer in self._layers.items():
            sums = layer.sums.cpu()
            for step in sums[:, _ROWS].nonzero()[:, 0].tolist():
                signal, noise, rows = sums[step].tolist()
                found.append({"layer": name, "step": step, "rows": int(rows)} | ratios(signal, noise))
        return found


def relative_error(probe: LinearProbe | None) -> float | None:
    """Relative L2 over all that was compared; None where nothing was. Syncs."""
    if probe is None:
        return None
    signal, noise, rows = probe.sums.sum(0).tolist()
    error: float = ratios(signal, noise)["rel_l2"]
    return error if rows else None
