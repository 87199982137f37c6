"""Replay: run the launches of an earlier call again, with other tensors.

The launches of an op's call follow from shapes, strides, dtypes and options. Between equal calls only addresses
change. So the first call is recorded while it is made (`Recording`), and later ones only launch (`Replay`). The ops
decide which calls are equal (sage_kernels/ops/replay.py).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import compat
from .descriptors import Described, encode_once
from .recording import Tape, recording


encode_once()


class _RecordedLaunch(NamedTuple):
    """One launch of a recorded call.

    Attributes:
        start, programs: the kernel's launcher (compat.starter), and the size of its grid.
        values: its arguments; None where `places` or `described` has one.
        rest: its constants.
        places: pairs (argument, slot) of tensors; a slot is an index into the call's addresses.
        described: triples (argument, Described, slot) of tensor descriptors.
        named: pairs (argument, name of its number) of integers that may change.
    """

    start: Callable
    programs: int
    values: list
    rest: tuple
    places: list
    described: list
    named: list


_SCRATCH_ALIGNMENT = 256  # bytes; descriptors need 16, a cache line is 128


def _like(x: torch.Tensor, given) -> int | None:
    """Return the index of a given contiguous tensor with the same shape and dtype as x, or None.

    torch.empty_like of it takes a third of the time of torch.empty.
    """
    likes = (i for i, y in enumerate(given) if y.is_contiguous() and (x.shape, x.dtype) == (y.shape, y.dtype))
    return next(likes, None)


class Replay:
    """The launches of a recorded call, ready to run again with other tensors.

    These must have the same shapes, strides, dtypes and options as in the recorded call; the caller makes sure.
    """

    def __init__(self, tape: Tape, slots: dict[int, int], given, single: bool, numbers: dict[str, int]):
        """Prepare the launches on a tape.

        Args:
            slots: address of a tensor → its index: given tensors, then scratch, then returned ones.
            given: the call's input tensors.
            single: the call returns one tensor, not a tuple.
            numbers: as in `Recording.replay`.
        Raises: KeyError if a launch used a tensor without a slot, or its kernel is specialised on one of the numbers.
        """
        self.device = given[0].device
        self.single = single
        self.returned = [(x.shape, x.dtype, _like(x, given)) for x in tape.returned]
        self.offsets, self.scratch_bytes = [], 0
        for x in tape.scratch:
            self.offsets.append(self.scratch_bytes)
            used = math.ceil(x.numel() * x.element_size() / _SCRATCH_ALIGNMENT)
            self.scratch_bytes += used * _SCRATCH_ALIGNMENT
        aligned = set()
        self.launches = []
        for parameters, _, start, programs, arguments, rest in tape.launches:
            values, places, described, named = [*arguments], [], [], []
            for i, (x, (name, is_specialized, is_aligned)) in enumerate(zip(arguments, parameters, strict=False)):
                if name in numbers:
                    if is_specialized or x != numbers[name]:
                        raise KeyError(name)
                    named.append((i, name))
                if type(x) in (int, float):
                    continue
                tensor = x if isinstance(x, torch.Tensor) else x.base
                slot = slots[tensor.data_ptr()]
                if is_aligned:
                    aligned.add(slot)
                if tensor is x:
                    places.append((i, slot))
                else:
                    described.append((i, Described({**vars(x), "base": None}), slot))
                values[i] = None
            self.launches.append(_RecordedLaunch(start, programs, values, rest, places, described, named))
        self.aligned = [slot for slot in aligned if slot < len(given)]  # tensors allocated here always are

    def __call__(self, given, numbers=None):
        """Run the launches with these tensors and numbers, and return the results; () if the call has none.

        Returns None, and launches nothing, if the call must be made in full: a tensor is not aligned to 16 bytes,
        another device is current, or a profiler has a hook.
        """
        device = compat.current_device()
        if device != self.device.index or compat.profiler_listens():
            return None
        addresses = [x.data_ptr() for x in given]
        for slot in self.aligned:
            if addresses[slot] & 15:
                return None
        stream = compat.current_stream(device)
        if self.offsets:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            start = scratch.data_ptr()
            addresses += [start + offset for offset in self.offsets]
        results = []
        for shape, dtype, like in self.returned:
            if like is None:
                results.append(torch.empty(shape, dtype=dtype, device=self.device))
            else:
                results.append(torch.empty_like(given[like]))
            addresses.append(results[-1].data_ptr())
        for start, programs, recorded, rest, places, described, named in self.launches:
            values = recorded.copy()
            for i, name in named:
                values[i] = numbers[name]
            for i, slot in places:
                values[i] = addresses[slot]
            for i, descriptor, slot in described:
                values[i] = descriptor.at(addresses[slot])
            start(programs, stream, values, rest)
        return results[0] if self.single else tuple(results)


class Recording:
    """Notes the launches of a call made inside of it: `with Recording() as recorded: results = call()`."""

    def __enter__(self):
        self._tape = recording.tape = Tape()
        return self

    def __exit__(self, *exception) -> None:
        recording.tape = None

    def replay(self, results, given, numbers=None) -> Replay | None:
        """Return a Replay of the call, to run it with other tensors.

        Args:
            results: of the call: a tensor or a tuple of tensors from `buffer`, or None.
            given: all other tensors that its launches read or write.
            numbers: {name of a kernel's parameter: its value in this call}: integers that may differ in a replay. No
                kernel may be specialised on them, and no grid or buffer may depend on them.
        Returns: None if a launch had to go through Triton (see `launch`), or used a tensor that is neither given nor
            from `buffer`: then something besides launches was computed.
        """
        tape, single = self._tape, isinstance(results, torch.Tensor)
        expected = [results] if single else list(results or ())
        if not tape.complete or not tape.launches or len(tape.returned) != len(expected):
            return None
        if any(a is not b for a, b in zip(tape.returned, expected, strict=True)):
            return None
        tensors = [*given, *tape.scratch, *tape.returned]
        # an empty tensor has address 0 and is used by no launch: it gets a negative key, unlike any address
        slots = {x.data_ptr() or -1 - slot: slot for slot, x in enumerate(tensors)}
        if len(slots) != len(tensors):  # two tensors share an address: a launch's use of it would be ambiguous
            return None
        try:
            return Replay(tape, slots, given, single, numbers or {})
        except KeyError:
            return None
