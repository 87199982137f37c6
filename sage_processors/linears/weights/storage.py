"""Storage of 8-bit weights: of one linear layer, or of several that are multiplied as one matrix."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

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
    """8-bit codes and scales of one or several linear layers, in buffers that move with the model.

    Attributes:
        modules: the linear layers, in their order in the matrix. The first one has the buffers.
        in_turns: rows of value and gate alternate, as the gated activations of `quantized_linear` need them: row 0 of
            the value, row 0 of the gate, row 1 of the value … Value and gate are two modules of equal size, or the
            two halves of the rows of one module.
        gate_first: the first half of a single module in turns is the gate.
        filled: for each module, if its rows are there.
        is_fixed: a captured CUDA graph reads the buffers, so they stay in place and in this order.
    """

    def __init__(self, modules, *, in_turns: bool = False, gate_first: bool = False):
        self.modules, self.in_turns, self.gate_first = list(modules), in_turns, gate_first
        self.filled = [False] * len(self.modules)
        self.starts = [0]
        for module in self.modules:
            self.starts.append(self.starts[-1] + module.out_features)
        self.is_fixed = False
        self._biases: tuple = ((), ())  # sources of _bias, and their versions
        self._bias: Any = None

    @property
    def is_joined(self) -> bool:
        """True for several projections of an attention module that are one matmul (qkv.TOGETHER)."""
        return len(self.modules) > 1 and not self.in_turns

    @property
    def all_rows(self) -> QuantizedRows:
        """The codes [N, K] and scales [N] of the whole matrix."""
        buffers = self.modules[0]._buffers
        return QuantizedRows(buffers[CODES], buffers[SCALE])

    def rows_of(self, first: int, last: int) -> QuantizedRows:
        """Return views of the codes and scales of modules first … last. A lone module's stay in turns."""
        rows = codes, scale = self.all_rows
        if len(self.modules) == 1:
            return rows
        if self.in_turns:
            return QuantizedRows(codes[first::2], scale[first::2])
        start, stop = self.starts[first], self.starts[last + 1]
        if start == 0 and stop == self.starts[-1]:
            return rows
        return QuantizedRows(codes[start:stop], scale[start:stop])

    def fits(self, index: int, weight: torch.Tensor) -> bool:
        """Return True if a weight has as many rows as there is room for.

        The room of a module alone grows with its weight; that of joined modules does not.
        """
        return len(self.modules) == 1 or len(weight) == self.starts[index + 1] - self.starts[index]

    def write(self, index: int, rows: QuantizedRows) -> None:
        """Store the 8-bit weight of one module, given in the order of its own rows.

        It is copied into the existing buffers if it fits, as captured CUDA graphs may read these.
        """
        home = self.modules[0]
        if len(self.modules) == 1:
            self.starts = [0, len(rows.codes)]  # a vocabulary may have grown, and lm_head with it
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
        """Return rows [N, ...] of one module in turns, value first."""
        halves = bits_of(rows).chunk(2)
        return _as_type(torch.stack(halves[::-1] if self.gate_first else halves, 1).flatten(0, 1), rows.dtype)

    def turned_back(self, columns: torch.Tensor) -> torch.Tensor:
        """Return columns [..., N] that are in turns in the module's own order."""
        halves = columns.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat(halves[::-1] if self.gate_first else halves, -1)

    def plain_rows(self, index: int, *, copies: bool = True) -> QuantizedRows:
        """Return the codes [N, K] and scales [N] of one module, in its own order of rows.

        copies: False returns the buffers themselves where they are in this order and of this module alone.
        """
        rows = self.rows_of(index, index)
        if len(self.modules) > 1 or not self.in_turns:
            if len(self.modules) == 1 and not copies:
                return rows
            return QuantizedRows(*(part.clone(memory_format=torch.contiguous_format) for part in rows))
        back = [self.turned_back(bits_of(part).movedim(0, -1)).movedim(-1, 0).contiguous() for part in rows]
        return QuantizedRows(*(_as_type(bits, part.dtype) for bits, part in zip(back, rows, strict=True)))

    def dequantized(self, index: int, dtype: torch.dtype, balance: torch.Tensor | None) -> torch.Tensor:
        """Return the weight [N, K] of one module in a 16-bit type or fp32, in its own order of rows.

        balance: fp32 [K] that its columns were divided by, powers of two.
        """
        codes, scale = self.rows_of(index, index)
        if codes.dtype == torch.int8 and not torch.compiler.is_compiling():  # without a copy of it in fp32
            weight = torch.mul(codes, scale[:, None], out=torch.empty(codes.shape, dtype=dtype, device=codes.device))
        else:
            weight = (codes.to(torch.float32) * scale[:, None]).to(dtype)
        if self.in_turns and len(self.modules) == 1:
            weight = self.turned_back(weight.t()).t()
        return weight if balance is None else weight * balance.to(weight.device, dtype)

    @property
    def device(self) -> torch.device | None:
        """The device of the 8-bit weights, or None if there are none yet."""
        codes = self.modules[0]._buffers.get(CODES)
        return None if codes is None else codes.device

    @property
    def size(self) -> int:
        """Bytes of the codes of the whole matrix."""
        return sum(int(module.in_features * module.out_features) for module in self.modules)

    def move_to(self, device: torch.device) -> None:
        """Move the weights to the device of a call."""
        for name in (CODES, SCALE):
            put_buffer(self.modules[0], name, self.modules[0]._buffers[name].to(device))

    def be_persistent(self, on: bool) -> None:
        """Count the buffers as a part of state_dict or, as usual, not."""
        home = self.modules[0]
        for name in (CODES, SCALE):
            if name in home._buffers:
                (home._non_persistent_buffers_set.discard if on else home._non_persistent_buffers_set.add)(name)

    def clear(self) -> None:
        """Remove the weights and their buffers."""
        self._biases, self._bias = ((), ()), None
        self.filled = [False] * len(self.modules)
        for module in self.modules:
            for name in (CODES, SCALE):
                module._buffers.pop(name, None)
                module._non_persistent_buffers_set.discard(name)
                hook = module.__dict__.get("_hf_hook")  # accelerate's hook would move the buffers that it saw back
                for one in (hook, *getattr(hook, "hooks", ())):
                    getattr(one, "original_devices", {}).pop(name, None)

    def bias(self, first: int, last: int) -> torch.Tensor | None:
        """Return the bias [N] of the modules first … last, in the order of `rows_of`.

        It is zero for a module without one. Returns None if none of them has one.
        """
        modules = self.modules[first : last + 1]
        own = [module._sage.bias for module in modules]
        if own[0] is None and all(bias is None for bias in own):
            return None
        if len(own) == 1 and not (self.in_turns and len(self.modules) == 1):
            return own[0]
        versions = [None if x is None else x._version for x in own]
        known, known_versions = self._biases
        if versions != known_versions or not all(map(operator.is_, own, known)):
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
        """Return the tensor that takes the place of `old`: `new`, or `old` with the numbers of `new`.

        The latter if a captured CUDA graph may read `old`, and both have the same shape, dtype and device.
        """
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


