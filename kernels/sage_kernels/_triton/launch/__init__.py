"""Launches of kernels: single ones, replays of whole calls, and compiles ahead of the first launch.

May import `_triton/compat` and torch. The other rooms and the ops use:
    launch(kernel, programs, *arguments, **constants)   launch a kernel on the current stream
    buffer(*shape, device=)                             allocate memory for intermediate or returned tensors of a call
    processors_of(device), capability_of(device)        number of SMs, compute capability
    Recording()                                         note a call's launches, and make a Replay of it if possible
    Replay(given, numbers)                              run the call again with other tensors and numbers
    compile_ahead(calls)                                start to compile the kernels that calls will launch
    compiled_together(call)                             within it, all kernels of the call are compiled in parallel

There are two ways to launch, the fastest first, with the same kernels and arguments:
    replay.py     for a Replay: the launcher that Triton built for the compiled kernel
    launcher.py   for a first call: that same launcher if an equal launch was made before, else Triton's kernel[grid]
recording.py has the tape on which a thread notes the launches of a call. kernels/NOTES.md says what
each way saves in whole models.
"""

from .ahead import Compiling, compile_ahead, compiled_together
from .launcher import capability_of, launch, processors_of
from .recording import buffer
from .replay import Recording, Replay


__all__ = [
    "Compiling",
    "Recording",
    "Replay",
    "buffer",
    "capability_of",
    "compile_ahead",
    "compiled_together",
    "launch",
    "processors_of",
]
