"""Private and version-dependent names: each is deleted in turn, and the ops still answer right.

In processes of their own, one for each name, that have loaded PyTorch and Triton but nothing of ours.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import sage_kernels
from sage_kernels import compat
from sage_kernels.ops import replay
from tests.support.recording_driver import run
from tests.support.repository import ROOT


# forks for each name of NAMES, deletes it, calls `check(name)`, and prints what failed
EACH = """
import functools, os, sys, traceback

def delete(name):
    path, _, last = name.rpartition(".")
    found = sys.modules[path.partition(".")[0]]
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    delattr(found, last)

def each(names, check, delete=delete):
    sys.stdout.flush()
    for name in names:
        child = os.fork()
        if not child:
            try:
                if name:
                    delete(name)
                check(name)
            except BaseException:
                print("without", name, file=sys.stderr)
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print("failed without", name)
    print("tried", len(names))
"""

TORCH = (
    EACH
    + """
import torch._inductor.config, torch._inductor.custom_graph_pass
import types, torch, torch._dynamo, torch._library.autograd
import torch.utils._device, torch.utils._pytree, torch.autograd.forward_ad, importlib
DEVICE = "cuda" if {on_gpu} else "cpu"
FUSED = "torch.ops.aten._scaled_dot_product_flash_attention" + ("" if {on_gpu} else "_for_cpu") + "_backward"

def check(name):
    import sage_kernels
    from sage_kernels import compat
    from sage_kernels.ops import replay
    from sage_kernels.testing import make_qkv
    from sage_kernels.reference import ref_attention
    inputs = make_qkv("normal", 1, 30, 40, 2, 1, 64, dtype=torch.float16)
    wanted, _ = ref_attention(*inputs, scale=0.125, scaling="per_token", smooth_k=True)
    q, k, v = (x.to(DEVICE) for x in inputs)
    for _ in range(4):  # and made again
        out = sage_kernels.sage_attention(q, k, v)
    assert (out.cpu().float() - wanted.float()).abs().max() < 5e-3, "attention"
    assert torch.equal(sage_kernels.sage_attention(torch._neg_view(-q), k, v), out), "negative bit"
    cache = []
    for _ in "kv":
        cache.append(torch.zeros(1, 1, 50, 64, dtype=torch.int8, device=DEVICE))
        cache.append(torch.zeros(1, 1, 50, dtype=torch.bfloat16, device=DEVICE))
    decoded = []
    for _ in range(4):
        sage_kernels.append_kv(k.transpose(1, 2), v.transpose(1, 2), None, *cache, position=0)
        length = torch.tensor(40, device=DEVICE)
        decoded.append(sage_kernels.sage_decode_attention(q[:, :1], *cache, lengths=length))
    assert all(torch.equal(x, decoded[0]) for x in decoded)
    assert (decoded[0] - out[:, :1]).abs().max() < 0.05, "decode"
    looked_up = ("_C._dispatch", "_C._len", "_C.Dispatch", "_profiler_enabled", "_current_level")
    assert replay.is_plain_call(q) == (not any(part in name for part in looked_up)), "plain"
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    loss = sage_kernels.differentiable_attention(*leaves).float().square().sum()
    grads = torch.autograd.grad(loss, leaves)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), enable_gqa=True)
    wanted = torch.autograd.grad(exact.float().square().sum(), leaves)
    assert all((x - y).float().norm() < 0.05 * y.float().norm() for x, y in zip(grads, wanted)), "gradients"
    assert sage_kernels.has_fused_backward(q) == (name != FUSED), "fused"
    # what sage_processors asks for
    compat.mark_static_address(torch.zeros(1))
    class Mode(torch.overrides.TorchFunctionMode):
        pass
    assert not compat.function_modes()
    with Mode():
        assert compat.function_modes()
    tree = ((1, [2.0, {{"a": 3}}]), {{"b": (4,)}})
    assert compat.map_only(int, lambda x: -x, tree) == ((-1, [2.0, {{"a": -3}}]), {{"b": (-4,)}})
    if "{extra}":
        import sage_processors.diffusion.calls.processors
        import sage_processors.language.masks
        import sage_processors.reporting.event_counter
        sage_processors.reporting.event_counter.EventCounter(3)
        mask = sage_processors.language.masks.sage_mask(1, 3, 5, q_offset=2)
        assert (type(mask) is torch.Tensor) == ("_make_wrapper" in name)
        assert torch.equal(mask | False, torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2))

