"""The only place for private or version-dependent names of Triton, Gluon and the CUDA driver.

Each name may be missing. Then the public way is taken: kernel[grid](...), Triton kernels instead of Gluon ones,
pointers instead of the copy engine, launches that wait for the previous one. That is slower, with the same results.
Private names of PyTorch are in sage_kernels/compat.py.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from ..compat import find
from . import ready
from .keys import settle_key


logger = logging.getLogger("sage_kernels")
# Looked up with `find`. tests/kernels/launch/test_compat.py deletes each
NAMES = (
    "triton.runtime.driver",
    "triton.knobs.runtime",
    "triton.knobs.compilation",
    "triton.language.extra.cuda.gdc_launch_dependents",
    "triton.language.extra.cuda.gdc_wait",
    "triton.tools.tensor_descriptor.TensorDescriptor",
    "triton.compiler.compiler.make_backend",
    "triton.runtime.cache.get_cache_key",
    "triton.runtime.cache.get_cache_manager",
    "triton.runtime.cache.FileCacheManager",
    "triton._C.libtriton.get_cache_invalidating_env_vars",
    "triton.runtime.cache.triton_key",
)
# Attributes of Triton's kernels and compiled kernels, read with `attribute`
ATTRIBUTES = (
    "params", "do_not_specialize", "do_not_specialize_on_alignment", "arg_names", "device_caches", "ASTSource",
    "compile", "run", "function", "packed_metadata", "metadata", "src", "launcher_cls",
)  # fmt: skip
# All that the Hopper kernels use of Gluon
GLUON = (
    "triton.experimental.gluon.jit",
    "triton.experimental.gluon.constexpr_function",
    "triton.language.core._aggregate",
    *(
        f"triton.experimental.gluon.language.{name}"
        for name in (
            "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout.get_default_for",
            "SliceLayout", "SwizzledSharedLayout", "abs", "allocate_shared_memory", "arange", "atomic_add",
            "atomic_max", "barrier", "bfloat16", "constexpr", "convert_layout", "div_rn", "exp2", "float16", "float32",
            "float8e4nv", "fma", "full", "full_like", "inline_asm_elementwise", "int1", "int32", "int64", "int8",
            "join", "load", "log2", "max", "maximum", "min", "minimum", "permute", "pointer_type", "program_id",
            "reduce", "reshape", "shared_memory_descriptor", "split", "static_range", "store", "sum", "tensor",
            "to_tensor", "uint32", "uint8", "warp_specialize", "where", "zeros", "zeros_like",
        )
    ),
    *(
        f"triton.experimental.gluon.language.shared_memory_descriptor.{name}"
        for name in ("index", "load", "reinterpret", "slice")
    ),
    *(
        f"triton.experimental.gluon.language.nvidia.hopper.{name}"
        for name in (
            "fence_async_shared", "mbarrier", "tma.async_load", "tma.async_store", "tma.store_wait", "warpgroup_mma",
            "warpgroup_mma_wait",
        )
    ),
    "triton.experimental.gluon.nvidia.hopper.TensorDescriptor",
)  # fmt: skip

# Earlier names of the same functions; hopper_primitives.py takes whichever there is
EARLIER = {
    f"triton.experimental.gluon.language.{new}": f"triton.experimental.gluon.language.{old}"
    for new, old in (
        ("barrier", "thread_barrier"),
        ("shared_memory_descriptor.reinterpret", "shared_memory_descriptor._reinterpret"),
        ("nvidia.hopper.tma.async_load", "nvidia.hopper.tma.async_copy_global_to_shared"),
        ("nvidia.hopper.tma.async_store", "nvidia.hopper.tma.async_copy_shared_to_global"),
    )
}


def attribute(x, name: str):
    """Return x.name of an object made by Triton: a function, so that tests can hide names.

    Raises: AttributeError.
    """
    return getattr(x, name)


# kernels


@triton.jit
def _nothing():
    pass


gdc_launch_dependents = find("triton.language.extra.cuda.gdc_launch_dependents")
gdc_wait = find("triton.language.extra.cuda.gdc_wait")
# Programmatic dependent launch: a launch may begin before the previous one ends. Both kernels must take part.
PROGRAMMATIC = gdc_launch_dependents is not None and gdc_wait is not None
if not PROGRAMMATIC:
    gdc_launch_dependents = gdc_wait = _nothing
TensorDescriptor = find("triton.tools.tensor_descriptor.TensorDescriptor")


@functools.cache
def has_gluon() -> bool:
    """Return whether this Triton has every Gluon name the Hopper kernels use. Warns once if not."""
    missing = [name for name in GLUON if find(name) is None and (name not in EARLIER or find(EARLIER[name]) is None)]
    if missing:
        logger.warning(
            "triton %s: got no %s, expected it for the Hopper kernel; the kernel for any GPU runs instead, slower",
            triton.__version__, " and ".join(missing),
        )  # fmt: skip
    return not missing


# Decorator of classes with fields and methods for Gluon code; Triton's name is private
aggregate = find("triton.language.core._aggregate")


# launches

_driver, _knobs = find("triton.runtime.driver"), find("triton.knobs.runtime")
if not hasattr(type(_driver), "active"):  # without the object, `find` returns the module of the same name
    _driver = None


def current_device() -> int:
    """Return the index of the current GPU, by Triton's faster function if there is one."""
    ready.wait()
    return torch.cuda.current_device() if _driver is None else _driver.active.get_current_device()


