"""Kernels compiled ahead are those that a run launches; a compile that fails is the launch's error; nothing hangs."""

from __future__ import annotations

import pytest


pytest.importorskip("triton", reason="triton is not installed")
from tests.support.recording_driver import run  # noqa: E402


# what a Hopper GPU that is not there would compile: noted, not compiled
RUN = """
import threading, torch, triton
from tests.support.recording_driver import install
from triton.runtime.jit import JITFunction

install(device=None, stream=7)
compiled = []  # (kernel, what it is specialised for) as Triton is asked for it

class Compiled:
    function, packed_metadata = 0, ()
    def run(self, *arguments): pass
    def launch_metadata(self, *arguments): return None

def compile(self, key, signature, device, *rest):
    compiled.append((self.__name__, key))
    found = self.device_caches[device][0][key] = Compiled()
    return found

JITFunction._do_compile = compile
from sage_kernels import new_skip_state
from sage_kernels.ops import skip_state, warm_up
from sage_kernels._triton.attention import launch as launch_attention
from sage_kernels._triton.attention.tiles import choose_tile
from sage_kernels._triton.launch import ahead, launcher
from sage_kernels._triton.prologue import prologue
from sage_kernels._triton.prologue.plan_step import launch_plan_step
from sage_kernels.facts.masking import make_masking
from sage_kernels.planning.state import ScaleState, Site

launch_attention.device_tile = lambda _, width, scaling, masking, pv, lagged: choose_tile(
    90, width, scaling, masking.by_row, pv, not lagged)
launch_attention.processors_of = prologue.processors_of = lambda device: 132
CPU = torch.device("cpu")
skip_state.REFERENCE_BLOCK = (192, 64)  # Hopper's

def closing(state):
    level = state._noise_bins.of(1.0)
    return lambda: launch_plan_step(*state._launch_tensors(level, level), **state._launch_numbers())

def forget():
    '''As a new process: nothing is compiled.'''
    compiled.clear(), ahead._known.clear(), launcher._ready.clear()
    for kernel in KERNELS:
        kernel.device_caches.clear()

def launches(tokens, head_dim, recipe, causal, by_key, steps=6, skips=False):
    state = ScaleState([Site(name, 2, head_dim) for name in "ab"], device=CPU)
    tensors = [torch.zeros(2, tokens, 4, head_dim, dtype=torch.bfloat16) for _ in range(3)]
    mask = torch.zeros(2, 1, 1, tokens, dtype=by_key) if by_key else None
    masking, _ = make_masking(mask, causal, None, 0.0, None, tokens, tokens)
    state.begin_run(1.0)
    shape = (2, 4, tokens, tokens, head_dim, CPU)
    lists = [new_skip_state(*shape, recipe=recipe, compensates=True) if skips else None for _ in "ab"]
    for step in range(steps):
        for site in range(2):
            of_site = state.head_state(site)
            if "fp8" in recipe:
                kept = state.kept.row_maxima.of(site, (2, 4, tokens), CPU)
                of_site = of_site if kept is None else of_site.keeping(*kept)
            q, k, v = tensors[0], *(x[:, :, ::2] for x in tensors[1:])
            launch_attention.launch_attention_fwd(
                q, k, v, scale=0.1, scaling="planned", smooth_k=True, state=of_site, return_lse=False, recipe=recipe,
                masking=masking, skip=lists[site])
        closing(state)()
        state.kept.row_maxima.next_step()
    return state

from sage_kernels._triton.attention.hopper.kernel import attention_fwd_hopper_kernel
from sage_kernels._triton.prologue.plan_step import _plan_step_kernel
from sage_kernels._triton.prologue.mask_tiles import _key_mask_kernel
from sage_kernels._triton.attention.compensate import _compensate_kernel, _pool_tiles_kernel
from sage_kernels._triton.attention.skip_tiles import _choose_tiles_kernel, _measure_tiles_kernel
KERNELS = [attention_fwd_hopper_kernel, _plan_step_kernel, _key_mask_kernel, prologue._prologue_kernel]
KERNELS += [_choose_tiles_kernel, _measure_tiles_kernel, _compensate_kernel, _pool_tiles_kernel]
numbers = {}
for recipe in ("qk_int8_pv_bf16", "qk_int8_pv_fp8"):
    for tokens, head_dim, causal, by_key, skips in (
        (300, 64, "", None, False), (9000, 64, "", None, False), (520, 128, "top_left", None, False),
        (400, 64, "", torch.bool, False), (600, 64, "", None, True),
    ):
        forget()
        state = launches(tokens, head_dim, recipe, causal, by_key)
        if skips:
            launches(tokens, head_dim, recipe, causal, by_key, skips=True)
        launched = set(compiled)
        assert len(launched) == len(compiled)
        forget()
        length = warm_up.LONG if tokens >= warm_up.LONG else warm_up.SHORT
        kind = warm_up.CallKind(torch.bfloat16, head_dim, recipe, keeps_rows=True, causal=causal, by_key=by_key,
                                tokens=(length,), skips=skips, compensates=skips)
        started = warm_up.compile_ahead([kind], CPU, [closing(state)])
        started.wait()
        predicted = set(compiled)
        assert predicted == launched, (recipe, tokens, causal, predicted ^ launched)
        numbers[recipe] = max(numbers.get(recipe, 0), len(predicted))
        for _ in range(2):  # before and after a run
            before = threading.active_count()
            again = warm_up.compile_ahead([kind], CPU, [closing(state)])
            assert not again.jobs and len(again.known) == len(predicted) and threading.active_count() <= before
            launches(tokens, head_dim, recipe, causal, by_key, skips=skips)
            assert len(compiled) == len(predicted), "a run compiled again"
# a later step's kernels are the reason: in bf16 there are none
assert numbers["qk_int8_pv_fp8"] > numbers["qk_int8_pv_bf16"], numbers

# a call that nobody expected: its other kernels are compiled beside its first one, each once
forget()
state = ScaleState([Site("a", 4, 64)], device=CPU)
q = torch.zeros(1, 300, 4, 64, dtype=torch.bfloat16)
seen = []
def compile_and_tell(self, *arguments):
    seen.append((self.__name__, threading.current_thread().name))
    return compile(self, *arguments)
JITFunction._do_compile = compile_and_tell
from sage_kernels._triton.launch import compiled_together
call = lambda: launch_attention.launch_attention_fwd(
    q, q, q, scale=0.1, scaling="planned", smooth_k=True, state=state.head_state(0), return_lse=False)
with compiled_together(call):
    call()
beside = [("_prologue_kernel", "MainThread"), ("attention_fwd_hopper_kernel", "sage_kernels compile")]
assert sorted(seen) == beside, seen
print("all as predicted")
"""


