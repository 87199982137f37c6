"""How kernels are launched: by Triton, sooner where they were before, and whole calls once more with other addresses.

May import `_triton/compat` and torch. All that the other rooms and the ops use of it:
    launch(kernel, programs, *arguments, **constants)   one launch on the current stream
    buffer(*shape, device=)                             memory that launches of one call hand on, or return
    processors_of(device)                               how many SMs a GPU has
    record(call, given, numbers)                        make a call; a Replay that makes it again, if that can be
    Replay(given, numbers)                              the call again, with other tensors and numbers
    compile_ahead(calls)                                start to compile what calls will launch
    compiled_together(call)                             make a call whose kernels are compiled side by side

Three ways to the driver, each tried where the one above it can't be taken, all with the same launches:
    direct.py     of a Replay: the driver's own function, arguments written once, addresses put in place
    replay.py     of a Replay: the compiled kernel's own launcher
    launcher.py   of a first call: the compiled kernel's launcher where Triton launched the like before, else Triton
recording.py is what a thread writes down of the call that it is making. What each brings to whole models is measured
by kernels/benchmarks/bench_launch_layers.py.
"""

from .ahead import Compiling, compile_ahead, compiled_together
from .launcher import capability_of, launch, processors_of
from .recording import buffer
from .replay import Replay, record


__all__ = [
    "Compiling",
    "Replay",
    "buffer",
    "capability_of",
    "compile_ahead",
    "compiled_together",
    "launch",
    "processors_of",
    "record",
]
