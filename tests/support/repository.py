"""This checkout: where it lies, its files, and fresh interpreters that know nothing else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
HUGGING_FACE = {"diffusers", "transformers", "accelerate", "huggingface_hub", "tokenizers", "safetensors", "peft"}
OPTIONAL = ("triton", "torchmetrics", "PIL", "rich", "typer", *sorted(HUGGING_FACE))


def fresh(code: str, *, without=(), path=(ROOT, ROOT / "kernels"), cwd=None) -> str:
    """Output of `code` in a new interpreter in which the packages `without` are not installed: its set `hidden`."""
    hide = f"""
        import sys
        from importlib.machinery import PathFinder
        sys.path[:0] = {[str(p) for p in path]!r}
        hidden = {set(without)!r}
        find = PathFinder.find_spec
        def find_spec(name, path=None, target=None):
            return None if name.partition(".")[0] in hidden else find(name, path, target)
        PathFinder.find_spec = find_spec
        """
    program = textwrap.dedent(hide) + textwrap.dedent(code)
    # -I: neither the environment nor this checkout's folder decide what is importable
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(*folders: str) -> list[Path]:
    """Every Python file of these folders of the checkout."""
    found = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert found, folders
    return found
