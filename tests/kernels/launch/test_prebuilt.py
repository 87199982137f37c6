"""Prebuilt kernels: of these sources, the same as compiled ones, taken where they fit, and compiled where not."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile

import pytest
import torch


pytest.importorskip("triton", reason="triton is not installed")
from sage_kernels.results import SOURCES  # noqa: E402
from tests.project import versions  # noqa: E402
from tests.support.recording_driver import run  # noqa: E402
from tests.support.repository import ROOT  # noqa: E402


ARCHIVES = sorted((SOURCES / "prebuilt").glob("triton-*.zip"))
VERSION = importlib.metadata.version("triton")

# the keys of all usual kernels, found without compiling any
KEYS = """
import triton
from tests.support.usual_kernels import as_on_hopper, usual_jobs

as_on_hopper()
from sage_kernels._triton import compat

class Compiled:
    pass

keys = []
for job in usual_jobs().values():
    device = compat.current_device()
    job.kernel.device_caches[device]
    job.kernel.compile = (
        lambda src, target, options: keys.append(compat.compile_request(src, target, options)) or Compiled()
    )
    job.kernel.warmup(*job.arguments, grid=(1,), **job.constants)
print(*(f"{found.key} {found.name}" for found in keys), sep="\\n")
"""


def test_they_are_those_of_these_sources(tmp_path):
    done = run(KEYS, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = dict(line.split() for line in done.stdout.splitlines())
    stored = set(zipfile.ZipFile(SOURCES / "prebuilt" / f"triton-{VERSION}.zip").namelist())
    expected = {f"{key}.{kind}" for key in wanted for kind in ("cubin", "json")}
    assert {"attention_fwd_hopper_kernel", "_prologue_kernel", "_plan_step_kernel"} <= set(wanted.values())
    assert stored == expected, (
        f"{len(expected - stored)} missing, {len(stored - expected)} of old: run `make prebuilt`"
    )


def test_there_are_some_for_both_ends_of_the_versions_of_triton_and_all_of_one_state():
    lowest, newest = (
        dict(pin.split("==") for pin in pins)["triton"] for pins in (versions.lowest(), versions.newest())
    )
    made = re.search(r"prebuild\.py \$\(or \$\(ARGS\),([\d. ]+)\)", (ROOT / "Makefile").read_text())[1].split()
    assert {f"{lowest}.0", VERSION, newest} <= set(made)
    assert {path.stem.removeprefix("triton-") for path in ARCHIVES} == set(made)
    known = [zipfile.ZipFile(path) for path in ARCHIVES]
    assert (
        len({archive.comment for archive in known}) == 1 and len({len(archive.namelist()) for archive in known}) == 1
    )


# the kernels that come compiled, met in the opposite order by another process
OTHER_ORDER = """
import importlib
from sage_kernels._triton import compat
from tests.support import recording_driver

recording_driver.install()
for place in (
    "linear.quantize_weight._quantize_weight_kernel", "linear.matmul._add_parts_kernel",
    "linear.hopper.kernel.linear_hopper_kernel", "linear.quantize_rows._quantize_rows_kernel",
    "prologue.plan_step._plan_step_kernel", "heads.qk_norm_rope._qk_norm_rope_kernel",
    "prologue.rotate._rotate_kernel", "prologue.pre_balance._pre_balance_kernel",
    "attention.hopper.kernel.attention_fwd_hopper_kernel", "prologue.prologue._prologue_kernel",
):
    module, _, name = place.rpartition(".")
    compat.parameters(getattr(importlib.import_module(f"sage_kernels._triton.{module}"), name))
"""


def test_their_keys_do_not_depend_on_what_is_launched_first(tmp_path):
    """Triton's keys do: without `settle_key` this finds none of several kernels in the archive."""
    wanted = []
    for name, script in (("usual", KEYS), ("other", OTHER_ORDER + KEYS)):
        (tmp_path / name).mkdir()
        done = run(script, tmp_path / name)
        assert done.returncode == 0, done.stderr[-3000:]
        wanted.append(set(done.stdout.split()))
    assert wanted[0] == wanted[1]


