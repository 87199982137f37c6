"""A driver for Triton that compiles for a Hopper GPU that is not there, and records what its launches are handed.

For scripts in processes of their own: it stays the active one.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget


def install(device: int | None = 0, stream: int = 0) -> list:
    """Make it the active driver. Returns the list that grows by (kernel, grid, stream and function, values) a launch,
    tensors as their addresses; device, stream: what it says is current."""
    handed = []

    class Utils:
        def load_binary(self, *_):
            return 0, 0, 32, 0, 1024

        def get_device_properties(self, _):
            return {"max_shared_mem": 232448}

    class Launcher:
        made = []  # hashes of the kernels, as launchers of them are made

        def __init__(self, src, metadata):
            self.hash = metadata.hash
            self.made.append(self.hash)

        def __call__(self, *arguments):
            values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments[9:]]
            handed.append((self.hash, arguments[:3], arguments[3:5], values))

    class Driver:
        utils, launcher_cls = Utils(), Launcher
        get_current_device = staticmethod(lambda: device)
        get_current_stream = staticmethod(lambda device=0: stream)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    triton.runtime.driver.set_active(Driver())
    return handed


def record(call, given, numbers=None) -> tuple:
    """Make a call. Returns its results, and the Replay of it or None; given, numbers: as in `Recording.replay`."""
    from sage_kernels._triton.launch import Recording

    with Recording() as recorded:
        results = call()
    return results, recorded.replay(results, given, numbers)


def named(handed: list, given, results) -> list:
    """What was handed over, with names for addresses: of the given tensors, the results, and buffers as they come.

    Empties the list.
    """
    results = [results] if isinstance(results, torch.Tensor) else results
    names = {x.data_ptr(): f"given {i}" for i, x in enumerate(given)}
    names |= {x.data_ptr(): f"result {i}" for i, x in enumerate(results)}
    launches = []
    for kernel, grid, head, values in handed:
        line = []
        for x in values:
            if hasattr(x, "block_shape"):
                line.append(("described", list(x.shape), list(x.strides), list(x.block_shape), x.padding))
                x = x.base
            if hasattr(x, "data_ptr"):
                x = x.data_ptr()
            if type(x) is int and (x in names or x > 2**40):
                x = names.setdefault(x, f"buffer {len(names)}")
            line.append(x)
        launches.append((kernel, grid, head, line))
    handed.clear()
    return launches


def replayed(handed: list, name: str, call, first, second):
    """Record call(*first) and replay it with the tensors `second`, which must launch what call(*second) does.

    Returns: the Replay, and what was handed over.
    """
    results, again = record(lambda: call(*first), first)
    assert again is not None, name
    recorded = named(handed, first, results)
    made = again(second)
    found = named(handed, second, made)
    assert found == recorded and recorded, (name, recorded, found)
    fresh = call(*second)
    assert named(handed, second, fresh) == recorded, name
    for a, b in zip(*([x] if torch.is_tensor(x) else x for x in (made, fresh)), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) and a.data_ptr() != b.data_ptr(), name
    # an address that Triton would compile anew for
    x = second[0]
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    assert again((shifted, *second[1:])) is None and not handed, name
    return again, recorded


def run(script: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a script in a process of its own, where kernels are compiled, with a cache in `folder`."""
    path = folder / "script.py"  # Triton reads the source of its kernels from files
    path.write_text(script)
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": f"{root / 'kernels'}{os.pathsep}{root}",
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    return subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, check=False)
