"""Private names of PyTorch, and names that some versions lack, each with a public fallback.

Nothing here decides a result, only its speed: without a name calls go through PyTorch's dispatcher, are compared in
another way, or are not replayed. Names of Triton and of the CUDA driver are in _triton/compat.py.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch.autograd import forward_ad


# tests/kernels/launch/test_compat.py deletes each
NAMES = (
    "torch.Tensor._make_wrapper_subclass",
    "torch._C._construct_storage_from_data_pointer",
    "torch._C._cuda_endAllocateToPool",
    "torch._C._dispatch_keys",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._is_any_autocast_enabled",
    "torch._C._len_torch_function_stack",
    "torch._C._storage_Use_Count",
    "torch._C.DispatchKey",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKeySet.raw_repr",
    "torch._dynamo.eval_frame.skip_code",
    "torch._dynamo.mark_static_address",
    "torch._inductor.config.pre_grad_custom_pass",
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    "torch.autograd._profiler_enabled",
    "torch.autograd.forward_ad._current_level",
    "torch.compiler._is_exporting_flag",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._device.DeviceContext",
    "torch.utils._pytree.tree_map_only",
)


def find(name: str):
    """Look up "torch.…" or "triton.…"; None if this version has no such name."""
    path, *parts = name.split(".")
    found = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
        except ImportError:
            return None
    return found


def _bits(*keys: str) -> int:
    """Combine dispatch keys to one number. Raises AttributeError if PyTorch lacks one of the names."""
    first, *rest = (getattr(_key, name) for name in keys)
    key_set = _key_set(first)
    for key in rest:
        key_set = key_set.add(key)
    return key_set.raw_repr()


_keys_of, _included = find("torch._C._dispatch_keys"), find("torch._C._dispatch_tls_local_include_set")
_key, _key_set = find("torch._C.DispatchKey"), find("torch._C.DispatchKeySet")
_raw = find("torch._C.DispatchKeySet.raw_repr")
_function_modes, _is_profiling = find("torch._C._len_torch_function_stack"), find("torch.autograd._profiler_enabled")
_mode_stack = find("torch.overrides._get_current_function_mode_stack")
_device_context = find("torch.utils._device.DeviceContext")
_TELLS_EXPORTS = find("torch.compiler._is_exporting_flag") is not None
_map_only = find("torch.utils._pytree.tree_map_only")
# Dispatch keys of an ordinary tensor, and of one made under inference_mode; keys that every thread includes
_ORDINARY: frozenset[int] = frozenset()
_QUIET = 0
SEES_DISPATCH = None not in (_keys_of, _included, _key, _key_set, _raw, _function_modes, _is_profiling)
SEES_DISPATCH = SEES_DISPATCH and hasattr(forward_ad, "_current_level")
if SEES_DISPATCH:
    try:
        _ORDINARY = frozenset(
            _bits(*names)
            for device in ("CPU", "CUDA")
            for names in (
                (device, "ADInplaceOrView", f"Autograd{device}", f"Autocast{device}"),
                (device, f"Autocast{device}"),
            )
        )
        _QUIET = _bits("BackendSelect", "ADInplaceOrView")
    except (AttributeError, TypeError):  # keys have other names: no call is known to be plain
        SEES_DISPATCH = False


def is_exporting() -> bool:
    """Return True inside torch.export.

    PyTorch before 2.13 lacks a flag of its own, and its public function is true in all that Dynamo traces.
    """
    return bool(torch.compiler._is_exporting_flag) if _TELLS_EXPORTS else torch.compiler.is_exporting()


def is_unobserved() -> bool:
    """Return True if nothing in this thread changes the meaning of an op's call, or has to see it.

    Compilers, tracers, profilers, modes and transforms of torch.func do. False without the names to tell.
    """
    return not torch.compiler.is_compiling() and is_unobserved_eagerly()


def is_unobserved_eagerly() -> bool:
    """Return True as `is_unobserved` does. For code that torch.compile does not trace."""
    return (
        SEES_DISPATCH
        and _included().raw_repr() | _QUIET == _QUIET
        and _function_modes() == 0
        and not _is_profiling()
        and forward_ad._current_level < 0
    )


def are_ordinary(tensors) -> bool:
    """Return True if the dispatcher does nothing for these tensors (or None) but choose a device.

    For tensors of PyTorch's own types. The dispatcher resolves negative and conjugate bits, tensors of zeros without
    memory, wrappers of torch.func and sparse, quantised and nested layouts. All of these show in dispatch keys.
    """
    return SEES_DISPATCH and _ORDINARY.issuperset([_keys_of(x).raw_repr() for x in tensors if x is not None])


def differentiates_forward() -> bool:
    """Return True if tensors may have tangents here (torch.func.jvp, forward_ad.dual_level)."""
    level = getattr(forward_ad, "_current_level", None)
    return level is None or level >= 0


def is_differentiating_forward() -> bool:
    """Return True if tensors are known to have tangents here; False without the name to tell."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def has_tangent(x: torch.Tensor) -> bool:
    """Return True if forward-mode differentiation is under way for x."""
    return differentiates_forward() and forward_ad.unpack_dual(x).tangent is not None


