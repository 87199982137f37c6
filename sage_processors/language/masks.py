"""Masks for transformers models with our attention: bands without storage, other masks written out.

A causal mask of 32,768 tokens is 1 GiB of booleans. transformers builds one for every prefill that continues a cache,
and for every layer with a sliding window. Here these masks are `BandMask`s, which hold only the limits of the band.
Any other mask is transformers' own boolean mask.

A model also hands its masks to other code, such as layers with attention of their own and expert routers. If
transformers does not run a model with SDPA, this code adds masks to its scores, and would add booleans as 0 and 1
without an error. Such a model gets `AddedMask`s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from sage_kernels.compat import make_wrapper_subclass, map_only


try:
    from transformers.masking_utils import remap_positions_for_packed_sequence
except ImportError:  # in older versions, positions in packed sequences are those in the whole row
    remap_positions_for_packed_sequence = None

UNLIMITED = -1  # side of a band without a limit
WRITTEN_OUT = "written out"  # stands for transformers' own mask of all cells
# transformers would also skip the mask of one row over a partly filled cache
NO_SKIPS = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


class Unwritten(torch.Tensor):
    """Mask without storage. Any operation gets it written out, except a move to another device.

    A model spread over several devices moves its masks before every layer.
    """

    def written(self) -> torch.Tensor:
        """Return the mask as an ordinary contiguous tensor."""
        raise NotImplementedError

    def moved(self, **where: Any) -> torch.Tensor:
        """Return the same mask on another device. where: device and non_blocking, as in torch.Tensor.to."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0].moved(device=kwargs.get("device"), non_blocking=kwargs.get("non_blocking", False))
        args, kwargs = map_only(Unwritten, lambda mask: mask.written(), (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo):
        return self.written()

    def __reduce_ex__(self, protocol):
        return self.written().__reduce_ex__(protocol)


class BandMask(Unwritten):
    """Bool mask [B, 1, S_q, S_kv] of a band of visible keys around every row, without storage.

    Row i has the key position i + offset. It sees keys from `left` before it to `right` after it. UNLIMITED is no
    limit. With packed sequences, it sees only keys of its own sequence. `longest` is then the number of tokens of the
    longest sequence, else 0.
    """

    offset: int
    left: int
    right: int
    longest: int
    _anchor: torch.Tensor

    @staticmethod
    def __new__(cls, shape, offset: int, left: int, right: int, anchor: torch.Tensor, longest: int = 0):
        """Make a mask on the device of `anchor`, a tensor that torch.compile can hold on to.

        With packed sequences, `anchor` is 0 and the ends of the sequences, int32 [sequences + 1].
        """
        mask = make_wrapper_subclass(cls, tuple(shape), dtype=torch.bool, device=anchor.device)
        mask.offset, mask.left, mask.right, mask.longest, mask._anchor = offset, left, right, longest, anchor
        return mask

    @property
    def ends(self) -> torch.Tensor | None:
        """0 and the ends of the packed sequences, int32 [sequences + 1]; None without packed sequences."""
        return self._anchor if self.longest else None

    def plain(self) -> torch.Tensor:
        """Return the mask written out, bool [B, 1, S_q, S_kv]. All samples share the same memory."""
        return _in_band(self.shape, self.offset, self.left, self.right, self._anchor.device, self.ends)

    def written(self) -> torch.Tensor:
        """Return the mask written out, with the strides that this class reports."""
        return self.plain().contiguous()

    def moved(self, **where: Any) -> BandMask:
        """Return the same band on another device."""
        return BandMask(self.shape, self.offset, self.left, self.right, self._anchor.to(**where), self.longest)

    def __tensor_flatten__(self):
        return ["_anchor"], (self.offset, self.left, self.right, self.longest)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        offset, left, right, longest = context
        return BandMask(outer_size, offset, left, right, inner["_anchor"], longest)


class AddedMask(Unwritten):
    """Mask [B, 1, S_q, S_kv] to be added to scores, for models in which other code adds the masks too.

    Its values, in the model's dtype, are those of transformers' `eager` masks: 0 at visible keys and the lowest number
    elsewhere. Our attention reads `visible` instead.
    """

    visible: torch.Tensor

    @staticmethod
    def __new__(cls, visible: torch.Tensor, dtype: torch.dtype):
        """Make a mask from `visible`, a BandMask or bool [B, 1, S_q, S_kv] for our attention."""
        mask = make_wrapper_subclass(cls, tuple(visible.shape), dtype=dtype, device=visible.device)
        mask.visible = visible
        return mask

    def written(self) -> torch.Tensor:
        """Return the numbers that are added."""
        return _added(self.visible, self.dtype)

    def moved(self, **where: Any) -> AddedMask:
        """Return the same mask on another device."""
        return AddedMask(self.visible.to(**where), self.dtype)

    def __tensor_flatten__(self):
        return ["visible"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return AddedMask(inner["visible"], context)


def _added(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bool mask as numbers to be added, as transformers' `eager_mask` does."""
    shown: Any = plain_mask(visible)
    return torch.where(shown, torch.zeros((), dtype=dtype, device=visible.device), torch.finfo(dtype).min)


def _in_band(shape, offset, left: int, right: int, device, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Return a BandMask written out: bool, in `shape`. All samples share the same memory."""
    batch, _, seq_q, seq_kv = shape
    rows = torch.arange(seq_q, device=device)[:, None] + offset
    distance = torch.arange(seq_kv, device=device) - rows
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left != UNLIMITED:
        seen = seen & (distance >= -left)
    if right != UNLIMITED:
        seen = seen & (distance <= right)
    if ends is not None:
        sequence = sequence_of(ends, seq_q, device)
        seen = seen & (sequence[:, None] == sequence)
    return seen.expand(batch, 1, seq_q, seq_kv)


def no_ends(device: torch.device | str) -> torch.Tensor:
    """Return the anchor of a BandMask without packed sequences."""
    return torch.empty(0, dtype=torch.float32, device=device)


_adds_masks: dict[type, bool] = {}


def adds_masks(config_class: Any) -> bool:
    """True if some model of this config class can't run with SDPA in transformers, or none is known."""
    if config_class not in _adds_masks:
        kinds, waiting = [], [PreTrainedModel]
        while waiting:
            kinds.append(waiting.pop())
            waiting += kinds[-1].__subclasses__()
        of_class = [kind for kind in kinds if kind.config_class is config_class]
        if not of_class:
            return True  # its models are not known yet, and these masks are right for any model
        _adds_masks[config_class] = not all(kind._supports_sdpa for kind in of_class)
    return _adds_masks[config_class]


def sequence_of(ends: torch.Tensor, length: int, device) -> torch.Tensor:
    """Return the packed sequence number of each of `length` tokens. ends: 0 and the sequences' ends."""
    return torch.bucketize(torch.arange(length, device=device), ends.to(device)[1:].contiguous(), right=True)


def plain_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `mask` as an ordinary tensor: a BandMask is written out."""
    return mask.plain() if isinstance(mask, BandMask) else mask


def visible_mask(mask: Any) -> Any:
    """Return the mask that our attention uses: the `visible` of an AddedMask, any other mask unchanged."""
    return mask.visible if isinstance(mask, AddedMask) else mask


_step = threading.local()


@contextmanager
def mask_of_step(mask: torch.Tensor | None) -> Iterator[None]:
    """Make this the mask of every layer in a forward of one token over static buffers.

    Nothing is read from the device.

    Args:
        mask: bool [B, 1, 1, slots] for padding, or None; the buffers' own length hides their empty slots.
    """
    _step.mask = (mask,)
    try:
        yield
    finally:
        _step.mask = None


def sage_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **options):
    """Make the mask of a forward for our implementations. Arguments as transformers' `sdpa_mask`.

    Returns:
        None: for a single row or an encoder, no key is hidden. Otherwise row i sees keys up to i, as everywhere in
            transformers.
        BandMask: without padding, for causal attention with more keys in the cache than rows, a sliding window, or
            sequences packed into one row.
        bool [B, 1, S_q, S_kv]: all other masks. For padding alone it is a view of [B, 1, 1, S_kv], which the op takes
            as a mask of keys.
        AddedMask, or its numbers in compiled code: for a model whose code adds masks (`adds_masks`). It is made for
            causal attention too, because not all layers of such models say that they are causal. None then always
            means that no key is hidden.
    """
    of_step = None if torch.compiler.is_compiling() else getattr(_step, "mask", None)
    if of_step is not None:
        mask: torch.Tensor | None = of_step[0]
        return mask
    config = options.get("config")
    cache = None if torch.compiler.is_compiling() else getattr(kv_offset, "cache", None)  # Dynamo has a symbol here
    if cache is not None:  # an Int8KVCache
        kv_offset = int(kv_offset)
        if config is not None:
            cache.check_windows(config)
    sizes = {"q_offset": q_offset, "kv_offset": kv_offset} | options
    seen = _mask(batch_size, q_length, kv_length, **sizes)
    if isinstance(seen, str):
        seen = sdpa_mask(batch_size, q_length, kv_length, **sizes | NO_SKIPS)
    tracing = _is_tracing()
    # the compiler can't search through classes; `adds_masks` ran when the name was chosen, and unknown models may add
    adds = config is not None and (_adds_masks.get(type(config), True) if tracing else adds_masks(type(config)))
    if not adds:
        return seen
    dtype, device = options.get("dtype", torch.float32), options.get("device", "cpu")
    written_out = tracing or make_wrapper_subclass is None
    if seen is None:
        sides = _band(options.get("mask_function", causal_mask_function)) or (UNLIMITED, UNLIMITED)
        if sides[1] != 0 and options.get("allow_is_bidirectional_skip", False):
            return None
        offset, right = (int(q_offset) - kv_offset, 0) if sides[1] == 0 else (0, UNLIMITED)
        band = (batch_size, 1, q_length, kv_length), offset, UNLIMITED, right
        seen = _in_band(*band, device) if written_out else BandMask(*band, no_ends(device))
    return _added(seen, dtype) if written_out else AddedMask(seen, dtype)


def _is_tracing() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor | str | None:
    """Return the mask of a model that transformers can run with SDPA, as `sage_mask`; else WRITTEN_OUT."""
    tracing = _is_tracing()
    packed = None if tracing or attention_mask is not None or batch_size != 1 else _packed(mask_function)
    if packed is not None and q_length == kv_length == packed[0].shape[-1] and make_wrapper_subclass is not None:
        sequences, (left, right) = packed
        starts = (sequences[0, 1:] != sequences[0, :-1]).nonzero()[:, 0] + 1  # waits for the device, once a forward
        ends = torch.nn.functional.pad(torch.nn.functional.pad(starts, (1, 0)), (0, 1), value=q_length)
        longest = int(ends.diff().max())
        return BandMask((1, 1, q_length, q_length), 0, left, right, ends.to(device, torch.int32), longest)
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if not may_skip or (attention_mask is not None and attention_mask.dim() != 2) or make_wrapper_subclass is None:
        return WRITTEN_OUT
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if mask_function is bidirectional_mask_function:
        padding = None if padding is None else padding[:, kv_offset : kv_offset + kv_length]
        if padding is None or (not tracing and bool(padding.all())):
            return None
        return padding[:, None, None].expand(batch_size, 1, q_length, kv_length)  # all rows share the same memory
    if tracing:  # values can't be read, so any mask that hides something is written out
        square = padding is None and local_size is None and isinstance(q_offset, int) and q_length == kv_length
        causal = mask_function is causal_mask_function
        return None if square and causal and q_offset == kv_offset == 0 else WRITTEN_OUT
    band = _band(mask_function)
    if band is None:
        return WRITTEN_OUT
    left, right = band
    first = int(q_offset) - kv_offset
    last = first + q_length
    if padding is not None:
        nearest = 0 if left == UNLIMITED else max(0, first - left)
        reach = padding[:, kv_offset + nearest : kv_offset + (min(last, kv_length) if right == 0 else kv_length)]
        if not bool(reach.all()):
            return WRITTEN_OUT
    if right:  # a window on both sides
        if first or q_length != kv_length:
            return WRITTEN_OUT
        if right >= kv_length - 1:
            return None
    else:
        if last - 1 <= left:
            left = UNLIMITED
        if q_length == 1:
            return None if left == UNLIMITED and last == kv_length else WRITTEN_OUT
        if left == UNLIMITED and first == 0 and q_length >= kv_length:
            return None  # otherwise the cache has empty slots, and a model that cuts rows off needs a mask
    return BandMask((batch_size, 1, q_length, kv_length), first, left, right, no_ends(device))


def _closure(function) -> dict:
    """Return {name: value} of a function's closure."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


# Code objects of transformers' mask functions, to recognise functions that it makes later.
_INTERSECTION = and_masks(causal_mask_function).__code__
_CAUSAL_WINDOW = sliding_window_overlay(1).__code__
_TWO_SIDED_WINDOW = sliding_window_bidirectional_overlay(1).__code__
_PACKED = packed_sequence_mask_function(no_ends("cpu")).__code__
_REMAPPED: Any = None
if remap_positions_for_packed_sequence is not None:
    _REMAPPED = remap_positions_for_packed_sequence(causal_mask_function, no_ends("cpu")).__code__


def _packed(mask_function) -> tuple[torch.Tensor, tuple[int, int]] | None:
    """Return a mask function's sequence number of each token [1, S], and its band within each sequence.

    Returns None if the function may hide anything else. Positions that go up by one within a sequence leave the band
    where it is.
    """
    if getattr(mask_function, "__code__", None) is not _INTERSECTION:
        return None
    functions = _closure(mask_function)["mask_functions"]
    apart = [one for one in functions if getattr(one, "__code__", None) is _PACKED]
    if len(functions) != 2 or len(apart) != 1:
        return None
    inside = functions[1 - functions.index(apart[0])]
    if _REMAPPED is not None and getattr(inside, "__code__", None) is _REMAPPED:
        inside = _closure(inside)["mask_function"]
    band = _band(inside)
    return None if band is None else (_closure(apart[0])["packed_sequence_mask"], band)


def _band(mask_function) -> tuple[int, int] | None:
    """Return (left, right) of a mask function that is known to be a band; None for any other."""
    if mask_function is causal_mask_function:
        return UNLIMITED, 0
    if getattr(mask_function, "__code__", None) is not _INTERSECTION:
        return None
    functions = _closure(mask_function)["mask_functions"]
    if len(functions) != 2:
        return None
    overlay, base = functions
    code = getattr(overlay, "__code__", None)
    if code is _CAUSAL_WINDOW and base is causal_mask_function:
        return _closure(overlay)["sliding_window"] - 1, 0
    if code is _TWO_SIDED_WINDOW and base is bidirectional_mask_function:
        return (_closure(overlay)["sliding_window"],) * 2
    return None