# a kernel that comes compiled, and one that does not
LOADED = """
import torch
from sage_kernels.ops import linear, warm_up
from tests.support.usual_kernels import as_on_hopper

as_on_hopper()
linear._has_kernel_for_weights = lambda device, format: True
for format in ("int8", "fp8", "int8"):
    linear.quantize_weight(torch.ones(16, 3072, dtype=torch.bfloat16), format=format)
for kernel in warm_up.loaded_kernels():
    print(kernel.name, kernel.was_there, kernel.seconds > 0)
"""


def test_what_was_compiled_is_told_from_what_was_there(tmp_path):
    done = run(LOADED, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines == ["_quantize_weight_kernel True False", "_quantize_weight_kernel False True"]


# one small kernel, as it is prebuilt and as it is compiled, and whatever may be wrong with an archive
TAKEN = """
import hashlib, json, logging, os, shutil, sys, tempfile, zipfile
from pathlib import Path
import triton
from tests.support.usual_kernels import as_on_hopper, usual_jobs

as_on_hopper()
from sage_kernels._triton.launch import prebuilt

triton.knobs.propagate_env = False
triton.knobs.compilation.disable_line_info = True  # as those are
job = min((j for j in usual_jobs().values() if "norm_rope" in j.name), key=lambda j: j.constants["NORM"])
hits, said = [], []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
logging.getLogger("sage_kernels").addHandler(type("Said", (logging.Handler,), {"emit": lambda _, r: said.append(r)})())

def get(folder=prebuilt.FOLDER, cache=None):
    '''The kernel, and whether it was there, in what is like a new process.'''
    hits.clear(), said.clear()
    prebuilt._stored.cache_clear()
    prebuilt.FOLDER = folder
    job.kernel.device_caches.clear()
    triton.knobs.cache.dir = cache or tempfile.mkdtemp()
    prebuilt.offer(job.kernel)
    kernel = job.kernel.warmup(*job.arguments, grid=(1,), **job.constants)
    (hit,) = hits
    return kernel, hit

def metadata(kernel):
    found = kernel.metadata._asdict()
    return found | {"extern_libs": [[name, Path(path).name] for name, path in found["extern_libs"]]}

cache = tempfile.mkdtemp()
taken, hit = get(cache=cache)
assert hit and set(taken.asm) == {"cubin"}
assert not [p for p in Path(cache).rglob("*") if p.name.startswith("tmp.")], "not moved to its place"
times = {p: p.stat().st_mtime_ns for p in Path(cache).rglob("*.cubin")}
again, hit = get(cache=cache)
assert hit and times and times == {p: p.stat().st_mtime_ns for p in Path(cache).rglob("*.cubin")}, "written twice"

compiled, hit = get(folder=Path(tempfile.mkdtemp()))
assert not hit and "ptx" in compiled.asm and not said
assert taken.asm["cubin"] == compiled.asm["cubin"] and taken.hash == compiled.hash
assert metadata(taken) == metadata(compiled)

path = f"triton-{triton.__version__}.zip"
whole = (prebuilt.FOLDER / path) if (prebuilt.FOLDER / path).exists() else Path(sys.argv[1]) / path
content = whole.read_bytes()

def archive(change):
    '''A folder with a changed archive.'''
    folder = Path(tempfile.mkdtemp())
    (folder / path).write_bytes(content)
    change(folder / path)
    return folder

def rewritten(change):
    '''Its entries through a function: {name: content}.'''
    def write(file):
        with zipfile.ZipFile(file) as known:
            entries = change({name: known.read(name) for name in known.namelist()})
        with zipfile.ZipFile(file, "w") as new:
            for name, data in entries.items():
                new.writestr(name, data)
    return archive(write)

def flipped(file):
    '''Another byte in the middle of each entry.'''
    with zipfile.ZipFile(file) as known:
        middles = [x.header_offset + 60 + len(x.filename) + x.compress_size // 2 for x in known.infolist()]
    data = bytearray(file.read_bytes())
    for i in middles:
        data[i] ^= 255
    file.write_bytes(data)

wrong = {
    "cut off": archive(lambda file: file.write_bytes(content[: len(content) // 2])),
    "flipped": archive(flipped),
    "without code": rewritten(lambda entries: {n: x for n, x in entries.items() if n.endswith(".json")}),
    "no metadata": rewritten(lambda entries: {n: b"{" if n.endswith(".json") else x for n, x in entries.items()}),
}
for name, folder in wrong.items():
    kernel, hit = get(folder=folder)
    assert not hit and kernel.asm["cubin"] == compiled.asm["cubin"], name
    assert len(said) == 1, (name, [r.getMessage() for r in said])

others = {
    "other sources": rewritten(lambda entries: {f"{hashlib.sha256(n.encode()).hexdigest()}.{n.partition('.')[2]}": x
                                                for n, x in entries.items()}),
    "another version": archive(lambda file: file.rename(file.with_name("triton-3.5.0.zip"))),
}
for name, folder in others.items():
    kernel, hit = get(folder=folder)
    assert not hit and not said, name

# whoever wants kernels compiled gets that
for name, value in (("TRITON_ALWAYS_COMPILE", "1"), ("DISABLE_LLVM_OPT", "1"), ("TRITON_KERNEL_DUMP", "1")):
    os.environ[name] = value
    kernel, hit = get(folder=whole.parent)
    assert not hit and "ptx" in kernel.asm, name
    del os.environ[name]
assert get(folder=whole.parent)[1]
print("done")
"""


def test_one_is_as_if_compiled_and_nothing_else_is_ever_taken(tmp_path):
    script = TAKEN.replace("sys.argv[1]", repr(str(SOURCES / "prebuilt")))
    done = run(script, tmp_path)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-3000:]