# Returns True if autocast is on for some device of this thread; without the name each device is asked
is_any_autocast = find("torch._C._is_any_autocast_enabled") or (lambda: True)
# Leaves the modes that see each operation, such as that of fake tensors
without_dispatch_modes = find("torch.utils._python_dispatch._disable_current_modes") or contextlib.nullcontext
# Gradients of attention from output and log-sum-exp, by kernels without a score matrix; None: use the formula
flash_backward = find("torch.ops.aten._scaled_dot_product_flash_attention_backward")
flash_backward_for_cpu = find("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
# Makes a tensor subclass without storage; None: masks are written out
make_wrapper_subclass = find("torch.Tensor._make_wrapper_subclass")


def keep_out_of_dynamo(function) -> None:
    """Keep Dynamo from compiling a function. Without the name it is compiled, and has to stand it."""
    skip = find("torch._dynamo.eval_frame.skip_code")
    if skip is not None:
        skip(function.__code__)


def mark_static_address(x: torch.Tensor, *, guard: bool = True) -> None:
    """Tell the compiler that x keeps its address: CUDA graphs may then mutate it.

    A graph that mutates any other input is not made. Does nothing in code that is being compiled, where
    inputs were marked before.
    """
    mark = find("torch._dynamo.mark_static_address")
    if mark is not None and not torch.compiler.is_compiling():
        mark(x, guard=guard)


def add_graph_pass(change, version: bytes) -> None:
    """Let torch.compile's Inductor run change(graph) on Dynamo's graphs, after passes that are set there.

    Without the names graphs stay as they are. Adding the same function again does nothing.
    version: of the change; compiled code of another version is not used again.
    """
    base: Any = find("torch._inductor.custom_graph_pass.CustomGraphPass")
    config = find("torch._inductor.config")
    if base is None or not hasattr(config, "pre_grad_custom_pass"):
        return
    before = config.pre_grad_custom_pass
    if change in getattr(before, "changes", ()):
        return

    class Passes(base):
        """Runs several passes in order."""

        changes = (*getattr(before, "changes", (before,) if before else ()), change)

        def __call__(self, graph):
            for each in self.changes:
                each(graph)

        def uuid(self):
            known = before.uuid() if hasattr(before, "uuid") else repr(before)
            return known, version

        def __reduce__(self):  # part of a cache's key: only the pass's identity counts
            return str, (repr(self.uuid()),)

    config.pre_grad_custom_pass = Passes()


def function_modes() -> list:
    """Return the torch_function modes that are on, except torch.set_default_device's own.

    Without the name to look them up: [None] where there may be one.
    """
    if _function_modes is not None and _function_modes() == 0:
        return []
    if _mode_stack is None:
        return [None]
    return [mode for mode in _mode_stack() if _device_context is None or not isinstance(mode, _device_context)]


def is_traced() -> bool:
    """Return True while torch.jit.trace records."""
    found: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return found


def map_only(kind: type, change, tree):
    """Apply `change` to every x of type `kind` in a tree of tuples, lists and dicts."""
    if _map_only is not None:
        return _map_only(kind, change, tree)
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_only(kind, change, x) for key, x in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(map_only(kind, change, x) for x in tree)
    return tree


def without_owner(x: torch.Tensor, holders: int = 1) -> torch.Tensor:
    """Return a tensor that shares the memory of x but does not own it.

    holders: number of tensors of this memory that are known, x among them.
    Returns x itself if something else holds its memory, or without the names.
    """
    make, count = find("torch._C._construct_storage_from_data_pointer"), find("torch._C._storage_Use_Count")
    storage = x.untyped_storage()
    if make is None or count is None or not storage.nbytes() or count(storage._cdata) > holders + 1:  # and `storage`
        return x
    with torch.inference_mode(False):
        other = make(storage.data_ptr(), x.device, storage.nbytes())
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        return empty.set_(other, x.storage_offset(), x.shape, x.stride())


def end_allocations(device: torch.device, pool: tuple[int, int]) -> None:
    """End the allocations of a broken capture in a memory pool.

    Without the name they end with the process.
    """
    end = find("torch._C._cuda_endAllocateToPool")
    if end is not None:
        with contextlib.suppress(RuntimeError):  # they have ended already
            end(device.index if device.index is not None else torch.cuda.current_device(), pool)
