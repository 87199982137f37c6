"""Diffusers' own tests of attention back ends (AttentionBackendTesterMixin) with ours, for all of its transformers.

    python tests/diffusion/calls/upstream_backend.py CHECKOUT          # a checkout, or a bare repository, of diffusers
    python tests/diffusion/calls/upstream_backend.py CHECKOUT -k compile -x
    python tests/diffusion/calls/upstream_backend.py CHECKOUT --native # diffusers' own: what fails with it is not ours

Diffusers' tests are in no wheel, so CI can't run them: test_backend_upstream.py asks the same of our own small models.
What is run comes from CHECKOUT, what is tested is the installed diffusers; configurations of models that it does not
have are left out, and named; those that stock attention does not run either are skipped. The last lines say for each
model how many calls ran in INT8: a model whose processors ask for no back end passes, too, with none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[3]
PLACE = Path("tests", "models", "transformers")
_REGISTERED = "sp.register_diffusers_backend(min_tokens=0)"

# runs as a test file of diffusers, among those of its transformers
SOURCE = '''
import functools
import importlib
import pathlib

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

import sage_processors as sp

from ..testing_utils import BaseModelTesterConfig, attention


NAME = sp.register_diffusers_backend(min_tokens=0)
attention._ALL_BACKEND_PARAMS[:] = [pytest.param(AttentionBackendName(NAME), id=NAME)]
LEFT_OUT, RAN = {}, {}

for file in sorted(pathlib.Path(__file__).parent.glob("test_models_*.py")):
    try:
        module = importlib.import_module(f"{__package__}.{file.stem}")
    except ImportError as error:
        LEFT_OUT[file.stem] = str(error).splitlines()[0]
        continue
    for name, kind in vars(module).items():
        if isinstance(kind, type) and issubclass(kind, BaseModelTesterConfig) and kind.__module__ == module.__name__:
            if name.endswith("TesterConfig"):
                short, bases = name.removesuffix("TesterConfig"), (kind, attention.AttentionBackendTesterMixin)
                globals()[f"Test{short}"] = type(short, bases, {})


@functools.cache
def stock_error(kind):
    """Why a configuration does not run with stock attention: what it needs is not installed, or it is no model."""
    try:
        with torch.no_grad():
            kind().model_class(**kind().get_init_dict()).eval()(**kind().get_dummy_inputs(), return_dict=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


@pytest.fixture(autouse=True)
def counted(request):
    error = stock_error(request.node.cls)
    if error:
        pytest.skip(f"stock attention does not run it either: {error}")
    if request.function.__name__ == "test_compile" and not request.node.cls().model_class._repeated_blocks:
        pytest.skip("diffusers refuses to compile the repeated blocks of a model that names none")
    sp.register_diffusers_backend(min_tokens=0)
    yield
    report = sp.diffusers_backend_report()
    calls, exact = RAN.setdefault(request.node.cls.__name__, [0, {}])
    RAN[request.node.cls.__name__][0] = calls + report.calls
    for reason, number in report.fallbacks.items():
        exact[reason] = exact.get(reason, 0) + number


@pytest.fixture(scope="session", autouse=True)
def told(request):
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print()
        for name, (calls, exact) in RAN.items():
            print(f"{name}: {calls} calls in INT8; 16 bit: {exact or 0}")
        for name, why in LEFT_OUT.items():
            print(f"left out: {name}: {why}")
'''


def tests_of(checkout: Path, folder: Path) -> None:
    """A copy of diffusers' tests in `folder`."""
    if (checkout / PLACE).is_dir():
        shutil.copytree(checkout / "tests", folder / "tests")
        return
    command = ["git", "-C", str(checkout), "archive", "HEAD", "tests"]
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode:
        sys.exit(f"CHECKOUT: got {checkout}, expected a checkout or a repository of diffusers, with {PLACE}")
    subprocess.run(["tar", "-x"], input=packed.stdout, cwd=folder, check=True)


def main() -> int:
    """Run them. Returns pytest's exit status."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python tests/diffusion/calls/upstream_backend.py CHECKOUT [--native] [options of pytest]")
    options, source = sys.argv[2:], SOURCE
    if "--native" in options:
        options.remove("--native")
        source = source.replace(f"\nNAME = {_REGISTERED}\n", '\nNAME = "native"\n')
    with tempfile.TemporaryDirectory() as folder:
        tests_of(Path(sys.argv[1]), Path(folder))
        file = PLACE / "test_sage_int8_backend.py"
        (Path(folder) / file).write_text(source, encoding="utf-8")
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, str(file), *options]
        return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
