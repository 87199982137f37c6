"""How kernels are launched: by Triton, sooner where they were before, and whole calls once more with other addresses.

May import `_triton/compat` and torch. What the other rooms use of it:
    launch(kernel, programs, *arguments, **constants)   one launch on the current stream
    buffer(*shape, device=)                             memory that launches of one call hand on, or return
    record(call, given)                                 make a call; a Replay that makes it again, if it can be
    compile_ahead(calls)                                start to compile what calls will launch
    compiled_together(call)                             make a call whose kernels are compiled side by side
    processors_of(device)                               how many SMs a GPU has
"""

from .ahead import Compiling, compile_ahead, compiled_together
from .launcher import launch, processors_of
from .recording import buffer
from .replay import Replay, record


__all__ = [
    "Compiling",
    "Replay",
    "buffer",
    "compile_ahead",
    "compiled_together",
    "launch",
    "processors_of",
    "record",
]