# what FLUX's widths launch, with whatever kernels there are; prints how many Triton had, and saves what came out
ON_A_GPU = """
import sys, torch, triton
import sage_kernels
from sage_kernels.planning.state import ScaleState, Site

torch.manual_seed(0)
hits = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.append((src.name, cache_hit))
found = []
for width, tokens in ((128, 8300), (64, 700)):
    for recipe in ("qk_int8_pv_bf16", "qk_int8_pv_fp8"):
        state = ScaleState([Site("a", 4, width)], device="cuda")
        state.begin_run(1.0)
        for step in range(6):
            q, k, v = (torch.randn(1, tokens, 4, width, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
            of_site = state.head_state(0)
            if "fp8" in recipe:
                kept = state.kept.row_maxima.of(0, (1, 4, tokens), q.device)
                of_site = of_site if kept is None else of_site.keeping(*kept)
            found.append(sage_kernels.sage_attention(q, k, v, state=of_site, recipe=recipe))
            state.advance(1.0 - step / 10, 0.9 - step / 10)
    q, k, v = (torch.randn(1, tokens, 4, width, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    found.append(sage_kernels.sage_attention(q, k, v, causal=True, scaling="per_token"))
x = torch.randn(1, 8192, 3072, device="cuda", dtype=torch.bfloat16)
weight = sage_kernels.quantize_weight(torch.randn(3072, 3072, device="cuda", dtype=torch.bfloat16))
bias = torch.randn(3072, device="cuda", dtype=torch.bfloat16)
rows = sage_kernels.quantize_activation(x)
found.append(sage_kernels.quantized_linear(rows, weight, bias))
torch.cuda.synchronize()
torch.save([x.cpu() for x in found], sys.argv[1])
print(sum(hit for _, hit in hits), [name for name, hit in hits if not hit])
"""


@pytest.mark.gpu
def test_their_results_are_those_of_compiled_kernels_bit_for_bit(tmp_path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("they are for Hopper")
    if VERSION not in {path.stem.removeprefix("triton-") for path in ARCHIVES}:
        pytest.skip(f"there are none for Triton {VERSION}")
    script, results = tmp_path / "script.py", {}
    script.write_text(ON_A_GPU)
    known = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    known["PYTHONPATH"] = os.pathsep.join((str(ROOT / "kernels"), str(ROOT)))
    for name, settings in (("prebuilt", {}), ("compiled", {"TRITON_ALWAYS_COMPILE": "1"})):
        settings = known | settings | {"TRITON_CACHE_DIR": str(tmp_path / name)}
        command = [sys.executable, script, tmp_path / f"{name}.pt"]
        done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        there, _, missing = done.stdout.strip().partition(" ")
        assert (int(there) >= 12 and missing == "[]") if name == "prebuilt" else there == "0", done.stdout
        results[name] = torch.load(tmp_path / f"{name}.pt")
    assert all(torch.isfinite(x).all() for x in results["prebuilt"])
    assert all(map(torch.equal, results["prebuilt"], results["compiled"]))
