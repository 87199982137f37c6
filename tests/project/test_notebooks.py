"""The notebooks run as they stand, small; what is committed of them is the outcome of their sources."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from sage_processors.evaluation import quality
from sage_processors.option_groups import SCALINGS
from tests.support.repository import ROOT


for _needed in ("jupytext", "nbclient", "nbformat", "ipykernel", "matplotlib"):
    pytest.importorskip(_needed, reason="the notebooks extra is not installed")

import nbformat  # noqa: E402
from IPython.core.formatters import DisplayFormatter  # noqa: E402
from PIL import Image  # noqa: E402

from sage_kernels import RECIPES  # noqa: E402


FOLDER = ROOT / "notebooks"
sys.path.append(str(FOLDER))

import measure  # noqa: E402
import run  # noqa: E402


FIGURES = {
    "linears": ["linear_error_per_step", "psnr_by_linear_share"],
    "llm_perplexity": ["llm_perplexity"],
    "lora_training": ["lora_training"],
    "psnr_fid_comparison": ["feature_fd_above_stock", "psnr_per_scaling", "stock_and_int8"],
    "quality_budget": ["quality_budget"],
    "real_language": ["real_language_by_layer", "real_language_by_position"],
    "seed_tables": ["seed_error_by_length", "seed_recovered_by_budget"],
    "timestep_scaling": [
        "beyond_plan_per_step",
        "error_per_step",
        "scale_by_noise_level",
        "sigma_formulas_without_guard",
        "utilisation_per_step",
    ],
    "video": ["video_flicker", "video_psnr", "video_skipping", "video_strip"],
}
TABLES = {
    "linears": 3,
    "llm_perplexity": 1,
    "lora_training": 2,
    "psnr_fid_comparison": 3,
    "quality_budget": 4,
    "real_language": 5,
    "seed_tables": 15,
    "timestep_scaling": 5,
    "video": 10,
}
MACHINE_PATHS = re.compile(r"/(?:home|root|Users|work|tmp|mnt|opt)/[\w.-]")


def outputs(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def tables(notebook) -> list[str]:
    """Markdown tables with at least one line of numbers."""
    texts = [output.data.get("text/markdown", "") for output in outputs(notebook) if "data" in output]
    return [text for text in texts if re.search(r"^\|( --- \|)+$", text, re.M) and re.search(r"\d", text)]


def check_outcome(name: str, notebook, figures: Path) -> None:
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert len(tables(notebook)) >= TABLES[name], name
    for figure in FIGURES[name]:
        picture = Image.open(figures / f"{figure}.png")
        assert min(picture.size) > 200 and len(picture.convert("RGB").getcolors(1 << 20)) > 4, figure
    shown = sum("image/png" in output.data for output in outputs(notebook) if "data" in output)
    assert shown == len(FIGURES[name]), name


def execute(notebook, monkeypatch) -> None:
    """Run a notebook's cells in its folder, as `run.execute` does but in this process: a kernel imports all anew."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr("IPython.display.display", lambda *values: shown.extend(values))
    formatter, names = DisplayFormatter(), {"__name__": "__main__"}
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        shown, body = [], ast.parse(cell.source).body
        last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), cell.id, "exec"), names)
        shown += [eval(compile(last, cell.id, "eval"), names)] if last else []
        found = [formatter.format(value)[0] for value in shown if value is not None]
        cell.outputs = [nbformat.v4.new_output("display_data", data=data) for data in found]


def test_every_source_is_a_known_notebook():
    assert [path.stem for path in run.sources()] == sorted(FIGURES)


@pytest.mark.slow("executes a whole notebook")
@pytest.mark.parametrize("name", sorted(FIGURES))
def test_notebook_runs(name, tmp_path, monkeypatch):
    values = {"SIZE": "small", "FIGURES": str(tmp_path)}
    if needed := run.missing(name):
        pytest.skip(f"{needed} has no weights: an untrained pipeline would show nothing")
    own, smaller = quality.picture_arguments, {"height": 64, "width": 64}  # a sixteenth of the work of attention
    if name != "timestep_scaling":  # whose own checks are of the size that was learnt
        monkeypatch.setattr(quality, "picture_arguments", lambda pipe: own(pipe) | smaller)
    notebook = run.with_parameters(run.read(FOLDER / f"{name}.py"), **values)
    before = {path: path.stat().st_mtime_ns for path in FOLDER.rglob("*.png")}
    execute(notebook, monkeypatch)
    check_outcome(name, notebook, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in FOLDER.rglob("*.png")} == before  # only `make notebooks` writes


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_committed_notebook_is_its_source_executed(name):
    path = FOLDER / f"{name}.ipynb"
    if needed := run.missing(name):
        assert not path.exists() and not any((FOLDER / "figures" / f"{f}.png").exists() for f in FIGURES[name])
        pytest.skip(f"{needed} has no weights: nothing was executed")
    committed, source = nbformat.read(path, as_version=4), run.read(FOLDER / f"{name}.py")
    nbformat.validate(committed)
    assert [(c.cell_type, c.source) for c in committed.cells] == [(c.cell_type, c.source) for c in source.cells], (
        f"{name}.ipynb is not of this source: python notebooks/run.py {name}"
    )
    counts = [cell.execution_count for cell in committed.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    check_outcome(name, committed, FOLDER / "figures")
    text = path.read_text(encoding="utf-8")
    assert "Traceback" not in text and not MACHINE_PATHS.search(re.sub(r'"image/png": "[^"]*"', "", text))
    assert path.stat().st_size < 500_000
    assert all((FOLDER / "figures" / f"{figure}.png").stat().st_size < 100_000 for figure in FIGURES[name])


def test_sources_name_no_machine():
    for path in FOLDER.glob("*.py"):
        assert not MACHINE_PATHS.search(path.read_text(encoding="utf-8")), path


# --- measure.py: what the lent GPU runs ---


def test_committed_table_is_one_of_measure():
    table = measure.read_table(FOLDER / "data" / "quality.csv")
    assert table and tuple(table[0]) == measure.COLUMNS
    rows = measure.as_rows(table)
    assert all(row.low <= row.value <= row.high and row.images > 32 for row in rows)
    assert {row.metric for row in rows} >= {"psnr_db_mean", "ms_ssim4_mean", "feature_fd", "feature_fd_excess"}


def test_variants_are_every_scaling():
    for recipe in RECIPES:
        found = measure.variants(recipe)
        # "per_token" is another name of "dynamic"
        wanted = {"dynamic", "per_token"} if RECIPES[recipe].plain else set(SCALINGS)
        assert {v.config.scaling.name for v in found.values()} | {"per_token"} == wanted
        assert {v.config.recipe for v in found.values()} == {recipe} and all(v.name == k for k, v in found.items())