def as_saved(rows: QuantizedRows, balance: Any) -> dict[str, torch.Tensor]:
    """Return {name in a file: tensor} of an 8-bit weight.

    The codes are [1, N, K]: a library that does not know them refuses a weight of this shape.
    """
    saved = {"weight": rows.codes[None], "weight_scale": rows.scale}
    return saved if balance is None else saved | {"weight_balance": balance.vector.clone()}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """View FP8 as bytes, since few operations take FP8; return any other tensor as it is."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _as_type(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `bits_of`. torch.jit.trace can't record a view of another type, so there is none without need."""
    return bits if bits.dtype == dtype else bits.view(dtype)


def placeholder(shape, dtype, device) -> nn.Parameter:
    """Return a parameter in place of a dropped weight: one NaN in memory, expanded to its shape."""
    one = torch.full((1, 1), torch.nan, dtype=dtype, device=device)
    return nn.Parameter(one.expand(shape), requires_grad=False)


def put_buffer(module, name: str, tensor) -> None:
    """Give a module a non-persistent buffer, which no checkpoint contains."""
    module._buffers[name] = in_place(tensor)
    module._non_persistent_buffers_set.add(name)


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, marked as static: else CUDA graphs of torch.compile copy it at every replay."""
    mark_static_address(tensor, guard=False)
    return tensor
