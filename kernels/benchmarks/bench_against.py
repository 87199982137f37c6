"""Time attention against that of earlier commits, in turns in one process.

    python kernels/benchmarks/bench_against.py de7f737
    python kernels/benchmarks/bench_against.py de7f737=../old itself=. --no-save

Each argument is a commit of this repository, or NAME=FOLDER for a checkout. Its packages are copied under another
name, so that both versions can be imported. A comparison with a copy of today's code ("itself=.") shows the noise.
Both recipes run with a plan. The ratio is the median over turns of today's time over the other's in the same turn:
absolute times drift, and a GPU that has been busy is slower.
"""

from __future__ import annotations

import argparse
import importlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from bench import FP8_RECIPE, RESULTS, Entrant, gate, make_sets, planned_attention, quintiles
from cases import Case, square

import sage_kernels
from sage_kernels import DEFAULT_RECIPE
from sage_kernels.planning import state as planning
from sage_kernels.results import append_row, check_appendable


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"sage_kernels": "kernels/sage_kernels", "sage_processors": "sage_processors"}
PLANNING = ("sage_kernels.planning.state", "sage_processors.scales")  # where ScaleState is, and where it was once
TURNS = 60
TURN_MS = 25.0  # time of each function in each turn
CASES = [square(128, 4096), square(128, 16384)]


class Version(NamedTuple):
    """One version of the packages. attention: its `sage_attention`. planning: its module with ScaleState."""

    name: str
    attention: Callable
    planning: ModuleType


def unpack(commit: str, folder: Path) -> Path:
    """Write the packages of a commit into a folder, which is returned. Raises: ValueError."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, *PACKAGES.values()], capture_output=True, check=False
    )
    if done.returncode:
        raise ValueError(f"commit {commit!r}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as packed:
        packed.extractall(folder, filter="data")
    return folder


def copy_renamed(checkout: Path, suffix: str, folder: Path) -> None:
    """Copy the packages of a checkout, with a suffix in all package and operator names.

    Raises: ValueError if the folder is no checkout.
    """
    if not (checkout / PACKAGES["sage_kernels"]).is_dir():
        raise ValueError(
            f"{checkout}: got no {PACKAGES['sage_kernels']} in it, expected a checkout of this repository"
        )
    for package, place in PACKAGES.items():
        for file in (checkout / place).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for name in PACKAGES:
                text = text.replace(name, name + suffix)
            copy = folder / (package + suffix) / file.relative_to(checkout / place)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")


def load(name: str, checkout: Path, folder: Path) -> Version:
    """Import a checkout's packages beside today's. Raises: ValueError."""
    suffix = "_" + "".join(letter if letter.isalnum() else "_" for letter in name)
    copy_renamed(checkout, suffix, folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    kernels = importlib.import_module("sage_kernels" + suffix)
    for place in PLANNING:
        package, _, rest = place.partition(".")
        if (folder / (package + suffix) / Path(*rest.split("."))).with_suffix(".py").is_file():
            return Version(name, kernels.sage_attention, importlib.import_module(f"{package}{suffix}.{rest}"))
    raise ValueError(f"{checkout}: got none of {', '.join(PLANNING)}, expected one that has ScaleState")


def entrants_of(case: Case, versions: list[Version], recipe: str, inputs) -> tuple[list[Entrant], list[str]]:
    """Return an entrant for each version, today's first, and the failures of the gate."""
    offered = []
    for version in versions:
        function = planned_attention(
            case, *inputs, lagged=recipe == FP8_RECIPE, attention=version.attention, planning=version.planning,
            recipe=recipe,
        )  # fmt: skip
        offered.append(("sage_kernels", f"@{version.name}" if version.name else "", recipe, function))
    return gate(case, inputs, offered)


def take_turns(entrants: list[Entrant], sets: list) -> None:
    """Time all entrants in every turn, in ms per call. The first one changes from turn to turn."""

    def timed(entrant: Entrant, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(calls):
            entrant.function(*sets[i % len(sets)])
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    for entrant in entrants:  # compiles the kernels, and makes the row maxima of each set of inputs
        timed(entrant, 3 * len(sets))
    calls = max(2, round(TURN_MS / timed(entrants[0], len(sets))))
    for turn in range(TURNS):
        first = turn % len(entrants)
        for entrant in entrants[first:] + entrants[:first]:
            entrant.function(*sets[-1])
            entrant.times.append(timed(entrant, calls))


def report(case: Case, entrants: list[Entrant], save: bool) -> None:
    """Print each version's time and today's relative to it, and append rows for each other version."""
    now, *others = entrants
    print(f"{case.name:20} {now.recipe:16} today {quintiles(now.times)[1]:.4f} ms, {now.error:.5f}", flush=True)
    for other in others:
        version = other.suffix.removeprefix("@")
        ratios = quintiles([mine / its for mine, its in zip(now.times, other.times, strict=True)])
        said = (
            f"{version} {quintiles(other.times)[1]:.4f} ms, {other.error:.5f}; today's time is {ratios[1]:.4f} of it"
        )
        print(f"{'':37} {said}", flush=True)
        if not save:
            continue
        shared = {
            "suite": "attention_fwd", "case": f"{case.name}/against_{version}", "recipe": now.recipe,
            "batch": case.batch, "heads": case.heads, "kv_heads": case.kv_heads, "seq_q": case.seq_q,
            "seq_k": case.seq_kv, "head_dim": case.head_dim, "causal": case.causal, "includes_quantization": True,
        }  # fmt: skip
        for provider, entrant in (("sage_kernels", now), (f"sage_kernels@{version}", other)):
            low, median, high = (f"{ms:.4f}" for ms in quintiles(entrant.times))
            append_row(
                RESULTS, **shared, provider=provider, metric="time", unit="ms", median=median, p20=low, p80=high,
                rel_l2_error=f"{entrant.error:.5f}",
            )  # fmt: skip
        low, median, high = (f"{ratio:.4f}" for ratio in ratios)
        append_row(
            RESULTS, **shared, provider="sage_kernels", metric="time_ratio", unit="1", median=median, p20=low,
            p80=high, rel_l2_error=f"{now.error:.5f}",
        )  # fmt: skip


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+", metavar="COMMIT", help="or NAME=FOLDER of a checkout")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench_against.py times GPU kernels: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    if not options.no_save:
        check_appendable(RESULTS)
    torch.manual_seed(0)
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        versions = [Version("", sage_kernels.sage_attention, planning)]
        for number, given in enumerate(options.commits):
            name, _, checkout = given.partition("=")
            place = Path(folder) / str(number)
            try:
                versions.append(load(name, Path(checkout) if checkout else unpack(name, place / "checkout"), place))
            except ValueError as error:
                parser.error(str(error))
        for case in CASES:
            sets = make_sets(case)
            for recipe in (DEFAULT_RECIPE, FP8_RECIPE):
                entrants, failed = entrants_of(case, versions, recipe, sets[0])
                failures += failed
                if not failed:
                    take_turns(entrants, sets)
                    report(case, entrants, not options.no_save)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
