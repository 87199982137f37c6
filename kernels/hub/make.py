"""Write INT8 attention as a kernel of the Hugging Face Hub: `python kernels/hub/make.py FOLDER`.

FOLDER becomes a repository of kernels: build.toml and torch-ext/ for kernel-builder, and build/ as kernel-builder
makes it of sources without compiled code ("noarch"), which `kernels` loads as it is. The kernels in it are
sage_kernels' own files, those that attention imports, and nothing else: there is no second copy in this repository.

One thing in them is changed: the namespace of the ops. Several versions of a Hub kernel, and sage_kernels itself, may
be loaded in one process, and each has its own.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path


HUB = Path(__file__).resolve().parent
SOURCES = HUB.parent / "sage_kernels"
EXTENSION = "torch-ext"
ENTRIES = ("ops/attention.py", "ops/varlen.py")
NAMESPACE = re.compile(r'(?<=Library\(")sage_kernels(?=")|(?<=")sage_kernels(?=::)|(?<=torch\.ops\.)sage_kernels\b')
ROOT_INIT = '"""The part of sage_kernels that attention is made of."""\n'


def needed() -> list[Path]:
    """The files of sage_kernels that attention imports, wherever in their text, and the packages that they lie in."""
    found: set[Path] = set()
    waiting = [SOURCES / name for name in ENTRIES]
    while waiting:
        path = waiting.pop()
        if path in found or path == SOURCES / "__init__.py":
            continue
        found.add(path)
        waiting += _imports(path)
        waiting += [folder / "__init__.py" for folder in path.parents if SOURCES in folder.parents]
    return sorted(found)


def _imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        candidates = [base.with_suffix(".py"), base / "__init__.py"]
        candidates += [base / f"{alias.name}.py" for alias in node.names]
        candidates += [base / alias.name / "__init__.py" for alias in node.names]
        yield from (candidate for candidate in candidates if candidate.is_file())


def contents() -> dict[str, str]:
    """{path in the package: text} of the kernel's Python package."""
    own = HUB / EXTENSION / _name()
    texts = {path.relative_to(own).as_posix(): path.read_text(encoding="utf-8") for path in sorted(own.glob("*.py"))}
    texts["sage_kernels/__init__.py"] = ROOT_INIT
    for path in needed():
        name = f"sage_kernels/{path.relative_to(SOURCES).as_posix()}"
        texts[name] = path.read_text(encoding="utf-8")
    namespace = f"{_name()}_{digest(texts)}"
    return {name: NAMESPACE.sub(namespace, text) for name, text in texts.items()}


def digest(texts: dict[str, str]) -> str:
    """Eight hexadecimal digits that change with any of the texts."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()[:8]


def _general() -> dict:
    """The section of that name in build.toml, whose values are all JSON, too. (tomllib came with Python 3.11.)"""
    section = (HUB / "build.toml").read_text(encoding="utf-8").split("[general]")[1].split("\n[")[0]
    return {name: json.loads(value) for name, value in re.findall(r"^([\w-]+) = (.+)$", section, re.MULTILINE)}


def _name() -> str:
    return str(_general()["name"]).replace("-", "_")


def make(folder: Path) -> None:
    """Write the repository into `folder`, which must not exist or be empty."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"folder: got {folder}, which holds files, expected a new one")
    general, texts = _general(), contents()
    _write(folder / EXTENSION / _name(), texts)
    for backend in general["backends"]:
        variant = folder / "build" / f"torch-{backend}"
        _write(variant, texts)
        metadata = {
            "id": f"_{_name()}_{backend}_{digest(texts)}",
            "name": general["name"],
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    for name in ("build.toml", "CARD.md"):
        shutil.copyfile(HUB / name, folder / name)
    shutil.copyfile(HUB.parents[1] / "LICENSE", folder / "LICENSE")


def _write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(__file__).name} FOLDER")
    try:
        make(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(str(error))
