"""Our place in diffusers' attention dispatcher, and all of its private names that this package touches.

A back end is a function in a registry, but its name has to be a member of an enum that diffusers closed: whatever
takes a name (`set_attention_backend`, `attention_backend`, DIFFUSERS_ATTN_BACKEND) makes a member of it. So one is
added, and taken out again. Tried with diffusers 0.36 to 0.42.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


NAME = "sage_int8"
_MEMBER = "SAGE_INT8"
_MODULE = "diffusers.models.attention_dispatch"
_NEEDED = ("AttentionBackendName", "_AttentionBackendRegistry", "_templated_context_parallel_attention")
_REGISTRY = ("register", "_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel")
_ENUM = ("_member_map_", "_member_names_", "_value2member_map_")

_module: Any = None
_ours: list[tuple[Any, Any]] = []  # the member, and which back end was active before it came


class _AnyArgument:
    """Names of the arguments that a back end takes, for a registry that drops all others without a word: any."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


def module() -> Any:
    """The module of diffusers, also where DIFFUSERS_ATTN_BACKEND names our back end, which it can't know yet.

    Kept for code that is traced: before torch 2.13, torch.compile follows no import of a lazy module.
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
            raise ImportError(
                "sage_processors needs diffusers for this: pip install 'sage-processors[diffusers]'"
            ) from error
    return _module


def load() -> Any:
    """The module of diffusers, if a back end of ours fits in. Raises: ImportError without it, or with another one."""
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
    """What the enum makes of a member in its class body. Its dictionaries are written to last."""
    member = str.__new__(names, NAME)
    member._name_, member._value_, member.__objclass__ = _MEMBER, NAME, names
    setattr(names, _MEMBER, member)
    names._member_names_.append(_MEMBER)
    names._member_map_[_MEMBER] = names._value2member_map_[NAME] = member
    if hasattr(names, "_hashable_values_"):  # Python 3.13: what `in` looks at
        names._hashable_values_.append(NAME)
    return member


def add(attend: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Make `attend` a back end of the name NAME, active if DIFFUSERS_ATTN_BACKEND says so. Twice is once.

    Args: attend: called with keywords alone. arguments: the names of those that it knows.
    Raises: RuntimeError where diffusers has another one of this name.
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
    """Take our back end out again; where it is active, the one from before is. Nothing if it is not there."""
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
    """Whether diffusers knows our back end."""
    return bool(_ours)


def is_active() -> bool:
    """Whether processors that name no back end run ours."""
    return bool(load()._AttentionBackendRegistry._active_backend == NAME)


def native() -> Callable[..., Any]:
    """Diffusers' exact attention: the function behind the name "native"."""
    attend: Callable[..., Any] = _module._AttentionBackendRegistry._backends[_module.AttentionBackendName.NATIVE]
    return attend


def is_native(backend: Any) -> bool:
    """Whether a back end of a processor (None: the active one) is diffusers' native one, which returns no sums."""
    named = _module._AttentionBackendRegistry._active_backend if backend is None else backend
    return bool(named == _module.AttentionBackendName.NATIVE)


def without_ours(backend: Any) -> Any:
    """A back end of a processor, None for ours: a Sage processor goes by its own rules then, as without one."""
    return None if backend == NAME else backend


def exact(backend: Any) -> Any:
    """The back end for a call that has to be exact: `backend`, or native where ours would run."""
    named = _module._AttentionBackendRegistry._active_backend if backend is None else backend
    return _module.AttentionBackendName.NATIVE if named == NAME else backend
