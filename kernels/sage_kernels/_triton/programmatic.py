"""Launches on Hopper that may begin before the one before them ends: what lets them, and what they wait for."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_launch_before():
    """What the launch before has written is there from here on: this one's programs may begin before that one ends."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_launch_begin():
    """The next launch may take the processors that this one has no more programs for; it waits before it reads."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
