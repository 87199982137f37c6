"""Capture launches in a CUDA graph. A capture that fails leaves PyTorch as it was."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sage_kernels.compat import end_allocations, without_owner

from ...patching.nested import UnknownValueError, mapped, tensors_of


Recorded = tuple[Any, Callable[[], None]]  # (results that each replay overwrites, the replay)
_failed: list[Any] = []  # kept alive, as PyTorch's allocator may still refer to them
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[2])


class CaptureError(Exception):
    """A function that could not be captured.

    Attributes: reason: "memory" or "not_capturable". line: of the code that failed, "" if unknown.
    """

    def __init__(self, error: BaseException):
        super().__init__(str(error).strip().partition("\n")[0])
        self.reason = "memory" if isinstance(error, torch.OutOfMemoryError) else "not_capturable"
        self.line = line_of(error)


def line_of(error: BaseException) -> str:
    """Return the innermost line outside of PyTorch and this package that raised an error, with its code."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [x for x in frames if not any(Path(x.filename).is_relative_to(package) for package in _PACKAGES)]
    if not others:
        return ""
    last = others[-1]
    return f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}: {last.line}"


def tidy(device: torch.device) -> None:
    """Release the memory that PyTorch caches, to make room for a capture."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    if free < total // 4:  # takes long where there are many objects
        gc.collect()
    torch.cuda.empty_cache()


class Captures:
    """Captures on one GPU. All graphs share memory, so they have to run one after another in one stream.

    Attributes:
        stream: the current stream at the first capture.
        memory: bytes that the captures so far have taken from the GPU.
    """

    def __init__(self, device: torch.device):
        self._device, self.memory = device, 0
        self.stream = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)
        self._keepers: list[Any] = []
        with torch.cuda.device(device), torch.cuda.stream(self._side):
            x = torch.zeros(16, 16, device=device, dtype=torch.float16)
            torch.mm(x, x)  # makes cuBLAS's workspace outside of the graphs' memory
            self._new_pool()

    def _new_pool(self) -> None:
        """Take another pool of memory, with a graph of its own that keeps it while others come and go.

        This successful capture also ends the capturing mode in which a broken one leaves PyTorch's generator.
        """
        self._pool = torch.cuda.graph_pool_handle()
        place, graph = torch.zeros(1, device=self._device, dtype=torch.float32), torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        place.add_(1)
        graph.capture_end()
        self._keepers.append(graph)

    def record(self, run: Callable[[], Any]) -> Recorded:
        """Capture the launches of a function, without running them.

        Returns: (its results, the replay). Raises: CaptureError.
        """
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        failure: BaseException | None = None
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    results = run()
                except BaseException as error:  # an interrupt must end the capture, too
                    failure, results = error, None
                graph.capture_end()
            except Exception as error:  # of the beginning or the end: PyTorch leaves both half done
                failure, results = failure or error, None
                self._end_broken_capture(graph)
        self.memory += max(0, torch.cuda.memory_reserved(self._device) - before)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failure is not None:
            told, failure = CaptureError(failure), None  # its frames hold the tensors of the capture
            raise told
        try:
            # the next capture may use the same memory
            holders = Counter(x.untyped_storage().data_ptr() for x in {id(x): x for x in tensors_of(results)}.values())
            results = mapped(results, lambda x: without_owner(x, holders[x.untyped_storage().data_ptr()]))
        except UnknownValueError:  # the caller refuses such results
            pass
        return results, graph.replay

    def _end_broken_capture(self, graph: Any) -> None:
        """End what a broken capture has begun, in PyTorch's allocator and generator."""
        _failed.append(graph)
        end_allocations(self._device, self._pool)
        self._new_pool()

    def most(self) -> int:
        """Return how many bytes graphs may take: half of what would be free on the GPU without them."""
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + cached) // 2
