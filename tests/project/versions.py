"""The lowest and the newest versions that pyproject.toml allows, each in a clean environment: `make test-versions`.

    python tests/project/versions.py                            # both: found on the package index, installed, tried
    python tests/project/versions.py lowest --resolve           # only whether they fit together: downloads nothing
    python tests/project/versions.py lowest --with torch==2.13.0

lowest: the first version of every requirement. newest: NEWEST, and beside it those of constraints.txt, which the tests
run with. --with puts another version in place of one, such as a build of PyTorch for CPUs where there is none of the
version itself: what is tried then is said in the last line. Not part of `make test`: PyTorch for GPUs is gigabytes.
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
import venv
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("diffusers", "transformers")
# PyTorch and its Triton, the newest that were tried; constraints.txt has those that are small: a build for CPUs
NEWEST = ("torch==2.15.0", "triton==3.9.0")
# What the versions matter to: private names, launches as Triton makes them, every op once, models of both libraries
TESTS = (
    "tests/kernels/launch/test_compat.py",
    "tests/kernels/launch/test_launch.py",
    "tests/kernels/launch/test_plain_calls.py",
    "tests/kernels/launch/test_dispatched_tensors.py",
    "tests/diffusion/calls/test_backend.py",
    "tests/diffusion/calls/test_backend_calls.py",
    "tests/diffusion/calls/test_backend_parallel.py",
    "tests/diffusion/test_compile.py",
    "tests/diffusion/calls/test_processors.py",
    "tests/language/test_transformers_coexistence.py",
    "tests/language/test_transformers_export.py",
    "tests/language/test_transformers_masks.py",
    "tests/language/test_transformers_names.py",
)
# Triton 3.6's interpreter makes numbers of arrays of one element, which NumPy refuses from 2.4 on
TESTERS = ("pytest>=8", "numpy<2.4", "hypothesis>=6.100")


def requirements() -> list[str]:
    """The requirements of the package and of EXTRAS, as pyproject.toml has them, without their markers."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = [re.search(r"^dependencies = \[(.*?)\]", text, re.M | re.S)[1]]
    lists += [re.search(rf"^{name} = \[(.*?)\]", text, re.M)[1] for name in EXTRAS]
    found = [re.split(r"\s*;", quoted)[0] for part in lists for quoted in re.findall(r'"([^"]+)"', part)]
    return list(dict.fromkeys(found))


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+?(?=[<>=!~ ]|$)", requirement)[0]


def lowest() -> list[str]:
    """Every requirement at its first version. Raises ValueError for one without."""
    pins = []
    for requirement in requirements():
        first = re.search(r">=\s*([0-9.]+)", requirement)
        if first is None:
            raise ValueError(f"pyproject.toml: got {requirement!r}, expected a first version: {requirement}>=…")
        pins.append(f"{name_of(requirement)}=={first[1]}")
    return pins


def newest() -> list[str]:
    """Every requirement as constraints.txt pins it for this Python, and NEWEST."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        found = re.match(r'([\w.-]+)==([\w.]+)(?:; python_version (<|>=) "3\.(\d+)")?', line)
        if found and (found[3] is None or (sys.version_info.minor < int(found[4])) == (found[3] == "<")):
            pins[found[1]] = f"{found[1]}=={found[2]}"
    return replaced([pins[name_of(requirement)] for requirement in requirements()], list(NEWEST))


SETS = {"lowest": lowest, "newest": newest}


def replaced(pins: list[str], others: list[str]) -> list[str]:
    """The pins, others in place of those of the same name."""
    by_name = {name_of(other): other for other in others}
    return [by_name.get(name_of(pin), pin) for pin in pins]


def pip(python, *arguments) -> subprocess.CompletedProcess:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def resolve(pins: list[str]) -> str | None:
    """Why these versions can't be installed together, by their metadata alone; None: they can."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = pip(sys.executable, "--dry-run", "--ignore-installed", "--report", str(report), *pins)
        if done.returncode:
            return done.stderr.strip()
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    print(f"    resolved: {len(found)} packages, {', '.join(pins)}", flush=True)
    return None


def attempt(name: str, pins: list[str], keep: Path | None) -> str | None:
    """Why TESTS fail with these versions in an environment of their own; None: they pass."""
    folder = Path(tempfile.mkdtemp(prefix=f"versions-{name}-")) if keep is None else keep / name
    try:
        venv.create(folder, with_pip=True, clear=True)
        python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        done = pip(python, "--no-compile", *pins, *TESTERS)
        if done.returncode:
            return done.stderr.strip()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
        command = [str(python), "-m", "pytest", "-q", "-m", "not gpu and not real", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **environment}, check=False)
        return None if not done.returncode else f"pytest ended with {done.returncode}"
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help="lowest, newest; both by default")
    parser.add_argument("--resolve", action="store_true", help="only whether they can be installed together")
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="NAME==VERSION")
    parser.add_argument("--keep", type=Path, help="folder to leave the environments in")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.sets if name not in SETS]:
        parser.error(f"SET: got {unknown[0]!r}, expected one of {list(SETS)}")
    failures = []
    for name in options.sets or SETS:
        pins = replaced(SETS[name](), options.others)
        print(f"{name}: {' '.join(pins)}", flush=True)
        failure = resolve(pins)
        if failure is None and not options.resolve:
            failure = attempt(name, pins, options.keep)
        if failure is not None:
            failures.append(name)
            print(f"FAILED {name}: {failure}", flush=True)
        else:
            print(f"{name}: {'resolved' if options.resolve else 'tried'}: {' '.join(pins)}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