def current_stream(device: int) -> int:
    """Return the handle (an address) of the device's current stream."""
    if _driver is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _driver.active.get_current_stream(device)


def get_ready() -> None:
    """Begin, in the background, to build Triton's library for the driver, and the hash of its own files."""
    own_key = find("triton.runtime.cache.triton_key")
    ready.begin([task for task in (_driver and (lambda: _driver.active), own_key) if task])


def profiler_listens() -> bool:
    """Return whether a profiler has a hook on Triton's launches; True if this is unknown."""
    return bool(getattr(getattr(_knobs, "launch_enter_hook", None), "calls", True))


# by id, since a kernel's hash asks for its key; with the kernel, which keeps the id its own
_parameters: dict[int, tuple[Any, list[tuple[str, bool, bool]] | None]] = {}


def parameters(kernel) -> list[tuple[str, bool, bool]] | None:
    """Describe each parameter of a kernel: (name, specialised on integers, specialised on alignment).

    If specialised, the kernel is compiled again for other integers (or unaligned addresses).
    Returns None if Triton doesn't say so, as for kernels in its interpreter: only Triton can launch such kernels.
    """
    known = _parameters.get(id(kernel))
    if known is None:
        known = _parameters[id(kernel)] = kernel, _read_parameters(kernel)
    return known[1]


def _read_parameters(kernel) -> list[tuple[str, bool, bool]] | None:
    if not isinstance(kernel, triton.JITFunction):
        return None
    settle_key(kernel)
    try:
        names, found = attribute(kernel, "arg_names"), []
        for name, x in zip(names, attribute(kernel, "params"), strict=True):
            kept = attribute(x, "do_not_specialize")
            found.append((name, not kept, not (kept or attribute(x, "do_not_specialize_on_alignment"))))
    except AttributeError:
        return None
    return found


def starter(compiled):
    """Return a function that launches a compiled kernel again, without Triton's binding of arguments.

    Its arguments: programs, stream, values (arguments of the kernel), rest (its constants). Profilers get no metadata.
    Returns None if this Triton has no such way. The kernel must have been launched once.
    """
    try:
        run, function, packed = (attribute(compiled, name) for name in ("run", "function", "packed_metadata"))
    except AttributeError:
        return None

    def start(programs: int, stream: int, values, rest) -> None:
        run(programs, 1, 1, stream, function, packed, None, None, None, *values, *rest)

    return start


# compiles

_compilation = find("triton.knobs.compilation")
_callbacks = threading.local()  # .hits, .parsed: what this thread's compiles report to; None or missing: nothing


class LoadedKernel(NamedTuple):
    """A kernel that Triton compiled, or loaded without compiling.

    Attributes:
        name: of its function.
        was_there: its machine code came with the package or was in Triton's cache.
        seconds: of compiling.
    """

    name: str
    was_there: bool
    seconds: float


MOST_LOADED = 4096
loaded: list[LoadedKernel] = []  # in this process, in order


def _on_compile(*, src, times, cache_hit: bool, **_) -> None:
    hits = getattr(_callbacks, "hits", None)
    if hits is not None:
        hits.append(cache_hit)
    if len(loaded) < MOST_LOADED:
        seconds = 0.0 if cache_hit else getattr(times, "total", 0) / 1e6
        loaded.append(LoadedKernel(getattr(src, "name", "?"), cache_hit, seconds))


if getattr(_compilation, "listener", _on_compile) is None:
    _compilation.listener = _on_compile


@contextlib.contextmanager
def collect_cache_hits():
    """Collect, for each kernel compiled by this thread inside, whether Triton's disk cache had it.

    Yields a list of bools. It stays empty if Triton has no listener for compiles, or someone else's is set.
    """
    if getattr(_compilation, "listener", _on_compile) is None:
        _compilation.listener = _on_compile
    _callbacks.hits = []
    try:
        yield _callbacks.hits
    finally:
        _callbacks.hits = None


@functools.cache
def _reporting(source: type) -> type:
    """Return a subclass of Triton's source class; its make_ir calls `_callbacks.parsed` at the end."""
    if hasattr(source, "_reports"):
        return source

    def make_ir(self, *arguments, **options):
        try:
            return source.make_ir(self, *arguments, **options)
        finally:
            callback = getattr(_callbacks, "parsed", None)
            if callback is not None:
                callback()

    return type(source.__name__, (source,), {"make_ir": make_ir, "_reports": True})


