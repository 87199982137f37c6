"""Checks of the command `doctor`: versions, this machine's kernels, their results, Triton's cache.

Needs only torch. `show` also needs rich. It changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import stat
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import torch

from sage_kernels import DEFAULT_RECIPE, SCALINGS

from ..installation import pip_install
from ..version import __version__
from .self_test import self_test, summary


PACKAGES = ("triton", "diffusers", "transformers", "accelerate", "safetensors")
HEAD_DIMS = (64, 128, 256)  # one for each width for which the kernels differ
NETWORK_FILE_SYSTEMS = (
    "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.s3fs fuse.sshfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 "
    "ocfs2 smb3 smbfs wekafs"
).split()


def examine(device: torch.device) -> dict:
    """Run all checks, and return the results as data for JSON.

    `passed` is the result of the self-test alone, `verdict` a sentence on what this machine is fit for. The data
    can be posted in public: the home folder is "~" and the current user is "you".
    """
    began = time.perf_counter()
    outcomes = self_test(device)
    seconds = round(time.perf_counter() - began, 2)
    cache = examine_cache(triton_cache())
    passed, rows = all(outcome.passed for outcome in outcomes), kernels(device)
    found: dict = _without_home(
        {
            "verdict": verdict(device, passed, rows),
            "environment": environment(),
            "device": device_facts(device),
            "kernels": rows,
            "self_test": [asdict(outcome) for outcome in outcomes],
            "self_test_seconds": seconds,
            "triton_cache": cache,
            "passed": passed,
        }
    )
    return found


def verdict(device: torch.device, passed: bool, rows: list[dict]) -> str:
    """Return a sentence on what the device is fit for. rows: of `kernels`."""
    if not passed:
        return "Not fit for INT8 attention: a check of its results failed."
    if device.type != "cuda":
        return (
            "All checks passed, but there is no GPU: INT8 attention runs in its reference here, which shows how near "
            "it is to stock but is slower."
        )
    name = torch.cuda.get_device_name(device)
    if problems := [row["problem"] for row in rows if row["problem"]]:
        return f"{name} can't run the kernels: {problems[0]}"
    from sage_kernels.facts.crossover import NEVER, find_crossover, gpu_class

    row = find_crossover(gpu_class(device) or "", 128, DEFAULT_RECIPE, False)
    if row.tokens >= NEVER:
        return f"{name} passed all checks, but INT8 attention is not known to be faster on it than 16 bit."
    known = "as measured" if row.evidence else "a cautious guess, as nobody measured such a GPU"
    return (
        f"{name} runs INT8 attention for models with {row.tokens} tokens or more ({known}); shorter calls stay in 16 "
        "bit. `sage-processors time MODEL` times a model on it."
    )


def _without_home(found):
    """Return the data with "~" in place of the home folder in all texts."""
    if isinstance(found, dict):
        return {name: _without_home(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_without_home(value) for value in found]
    if isinstance(found, str):
        home = Path.home()
        for place in {str(home), str(home.resolve())} - {home.anchor}:
            found = re.sub(re.escape(place) + r"(?![\w.-])", "~", found)
    return found


def environment() -> dict[str, str | None]:
    """Return versions of Python, the system and packages. A package that is not installed has None."""
    found: dict[str, str | None] = {"python": platform.python_version(), "system": platform.platform()}
    found["sage_processors"] = __version__
    found["torch"] = torch.__version__
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device_facts(device: torch.device) -> dict[str, str | None]:
    """Return the device's name, compute capability, driver, and CUDA or ROCm version."""
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
    """Return one row per head_dim and scaling: kernel and tile, or the `problem` if no kernel can run."""
    if device.type != "cuda":
        return [{"head_dim": None, "scaling": None, "kernel": "reference (CPU)", "tile": None, "problem": ""}]
    rows = []
    for head_dim in HEAD_DIMS:
        for scaling in (*SCALINGS, "planned"):
            row = {"head_dim": head_dim, "scaling": scaling, "kernel": None, "tile": None, "problem": ""}
            try:
                # by name, because no file of this package may import triton or a module that imports it
                primitives = importlib.import_module("sage_kernels._triton.primitives")
                launcher = importlib.import_module("sage_kernels._triton.attention.launch")
                tile = launcher.device_tile(device, primitives.head_width(head_dim), scaling)
                row |= {"kernel": tile.kernel, "tile": tile._asdict()}
            except Exception as error:  # any problem of this machine is a result
                row["problem"] = summary(error)
            rows.append(row)
    return rows


