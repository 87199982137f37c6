"""The 8-bit weights of a linear layer, or of several that are multiplied as one matrix."""

from __future__ import annotations

import torch

from sage_kernels import QuantizedRows, quantize_weight
from sage_kernels.compat import mark_static_address


CODES, SCALE = "_sage_codes", "_sage_scale"


def is_ready_for(module, device: torch.device) -> bool:
    """Whether the module's 16-bit weight is on a device now, and can be read."""
    weight = module._parameters.get("weight")
    return weight is not None and not weight.is_meta and weight.device == device


class Storage:
    """Codes and scales in buffers of one of the modules, so that they move with the model.

    Attributes:
        modules: the linear layers, in their order in the matrix; buffers are on the first one.
        in_turns: rows of two equal parts alternate, as the gated activations of `quantized_linear` want them: the
            value's row 0, the gate's row 0, the value's row 1 … Of one module: its first half of rows is a part, and
            the other one the other.
        gate_first: of one module in turns: the first half is the gate.
    """

    def __init__(self, modules, *, in_turns: bool = False, gate_first: bool = False):
        self.modules, self.in_turns, self.gate_first = list(modules), in_turns, gate_first
        self.starts = [0]
        for module in self.modules:
            self.starts.append(self.starts[-1] + module.out_features)
        self._bias = self._bias_key = None

    @property
    def is_filled(self) -> bool:
        return self.modules[0]._buffers.get(CODES) is not None

    @property
    def all_rows(self) -> QuantizedRows:
        """Codes [N, K] and scale [N] of the whole matrix."""
        buffers = self.modules[0]._buffers
        return QuantizedRows(buffers[CODES], buffers[SCALE])

    def rows_of(self, first: int, last: int) -> QuantizedRows:
        """Codes and scale of the modules first … last, as views; of one in turns with itself: as they lie."""
        codes, scale = self.all_rows
        if len(self.modules) == 1:
            return QuantizedRows(codes, scale)
        if self.in_turns:
            return QuantizedRows(codes[first::2], scale[first::2])
        start, stop = self.starts[first], self.starts[last + 1]
        return QuantizedRows(codes[start:stop], scale[start:stop])

    def fill(self, format: str) -> None:
        """Quantise all modules' weights, into the tensors that are there where they fit: graphs may read them."""
        parts = [quantize_weight(module._parameters["weight"], format=format) for module in self.modules]
        codes, scale = (self._laid_out([part[i] for part in parts]) for i in range(2))
        self._keep(codes, scale)

    def write(self, index: int, format: str) -> None:
        """Quantise one module's weight anew."""
        if len(self.modules) == 1 or not self.is_filled:
            return self.fill(format)
        rows = quantize_weight(self.modules[index]._parameters["weight"], format=format)
        for mine, new in zip(self.rows_of(index, index), rows, strict=True):
            mine.copy_(new)
        return None

    def take(self, parts) -> None:
        """Keep codes and scales that were quantised before: one QuantizedRows a module."""
        self._keep(*(self._laid_out([part[i] for part in parts]) for i in range(2)))

    def _laid_out(self, parts):
        if len(self.modules) == 1:
            (part,) = parts
            return self.turned(part) if self.in_turns else part
        return torch.stack(parts, 1).flatten(0, 1) if self.in_turns else torch.cat(parts)

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, ...] of one module, its two halves in turns, value first."""
        halves = rows.chunk(2)
        return torch.stack(halves[::-1] if self.gate_first else halves, 1).flatten(0, 1)

    def turned_back(self, columns: torch.Tensor) -> torch.Tensor:
        """[..., N], columns in turns, as the module itself gives them."""
        halves = columns.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat(halves[::-1] if self.gate_first else halves, -1)

    def _keep(self, codes, scale) -> None:
        home = self.modules[0]
        for name, new in ((CODES, codes), (SCALE, scale)):
            old = home._buffers.get(name)
            if old is not None and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device):
                old.copy_(new)
            else:
                put_buffer(home, name, new)

    def move(self, device: torch.device) -> None:
        """To where a call is."""
        for name in (CODES, SCALE):
            put_buffer(self.modules[0], name, self.modules[0]._buffers[name].to(device))

    def clear(self) -> None:
        """Forget the weights."""
        self._bias = self._bias_key = None
        for module in self.modules:
            for name in (CODES, SCALE):
                module._buffers.pop(name, None)
                module._non_persistent_buffers_set.discard(name)

    def bias(self, first: int, last: int) -> torch.Tensor | None:
        """The biases [N] of the modules first … last, in the order of `rows_of`; zeros where a module has none."""
        modules = self.modules[first : last + 1]
        own = [module._parameters.get("bias") for module in modules]
        if all(bias is None for bias in own):
            return None
        if len(own) == 1 and not (self.in_turns and len(self.modules) == 1):
            return own[0]
        key = (first, last, *((None, 0) if x is None else (x.data_ptr(), _version(x), x.device) for x in own))
        if key != self._bias_key:
            known = next(x for x in own if x is not None)
            zeros = [
                x if x is not None else known.new_zeros(m.out_features) for x, m in zip(own, modules, strict=True)
            ]
            with torch.no_grad(), torch.inference_mode(False):
                self._bias, self._bias_key = self._laid_out([x.detach() for x in zeros]), key
            mark_static_address(self._bias, guard=False)
        return self._bias

    def forget_bias(self) -> None:
        """It may have been written to."""
        self._bias_key = None

    def __getstate__(self):
        return self.__dict__ | {"_bias": None, "_bias_key": None}


def _version(x) -> int:
    return 0 if x.is_inference() else x._version


def put_buffer(module, name: str, tensor) -> None:
    """A buffer that no file of the model holds."""
    module._buffers[name] = tensor
    module._non_persistent_buffers_set.add(name)
    mark_static_address(tensor, guard=False)  # CUDA graphs would copy it at every replay
