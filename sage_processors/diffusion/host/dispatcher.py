"""Our attention back end in diffusers' dispatcher. All private names of the dispatcher are here.

A back end is a function in a registry. Its name must be a member of an enum, because everything that takes a name
(`set_attention_backend`, `attention_backend`, DIFFUSERS_ATTN_BACKEND) looks the name up there. An enum can't be
extended, so we add a member through its private dictionaries, and remove it again. Works with diffusers 0.36 to 0.42.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ...installation import pip_install


NAME = "sage_int8"
_MEMBER = "SAGE_INT8"
_MODULE = "diffusers.models.attention_dispatch"
_NEEDED = ("AttentionBackendName", "_AttentionBackendRegistry", "_templated_context_parallel_attention")
_REGISTRY = ("register", "_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel")
_ENUM = ("_member_map_", "_member_names_", "_value2member_map_")

_module: Any = None
_ours: list[tuple[Any, Any]] = []  # (our enum member, the back end that was active before)


class _AnyArgument:
    """A collection of argument names that contains every name.

    diffusers' registry silently drops arguments with a name that is not in a back end's collection. Ours gets all of
    them, so that a call with an unknown argument runs in 16 bit instead of without it.
    """

    def __init__(self, *names: str) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


def module() -> Any:
    """Import and return diffusers' dispatcher module.

    If DIFFUSERS_ATTN_BACKEND names our back end, the variable is set aside during the import, because diffusers does
    not know the name yet. The module is kept for traced code: before torch 2.13, torch.compile can't import it.
    Raises: ImportError without diffusers.
    """
    global _module
    if _module is None:
        try:
            constants: Any = importlib.import_module("diffusers.utils.constants")
            if _MODULE in sys.modules or getattr(constants, "DIFFUSERS_ATTN_BACKEND", None) != NAME:
                _module = importlib.import_module(_MODULE)
            else:
                constants.DIFFUSERS_ATTN_BACKEND = "native"
                try:
                    _module = importlib.import_module(_MODULE)
                finally:
                    constants.DIFFUSERS_ATTN_BACKEND = NAME
        except ImportError as error:
            raise ImportError(f"sage_processors needs diffusers for this: {pip_install('diffusers')}") from error
    return _module


def load() -> Any:
    """Return diffusers' dispatcher module after a check that our back end can be added.

    Raises: ImportError without diffusers, or with a version whose dispatcher lacks a name that we need.
    """
    module()
    missing = [name for name in _NEEDED if not hasattr(_module, name)]
    missing = missing or [name for name in _REGISTRY if not hasattr(_module._AttentionBackendRegistry, name)]
    missing = missing or [name for name in _ENUM if not hasattr(_module.AttentionBackendName, name)]
    if missing:
        version = importlib.import_module("diffusers").__version__
        raise ImportError(
            f"diffusers: got {version}, whose attention dispatcher has no {missing[0]}, expected one of 0.36 to 0.42; "
            "sage_processors.apply needs none of it"
        )
    return _module


def _new_member(names: Any) -> Any:
    """Add a member to the enum, as its class body would. Writes to the enum's dictionaries last."""
    member = str.__new__(names, NAME)
    member._name_, member._value_, member.__objclass__ = _MEMBER, NAME, names
    setattr(names, _MEMBER, member)
    names._member_names_.append(_MEMBER)
    names._member_map_[_MEMBER] = names._value2member_map_[NAME] = member
    if hasattr(names, "_hashable_values_"):  # used by `in` since Python 3.13
        names._hashable_values_.append(NAME)
    return member


def add(attend: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Register `attend` as the back end called NAME; a second call does nothing.

    It becomes the active back end if DIFFUSERS_ATTN_BACKEND names it.
    Args: attend: called with keyword arguments only. arguments: the names of the arguments it knows.
    Raises: RuntimeError if diffusers already has a back end of this name that is not ours.
    """
    module = load()
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    if _ours:
        return
    if NAME in names._value2member_map_:
        raise RuntimeError(
            f"diffusers: got a back end {NAME!r} that sage_processors did not put there, expected none; call "
            "sage_processors.register_diffusers_backend in one place alone"
        )
    member = _new_member(names)
    registry.register(member, constraints=[], supports_context_parallel=True)(attend)
    registry._supported_arg_names[member] = _AnyArgument(*arguments)
    _ours.append((member, registry._active_backend))
    if importlib.import_module("diffusers.utils.constants").DIFFUSERS_ATTN_BACKEND == NAME:
        registry._active_backend = member


def remove() -> None:
    """Remove our back end, if it is registered. If it is active, the earlier one becomes active again."""
    if not _ours:
        return
    module = load()
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    member, before = _ours.pop()
    if registry._active_backend is member:
        registry._active_backend = before
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(member, None)
    registry._supports_context_parallel.discard(NAME)
    names._value2member_map_.pop(NAME)
    names._member_map_.pop(_MEMBER)
    names._member_names_.remove(_MEMBER)
    if NAME in getattr(names, "_hashable_values_", ()):
        names._hashable_values_.remove(NAME)
    delattr(names, _MEMBER)


def is_registered() -> bool:
    """True if our back end is registered with diffusers."""
    return bool(_ours)


def is_active() -> bool:
    """True if our back end is the active one, used by processors that name none."""
    return bool(load()._AttentionBackendRegistry._active_backend == NAME)


def native() -> Callable[..., Any]:
    """Return diffusers' own 16-bit attention, the function of the back end "native"."""
    attend: Callable[..., Any] = _module._AttentionBackendRegistry._backends[_module.AttentionBackendName.NATIVE]
    return attend


def is_native(backend: Any) -> bool:
    """True if a processor's back end is diffusers' native one, which returns no log-sum-exp.

    backend: None stands for the active one.
    """
    named = _module._AttentionBackendRegistry._active_backend if backend is None else backend
    return bool(named == _module.AttentionBackendName.NATIVE)


def without_ours(backend: Any) -> Any:
    """Return a processor's back end; None for ours, because a Sage processor runs INT8 attention anyway."""
    return None if backend == NAME else backend


def exact(backend: Any) -> Any:
    """Return the back end for a call that must run in 16 bit: `backend`, or native in place of ours."""
    named = _module._AttentionBackendRegistry._active_backend if backend is None else backend
    return _module.AttentionBackendName.NATIVE if named == NAME else backend
