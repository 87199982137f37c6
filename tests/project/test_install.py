"""What is published: an sdist, the wheel made of it, installed in an environment of its own, and run far from here."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import sage_processors as sp
from sage_kernels import Mixed
from tests.docs.blocks import blocks
from tests.project.test_committed_files import tracked
from tests.support.repository import ROOT


pytestmark = pytest.mark.slow("builds twice, makes a virtual environment and draws in it")


def run(*command, cwd: Path, **environment) -> str:
    """Output of a program that knows nothing of this checkout."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([*map(str, command)], cwd=cwd, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Of a copy of the files that git knows, so that nothing else gets into it."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = "import sys, setuptools.build_meta as build; print(build.build_sdist(sys.argv[1]))"
    made = run(sys.executable, "-c", build, folder, cwd=source).splitlines()[-1]
    return folder / made


@pytest.fixture(scope="module")
def environment(sdist, tmp_path_factory) -> Path:
    """A virtual environment with the wheels of the sdist and of the small models.

    What they require comes from here; this checkout does not.
    """
    folder = tmp_path_factory.mktemp("installed")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    pip = [sys.executable, "-m", "pip"]
    for project in (unpacked, ROOT / "demo"):
        run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, project, cwd=folder)
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 2
    shutil.rmtree(folder / "source")
    home = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=folder)
    python = home / "bin" / "python"
    (site,) = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).split()
    # a path, whose own .pth files are not read: an editable install of this checkout is one of those
    theirs = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    Path(site, "requirements.pth").write_text("".join(f"import sys; sys.path.append({path!r})\n" for path in theirs))
    # --ignore-installed: nothing of the other environment is taken out
    install = ["install", "-q", "--ignore-installed", "--no-deps", "--no-index", "--no-compile", *wheels]
    run(*pip, "--python", python, *install, cwd=folder)
    return home


def test_the_sdist_holds_what_a_wheel_needs_and_no_more_than_git_knows(sdist):
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames() if packed.getmember(name).isfile()}
    known = {str(name) for name in tracked()}
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert names - made <= known, sorted(names - made - known)
    packages = {name for name in known if name.startswith(("sage_processors/", "kernels/sage_kernels/"))}
    assert packages <= names and {"pyproject.toml", "README.md", "LICENSE"} <= names, sorted(packages - names)


def test_it_is_what_runs_and_says_its_version(environment, tmp_path):
    code = "import sage_processors, sage_kernels; print(sage_processors.__file__); print(sage_kernels.__file__)"
    places = run(environment / "bin" / "python", "-c", code, cwd=tmp_path).split()
    assert len(places) == 2 and all(place.startswith(str(environment)) for place in places), places
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)[1]
    assert version in run(environment / "bin" / "sage-processors", "--version", cwd=tmp_path)


def test_the_demo_draws_in_it(environment, tmp_path):
    demo = (environment / "bin" / "sage-processors", "demo", "--steps", 2, "--images", 1, "--json")
    told = json.loads(
        run(*demo, "--output", tmp_path / "x.png", cwd=tmp_path, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    )
    assert told["report"]["calls"] > 0 and (tmp_path / "x.png").is_file()


def test_what_is_here_meets_what_the_metadata_asks_for(environment, tmp_path):
    """The versions that the tests run with are among those that are claimed."""
    code = "from importlib import metadata as m; d = m.distribution('sage-processors'); print(d.read_text('METADATA'))"
    told = run(environment / "bin" / "python", "-c", code, cwd=tmp_path)
    fields = re.findall(r"^([\w-]+): (.*)$", told.partition("\n\n")[0], re.M)
    values = {name: [value for key, value in fields if key == name] for name, _ in fields}
    assert SpecifierSet(values["Requires-Python"][0]).contains(".".join(map(str, sys.version_info[:3])))
    extras = ("", "diffusers", "transformers")
    asked = [Requirement(text) for text in values["Requires-Dist"]]
    asked = [each for each in asked if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras)]
    assert {"torch", "diffusers", "transformers"} <= {each.name for each in asked}
    for each in asked:
        if each.name != "sage-processors":
            version = metadata.version(each.name)
            assert each.specifier.contains(version, prereleases=True), f"{each} and {version}"


