"""The 8-bit weights of a linear layer, or of several that are multiplied as one matrix."""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels import QuantizedRows
from sage_kernels.compat import mark_static_address


CODES, SCALE = "_sage_codes", "_sage_scale"


def is_captured(device: torch.device | None = None) -> bool:
    """Return True while a CUDA graph is captured on a device; None stands for the current GPU.

    A tensor that is made during the capture has no numbers before the first replay, and its sources are read again at
    every replay: a source that nobody keeps is then somebody else's memory. So eager calls alone make what is kept for
    later calls, such as a weight in another order of rows or a bias of several layers.
    """
    on_gpu = torch.cuda.is_initialized() if device is None else device.type == "cuda"
    return on_gpu and torch.cuda.is_current_stream_capturing()


class Storage:
    """Codes and scales in buffers of one of the modules, so that they move with the model.

    Attributes:
        modules: the linear layers, in their order in the matrix; buffers are on the first one.
        in_turns: rows of two equal parts alternate, as the gated activations of `quantized_linear` want them: the
            value's row 0, the gate's row 0, the value's row 1 … Of one module: its first half of rows is a part, and
            the other one the other.
        gate_first: of one module in turns: the first half is the gate.
        filled: of each module, whether its rows are there.
        is_fixed: a CUDA graph was captured that reads them: they stay where they are, in this order.
    """

    def __init__(self, modules, *, in_turns: bool = False, gate_first: bool = False):
        self.modules, self.in_turns, self.gate_first = list(modules), in_turns, gate_first
        self.filled = [False] * len(self.modules)
        self.starts = [0]
        for module in self.modules:
            self.starts.append(self.starts[-1] + module.out_features)
        self.is_fixed = False
        self._biases: tuple = ((), ())  # what _bias was made of, and the versions that it had
        self._bias: Any = None

    @property
    def is_joined(self) -> bool:
        """Whether it holds what an attention module names side by side (qkv.TOGETHER), for one matmul."""
        return len(self.modules) > 1 and not self.in_turns

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

    def write(self, index: int, rows: QuantizedRows) -> None:
        """Keep the 8-bit weight of one module, in the tensors that are there where it fits: graphs may read them."""
        home = self.modules[0]
        if len(self.modules) == 1:
            rows = QuantizedRows(*(self.turned(part) for part in rows)) if self.in_turns else rows
        for name, part in zip((CODES, SCALE), rows, strict=True):
            old = home._buffers.get(name)
            shape = (self.starts[-1], *part.shape[1:])
            if old is None or (old.shape, old.dtype, old.device) != (shape, part.dtype, part.device):
                put_buffer(home, name, part.new_zeros(shape))
        for mine, new in zip(self.rows_of(index, index), rows, strict=True):
            mine.copy_(new)
        self.filled[index] = True

    def _laid_out(self, parts):
        if len(self.modules) == 1:
            return self.turned(parts[0]) if self.in_turns else parts[0]
        return torch.stack(parts, 1).flatten(0, 1) if self.in_turns else torch.cat(parts)

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, ...] of one module, its two halves in turns, value first."""
        halves = bits_of(rows).chunk(2)
        return torch.stack(halves[::-1] if self.gate_first else halves, 1).flatten(0, 1).view(rows.dtype)

    def turned_back(self, columns: torch.Tensor) -> torch.Tensor:
        """[..., N], columns in turns, as the module itself gives them."""
        halves = columns.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat(halves[::-1] if self.gate_first else halves, -1)

    def plain_rows(self, index: int) -> QuantizedRows:
        """Codes [N, K] and scale [N] of one module in the order of its own weight, in memory of their own."""
        rows = self.rows_of(index, index)
        if len(self.modules) > 1 or not self.in_turns:
            return QuantizedRows(*(part.clone(memory_format=torch.contiguous_format) for part in rows))
        back = [self.turned_back(bits_of(part).movedim(0, -1)).movedim(-1, 0).contiguous() for part in rows]
        return QuantizedRows(*(bits.view(part.dtype) for bits, part in zip(back, rows, strict=True)))

    @property
    def device(self) -> torch.device | None:
        """Where the weights are; None: there are none yet."""
        codes = self.modules[0]._buffers.get(CODES)
        return None if codes is None else codes.device

    def move(self, device: torch.device) -> None:
        """To where a call is."""
        for name in (CODES, SCALE):
            put_buffer(self.modules[0], name, self.modules[0]._buffers[name].to(device))

    def clear(self) -> None:
        """Forget the weights."""
        self._biases, self._bias = ((), ()), None
        self.filled = [False] * len(self.modules)
        for module in self.modules:
            for name in (CODES, SCALE):
                module._buffers.pop(name, None)
                module._non_persistent_buffers_set.discard(name)
                hook = module.__dict__.get("_hf_hook")  # accelerate's, which wants to put back what it saw
                for one in (hook, *getattr(hook, "hooks", ())):
                    getattr(one, "original_devices", {}).pop(name, None)

    def bias(self, first: int, last: int) -> torch.Tensor | None:
        """The biases [N] of the modules first … last, in the order of `rows_of`; zeros where a module has none."""
        modules = self.modules[first : last + 1]
        own = tuple(module._sage_linear.bias for module in modules)
        if all(bias is None for bias in own):
            return None
        if len(own) == 1 and not (self.in_turns and len(self.modules) == 1):
            return own[0]
        versions = tuple(None if x is None else x._version for x in own)
        known, known_versions = self._biases
        if versions != known_versions or any(a is not b for a, b in zip(own, known, strict=True)):
            one = next(x for x in own if x is not None)
            with torch.inference_mode(False), torch.no_grad():
                bias = self._laid_out(
                    [one.new_zeros(m.out_features) if x is None else x for x, m in zip(own, modules, strict=True)]
                )
                if is_captured(bias.device):
                    return bias
                self._bias, self._biases = self.renewed(self._bias, bias), (own, versions)
        return self._bias

    def renewed(self, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """What stands where `old` did: `new`, or, while a CUDA graph may read the old one, that with its numbers."""
        if (
            self.is_fixed
            and old is not None
            and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        ):
            return old.copy_(new)
        mark_static_address(new, guard=False)
        return new

    def __getstate__(self):
        return self.__dict__ | {"_biases": ((), ()), "_bias": None, "is_fixed": False}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: few operations take it as it is."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def put_buffer(module, name: str, tensor) -> None:
    """A buffer that no file of the model holds."""
    module._buffers[name] = in_place(tensor)
    module._non_persistent_buffers_set.add(name)


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, known to stay where it is: CUDA graphs would copy it at every replay."""
    mark_static_address(tensor, guard=False)
    return tensor
