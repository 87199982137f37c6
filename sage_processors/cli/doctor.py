"""What `sage-processors doctor` looks at: versions, the kernels of this machine, their results, Triton's cache.

Needs torch alone; `show` also needs rich. It reads and never changes anything.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_kernels import DEFAULT_RECIPE, RECIPES, SCALINGS, sage_attention
from sage_kernels.numerics import pv_dtype
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.recipe import INT8_MAX
from sage_kernels.testing import make_qkv, relative_l2

from ..version import __version__


PACKAGES = ("triton", "diffusers", "transformers", "accelerate", "safetensors")
HEAD_DIMS = (64, 128, 256)  # one of each width that the kernels tell apart
NETWORK_FILE_SYSTEMS = (
    "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.s3fs fuse.sshfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 "
    "ocfs2 smb3 smbfs wekafs"
).split()


@dataclass(frozen=True)
class Case:
    """One shape of the self-test.

    mask: None, "bool" (padding that differs in the batch) or "bias". same_values: V is 1 everywhere, so the output is,
    too, and a matrix unit that cuts off what it adds to a long sum is seen.
    """

    name: str
    seq_q: int
    seq_kv: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str | None = None
    causal: bool | str = False
    same_values: bool = False


CASES = (
    Case("self attention", 384, 384, 2, 2, 64),
    Case("cross attention, grouped heads", 200, 500, 4, 2, 128),
    Case("wide heads", 130, 300, 2, 2, 160),
    Case("padding mask", 200, 300, 2, 2, 64, mask="bool"),
    Case("additive bias", 200, 300, 2, 2, 64, mask="bias"),
    Case("causal", 200, 300, 2, 2, 128, causal="bottom_right"),
    Case("many keys of one value", 16, 16384, 2, 1, 64, same_values=True),
)


@dataclass
class Outcome:
    """One case in one recipe and scaling: SQNR of the worst head against the least that is right (dB), or an error.

    skipped: why this machine can't run the recipe at all; "" if it can. That is no failure.
    """

    recipe: str
    scaling: str
    case: str
    sqnr_db: float | None = None
    least_db: float | None = None
    error: str = ""
    skipped: str = ""
    passed: bool = field(init=False)

    def __post_init__(self):
        self.passed = bool(self.skipped) or (not self.error and self.sqnr_db >= self.least_db)


def examine(device: torch.device) -> dict:
    """Everything that the command prints, as data for JSON. `passed` is that of the self-test alone."""
    began = time.perf_counter()
    outcomes = self_test(device)
    seconds = round(time.perf_counter() - began, 2)
    cache = examine_cache(triton_cache())
    return {
        "environment": environment(),
        "device": device_facts(device),
        "kernels": kernels(device),
        "self_test": [asdict(outcome) for outcome in outcomes],
        "self_test_seconds": seconds,
        "triton_cache": cache,
        "passed": all(outcome.passed for outcome in outcomes),
    }


def environment() -> dict[str, str | None]:
    """Versions; None for what is not installed."""
    found = {"python": platform.python_version(), "system": platform.platform(), "sage_processors": __version__}
    found["torch"] = torch.__version__
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device_facts(device: torch.device) -> dict[str, str | None]:
    """Name, compute capability, driver and CUDA (or ROCm) version of the device that attention would run on."""
    if device.type != "cuda":
        return {"name": f"{device.type}, no GPU" if not torch.cuda.is_available() else device.type}
    facts = {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "rocm": torch.version.hip}
    facts["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    facts["driver"] = _driver()
    return facts


def _driver() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    arguments = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return next(iter(done.stdout.split()), None)


def kernels(device: torch.device) -> list[dict]:
    """Which kernel would run for each head dim and scaling, with its tile; `problem` where none can."""
    if device.type != "cuda":
        return [{"head_dim": None, "scaling": None, "kernel": "reference (CPU)", "tile": None, "problem": ""}]
    rows = []
    for head_dim in HEAD_DIMS:
        for scaling in (*SCALINGS, "planned"):
            row = {"head_dim": head_dim, "scaling": scaling, "kernel": None, "tile": None, "problem": ""}
            try:
                # by name: this package doesn't import triton, nor what does, until a kernel is about to run
                primitives = importlib.import_module("sage_kernels._triton.primitives")
                launcher = importlib.import_module("sage_kernels._triton.attention.launch")
                tile = launcher.device_tile(device, primitives.head_width(head_dim), scaling)
                row |= {"kernel": tile.kernel, "tile": tile._asdict()}
            except Exception as error:  # whatever is wrong with this machine is the answer
                row["problem"] = _summary(error)
            rows.append(row)
    return rows


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


# --- self-test ---


def self_test(device: torch.device) -> list[Outcome]:
    """Every recipe, scaling and case on `device` against exact attention (SDPA's MATH back end in fp64)."""
    outcomes = []
    for case in CASES:
        q, k, v = make_qkv(
            "biased_keys", 2, case.seq_q, case.seq_kv, case.heads, case.kv_heads, case.head_dim,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        if case.same_values:
            v = torch.ones_like(v)
        mask = _mask(case, device)
        exact = _exact(q, k, v, mask if mask is not None else _causal_mask(case, device))
        for recipe in RECIPES:
            skipped = recipe_problem(recipe, device)
            for scaling in (*SCALINGS, "timestep"):
                named = {"recipe": recipe, "scaling": scaling, "case": case.name}
                if skipped:
                    outcomes.append(Outcome(**named, skipped=skipped))
                    continue
                try:
                    out = _run(q, k, v, recipe, scaling, attn_mask=mask, causal=case.causal)
                    error = relative_l2(out, exact, (1, 3)).max().item()
                    if not math.isfinite(error):
                        raise ArithmeticError("the output is not finite")
                    worst = -20 * math.log10(max(error, 1e-30))
                    outcomes.append(Outcome(**named, sqnr_db=worst, least_db=least_sqnr_db(q, k, scaling, recipe)))
                except Exception as error:  # a crash in one case must not hide the others
                    outcomes.append(Outcome(**named, error=_summary(error)))
    return outcomes


def recipe_problem(recipe: str, device: torch.device) -> str:
    """Why `device` can't run a recipe that others can; "" if it can."""
    if device.type != "cuda" or RECIPES[recipe].pv != "fp8_e4m3":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and (major, minor) >= (8, 9):
        return ""
    return f"P and V in FP8 need an NVIDIA GPU of compute capability 8.9 or newer; this one has {major}.{minor}"


def _run(q, k, v, recipe, scaling, **masking):
    if scaling != "timestep":
        return sage_attention(q, k, v, recipe=recipe, scaling=scaling, **masking)
    state = ScaleState([Site("doctor", k.shape[2], k.shape[3])], device=q.device)
    sage_attention(q, k, v, recipe=recipe, state=state.head_state(0), **masking)
    state.advance(1.0, 0.5)
    out = sage_attention(q, k, v, recipe=recipe, state=state.head_state(0), **masking)
    dynamic = state.summary()[0]["dynamic_calls"]
    if dynamic != 1:
        raise RuntimeError(f"the second step was to run with planned scales, but {dynamic:g} calls of 2 had none")
    return out


def least_sqnr_db(q: torch.Tensor, k: torch.Tensor, scaling: str, recipe: str = DEFAULT_RECIPE) -> float:
    """The least SQNR, in dB, of attention on q [B, S_q, H, D], k [B, S_kv, H_kv, D] that rounds right.

    Rounding to steps of s is noise of variance s² / 12, so a score q·k / √D is off by a variance of
    (mean s_q² · mean k² + mean s_k² · mean q²) / 12, and so is the logarithm of its weight. For values without
    structure, the output is off by the same part of itself. To this come P and the output in 16 bit, or P and V in
    e4m3: steps of 2^-3 of the power of two below, so a variance of 2^-6 / 12 of that, half of it of the number's own
    square on average. As in all our rules, a kernel may be twice as far off as the theory (`sage_kernels.testing`).
    The scales are those of whole heads (the coarsest that a block can have), but of single tokens for "per_token".
    """
    repeat = q.shape[2] // k.shape[2]
    k = (k - k.double().mean(1, keepdim=True)).repeat_interleave(repeat, 2)
    group = 3 if scaling == "per_token" else (1, 3)
    variance = 0.0
    for rounded, other in ((q.double(), k), (k, q.double())):
        step = rounded.abs().amax(group, keepdim=True) / INT8_MAX
        variance = variance + step.square().mean((1, 3)) * other.square().mean((1, 3)) / 12
    variance = variance + 2 * (torch.finfo(pv_dtype(q.dtype)).eps / 2) ** 2
    if RECIPES[recipe].pv == "fp8_e4m3":
        variance = variance + 2 * 0.5 * torch.finfo(torch.float8_e4m3fn).eps ** 2 / 12
    return -10 * math.log10(4 * variance.max().item())


def _mask(case: Case, device):
    if case.mask == "bool":
        lengths = torch.tensor([case.seq_kv, case.seq_kv - 77], device=device)
        return (torch.arange(case.seq_kv, device=device) < lengths[:, None])[:, None, None]
    if case.mask == "bias":
        generator = torch.Generator("cpu").manual_seed(1)
        return torch.randn(1, case.heads, case.seq_q, case.seq_kv, generator=generator).to(device, torch.bfloat16)
    return None


def _causal_mask(case: Case, device):
    if not case.causal:
        return None
    shift = case.seq_kv - case.seq_q if case.causal == "bottom_right" else 0
    return torch.ones(case.seq_q, case.seq_kv, dtype=torch.bool, device=device).tril(shift)


def _exact(q, k, v, mask):
    """Attention in fp64, [B, S, H, D] in and out."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


# --- Triton's cache: machine code that is loaded without a check ---


def triton_cache() -> Path:
    """Where Triton keeps compiled kernels in this environment (triton/knobs.py; read here without importing it)."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(chosen) if chosen else Path(home) / ".triton" / "cache"


def examine_cache(folder: Path) -> dict:
    """Who may put code into `folder`: its owner, mode and file system, and what is wrong with them."""
    folder = folder.absolute()
    facts = {"path": str(folder), "exists": folder.is_dir(), "owner": None, "mode": None, "file_system": None}
    warnings = []
    there = cache = folder.resolve()
    while not there.exists():
        there = there.parent
    facts["file_system"] = file_system(there)
    if facts["file_system"] in NETWORK_FILE_SYSTEMS:
        warnings.append(
            f"{there} is on a network file system ({facts['file_system']}): slow, and unsafe when processes compile "
            "at the same time; set TRITON_CACHE_DIR to a local folder of yours"
        )
    if hasattr(os, "getuid"):  # POSIX; Windows has no modes to speak of
        if facts["exists"]:
            facts |= {"owner": _owner(there), "mode": f"{stat.S_IMODE(there.stat().st_mode):04o}"}
        warnings += [
            problem for place in (there, *there.parents) for problem in _open_to_others(place, place == cache)
        ]
    return facts | {"warnings": warnings}


def _owner(place: Path) -> str:
    import pwd

    uid = place.stat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # usual in containers
        return str(uid)


def _open_to_others(place: Path, is_cache: bool) -> list[str]:
    """Ways for another user to put files of theirs into `place`, or a folder of theirs in the place of one in it."""
    status = place.stat()
    problems = []
    if status.st_uid not in (os.getuid(), 0):
        problems.append(f"{place} belongs to {_owner(place)}, who can put code there that your processes run")
    who = [name for name, bit in (("group", stat.S_IWGRP), ("others", stat.S_IWOTH)) if status.st_mode & bit]
    # in a sticky folder such as /tmp, only owners move or remove things; new files anybody may make
    if who and (is_cache or not status.st_mode & stat.S_ISVTX):
        problems.append(
            f"{place} is writable by {' and '.join(who)}, who can put code there that your processes run; "
            "chmod go-w, or set TRITON_CACHE_DIR to a folder of yours"
        )
    return problems


def file_system(place: Path) -> str | None:
    """Type of the file system that `place` is on, where Linux tells; None elsewhere."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    best, kind = -1, None
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left.split()[4]))
        # a later mount on the same folder hides the earlier one
        if place.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0]
    return kind


# --- for people ---


def show(found: dict, console) -> None:
    """Print what `examine` found with rich."""
    from rich.table import Table

    facts = Table(title="This machine", title_justify="left", show_header=False)
    for name, value in (*found["device"].items(), *found["environment"].items()):
        if value is not None or name in found["environment"]:
            facts.add_row(name.replace("_", " "), value or "not installed")
    console.print(facts)
    if found["environment"]["triton"] is None:
        console.print("Without triton, attention runs on the CPU only: pip install triton", markup=False)
    if found["environment"]["diffusers"] is None:
        console.print(
            'Without diffusers there is the op alone: pip install "sage-processors[diffusers]"', markup=False
        )

    chosen = Table("head dim up to", "scaling", "kernel", "tile", title="Kernels", title_justify="left")
    for row in found["kernels"]:
        tile = row["tile"] and "{block_m} x {block_n}, {num_warps} warps, {num_stages} stages".format(**row["tile"])
        chosen.add_row(str(row["head_dim"] or "any"), row["scaling"] or "any", row["kernel"] or row["problem"], tile)
    console.print(chosen)

    title = f"Self-test against exact attention, {found['self_test_seconds']:.1f} s"
    tested = Table("recipe", "scaling", "case", title=title, title_justify="left")
    for name in ("worst head, dB", "at least, dB", ""):
        tested.add_column(name, justify="right")
    for row in found["self_test"]:
        numbers = ("", "") if row["error"] or row["skipped"] else (f"{row['sqnr_db']:.1f}", f"{row['least_db']:.1f}")
        verdict = "skipped" if row["skipped"] else "[green]passed[/]" if row["passed"] else "[red]failed[/]"
        tested.add_row(row["recipe"], row["scaling"], row["case"], *numbers, verdict)
    console.print(tested)
    for reason in dict.fromkeys(row["skipped"] for row in found["self_test"] if row["skipped"]):
        console.print(f"Skipped: {reason}", markup=False)
    for error in dict.fromkeys(row["error"] for row in found["self_test"] if row["error"]):
        console.print(f"Error: {error}", style="red", markup=False)

    cache = found["triton_cache"]
    about = f"owner {cache['owner']}, mode {cache['mode']}" if cache["exists"] else "not created yet"
    console.print(
        f"Triton's cache: {cache['path']} ({about}, file system {cache['file_system'] or 'unknown'})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for warning in cache["warnings"]:
        console.print(f"Warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    failed = sum(not row["passed"] for row in found["self_test"])
    console.print(f"{failed} of {len(found['self_test'])} checks failed" if failed else "All checks passed")
