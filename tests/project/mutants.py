"""Faults put into the sources, each of which a test must notice: `make mutants`, or `python tests/project/mutants.py`.

mutants.json says what each one replaces and which test files notice it. They run in a copy of this checkout, with what
`make test` leaves out left out. Prints the test that failed first; ends with 1 if a mutant lives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".*", "build", "dist", "__pycache__", "*.egg-info")


class Mutant(NamedTuple):
    """`old`, which is found once in `file`, becomes `new`; one of `tests` (files) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def mutants() -> list[Mutant]:
    content = json.loads((Path(__file__).parent / "mutants.json").read_text(encoding="utf-8"))
    return [Mutant(**fields) for fields in content]


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the mutant's file. Raises ValueError unless what it replaces is there once."""
    text = (root / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, expected once"
        )
    return text.replace(mutant.old, mutant.new)


def killer(mutant: Mutant, copy: Path) -> str | None:
    """The test that notices the mutant first, None if none does. The copy is as before afterwards.

    Raises RuntimeError if the tests did not run.
    """
    file = copy / mutant.file
    kept, changed = file.read_text(encoding="utf-8"), mutated(mutant, copy)
    file.write_text(changed, encoding="utf-8")
    try:
        return first_failure(mutant.tests, copy, mutant.name)
    finally:
        file.write_text(kept, encoding="utf-8")


def first_failure(tests: list[str], copy: Path, name: str) -> str | None:
    """The first of these tests that fails in a copy of the checkout. Raises RuntimeError if they did not run."""
    paths = os.pathsep.join((str(copy), str(copy / "kernels")))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu and not real", "-p", "no:cacheprovider"]
    command += tests
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", done.stdout, re.M)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"{name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    return failed[1]


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name has one of these")
    words = parser.parse_args(arguments).words
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    alive = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        sound = first_failure(sorted({test for mutant in chosen for test in mutant.tests}), copy, "without mutants")
        if sound is not None:
            print(f"fails without any mutant: {sound}")
            return 1
        for mutant in chosen:
            test = killer(mutant, copy)
            print(f"{mutant.name}: {'LIVES' if test is None else f'killed by {test}'}", flush=True)
            alive += [mutant.name] if test is None else []
    print(f"{len(chosen)} mutants, {len(chosen) - len(alive)} killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