@contextlib.contextmanager
def call_when_parsed(kernel, callback):
    """Call callback() when this thread, compiling the kernel inside, has parsed its source.

    Parsing runs in Python and holds the GIL; the rest of a compile does not. If Triton has no such hook, the callback
    is called at once.
    """
    try:
        attribute(kernel, "device_caches")[current_device()]  # sets kernel.ASTSource
        kernel.ASTSource = _reporting(attribute(kernel, "ASTSource"))
    except AttributeError:
        callback()
    _callbacks.parsed = callback
    try:
        yield
    finally:
        _callbacks.parsed = None


class CompileRequest(NamedTuple):
    """A kernel that Triton is about to compile, or to load from its disk cache.

    Attributes:
        name: of the kernel.
        key: SHA-256 of everything that decides its machine code: sources, types, constants, options, GPU, and the
            versions of Triton and ptxas.
        cached: a function that returns the hash by which Triton's cache knows the kernel (it differs between builds of
            Triton), and the cache entry with get_group, put and put_group.
    """

    name: str
    key: str
    cached: Callable[[], tuple[str, Any]]


_make_backend = find("triton.compiler.compiler.make_backend")
_cache_key = find("triton.runtime.cache.get_cache_key")
_cache_of = find("triton.runtime.cache.get_cache_manager")
_FileCache = find("triton.runtime.cache.FileCacheManager")
_environment = find("triton._C.libtriton.get_cache_invalidating_env_vars")


def compile_request(src, target, options) -> CompileRequest | None:
    """Describe the kernel a compile with these arguments produces.

    Returns None if environment variables or hooks may change what Triton produces, or if that can't be known.
    """
    ready.wait()
    if None in (_make_backend, _cache_key, _cache_of, _environment) or target is None:
        return None
    if any(getattr(_compilation, name, True) for name in ("always_compile", "override", "dump_ir")) or _environment():
        return None
    if getattr(_knobs, "add_stages_inspection_hook", None) is not None:
        return None
    backend = _make_backend(target)
    parsed = backend.parse_options(dict(options or {}, **src.parse_options()))
    decides = (triton.__version__, src.hash(), backend.hash(), parsed.hash())

    def cached():
        known = hashlib.sha256(_cache_key(src, backend, parsed, {}).encode()).hexdigest()
        return known, _cache_of(known)

    return CompileRequest(src.name, hashlib.sha256("-".join(decides).encode()).hexdigest(), cached)


def put_group(cache, name: str, files: dict[str, bytes]) -> None:
    """Put files into an entry of Triton's cache, as one group of this name.

    Triton makes and removes a folder for each file, which takes milliseconds on some machines. In its usual cache,
    which is a folder, files are written beside their places and moved there, the group last.
    """
    folder = getattr(cache, "cache_dir", None)
    if type(cache) is not _FileCache or not folder:
        cache.put_group(name, {file: cache.put(data, file) for file, data in files.items()})
        return
    paths = {file: os.path.join(folder, file) for file in files}
    whole = files | {f"__grp__{name}": json.dumps({"child_paths": paths}).encode()}
    for file, data in whole.items():
        beside = os.path.join(folder, f"tmp.pid_{os.getpid()}_{uuid.uuid4()}")
        with open(beside, "xb") as opened:
            opened.write(data)
        os.replace(beside, os.path.join(folder, file))


def call_before_compiles(kernel, callback) -> None:
    """Call callback(CompileRequest) before each compile of the kernel from now on.

    Triton "compiles" also if its disk cache has the kernel.

    Calling this again for the same kernel changes nothing. The callback is not called if `compile_request` returns
    None, or if this Triton has no such hook.
    """
    try:
        attribute(kernel, "device_caches")[current_device()]  # sets kernel.compile
        compile = attribute(kernel, "compile")
    except AttributeError:
        return
    if getattr(compile, "_reports", False):
        return

    @functools.wraps(compile)
    def reporting(src, target=None, options=None, **others):
        found = compile_request(src, target, options)
        if found is not None:
            callback(found)
        return compile(src, target=target, options=options, **others)

    reporting._reports = True
    kernel.compile = reporting


def build_launcher(compiled) -> None:
    """Build Triton's launcher of a compiled kernel in advance; it stays in Triton's disk cache.

    Up to Triton 3.6 a C compiler builds it at the kernel's first launch. Nothing is loaded onto the GPU here, as a
    CUDA graph may be under capture.
    """
    if _driver is not None:
        with contextlib.suppress(AttributeError):
            attribute(_driver.active, "launcher_cls")(attribute(compiled, "src"), attribute(compiled, "metadata"))
