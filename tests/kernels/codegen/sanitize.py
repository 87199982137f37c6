"""Every kernel once or twice on small, ragged shapes, to be watched by NVIDIA's compute-sanitizer.

`python tests/kernels/codegen/sanitize.py` runs the kernels and checks them against the reference; put
`compute-sanitizer --tool memcheck` before it to watch them. With `--tools` (`make sanitize`) it does that with all
four tools and writes tests/outcomes/sanitizer.json; what a run that was cut off has finished, under build/, is not run
again. compute-sanitizer comes with the CUDA toolkit.

Racecheck reports two things as races that are none: what Triton's warp_specialize hands to its warps (what to run, its
arguments), though barriers of the whole block lie between; and the scale of a key tile, which the producer writes into
the ring once the consumers have freed its place, though these meet at a barrier before they say so. Each report is
looked up in the machine code: where that is so it counts as ordered, and anything else as an error.

Initcheck does not see what the copy engine writes (TMA stores): to it all of such an output is uninitialised. Where
Hopper's matmul writes so, the output is NaN beforehand, and what is not written shows against the reference.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
SLOWEST_FIRST = ("racecheck", "memcheck", "initcheck", "synccheck")
RACE = re.compile(r"(Read|Write) access at \w+\+(0x[0-9a-f]+)")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error")
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

FP8, INT8, MIXED = "qk_int8_pv_fp8", "qk_int8_pv_int8", "mixed"
PARTS = 6  # processes that one tool watches: a launch takes some ten seconds there
COMPILING = 14  # processes that compile before
COMPILING_SECONDS = 400  # after which what does not end is taken to hang
PROCESSORS, COLUMNS = 2, 288  # that a linear layer is launched for; of its weight
REPORTED_LINES = 200  # of a tool that found something
BATCH, SEQ_Q, SEQ_KV, HEADS, KV_HEADS = 2, 130, 200, 2, 1  # no multiple of any tile


def maskings(device):
    """One set of options for each code path."""
    import torch

    from tests.kernels.attention.attention_cases import key_padding

    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(1, HEADS, SEQ_Q, SEQ_KV, generator=generator).to(device)
    return {
        "full": {},
        "causal": {"causal": "bottom_right"},
        "window": {"causal": "top_left", "window": 40},
        "keys": {"attn_mask": key_padding([SEQ_KV, 77], SEQ_KV).to(device)},
        "rows": {"attn_mask": bias.masked_fill(bias > 1, -torch.inf)},
        "softcap_sinks": {"softcap": 20.0, "sinks": torch.zeros(HEADS, device=device)},
    }


class Launch(NamedTuple):
    """tile: of the attention kernel, as the fields of a Tile; (): the tile table's choice. skips: with lists of key
    tiles, that leave out about half, compensated but for heads of 64 channels."""

    head_dim: int
    scaling: str
    masking: str
    tile: tuple = ()
    recipe: str = "qk_int8_pv_bf16"
    seq_kv: int = SEQ_KV
    skips: bool = False


class LinearLaunch(NamedTuple):
    """An 8-bit linear layer on Hopper. rows: of the output, which decide its tile. activation, gated: what follows.
    shared: of its last tiles, how many are shared by two programs."""

    format: str
    rows: int
    activation: str = "none"
    gated: bool = False
    shared: int = 0


def selection() -> list[Launch | LinearLaunch]:
    """Every kernel, every code path."""
    launches: list[Launch | LinearLaunch] = []
    for format in ("int8", "fp8"):
        for rows in (300, 700):
            for shared in (0, 3):
                launches.append(LinearLaunch(format, rows, gated=True, shared=shared))
        launches.append(LinearLaunch(format, 300, "swiglu", shared=1))
    for head_dim in (64, 128):
        for scaling in ("per_token", "per_block", "per_head", "planned"):
            launches.append(Launch(head_dim, scaling, "full"))
    for masking in ("causal", "window", "keys", "rows", "softcap_sinks"):
        launches.append(Launch(64, "per_token", masking))
        launches.append(Launch(128, "planned", masking))
    for head_dim in (40, 59, 256):
        launches.append(Launch(head_dim, "per_token", "full"))
        launches.append(Launch(head_dim, "planned", "causal"))
    for masking in ("full", "keys", "rows"):
        launches.append(Launch(64, "per_block", masking, (64, 64, 4, 2, "pointers")))
    for masking in ("full", "causal", "keys"):
        for head_dim in (64, 128):
            launches.append(Launch(head_dim, "planned", masking, recipe=FP8))
            launches.append(Launch(head_dim, "per_token", masking, recipe=FP8))
    for masking in ("full", "causal", "keys"):
        launches.append(Launch(64, "per_token", masking, recipe=INT8))
        launches.append(Launch(128, "planned", masking, recipe=INT8))
    for scaling in ("per_token", "planned"):
        launches.append(Launch(64, scaling, "full", (192, 64, 4, 6, "hopper", True)))
    for recipe in ("qk_int8_pv_bf16", FP8, INT8):  # so many keys that programs share them
        launches.append(Launch(128, "planned", "full", recipe=recipe, seq_kv=2100))
    for recipe in ("qk_int8_pv_bf16", FP8):
        for head_dim in (64, 128):
            launches.append(Launch(head_dim, "planned", "full", recipe=recipe, seq_kv=400, skips=True))
    launches.append(Launch(256, "planned", "full", seq_kv=400, skips=True))
    launches.append(Launch(128, "planned", "full", recipe=INT8, seq_kv=400, skips=True))
    for recipe in ("qk_int8_pv_bf16", FP8):  # programs share a list
        launches.append(Launch(128, "planned", "full", recipe=recipe, seq_kv=2100, skips=True))
    for scaling in ("per_token", "planned"):
        launches.append(Launch(128, scaling, "full", recipe="qk_fp8_pv_fp8"))
    for head_dim, masking in ((128, "full"), (64, "causal"), (128, "causal")):
        launches.append(Launch(head_dim, "per_token", masking, recipe=MIXED))
    return launches


def unordered_races(report: str, disassemble) -> tuple[list[str], int]:
    """The races that racecheck reports whose instructions no barriers keep apart, and how many reports there are.

    Args:
        report: with a line "code FILE ..." after the reports of each launch: its machine code.
        disassemble: path of such a file -> text.
    """
    from tests.kernels.codegen.sass import is_ordered_by_the_block, is_ordered_by_the_ring

    def is_ordered(code, at):
        return any(f(code, at["Read"], at["Write"]) for f in (is_ordered_by_the_block, is_ordered_by_the_ring))

    unordered, pairs, first, number = [], [], None, 0
    for line in report.splitlines():
        access = RACE.search(line)
        if line.startswith("code "):
            codes = [disassemble(path) for path in line.split()[1:]]
            for accesses in pairs:
                at = {kind: int(address, 16) for kind, address in accesses}
                if len(at) < 2 or not any(is_ordered(code, at) for code in codes):
                    unordered.append(str(accesses))
            pairs = []
        elif access and "Race reported" in line:
            first, number = access.groups(), number + 1
        elif access:
            pairs.append((first, access.groups()))
    return unordered + [str(accesses) for accesses in pairs], number


def run_kernels(launches: list[Launch | LinearLaunch], folder: Path | None = None):
    """folder: where the machine code of the Hopper kernels goes, printed after each launch."""
    import torch

    from sage_kernels import HeadState, new_skip_state
    from sage_kernels._triton.attention import launch as launch_attention
    from sage_kernels._triton.attention.hopper.kernel import attention_fwd_hopper_kernel
    from sage_kernels._triton.attention.launch import device_tile, launch_attention_fwd
    from sage_kernels._triton.attention.tiles import Tile
    from sage_kernels._triton.linear import launch as launch_linear
    from sage_kernels._triton.linear.hopper.kernel import linear_hopper_kernel
    from sage_kernels._triton.primitives import head_width
    from sage_kernels._triton.prologue.rotate import launch_rotate
    from sage_kernels.facts.numerics import padded_head_dim
    from sage_kernels.facts.recipe import RECIPES
    from sage_kernels.facts.skipping import CLOCK_LAST
    from sage_kernels.facts.state import reads_row_max
    from sage_kernels.planning.state import ScaleState, Site
    from sage_kernels.reference import ref_rotate
    from sage_kernels.testing import assert_matches_reference, make_qkv, masked_keys

    device = torch.device("cuda")
    launch, launched = launch_attention.launch, {}

    def recorded(kernel, *arguments, **constants):
        compiled = launch(kernel, *arguments, **constants)
        if kernel in (attention_fwd_hopper_kernel, linear_hopper_kernel):
            launched[compiled.hash] = compiled
        return compiled

    launch_attention.launch = launch_linear.launch = recorded
    start = time.monotonic()
    for each in launches:
        launched.clear()
        if isinstance(each, LinearLaunch):
            run_linear(each, launch_linear)
            tell(launched, folder, start, *each)
            continue
        head_dim, scaling, name, chosen, recipe, seq_kv, skips = each
        shape = (BATCH, SEQ_Q, seq_kv, HEADS, KV_HEADS, head_dim)
        q, k, v = make_qkv("normal", *shape, dtype=torch.float16, device=device)
        if recipe == MIXED:
            run_mixed(q, k, v, name == "causal")
            tell(launched, folder, start, head_dim, scaling, name, recipe)
            continue
        if head_dim == padded_head_dim(head_dim):  # others are padded first
            for x, rotated in zip((q, k), launch_rotate(q, k), strict=True):
                torch.testing.assert_close(rotated, ref_rotate(x))
        k, v, masking = masked_keys(k, v, SEQ_Q, **maskings(device)[name])
        scales = ScaleState([Site("a", KV_HEADS, head_dim)], device=device)
        lists = None
        if skips:  # keys of little else than noise: some tiles hold next to nothing
            k = k * torch.linspace(1, 0.01, seq_kv, device=device, dtype=k.dtype)[None, :, None, None]
            shape = (BATCH, HEADS, SEQ_Q, seq_kv, head_dim, device)
            lists = new_skip_state(*shape, recipe=recipe, limit=0.9, every=2, compensates=head_dim > 64)
        row_max = torch.full((BATCH, HEADS, SEQ_Q), -torch.inf, device=device)
        for step in range(2 if scaling == "planned" else 1):  # without a plan, then with one
            state = scales.head_state(0) if scaling == "planned" else None
            if state is not None and recipe == FP8:
                state = state.keeping(row_max, known=step > 0)
            before = None if state is None else HeadState(*(x.clone() for x in state))
            lagged = recipe == FP8 and reads_row_max(state, masking)
            tile = device_tile(device, head_width(head_dim), scaling, masking, RECIPES[recipe].pv, lagged or skips)
            tile = Tile(*chosen) if chosen else tile
            rest = {"scaling": "per_token" if state else scaling, "scale": head_dim**-0.5, "smooth_k": True}
            out, lse = launch_attention_fwd(
                q, k, v, **rest, state=state, return_lse=True, recipe=recipe, masking=masking, tile=tile,
                skip=lists,
            )  # fmt: skip
            if lists is not None:
                lists.now.add_(1)
                own = lists._replace(**{n: getattr(lists, n).cpu() for n in lists._fields[:7]})
                own.alarms.zero_()
                own.now.copy_(own.clock[CLOCK_LAST])  # no step since: the reference takes the lists as they are
                rest["skip"] = own
            rest |= {"block_q": tile.scale_rows, "block_k": tile.block_n, "first_max": tile.keep_first_max}
            assert_matches_reference(out, lse, q, k, v, state=before, recipe=recipe, masking=masking, **rest)
            scales.advance(1.0, 0.9)
        tell(launched, folder, start, head_dim, scaling, name, tile, recipe)


def linear_tile(each: LinearLaunch) -> tuple:
    """The fields of a LinearTile."""
    return (256, 128, 128, 4, 4, "hopper") if each.rows > 512 else (128, 128, 128, 4, 6, "hopper")


def run_linear(each: LinearLaunch, launch):
    """A layer of an odd number of slots and with edges on both sides, on a GPU that is taken for one of two SMs, so
    that a program has several tiles and its ring goes round."""
    import torch

    from sage_kernels._triton.linear.tiles import LinearTile
    from sage_kernels.facts.recipe import GATED
    from tests.kernels.linear.linear_cases import exact, normal, rows

    tile = LinearTile(*linear_tile(each))
    asked = []

    def split(tile, tiles, *_):
        asked.append(tile)
        return tiles - each.shared, 2 if each.shared else 1

    new_buffer = launch.buffer

    def poisoned(*shape, returned=False, **kinds):
        x = new_buffer(*shape, returned=returned, **kinds)
        return x.fill_(torch.nan) if returned else x

    launch.processors_of, launch.split_last_tiles, launch.buffer = lambda device: PROCESSORS, split, poisoned
    x, w = rows(each.rows, 1104, format=each.format), rows(COLUMNS, 1104, format=each.format, seed=1)
    bias, columns = normal(COLUMNS, seed=2), COLUMNS // (2 if each.activation in GATED else 1)
    options = {"activation": each.activation, "gate": None, "residual": None, "dtype": torch.float16}
    if each.gated:
        options |= {"gate": normal(columns, seed=3).half(), "residual": normal(each.rows, columns, seed=4).half()}
    on_gpu = {name: y.cuda() if isinstance(y, torch.Tensor) else y for name, y in options.items()}
    given = [y.cuda() for y in (*x, *w, bias)]
    out = launch.launch_quantized_linear(*given, **on_gpu, tile=tile)
    launch.buffer = new_buffer
    assert asked == [tile]  # Hopper's kernel ran
    wanted, bound = exact(x, w, bias, **options, tier="cuda")
    assert ((out.cpu().double() - wanted).abs() <= bound).all()


def run_mixed(q, k, v, causal: bool):
    """Mixed attention with half of the blocks promoted."""
    from sage_kernels import Mixed
    from sage_kernels.facts.block_budget import rows_of_block
    from tests.kernels.mixed.mixed_cases import assert_as_reference, launch

    given = {"options": Mixed("int8", budget=0.5), "causal": causal, "offset": (k.shape[1] - q.shape[1]) * causal}
    given["block_q"] = rows_of_block(q.device, "int8")
    results = launch(q, k, v, q.device, **given)
    assert_as_reference(*results, *(x.cpu() for x in (q, k, v)), **given)


def tell(launched: dict, folder: Path | None, start: float, *what) -> None:
    """Print what a launch was and, with a folder, where its machine code is now."""
    import torch

    torch.cuda.synchronize()
    print(f"after {time.monotonic() - start:.0f} s:", *what, flush=True)
    if folder:
        for key, compiled in launched.items():
            (folder / key).write_bytes(compiled.asm["cubin"])
        print("code", *(folder / key for key in launched), flush=True)


def disassemble(path: str) -> str:
    import triton

    nvdisasm = Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"
    return subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout


def have_ended(processes: dict[str, subprocess.Popen]) -> bool:
    """Whether all of them end, and well; says which do not, and ends those."""
    late, last = [], time.monotonic() + COMPILING_SECONDS
    for part, process in processes.items():
        try:
            process.wait(max(last - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late.append(part)
    if late:
        print(f"parts {', '.join(late)}: still at it after {COMPILING_SECONDS} s; the launch behind the last one that")
        print("each of them has told may hang", flush=True)
    return not any(process.returncode for process in processes.values())


def run_tools() -> int:
    from sage_kernels.results import commit, kernel_sources, outcome_meta
    from sage_processors.files.whole_file import write_whole

    sources, _ = kernel_sources(), commit()  # before anything runs

    sanitizer = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    if not sanitizer:
        print(
            "compute-sanitizer: not found; it comes with the CUDA toolkit. Or name it: COMPUTE_SANITIZER=/path/to/it"
        )
        return 1
    script = [sys.executable, str(Path(__file__).resolve())]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # the reference's: of so many processes all would wait
    # so that the tools need not wait for compilation
    parts = [f"{part}/{COMPILING}" for part in range(COMPILING)]
    compiling = {part: subprocess.Popen([*script, "--part", part], env=one_thread) for part in parts}
    if not have_ended(compiling):
        return 1
    # one allocation a tensor: inside of a cached block no access is out of bounds
    watched = one_thread | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # what a run that was cut off has left
    folder = ROOT / "build" / "sanitizer" / f"{sources[:12]}_{len(selection())}"
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def report_of(tool, part) -> str:
        """What one tool says of one part, and a last line with its exit status."""
        path = folder / f"{tool}_{part}.txt"
        if not path.is_file():
            command = [sanitizer, "--tool", tool, *script, "--part", f"{part}/{PARTS}"]
            if tool == "racecheck":
                code = folder / f"code_{part}"
                code.mkdir(exist_ok=True)
                # prints 100 reports unless told, and those not printed could not be looked up
                command = [*command[:3], "--print-limit", "0", *command[3:], "--code", str(code)]
            unfinished = path.with_suffix(".part")
            with unfinished.open("w") as file:
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=watched, check=False)
                file.write(f"\nexit {done.returncode}\n")
            if done.returncode:
                return unfinished.read_text()
            unfinished.replace(path)
            print(f"{tool}, part {part}: after {time.monotonic() - start:.0f} s", flush=True)
        return path.read_text()

    errors, ordered, reports = {}, {}, {}
    with ThreadPoolExecutor(len(TOOLS) * PARTS) as pool:
        started = {tool: [pool.submit(report_of, tool, part) for part in range(PARTS)] for tool in SLOWEST_FIRST}
        parts_of = {tool: [each.result() for each in started[tool]] for tool in TOOLS}
    texts = {tool: "".join(parts) for tool, parts in parts_of.items()}
    unordered, races = unordered_races(texts["racecheck"], disassemble)
    for tool, report in texts.items():
        found = SUMMARY.findall(report)
        is_whole = len(found) == PARTS and all(text.rstrip().endswith("exit 0") for text in parts_of[tool])
        errors[tool] = sum(int(number) for pair in found for number in pair if number) if is_whole else None
        if tool == "racecheck" and errors[tool] == races:  # every report was read
            print(f"{tool}: {races} reported", *unordered, sep="\n")
            errors[tool], ordered[tool] = len(unordered), races
        print(f"{tool}: {errors[tool]} errors", flush=True)
        if errors[tool] != 0:
            print(report[-8000:], flush=True)
            reports[tool] = [line for line in report.splitlines() if line.startswith("=========")][:REPORTED_LINES]
    cases = {tool: "passed" if number == 0 else "failed" for tool, number in errors.items()}
    cases["E08"] = "passed" if set(cases.values()) == {"passed"} else "failed"
    content = {"meta": outcome_meta(sources) | {"launches": len(selection())}, "cases": cases, "errors": errors}
    content["reported_but_ordered"] = {tool: number for tool, number in ordered.items() if errors[tool] == 0}
    content |= {"reports": reports} if reports else {}
    write_whole(ROOT / "tests" / "outcomes" / "sanitizer.json", json.dumps(content, indent=1) + "\n")
    return cases["E08"] != "passed"


if __name__ == "__main__":
    if "--tools" in sys.argv:
        sys.exit(run_tools())
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    part, _, parts = options.get("--part", "0/1").partition("/")
    run_kernels(selection()[int(part) :: int(parts)], Path(options["--code"]) if "--code" in options else None)