def test_kernels_compiled_ahead_are_those_of_a_run_of_six_steps(tmp_path):
    done = run(RUN, tmp_path)
    assert done.stdout == "all as predicted\n", done.stderr[-3000:]


# small kernels, compiled for real
COMPILES = """
import os, signal, sys, threading, time, torch, triton
import triton.language as tl
from tests.support.recording_driver import install

if hasattr(signal, "alarm"):
    signal.alarm(120)  # who waits for a thread that is not there waits for ever
handed = install(device=None, stream=7)
from sage_kernels._triton.launch import ahead, compile_ahead, launch

@triton.jit
def good(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)

@triton.jit
def read_alone(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)

@triton.jit
def bad(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "one at a time")

x = torch.zeros(64)
def use(kernel, BLOCK=16):
    return lambda: launch(kernel, 1, x, BLOCK=BLOCK)
"""

READING = """
reads = []  # (block, compiles that have ended) as a kernel's reading begins, and None as it ends
read = triton.compiler.ASTSource.make_ir

def read_slowly(self, *arguments):
    (block,) = self.constants.values()
    reads.append((block, sum(job.finished.is_set() for job in jobs)))
    time.sleep(0.1)
    found = read(self, *arguments)
    reads.append(None)
    return found

triton.compiler.ASTSource.make_ir = read_slowly

cores, ahead._cores = ahead._cores, lambda: 4
jobs = []
collected = ahead.collect([use(read_alone, block) for block in (16, 32, 64, 128)])
jobs += collected.values()
started = ahead._start(collected)
use(read_alone, 128)()  # in the main thread, before or after others
started.wait()
blocks = [x[0] for x in reads[::2]]
assert reads[1::2] == [None] * 4, "two were read at once"
assert sorted(blocks) == [16, 32, 64, 128] and blocks[0] == 16, blocks
assert reads[2][1] == 0, "the second one waited for the first one's compile to end"
print("in turns")
triton.compiler.ASTSource.make_ir, ahead._cores = read, cores
handed.clear()
"""

