"""What type checkers see of the packages: a user's lines are understood, wrong ones found; public files are strict."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sage_kernels
import sage_processors
from tests.support.repository import ROOT


pytest.importorskip("mypy")

# line → what `reveal_type` says, or the code of the error that it is
LINES = {
    "reveal_type(pipe.set_attn_processor(sp.SageAttnProcessor()))": "Any",  # of a pipeline that is Any
    "reveal_type(sp.apply(pipe, sp.SageAttnProcessor(recipe='qk_int8_pv_fp8')))": (
        "sage_processors.diffusion.handle.Handle"
    ),
    "reveal_type(sp.apply(pipe, sp.SageAttnProcessor('fast', keep={'first_steps': 2})).config.preset)": "str | None",
    "reveal_type(pipe.set_attn_processor(sp.SageAttnProcessor(preset='small', recipe='qk_int8_pv_bf16')))": "Any",
    "sp.SageAttnProcessor('fats')": "arg-type",
    "sp.SageAttnProcessor('fast', 'qk_int8_pv_bf16')": "call-arg",
    "reveal_type(sp.apply(pipe).report())": "sage_processors.diffusion.reports.report.Report",
    "reveal_type(sp.apply(pipe).report().fallbacks)": "dict[str, int]",
    "reveal_type(sp.handle_of(pipe))": "sage_processors.diffusion.handle.Handle | None",
    "reveal_type(sp.calibrate(pipe, ['a'], target_psnr=42).config)": "sage_processors.options.SageAttnProcessor",
    "reveal_type(sp.SageAttnProcessor.from_policy('a.json'))": "sage_processors.options.SageAttnProcessor",
    "reveal_type(sp.attention_report(model).calls)": "int",
    "reveal_type(sp.sage_class(int))": "type",
    "reveal_type(sp.pipelines.path('tiny_sd'))": "pathlib.Path",
    "reveal_type(sage_attention(q, q, q))": "torch._tensor.Tensor",
    "reveal_type(sage_attention(q, q, q, return_lse=True))": "tuple[torch._tensor.Tensor, torch._tensor.Tensor]",
    "reveal_type(sage_attention(q, q, q, return_lse=bool(q.dim())))": (
        "torch._tensor.Tensor | tuple[torch._tensor.Tensor, torch._tensor.Tensor]"
    ),
    "reveal_type(sage_decode_attention(q, q, q, q, q))": "torch._tensor.Tensor",
    "reveal_type(sage_decode_attention(q, q, q, q, q, return_lse=True)[1])": "torch._tensor.Tensor",
    "reveal_type(unsupported(q, q, q))": "str | None",
    "reveal_type(RECIPES[DEFAULT_RECIPE].pv)": "str",
    "reveal_type(sp.SageAttnProcessor(keep=sp.Keep(last_steps=2, noise=(0, 0.1)), skip=sp.Skip(every=4)).keep)": (
        "sage_processors.option_groups.Keep"
    ),
    "reveal_type(sp.SageAttnProcessor(linears='int8', scaling=sp.Scaling('delayed'), graphs='auto').scaling)": (
        "sage_processors.option_groups.Scaling"
    ),
    "reveal_type(sp.SageAttnProcessor(linears={'format': 'fp8'}, keep={'last_steps': 1}).linears)": (
        "sage_processors.option_groups.Linears"
    ),
    "reveal_type(sp.SageAttnProcessor(layers={'*a': {'recipe': '16bit', 'skip_limit': 0.1}}).layers)": (
        "tuple[sage_processors.option_groups.LayerRule, ...]"
    ),
    "sp.SageAttnProcessor(linears='int9')": "arg-type",
    "sp.SageAttnProcessor(on_unsupported='strict')": "arg-type",
    "sp.SageAttnProcessor(layers={'*': {'recip': '16bit'}})": "typeddict-unknown-key",
    "sp.Keep(first=2)": "call-arg",
    "sp.SageAttnProcessor(recipe=8)": "arg-type",
    "sp.SageAttnProcessor(recpie='qk_int8_pv_bf16')": "call-arg",
    "sp.apply(pipe, 'qk_int8_pv_bf16')": "arg-type",
    "sp.apply(pipe).reprot()": "attr-defined",
    "sage_attention(q, q, q, scale='big')": "call-overload",
    "sage_attention(q, q)": "call-overload",
}
HEAD = """
from typing import Any
import torch
import sage_processors as sp
from sage_kernels import DEFAULT_RECIPE, RECIPES, sage_attention, sage_decode_attention, unsupported

def use(pipe: Any, model: torch.nn.Module, q: torch.Tensor) -> None:
"""


@pytest.mark.slow("runs a type checker")
def test_a_users_lines_are_understood(tmp_path):
    file = tmp_path / "snippet.py"
    file.write_text(HEAD + "".join(f"    {line}\n" for line in LINES))
    first = HEAD.count("\n") + 1
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run(  # with the options, hence the cache, of `make types`
        [sys.executable, "-m", "mypy", *settings, "--no-error-summary", str(file)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: dict[int, str] = {}
    for place, said in re.findall(r"snippet\.py:(\d+): (?:error|note): (.*)", done.stdout):
        if revealed := re.match(r'Revealed type is "(.*)"', said):
            found[int(place)] = revealed[1].replace("builtins.", "")  # some versions of mypy leave that out
        elif code := re.search(r"\[([a-z-]+)\]$", said):
            found[int(place)] = code[1]
    assert "error: " not in re.sub(r"\S*snippet\.py:.*", "", done.stdout + done.stderr), done.stdout + done.stderr
    wanted = {first + i: said for i, said in enumerate(LINES.values())}
    assert found == wanted, done.stdout


@pytest.mark.parametrize("package", [sage_processors, sage_kernels], ids=lambda package: package.__name__)
def test_files_that_define_public_names_are_strict(package):
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    overrides = [part for part in settings.split("[[tool.mypy.overrides]]") if "disallow_untyped_defs = true" in part]
    strict = {name for part in overrides for name in re.findall(r'"([\w.]+)"', part)}
    homes = {getattr(getattr(package, name), "__module__", package.__name__) for name in package.__all__}
    homes = {name if name.startswith("sage_") else package.__name__ for name in homes}
    assert homes | {package.__name__} <= strict
    for name in strict:
        parts = (ROOT / ("kernels" if name.startswith("sage_kernels") else "")).joinpath(*name.split("."))
        assert parts.with_suffix(".py").is_file() or (parts / "__init__.py").is_file(), name


def test_type_checkers_see_every_public_name():
    """A name that the stub leaves out would be Any."""
    stub = ast.parse((ROOT / "sage_processors" / "__init__.pyi").read_text(encoding="utf-8"))
    homes = {
        alias.asname: f"sage_processors.{node.module}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert set(sage_processors.__all__) <= set(homes)
    for name in sage_processors.__all__:
        assert hasattr(importlib.import_module(homes[name]), name), name


def test_both_packages_say_that_they_are_typed():
    for package in (sage_processors, sage_kernels):
        assert (Path(package.__file__).parent / "py.typed").is_file()