def renamed(name):
    if name.endswith("_current_level"):  # PyTorch itself goes on with it, by another name
        where = torch.autograd.forward_ad
        where.unpack_dual = types.FunctionType(where.unpack_dual.__code__, dict(vars(where)), argdefs=())
        where.unpack_dual.__kwdefaults__ = {{"level": None}}
    if name.endswith("_make_wrapper_subclass"):  # of a class that can't be changed: our look-up finds none
        from sage_kernels import compat
        compat.make_wrapper_subclass = None
        return
    if name == "torch._C.DispatchKeySet":  # what torch.library.register_autograd goes on with
        torch._library.autograd._C = types.SimpleNamespace(**vars(torch._C))
    if name.startswith("torch.ops."):  # looked up anew by PyTorch: ours finds none
        from sage_kernels import compat
        setattr(compat, "flash_backward_for_cpu" if "cpu" in name else "flash_backward", None)
        return
    delete(name)

if "{extra}":  # what others need of these names they have by now
    import transformers.masking_utils, diffusers.models.attention_dispatch
each({names!r}, check, renamed)
"""
)

# what of Triton can go while Triton itself goes on: kernels run in its interpreter
TRITON = (
    EACH
    + """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language.extra.cuda, triton.tools.tensor_descriptor, triton.backends.nvidia.driver
import triton.runtime.interpreter

def check(name):
    from sage_kernels.reference import ref_attention
    from sage_kernels.testing import make_qkv
    from sage_kernels._triton import compat
    q, k, v = make_qkv("normal", 1, 30, 70, 2, 1, 64, dtype=torch.float16)
    options = dict(scale=0.125, scaling="per_token", smooth_k=True)
    if "gdc" not in name:
        from sage_kernels._triton.attention.launch import launch_attention_fwd
        out, _ = launch_attention_fwd(q, k, v, state=None, return_lse=False, **options)
        assert (out - ref_attention(q, k, v, **options)[0]).abs().max() < 5e-3, "attention"
    from sage_kernels._triton.decode.launch import launch_decode_attention
    from sage_kernels.reference import ref_append_kv, ref_decode_attention
    from sage_kernels.facts.masking import UNLIMITED, Masking
    cache = []
    for _ in "kv":
        cache.append(torch.zeros(1, 1, 70, 64, dtype=torch.int8))
        cache.append(torch.zeros(1, 1, 70, dtype=torch.bfloat16))
    ref_append_kv(k.transpose(1, 2), v.transpose(1, 2), None, *cache, position=0, ring=False)
    masking = Masking(None, UNLIMITED, UNLIMITED)
    options = dict(ring=False, masking=masking, scale=0.125)
    out, _ = launch_decode_attention(q[:, :1], *cache, None, None, return_lse=False, splits=2, **options)
    wanted, _ = ref_decode_attention(q[:, :1], *cache, None, None, **options)
    assert (out - wanted).abs().max() < 5e-3, "decode"
    assert compat.PROGRAMMATIC == ("gdc" not in name)

def gone(name):
    if not name.endswith("TensorDescriptor"):
        return delete(name)
    from sage_kernels._triton import compat  # Triton itself goes on with it
    compat.TensorDescriptor = None

each({names!r}, check, gone)
"""
)

# compiled for a Hopper GPU that is not there: what is launched, by a driver that records it
LAUNCHES = (
    EACH
    + """
