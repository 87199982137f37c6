"""Figures and tables: right numbers in them, the same file twice, readable as pictures."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from sage_kernels.results import COLUMNS, append_row


pytest.importorskip("matplotlib", reason="the notebooks extra is not installed")
from PIL import Image  # noqa: E402

from tests.support.repository import ROOT


sys.path.append(str(ROOT / "notebooks"))
import drawing  # noqa: E402
import picture_report  # noqa: E402


FIGURES = ("speed_by_length", "rivals", "wholes", "psnr_per_scaling")


@pytest.fixture(scope="module")
def plots():
    spec = importlib.util.spec_from_file_location("plots", ROOT / "kernels" / "benchmarks" / "plots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def speed(case: str, ratio: float, gpu: str = "GPU") -> dict:
    fields = {"suite": "attention_fwd", "case": case, "provider": "sage_kernels", "recipe": "qk_int8_pv_bf16"}
    return {**dict.fromkeys(COLUMNS, ""), **fields, "gpu": gpu, "metric": "throughput", "ratio_vs_cudnn": str(ratio)}


def quality(case: str, median: float, p20: float, p80: float, gpu: str = "cpu") -> dict:
    fields = {"suite": "quality", "case": case, "provider": "sage_kernels", "metric": "psnr_db", "batch": "32"}
    numbers = {"median": str(median), "p20": str(p20), "p80": str(p80)}
    return {**dict.fromkeys(COLUMNS, ""), **fields, **numbers, "gpu": gpu}


def widths(axes) -> list[float]:
    return [round(bar.get_width(), 6) for bar in axes.patches]


def test_speed_is_of_the_newest_row_of_every_case(plots):
    rows = [speed("A", 1.5), speed("A/per_block", 1.2), speed("B", 0.9), speed("A", 1.1)]
    others = [{**speed("A", 9), "provider": "torch_sdpa_flash"}, {**speed("A", 9), "metric": "time"}, speed("A", "")]
    others += [speed(f"A/{way}", 9) for way in ("cuda_graph", "unguarded", "drift")]
    found = {row["case"]: row["ratio_vs_cudnn"] for row in plots.speed_rows([*rows, *others])}
    assert found == {"A": "1.1", "A/per_block": "1.2", "B": "0.9"}


def test_rivals_are_of_one_run_and_every_bar_has_its_error(plots):
    def row(provider, median, error, case="A/drift", commit="b"):
        fields = {"provider": provider, "recipe": "", "median": str(median), "rel_l2_error": error, "commit": commit}
        return speed(case, 1) | fields

    rows = [row("old", 9, "0.1", commit="a"), row("cudnn", 600, "0.001"), row("sage_2", 700, "0.08")]
    figure = plots.draw_rivals([*rows, row("cudnn", 500, "0.001", "B/drift"), row("cudnn", 1, "0.001", "A")])
    left, right = figure.axes
    assert widths(left) == [600, 700] and widths(right) == [500] and left.get_title() == "A"
    assert [x.get_text() for x in left.texts] == ["600; 0.1%", "700; 8.0%"]
    assert [x.get_text() for x in left.get_yticklabels()] == ["cudnn", "sage_2"]
    assert plots.draw_rivals(rows[:0]) is None


def test_wholes_are_stacks_of_the_newest_run(plots):
    def row(case, median, provider="torch_sdpa_cudnn", recipe="", commit="b"):
        fields = {"suite": "picture", "metric": "time", "provider": provider, "recipe": recipe, "commit": commit}
        return speed(case, 1) | fields | {"median": str(median)}

    rows = [row("A", 9, commit="a"), row("A", 4), row("A/rest", 1), row("A", 2, "sage_kernels", "preset_fast")]
    rows += [row("A/rest", 0.5, "sage_kernels", "preset_fast"), row("A/first", 30), row("A/step", 0.1)]
    figure = plots.draw_wholes(rows)
    (axes,) = figure.axes
    assert widths(axes) == [3, 1.5, 1, 0.5] and [x.get_text() for x in axes.texts] == ["4.00", "2.00"]
    assert [x.get_text() for x in axes.get_yticklabels()] == ["torch_sdpa_cudnn", "preset_fast"]
    assert len(figure.legends[0].get_texts()) == 2 and plots.draw_wholes([]) is None


def test_parts_add_up_to_stock_and_are_of_the_newest_whole_run(plots):
    def run(commit, *times):
        return [
            speed("flux", "") | {"suite": "models", "metric": "time", "commit": commit, "median": str(time)}
            | {"provider": x, "recipe": ""}
            for x, time in zip(plots.LADDER, times, strict=False)
        ]  # fmt: skip

    old, new, cut = run("a", 200, 100, 200, 200, 200), run("b", 200, 120, 130, 90, 80), run("c", 200, 100)
    rows = [speed("flux", 2), *old, *new, *cut]
    found = plots.parts_of(rows)["flux"]
    assert list(found.values()) == pytest.approx([20, 20, 20, 15, 20, 5]) and sum(found.values()) == pytest.approx(100)
    axes = plots.draw_parts(rows).axes[0]
    assert widths(axes) == pytest.approx([20, 20, 20, 15, 20, 5]) and len({bar.get_fc() for bar in axes.patches}) == 6
    assert plots.draw_parts([*old, *new]) is None  # no such attention was timed alone


def test_lengths_are_lines_and_models_are_bars(plots):
    rows = [
        speed(f"D64_N{n}_full", ratio) | {"head_dim": "64", "seq_q": str(n)} for n, ratio in ((8192, 9), (512, 0.5))
    ]
    rows += [speed("D64_N8192_full", 1.3) | {"head_dim": "64", "seq_q": "8192"}]  # newer
    models = [speed("flux", 1.1), speed("flux/per_block", 1.2), speed("other", 7, gpu="B")]
    assert plots.draw_lengths(rows) is None
    left, right = plots.draw_lengths([*rows, *models]).axes
    (line, _) = left.lines  # the other one is where both are equally fast
    assert line.get_xydata().tolist() == [[512, 0.5], [8192, 1.3]]
    assert line.get_label() == "D=64, qk_int8_pv_bf16" and left.get_title() == "GPU"
    assert widths(right) == [1.1] and [label.get_text() for label in right.get_yticklabels()] == ["flux"]


def test_the_documentation_shows_figures_that_are_there():
    page = ROOT / "docs" / "results.md"
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert {Path(path).stem for path in shown} == {"speed_by_length", "wholes", "quality_budget", "video_strip"}
    assert all((page.parent / path).is_file() for path in shown)


def test_pictures_have_error_bars(plots):
    figure = plots.draw_pictures(
        [quality("sd/dynamic", 40, 35, 47), quality("sd/timestep", 50, 49, 52), quality("sd/static", 30, 29, 33)]
    )
    (axes,) = figure.axes
    assert widths(axes) == [40, 50, 30] and axes.get_title() == "sd, cpu, 32 pictures"
    segments = [line.tolist() for line in axes.collections[0].get_segments()]
    assert [[point[0] for point in line] for line in segments] == [[35, 47], [49, 52], [29, 33]]
    assert "dB" in axes.get_xlabel()


def test_a_panel_of_pictures_is_one_run(plots):
    """Not a mean over 8 pictures beside one over 32, and no panel for two ways."""
    of_32 = [quality(f"sd/{way}", 40 + i, 35, 47) for i, way in enumerate(("dynamic", "timestep", "static"))]
    of_8 = [{**quality(f"sd/{way}", 10, 9, 11), "batch": "8"} for way in ("dynamic", "policy")]
    pair = [quality("flux/dynamic", 40, 35, 47), quality("flux/timestep", 40, 35, 47)]
    (axes,) = plots.draw_pictures([*of_32, *of_8, *pair]).axes
    assert widths(axes) == [40, 41, 42] and axes.get_title() == "sd, cpu, 32 pictures"
    assert plots.draw_pictures(pair) is None


def test_no_rows_make_no_figure(plots, tmp_path, monkeypatch, capsys):
    assert plots.draw_lengths([quality("a/b", 1, 1, 1)]) is None and plots.draw_pictures([speed("A", 1)]) is None
    append_row(tmp_path / "r.csv", suite="decode", case="A", provider="x", metric="time", unit="ms", median=1)
    monkeypatch.setattr(sys, "argv", ["plots.py", "--results", str(tmp_path / "r.csv"), "--out", str(tmp_path)])
    assert plots.main() == 1 and "no rows to draw" in capsys.readouterr().out
    with pytest.raises(ValueError, match="results: got .*missing.csv"):
        plots.write(tmp_path / "missing.csv", tmp_path, "png")


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


def test_committed_figures_are_there():
    for name in FIGURES:
        file = ROOT / "kernels" / "benchmarks" / "figures" / f"{name}.png"
        assert Image.open(file).width > 300 and file.stat().st_size < 100_000


def test_missing_matplotlib_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'needs matplotlib.*pip install "sage-processors\[notebooks\]"'):
        drawing.figure()


# --- pictures in, a table and plots out ---


@pytest.fixture(scope="module")
def measured():
    generator = torch.Generator().manual_seed(0)
    stock = torch.nn.functional.interpolate(torch.rand(40, 3, 8, 8, generator=generator), 48, mode="bilinear")
    noise = torch.randn(stock.shape, generator=generator)
    sets = [
        picture_report.Pictures.measure(name, (stock + amount * noise).clamp(0, 1), stock)
        for name, amount in (("near", 0.001), ("far", 0.1))
    ]
    from sage_processors.evaluation.feature_distance import features

    return sets, features(stock), features(stock[:38].flip(3))


def test_report_has_every_number_with_its_interval(measured):
    sets, stock, real = measured
    rows = {(row.label, row.metric): row for row in picture_report.report(sets, stock, real)}
    assert sets[0].scales == 3  # 48 pixels
    for metric in ("psnr_db_mean", "ssim_mean", "ms_ssim3_mean", "psnr_db_worst", "feature_fd", "feature_fd_excess"):
        near, far = rows["near", metric], rows["far", metric]
        assert near.low <= near.value <= near.high and near.images == 40
        assert (near.value < far.value) == metric.startswith("feature")
    assert rows["near", "psnr_db_mean"].value == pytest.approx(60, abs=0.5)  # noise of 0.001 against a peak of 1
    assert rows["far", "feature_fd_excess"].value == pytest.approx(
        rows["far", "feature_fd"].value - rows["stock", "feature_fd"].value
    )
    assert rows["near", "psnr_db_worst"].value == sets[0].psnr_db.min().item()


def test_report_leaves_feature_fd_out_below_its_least(measured):
    sets, stock, real = measured
    values = [getattr(sets[0], name)[:8] for name in ("psnr_db", "ssim", "ms_ssim", "features")]
    few = [picture_report.Pictures("few", *values, 3)]
    for rows in (picture_report.report(few, stock[:8], real), picture_report.report(sets, stock)):
        assert rows and not any(row.metric.startswith("feature") for row in rows)


def test_join_is_measuring_at_once(measured):
    whole = measured[0][0]
    names = ("psnr_db", "ssim", "ms_ssim", "features")
    parts = [
        picture_report.Pictures("near", *(getattr(whole, name)[part] for name in names), whole.scales)
        for part in (slice(0, 13), slice(13, 40))
    ]
    joined = picture_report.Pictures.join(parts)
    assert all(torch.equal(getattr(joined, name), getattr(whole, name)) for name in names)
    with pytest.raises(ValueError, match="parts: got .*near.*far.*one label"):
        picture_report.Pictures.join(measured[0])
    with pytest.raises(ValueError, match=r"parts: got \[\]"):
        picture_report.Pictures.join([])


def test_markdown_and_plot_show_the_same(measured):
    rows = picture_report.report(*measured)
    text = picture_report.markdown(rows)
    lines = text.splitlines()
    assert "MS-SSIM (3 scales)" in lines[0] and "feature-FD" in lines[0] and "FID" not in text
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| stock", "| near", "| far"]
    assert all(line.count("|") == lines[0].count("|") for line in lines) and "–" in lines[2]
    figure, axes = drawing.figure()
    picture_report.plot(axes[0, 0], rows, "psnr_db_mean")
    expected = [row.value for row in rows if row.metric == "psnr_db_mean"]
    assert widths(axes[0, 0]) == pytest.approx(expected) and axes[0, 0].get_xlabel() == "PSNR, dB"
    for value in expected:
        assert f"{value:.2f} [" in text
    with pytest.raises(ValueError, match="metric: got 'lpips', expected one of"):
        picture_report.plot(axes[0, 0], rows, "lpips")
    with pytest.raises(ValueError, match=r"lines: got lengths \[1, 2\], expected 2 each"):
        picture_report.markdown_table(["a", "b"], [["1"]])
