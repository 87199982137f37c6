"""Figures: the same file twice, readable as pictures, and those that are shown are there."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest


pytest.importorskip("matplotlib", reason="the notebooks extra is not installed")
from PIL import Image  # noqa: E402

from sage_kernels.results import DRIFT, append_row, read_rows  # noqa: E402
from tests.support.repository import ROOT  # noqa: E402


sys.path.append(str(ROOT / "notebooks"))
import drawing  # noqa: E402


FIGURES = ("speed_by_length", "rivals", "wholes", "psnr_per_scaling")


@pytest.fixture(scope="module")
def plots():
    spec = importlib.util.spec_from_file_location("plots", ROOT / "kernels" / "benchmarks" / "plots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_shows_figures_that_are_there():
    page = ROOT / "docs" / "results.md"
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert {Path(path).stem for path in shown} == {"speed_by_length", "wholes", "quality_budget", "video_strip"}
    assert all((page.parent / path).is_file() for path in shown)


def test_the_projects_own_results_make_the_same_files_twice(plots, tmp_path):
    """SVG has ids that are drawn at random where no salt is given; PNG has none."""
    contents = {}
    for name, suffix in (("one", "svg"), ("two", "svg"), ("three", "png")):
        (tmp_path / name).mkdir()
        files = plots.write(ROOT / "kernels" / "benchmarks" / "results.csv", tmp_path / name, suffix)
        assert [file.stem for file in files] == list(FIGURES)
        contents[name] = [file.read_bytes() for file in files]
    assert contents["one"] == contents["two"] and all(svg.startswith(b"<?xml") for svg in contents["one"])
    for file in files:
        picture = Image.open(file)
        assert min(picture.size) > 150 and len(picture.convert("RGB").getcolors(1 << 20)) > 8
        assert file.stat().st_size < 100_000


def test_rivals_are_of_the_run_of_most_packages(plots, tmp_path):
    path = tmp_path / "results.csv"
    timed = {"suite": "attention_fwd", "case": f"D128_N4096_full/{DRIFT}", "metric": "throughput", "unit": "TFLOPS"}
    for commit, names in (("a", ("flash_attn_3", "sageattention_2")), ("b", ("flash_attn_4",))):
        for name in ("torch_sdpa_cudnn", *names):
            append_row(path, **timed, commit=commit, gpu="H200", provider=name, median=500)
    (place,) = plots.draw_rivals(read_rows(path)).axes
    assert [label.get_text() for label in place.get_yticklabels()] == [
        "torch_sdpa_cudnn", "flash_attn_3", "sageattention_2"
    ]  # fmt: skip


def test_committed_figures_are_there():
    for name in FIGURES:
        file = ROOT / "kernels" / "benchmarks" / "figures" / f"{name}.png"
        assert Image.open(file).width > 300 and file.stat().st_size < 100_000


def test_missing_matplotlib_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'needs matplotlib.*pip install -e "\.\[notebooks\]"'):
        drawing.figure()