import torch, triton, triton.knobs, triton.experimental.gluon.language.nvidia.hopper
import triton.experimental.gluon.nvidia.hopper
from tests.support.recording_driver import install, named, record

handed = install(device=None, stream=7)
torch.cuda.current_device, torch.cuda.get_device_capability = lambda: None, lambda device: (9, 0)
torch.cuda.current_stream = lambda device: type("", (), {{"cuda_stream": 7}})

class Missing(Exception):
    pass

def hide(name):
    '''What Triton itself goes on with: hidden from our look-ups alone.'''
    from sage_kernels._triton import compat
    if name.startswith("triton.knobs."):
        setattr(compat, "_knobs" if name.endswith("runtime") else "_compilation", None)
        return
    if name.startswith("triton"):
        find = compat.find
        compat.find = lambda asked: None if asked == name else find(asked)
        return
    get = compat.attribute
    def attribute(x, asked):
        if asked == name:
            raise AttributeError(asked)
        return get(x, asked)
    compat.attribute = attribute

def check(name, launched={{}}):
    from sage_kernels._triton import compat
    from sage_kernels._triton.attention import launch as launch_attention
    from sage_kernels._triton.prologue import prologue
    from sage_kernels.facts.masking import make_masking
    launch_attention.processors_of = prologue.processors_of = lambda device: 132
    real = launch_attention.device_tile
    class Cuda:
        type = "cuda"
    launch_attention.device_tile = lambda device, *rest: real(Cuda, *rest)
    torch.manual_seed(0)
    given = [torch.randn(1, 200, 2, 64).bfloat16() for _ in range(3)]
    masking, _ = make_masking(None, "", None, 0.0, None, 200, 200)
    def call():
        return launch_attention.launch_attention_fwd(
            *given, state=None, scaling="per_token", scale=0.1, smooth_k=True, return_lse=False, masking=masking,
        )[0]
    lines = []
    for _ in range(3):  # by Triton, and as it was launched before
        results, again = record(call, given)
        lines.append(named(handed, given, results))
        if again is not None:
            results = again(given)
            if results is None:
                assert name == "triton.knobs.runtime"  # perhaps a profiler looks on: Triton launches
                continue
            lines.append(named(handed, given, results))
    assert all(line == lines[0] for line in lines) and len(lines[0]) >= 2, lines
    hopper = "hopper" in real(Cuda, 64, "per_token").kernel
    assert hopper != ("gluon" in name), name
    started = ("params", "specialize", "arg_names", "run", "function", "packed_metadata")
    assert (again is None) == any(part == name or part in name.split("_", 1) for part in started) or name in (
        "do_not_specialize", "do_not_specialize_on_alignment", "triton.knobs.runtime"), (name, again)