OUTCOMES = """
made = triton.runtime.driver.active.launcher_cls.made
made.clear()
started = compile_ahead([use(good), use(bad), use(good, 32)])
assert not handed, "nothing is launched"
try:
    started.wait()
except triton.CompilationError as error:
    assert "one at a time" in str(error)
else:
    raise AssertionError("no error")
first, broken, second = started.jobs
assert (first.cached, second.cached) == (False, False) and broken.error is not None
assert len(made) == 2, "launchers are left to their first launches"
assert not ahead._under_way
[thread.join() for thread in list(ahead._workers)]
assert not ahead._workers, "threads that wait for work"
runs = []
def counted(**told):
    runs.append(told["src"].name)
triton.knobs.compilation.listener = counted
use(good)(), use(good, 32)()
assert len(handed) == 2 and not runs, "they were compiled"
for _ in range(2):  # as it would be without all this
    try:
        use(bad)()
    except triton.CompilationError as error:
        assert "one at a time" in str(error)
    else:
        raise AssertionError("no error")
# from the disk; who listens himself is left alone
good.device_caches.clear(), ahead._known.clear()
again = compile_ahead([use(good)])
again.wait()
assert again.jobs[0].cached is None and runs == ["good"]
triton.knobs.compilation.listener = None
good.device_caches.clear(), ahead._known.clear()
again = compile_ahead([use(good), use(good, 32)])
again.wait()
assert [job.cached for job in again.jobs] == [True, True]
# where a job waits behind others, the launch that needs it takes it
def idle():
    [thread.join() for thread in list(ahead._workers)]
idle(), ahead._known.clear()
ahead._cores = lambda: 0
waiting = compile_ahead([use(good, 64)])
use(good, 64)()
assert len(handed) == 3 and waiting.jobs[0].finished.is_set() and not ahead._waiting
# in a forked process, what was under way is not
began = []
def slowly(*arguments, **constants):
    began.append(1)
    time.sleep(1)
def start_slowly(*blocks):
    good.warmup = slowly
    ahead._cores = lambda: 1
    started = compile_ahead([use(good, block) for block in blocks])
    while not began:
        time.sleep(0.01)
    return started
if hasattr(os, "fork"):
    start_slowly(128)
    child = os.fork()
    if not child:
        signal.alarm(30)
        x = torch.zeros(128)
        use(good, 128)()
        os._exit(0 if len(handed) == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    idle()
print("all outcomes", flush=True)

# at the interpreter's exit
began.clear()
started = start_slowly(1, 2, 4, 256, 512, 1024, 2048)
import atexit
atexit.register(lambda: print(len(began), "of", len(started.jobs), "began"))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The process that compiles small kernels, when it has ended."""
    return run(COMPILES + READING + OUTCOMES, tmp_path_factory.mktemp("compiled"))


def test_kernels_are_read_one_after_the_other_and_compiled_side_by_side(compiled):
    assert compiled.stdout.startswith("in turns\n"), compiled.stderr[-3000:]


def test_a_compile_that_fails_is_the_error_of_its_launch_and_the_interpreter_ends(compiled):
    """At its exit, compiles that run are waited for; those that wait are left."""
    said = compiled.stdout.removeprefix("in turns\n")
    assert said == "all outcomes\n1 of 7 began\n" and compiled.returncode == 0, said + compiled.stderr[-3000:]
