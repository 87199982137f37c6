"""Calls of an op like an earlier one: found by all that decides what they launch, then only launched.

Imported without Triton; what is remembered is a Replay of `_triton/launch`. An op asks in this order:
    is_usual(tensors, dispatched)    nobody has to see this call but its implementation
    replay_by_key(key, given)           the results, if a call of this key was made before
    remember(key, call, given)       else, checked: make the call, and keep its launches under the key
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import compat


TENSOR = (torch.Tensor, torch.nn.Parameter)
_PLAIN = {*TENSOR, type(None)}
_LIMIT = 4096  # kinds of calls that are remembered
replays: dict[tuple, Callable] = {}  # key → Replay: results of a call with these tensors and numbers


def forget() -> None:
    """All calls have to be made anew."""
    replays.clear()


def is_plain_call(*tensors) -> bool:
    """Whether the dispatcher would only hand this call on to its implementation: saves the host a third of the time.

    It is needed where someone looks on (compiler, tracer, profiler, a mode, torch.func) and for tensors that it
    resolves first: subclasses, wrappers, negative bits, zeros without memory. What can't be told is not plain.
    """
    return compat.nobody_looks_on() and _PLAIN.issuperset(map(type, tensors)) and compat.are_ordinary(tensors)


def is_usual(tensors, dispatched: bool) -> bool:
    """Whether a call may be one that is made again, as far as PyTorch can change what it means.

    dispatched: whether the dispatcher has handed it to its implementation for this device. Then all who look on have
    seen it and what has to be resolved is; a tensor of another class is the only one that may not be what it seems.
    """
    return _PLAIN.issuperset(map(type, tensors)) if dispatched else is_plain_call(*tensors)


def layout_of(x: torch.Tensor | None) -> tuple | None:
    """What a launch knows of a tensor but its address."""
    if x is None:  # the checks have words for it
        return None
    return x.dtype, x.get_device(), x.shape, x.stride()  # a GPU's number: calls elsewhere are not made again


def replay_by_key(key: tuple, given, numbers=None):
    """The key, and the results for these tensors and numbers if a call of this key was made before.

    Results are None where the call has to be made anew; both are None where something unhashable is in the key.
    """
    try:
        again = replays.get(key)
    except TypeError:
        return None, None
    return key, None if again is None else again(given, numbers)


def remember(key: tuple, call, given, numbers=None):
    """What `call()` returns. Its launches are kept under the key, if they can be made again.

    given, numbers: the tensors, and the integers, that another call of this key may have others of; see
    `_triton.launch.record`.
    """
    from .._triton.launch import record

    results, again = record(call, given, numbers)
    if again is not None:
        keep(key, again)
    return results


def keep(key: tuple, again: Callable) -> None:
    """Have calls of this key made by again(given, numbers), which may give up: None."""
    if len(replays) >= _LIMIT:
        replays.clear()
    replays[key] = again


def try_replay(op: str, given: tuple, options: tuple, *, dispatched: bool = False):
    """A call's key, and its results if it was made before.

    Both are None where the call is neither found nor remembered: without a GPU, where someone looks on, and where a
    gradient is wanted.

    Args:
        given: all tensors that the op takes, None for those that are missing, the first one never. options: all else.
        dispatched: see `is_usual`.
    """
    if torch.compiler.is_compiling() or not given or type(given[0]) not in TENSOR or not given[0].is_cuda:
        return None, None
    if not is_usual(given, dispatched):
        return None, None
    tensors = [x for x in given if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None, None
    return replay_by_key(key_of(op, given, options), tensors)


def key_of(op: str, given: tuple, options: tuple) -> tuple:
    """All that decides whether a call is valid and what it launches. 1, 1.0 and True are one key of a dictionary."""
    return op, options, *map(type, options), *map(layout_of, given)