names = {names!r}
each([name for name in names if name == "triton.runtime.driver"], check)
each([name for name in names if name != "triton.runtime.driver"], check, delete=hide)
"""
)


def tried(done: subprocess.CompletedProcess) -> int:
    """How many names were tried. Fails for each that was missed."""
    failed = re.findall(r"^failed without (.*)$", done.stdout, re.M)
    assert not failed and not done.returncode, f"{failed}\n{done.stderr[-4000:]}"
    return sum(int(n) for n in re.findall(r"^tried (\d+)$", done.stdout, re.M))


def without_names_of_pytorch(**options) -> None:
    script = TORCH.format(names=["", *compat.NAMES], **options)
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'kernels')]!r}\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tried(done) == len(compat.NAMES) + 1


def test_E22_the_ops_answer_without_each_name_of_pytorch():
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    without_names_of_pytorch(on_gpu=False, extra="yes")


@pytest.mark.gpu
def test_E22_on_a_gpu():
    without_names_of_pytorch(on_gpu=True, extra="")


def test_E22_kernels_run_without_each_name_of_triton(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.compat import NAMES

    names = ["", *(name for name in NAMES if not name.startswith("triton.knobs."))]
    assert tried(run(TRITON.format(names=names), tmp_path)) == len(names)


@pytest.mark.slow("compiles the kernels without each name in turn")
def test_E22_launches_are_the_same_without_each_name_of_triton(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.compat import ATTRIBUTES, GLUON

    names = [
        "",
        "triton.runtime.driver",
        "triton.knobs.runtime",
        "triton.knobs.compilation",
        *ATTRIBUTES,
        GLUON[0],
        GLUON[-1],
    ]
    assert tried(run(LAUNCHES.format(names=names), tmp_path)) == len(names)


def test_E22_every_name_of_gluon_that_is_used_is_known_and_its_absence_noticed(monkeypatch, caplog):
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton import compat

    triton = ROOT / "kernels/sage_kernels/_triton"
    sources = "".join(
        file.read_text()
        for file in (triton / "hopper_primitives.py", triton / "ring.py", *triton.glob("*/hopper/*.py"))
    )
    used = {name.rstrip(".") for name in re.findall(r"\bgl\.([A-Za-z_0-9.]+)", sources)}
    from triton.experimental.gluon.language import shared_memory_descriptor as memory
    from triton.experimental.gluon.language import tensor

    methods = {name for name in dir(memory) if not (name.startswith("_") or hasattr(tensor, name))}
    used |= {f"{memory.__name__}.{name}" for name in methods & set(re.findall(r"\.(\w+)\(", sources))}
    used -= {name.partition("gluon.language.")[2] for name in compat.EARLIER.values()}
    used |= {"barrier", f"{memory.__name__}.reinterpret"}  # hopper_primitives.py looks them up by name
    assert used == {name.partition("gluon.language.")[2] for name in compat.GLUON if "gluon.language." in name and
                    ".nvidia." not in name}  # fmt: skip
    assert compat.has_gluon.__wrapped__() and not caplog.records
    find = compat.find
    for missing in compat.GLUON:
        gone = (missing, compat.EARLIER.get(missing))
        monkeypatch.setattr(compat, "find", lambda name, gone=gone: None if name in gone else find(name))
        caplog.clear()
        assert not compat.has_gluon.__wrapped__() and missing in caplog.text


def test_E22_no_launch_leaves_to_tritons_default_whether_products_and_sums_are_fused():
    """It is another one from Triton 3.10 on, with other bits."""
    silent = []
    for file in (ROOT / "kernels/sage_kernels/_triton").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
                if "enable_fp_fusion" not in {keyword.arg for keyword in node.keywords}:
                    silent.append((file.name, node.lineno))
    assert not silent


def dotted(node: ast.AST) -> str:
    """ "torch.a.b" of an expression or an import."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_in(file: Path):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(name: str) -> bool:
    package, *parts = name.split(".")
    if package == "triton":
        return parts[0] in ("runtime", "knobs", "backends", "tools", "compiler", "_C") or "extra" in parts
    is_named = [part.startswith("_") and not part.startswith("__") for part in parts]
    return package == "torch" and any(is_named) and parts[0] != "ops"


def test_E22_private_names_are_used_in_two_files_only():
    """The names of Gluon are the language that the Hopper kernel is written in: GLUON lists them."""
    found = set()
    for folder in ("kernels/sage_kernels", "sage_processors"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.name != "compat.py":
                found |= {(file.name, name) for name in names_in(file) if is_private(name)}
    assert not found


def test_E23_a_call_is_made_while_another_thread_forgets_all(monkeypatch):
    """While the call is made again."""
    x = torch.zeros(1, 2)

    def again(given, numbers=None):
        thread = threading.Thread(target=replay.forget)
        thread.start()
        thread.join()
        return "made again"

    key = (("options",), *replay.layouts_of((x, x)))
    monkeypatch.setitem(replay.replays, key, again)
    assert replay.replay_by_key(key, (x, x)) == (key, "made again")
    assert sage_kernels.sage_attention(*torch.zeros(3, 1, 2, 1, 8)).shape == (1, 2, 1, 8)
