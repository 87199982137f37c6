"""Write INT8 attention as a kernel of the Hugging Face Hub: `python kernels/hub/make.py FOLDER`.

FOLDER becomes a kernel repository. It has build.toml and torch-ext/ for kernel-builder, and build/, which `kernels`
loads. build/ is what kernel-builder makes of sources without compiled code ("noarch"). The kernel's files are those of
sage_kernels that attention imports, so this repository has no second copy of them.

Only the namespace of the ops is changed. One process may load several versions of a Hub kernel, and sage_kernels
itself. Each needs its own namespace.
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
ROOT_INIT = '"""The files of sage_kernels that attention needs."""\n'


def needed() -> list[Path]:
    """Return the files of sage_kernels that attention imports, with the __init__ files of their packages.

    Imports inside functions count too.
    """
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
    """Return {path: text} of all files of the kernel's Python package."""
    own = HUB / EXTENSION / _name()
    texts = {path.relative_to(own).as_posix(): path.read_text(encoding="utf-8") for path in sorted(own.glob("*.py"))}
    texts["sage_kernels/__init__.py"] = ROOT_INIT
    for path in needed():
        name = f"sage_kernels/{path.relative_to(SOURCES).as_posix()}"
        texts[name] = path.read_text(encoding="utf-8")
    namespace = f"{_name()}_{digest(texts)}"
    return {name: NAMESPACE.sub(namespace, text) for name, text in texts.items()}


def digest(texts: dict[str, str]) -> str:
    """Return eight hexadecimal digits of a hash of all texts."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()[:8]


def _general() -> dict:
    """Return the section "general" of build.toml.

    Its values are valid JSON, so Python 3.10, which has no tomllib, can read them.
    """
    section = (HUB / "build.toml").read_text(encoding="utf-8").split("[general]")[1].split("\n[")[0]
    return {name: json.loads(value) for name, value in re.findall(r"^([\w-]+) = (.+)$", section, re.MULTILINE)}


def _name() -> str:
    return str(_general()["name"]).replace("-", "_")


def make(folder: Path) -> None:
    """Write the repository into `folder`. Raises FileExistsError if the folder has files."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"folder: got {folder}, which has files, expected a new or empty folder")
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
