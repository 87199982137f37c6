"""Replays: a call like an earlier one runs the launches that were recorded then, without checks.

Imported without Triton; what is kept is a Replay of `_triton/launch`. An op asks in this order:
    is_usual(tensors, dispatched)    may the call be replayed, as far as PyTorch is concerned?
    replay_by_key(key, given)        the results, if a call of this key was recorded
    remember(key, call, given)       else, after the checks: make the call and record its launches
`try_replay` does the first two for most ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import compat


TENSOR = (torch.Tensor, torch.nn.Parameter)
_PLAIN = {*TENSOR, type(None)}
_LIMIT = 4096  # keys that are kept
replays: dict[tuple, Callable] = {}  # key → Replay(tensors, numbers), which returns results


def forget() -> None:
    """Drop all recorded calls."""
    replays.clear()


def is_plain_call(*tensors) -> bool:
    """Return True if the dispatcher would only pass this call on to its implementation.

    Skipping the dispatcher saves the host a third of the time. It is needed where someone has to see the call
    (compiler, tracer, profiler, a mode, torch.func) and for tensors that it resolves first: subclasses, wrappers,
    negative bits, zeros without memory. If that can't be told, the call is not plain.
    """
    return not torch.compiler.is_compiling() and is_usual(tensors, False)


def is_usual(tensors, dispatched: bool) -> bool:
    """Return True if PyTorch does not change the meaning of an eager call, so that it may be replayed.

    dispatched: the dispatcher has passed the call to its implementation for this device. Then everyone who has to see
    the call has seen it, and its tensors are resolved. Only a subclass of Tensor may still be something else.
    """
    is_known = _PLAIN.issuperset(map(type, tensors))
    return is_known and (dispatched or (compat.is_unobserved_eagerly() and compat.are_ordinary(tensors)))


def layouts_of(tensors) -> list[tuple | None]:
    """Return all that a launch knows of each tensor, apart from its address; None for None."""
    # a GPU's number: no other calls are replayed
    return [None if x is None else (x.dtype, x.get_device(), x.shape, x.stride()) for x in tensors]


def replay_by_key(key: tuple, given, numbers=None):
    """Return the key, and the results for these tensors and numbers if a call of this key was recorded.

    Results are None if it was not, or can't be replayed now. Both are None where something unhashable is in the key.
    """
    try:
        replay = replays.get(key)
    except TypeError:
        return None, None
    return key, None if replay is None else replay(given, numbers)


def remember(key: tuple, call, given, numbers=None):
    """Return what `call()` returns, and keep its launches under the key if they can be replayed.

    given, numbers: the tensors and integers that may be others in the next call; see `_triton.launch.Recording`.
    """
    from .._triton.launch import Recording

    with Recording() as recorded:
        results = call()
    replay = recorded.replay(results, given, numbers)
    if replay is not None:
        keep(key, replay)
    return results


def keep(key: tuple, replay: Callable) -> None:
    """Let replay(given, numbers) answer calls of this key. It may return None: the call is then made."""
    if len(replays) >= _LIMIT:
        replays.clear()
    replays[key] = replay


def try_replay(op: str, given: tuple, options: tuple, *, dispatched: bool = False):
    """Return a call's key, and its results if an equal call was recorded.

    Both are None where a call is neither looked up nor recorded: without a GPU, where someone has to see the call, and
    where a gradient is wanted.

    Args:
        given: all tensors that the op takes, None for missing ones; the first is never missing. options: all else.
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
    """Return the key of a call: everything its checks read and its launches depend on.

    The types of options are part of it, since 1, 1.0 and True are one key of a dictionary.
    """
    return op, options, *map(type, options), *layouts_of(given)