# every option in every form that docs/ shows
FORMS = """
from sage_kernels import Mixed
import sage_processors as sp

sp.SageAttnProcessor("fast")
sp.SageAttnProcessor(preset="small", recipe="qk_int8_pv_fp8", rotation="auto", graphs="off", min_tokens=0)
sp.SageAttnProcessor(training="int8", on_unsupported="raise", graphs="auto", min_tokens=None)
sp.SageAttnProcessor(scaling="timestep", linears="int8", keep=sp.Keep(first_steps=2, last_steps=1, noise=(0.0, 0.1)))
sp.SageAttnProcessor(scaling=sp.Scaling("sigma_power", margin=1, history=4, gamma=0.5), linears=sp.Linears("fp8"))
sp.SageAttnProcessor(scaling={"name": "delayed", "margin": 0.9, "history": 4}, keep={"first_steps": 2})
sp.SageAttnProcessor(linears=sp.Linears("int8", min_features=1024, drop_weights=True), keep={"noise": [0.0, 0.1]})
sp.SageAttnProcessor(linears={"format": "int8", "min_features": None}, skip={"limit": 0.01, "every": 8})
sp.SageAttnProcessor(skip=sp.Skip(limit=0.01, every=8, noise=(0.3, 0.6), first_steps=2, last_steps=1, compensate=True))
sp.SageAttnProcessor(recipe="mixed", mixed={"base": "int8", "budget": 0.1})
sp.SageAttnProcessor(recipe="mixed", mixed=Mixed(base="int4", selector="quest", budget=0.1, action="skip"))
sp.SageAttnProcessor(mixed=Mixed(keep_blocks=True), skip=None)
sp.SageAttnProcessor(layers={"*blocks.0.*": {"recipe": "16bit"}, "*.ff.net.2": {"linears": "none"}})
sp.SageAttnProcessor(layers=[("*", {"scaling": "per_token", "rotation": "hadamard", "keep_noise": (0.0, 0.1)})])
sp.SageAttnProcessor(layers=(sp.LayerRule("*", skip_limit=(0.0, 0.1)), sp.LayerRule(pattern="*", recipe="16bit")))
sp.SageConfig()
sp.SageConfig("int8", layers={"*.ff.*": "fp8", "*": {"linears": "none"}}, min_features=0)
sp.SageConfig(format="fp8", layers=[("*", "none")])
sp.SageConfig("int8", gated="16bit")
"""


def test_a_type_checker_accepts_what_the_documentation_shows(environment, tmp_path):
    """Every option in every form, and every block of Python in docs/."""
    pytest.importorskip("mypy")
    for kind in (sp.SageAttnProcessor, sp.Keep, sp.Scaling, sp.Linears, sp.Skip, sp.LayerRule, sp.SageConfig, Mixed):
        for name in [*inspect.signature(kind.__init__).parameters][1:]:
            assert re.search(rf'\b{name}=|"{name}":', FORMS), f"{kind.__name__}.{name}"
    (tmp_path / "forms.py").write_text(FORMS)
    for block in blocks("python"):
        name = re.sub(r"\W", "_", block.name)
        (tmp_path / f"{name}.py").write_text(block.text)
    # libraries whose types are not read; the packages themselves have to be found, typed
    others = "diffusers,transformers,accelerate,torchmetrics,peft,PIL,safetensors,triton,numpy,matplotlib,torchao"
    skipped = f"[mypy-{','.join(f'{name}.*' for name in others.split(','))}]"
    settings = [
        "[mypy]",
        "check_untyped_defs = True",
        skipped,
        "ignore_missing_imports = True",
        "follow_imports = skip",
    ]
    (tmp_path / "mypy.ini").write_text("\n".join(settings))
    python, cache = environment / "bin" / "python", tmp_path / "cache"
    options = ["--python-executable", python, "--config-file", "mypy.ini", "--cache-dir", cache]
    assert "Success" in run(sys.executable, "-m", "mypy", *options, *sorted(tmp_path.glob("*.py")), cwd=tmp_path)


def test_an_editable_install_is_on_the_path_of_type_checkers(sdist, tmp_path):
    """Not behind an import hook: both packages, with their types, and files that are added later."""
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("sage_processors-*")
    build = "import sys; sys.path.insert(0, 'tools'); import build_backend; build_backend.build_editable('.')"
    run(sys.executable, "-W", "ignore", "-c", build, cwd=source)
    with zipfile.ZipFile(next(source.glob("*.whl"))) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        folder = wheel.read(path).decode().strip()
    for name, home in (("sage_processors", source), ("sage_kernels", source / "kernels")):
        (home / name / "added.py").touch()
        found = Path(PathFinder.find_spec(name, [folder]).origin).parent
        assert found.resolve() == (home / name).resolve()
        assert (found / "py.typed").is_file() and (found / "added.py").is_file()