def triton_cache() -> Path:
    """Return the folder of Triton's compiled kernels, by the rules of triton/knobs.py."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(chosen) if chosen else Path(home) / ".triton" / "cache"


def examine_cache(folder: Path) -> dict:
    """Return owner, mode and file system of Triton's cache, with warnings if others can put code there.

    Triton loads machine code from its cache without a check.
    """
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
            "at the same time; set TRITON_CACHE_DIR to a local folder of your own"
        )
    if hasattr(os, "getuid"):  # POSIX; Windows has no such modes
        if facts["exists"]:
            facts |= {"owner": _owner(there), "mode": f"{stat.S_IMODE(there.stat().st_mode):04o}"}
        warnings += [
            problem for place in (there, *there.parents) for problem in _open_to_others(place, place == cache)
        ]
    return facts | {"warnings": warnings}


def _owner(place: Path) -> str:
    import pwd

    uid = place.stat().st_uid
    if uid == os.getuid():
        return "you"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # usual in containers
        return str(uid)


def _open_to_others(place: Path, is_cache: bool) -> list[str]:
    """Return warnings if another user can add files to the folder `place`, or replace folders in it."""
    status = place.stat()
    problems = []
    if status.st_uid not in (os.getuid(), 0):
        problems.append(f"{place} belongs to {_owner(place)}, who can put code there that your processes run")
    who = [name for name, bit in (("group", stat.S_IWGRP), ("others", stat.S_IWOTH)) if status.st_mode & bit]
    # in a sticky folder such as /tmp, anybody can add files, but only their owners can move or remove them
    if who and (is_cache or not status.st_mode & stat.S_ISVTX):
        problems.append(
            f"{place} is writable by {' and '.join(who)}, who can put code there that your processes run; "
            "chmod go-w, or set TRITON_CACHE_DIR to a folder of your own"
        )
    return problems


def file_system(place: Path) -> str | None:
    """Return the type of the file system of `place` on Linux; None on other systems."""
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


def show(found: dict, console, every: bool = False) -> None:
    """Print the results of `examine` with rich. every: all checks and tiles, not one line for each recipe."""
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
            f"Without diffusers only the attention op works: {pip_install('diffusers')}", soft_wrap=True, markup=False
        )

    title = f"Self-test against attention in fp64, {found['self_test_seconds']:.1f} s"
    if every:
        _show_rows(found, title, console)
    else:
        summed = Table("recipe", "checks", "passed", "least margin, dB", title=title, title_justify="left")
        for recipe in dict.fromkeys(row["recipe"] for row in found["self_test"]):
            rows = [row for row in found["self_test"] if row["recipe"] == recipe]
            margins = [row["sqnr_db"] - row["least_db"] for row in rows if row["sqnr_db"] is not None]
            passed = "skipped" if rows[0]["skipped"] else str(sum(row["passed"] for row in rows))
            summed.add_row(recipe, str(len(rows)), passed, f"{min(margins):.1f}" if margins else "–")
        console.print(summed)
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
    if failed:
        console.print(f"{failed} of {len(found['self_test'])} checks failed; --all lists them", style="red")
    console.print(found["verdict"], markup=False, soft_wrap=True, style="bold")


def _show_rows(found: dict, title: str, console) -> None:
    from rich.table import Table

    chosen = Table("head_dim up to", "scaling", "kernel", "tile", title="Kernels", title_justify="left")
    for row in found["kernels"]:
        tile = row["tile"] and "{block_m} x {block_n}, {num_warps} warps, {num_stages} stages".format(**row["tile"])
        chosen.add_row(str(row["head_dim"] or "any"), row["scaling"] or "any", row["kernel"] or row["problem"], tile)
    console.print(chosen)

    tested = Table("recipe", "scaling", "case", title=title, title_justify="left")
    for name in ("worst head, dB", "at least, dB", ""):
        tested.add_column(name, justify="right")
    for row in found["self_test"]:
        numbers = ("", "") if row["error"] or row["skipped"] else (f"{row['sqnr_db']:.1f}", f"{row['least_db']:.1f}")
        verdict = "skipped" if row["skipped"] else "[green]passed[/]" if row["passed"] else "[red]failed[/]"
        tested.add_row(row["recipe"], row["scaling"], row["case"], *numbers, verdict)
    console.print(tested)
