"""The documentation's tables come from results.csv and from nowhere else."""

import shutil
from pathlib import Path

import pytest

from sage_kernels.facts.recipe import DEFAULT_RECIPE
from sage_kernels.results import append_row, is_without_int8, read_rows
from tests.support.repository import ROOT
from tools.headline import FIGURES, figures_markdown
from tools.pages import PAGES, main, replace_sections, sections
from tools.peer_tables import peer_models
from tools.scaling_tables import PIPELINES, SHAPES, scaling_front
from tools.tables import results_markdown


TIMED = {"suite": "attention_fwd", "provider": "sage_kernels", "recipe": "r", "gpu": "H200", "unit": "TFLOPS"}
TIMED |= {"case": "D128_N4096_full", "metric": "throughput", "includes_quantization": True}


def test_the_documentation_is_what_results_csv_says():
    results = ROOT / "kernels" / "benchmarks" / "results.csv"
    found = sections(read_rows(results))
    shown = set()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == replace_sections(text, found), f"{page}: run `python -m tools.pages`"
        shown |= {name for name in found if f"<!-- {name}:begin -->" in text}
    assert shown == set(found)


def test_a_prompt_that_no_preset_ran_says_how_it_was_run():
    """bench_end_to_end.py puts attention and linear layers of language models into 8 bit by hand."""
    own = [figure for figure in FIGURES if (figure.suite, figure.recipe[:7]) == ("end_to_end", "qk_int8")]
    assert own and all("by hand" in figure.what and "no preset was timed" in figure.what for figure in own)


def test_the_command_updates_the_pages(tmp_path, capsys):
    arguments = ["--results", str(tmp_path / "results.csv")]
    for name in PAGES:
        shutil.copy(ROOT / name, tmp_path)
        arguments += ["--page", str(tmp_path / Path(name).name)]
    shutil.copy(ROOT / "kernels" / "benchmarks" / "results.csv", tmp_path)
    main(arguments)
    assert "already up to date" in capsys.readouterr().out
    page = tmp_path / "results.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| tiny_sd |", "| old |"), encoding="utf-8")
    main(arguments)
    assert "updated" in capsys.readouterr().out and "| old |" not in page.read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text("no markers")
    for wrong, message in ((arguments, "got no markers"), (["--page", "NOFILE.md"], "NOFILE.md does not exist")):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        assert left.value.code == 2 and message in capsys.readouterr().err


def test_a_figure_stands_beside_stock_of_its_own_run(tmp_path):
    """Stock called the same way, and the fastest: of this run, this GPU, and PyTorch's own ways alone."""
    path = tmp_path / "results.csv"
    figure = FIGURES[0]
    timed = {"suite": figure.suite, "case": figure.case, "gpu": "H200", "metric": "time", "unit": "ms"}
    ours = {"provider": "sage_kernels", "recipe": figure.recipe}
    assert figures_markdown(read_rows(path) if path.exists() else []) == "No rows yet."
    append_row(path, **timed, **ours, commit="a", median=700)
    assert figures_markdown(read_rows(path)) == "No rows yet."  # held against nothing
    append_row(path, **timed, provider="torch_sdpa_flash", commit="a", median=300)  # of another run
    for provider, median in ((figure.same_way, 900), (figure.beside, 800), ("sageattention_9", 500)):
        append_row(path, **timed, provider=provider, commit="b", median=median)
    append_row(path, **timed | {"gpu": "H100"}, provider="torch_sdpa_flash", commit="b", median=1)
    append_row(path, **timed, **ours, commit="b", median=600)
    append_row(path, **timed, provider=figure.same_way, commit="b", median=1200)  # of a run that follows
    append_row(path, **timed | {"gpu": "cpu"}, **ours, commit="b", median=1)
    append_row(path, **timed, provider=figure.same_way, commit="c", median=900)  # of a run without compiled stock
    append_row(path, **timed, **ours, commit="c", median=1)
    append_row(path, **timed, provider=figure.beside, commit="d", median=800)  # of a run without stock as it comes
    append_row(path, **timed, **ours, commit="d", median=2)
    text, shown = figures_markdown(read_rows(path)), figure.number
    assert f"{shown(900)}: 1.50× | cuDNN, compiled, {shown(800)}: 1.33× |" in text
    assert text.endswith("Measured on: H200. Above 1× ours is better, below it stock is.")
    assert text.startswith(f"- **Time**: {shown(600)} a picture of FLUX.1")


def test_quality_is_of_the_most_pictures_and_the_worst_kind_of_text(tmp_path):
    path, figure = tmp_path / "results.csv", FIGURES[0]
    timed = {"suite": figure.suite, "case": figure.case, "gpu": "H200", "metric": "time", "unit": "ms", "median": 1}
    for provider, recipe in ((figure.same_way, ""), (figure.beside, ""), ("sage_kernels", figure.recipe)):
        append_row(path, **timed, provider=provider, recipe=recipe)
    drawn = {"suite": "quality", "case": "tiny_sd/timestep", "provider": "sage_kernels", "recipe": DEFAULT_RECIPE}
    for pictures, value in ((256, 48.0), (256, 49.26), (32, 60.0)):
        append_row(path, **drawn, gpu="H200", metric="psnr_db_mean", unit="dB", batch=pictures, median=value)
    said = (
        "- **Quality**: of INT8 attention alone: PSNR to stock of small pipelines of our own: 49.3 dB (tiny_sd, 256 "
    )
    assert f"{said}pictures);" in figures_markdown(read_rows(path))
    real = {"suite": "real_language", "provider": "sage_kernels", "recipe": f"{DEFAULT_RECIPE}/rotated"}
    for kind, value in (("reference", 0.2), ("code", 0.9), ("code", 0.3)):
        append_row(path, **real, gpu="cpu", case=f"smollm2/{kind}", metric="kl_over_bf16", unit="1", median=value)
    assert "bf16's: 0.30 (SmolLM2) in fp32; PSNR" in figures_markdown(read_rows(path))
    together = real | {"recipe": f"{DEFAULT_RECIPE}/bf16_rotated", "case": "smollm2/reference"}
    append_row(path, **together, gpu="cpu", metric="kl_over_bf16", unit="1", median=1.4)
    assert "0.30 (SmolLM2) in fp32, 1.40 (SmolLM2) inside bf16; PSNR" in figures_markdown(read_rows(path))


def test_Q41_a_model_without_int8_calls_has_no_ratio_of_ours(tmp_path):
    path = tmp_path / "results.csv"
    timed = {"suite": "end_to_end", "gpu": "H200", "metric": "time", "unit": "ms", "provider": "sage_kernels"}
    timed |= {"recipe": "r", "median": 58.5, "ratio_vs_cudnn": 1.058}
    calls = timed | {"metric": "int8_calls", "unit": "1", "ratio_vs_cudnn": ""}
    append_row(path, **timed, case="unrecorded", rel_l2_error="0.00000")
    append_row(path, **timed, case="recorded")
    append_row(path, **calls | {"median": 0}, case="recorded")
    append_row(path, **timed, case="ran", rel_l2_error="0.00000")
    append_row(path, **calls | {"median": 57}, case="ran")
    append_row(path, **timed, case="measured", rel_l2_error="0.01")
    append_row(path, **timed | {"commit": "older"}, case="again", rel_l2_error="0.01")
    append_row(path, **calls | {"median": 0, "commit": "older"}, case="again")
    append_row(path, **timed | {"commit": "newer"}, case="again", rel_l2_error="0.01")
    linears = timed | {"recipe": "r+linears_int8", "ratio_vs_cudnn": ""}
    append_row(path, **timed | {"provider": "torch_sdpa_cudnn", "recipe": "", "median": 117}, case="linears")
    append_row(path, **linears, case="linears")
    append_row(path, **linears | {"metric": "int8_calls", "median": 0}, case="linears")
    append_row(path, **linears | {"metric": "rel_l1", "median": "0.07000"}, case="linears")
    text, none = results_markdown(read_rows(path)), "none: no call ran in INT8"
    assert "| 2.000, attention in 16 bit |" in text
    lines = [[x.strip() for x in line.strip("|").split("|")] for line in text.splitlines()]
    ratios = {line[0]: line[7] for line in lines if len(line) == 11 and line[1] == "r"}
    assert ratios == {"unrecorded": none, "recorded": none, "ran": "1.058", "measured": "1.058", "again": "1.058"}


def test_Q41_no_committed_ratio_is_of_a_model_without_int8_calls():
    rows = read_rows(ROOT / "kernels" / "benchmarks" / "results.csv")
    assert [row["case"] for row in rows if row["suite"] == "end_to_end" and is_without_int8(row)] != []
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| sdxl_1024 | qk")]
    assert len(lines) == 4  # on each GPU with 8-bit linear layers, all of whose calls were short, and without
    assert all("none: no call ran in INT8" in line and "1.058" not in line for line in lines)


def test_the_time_of_a_way_counts_its_steps_in_16_bit():
    """A call at twice the speed of 16 bit, with 4 of 25 steps in 16 bit: 0.16 + 0.84 / 2."""
    calls = {"suite": "attention_fwd", "recipe": DEFAULT_RECIPE, "metric": "throughput", "gpu": "NVIDIA H200"}
    calls |= {"commit": "a", "ratio_vs_cudnn": "2.0"}
    rows = [{**calls, "case": shape + suffix} for shape in SHAPES for suffix in ("", "/per_token")]
    pictures = {"suite": "quality", "recipe": DEFAULT_RECIPE, "gpu": "cpu", "metric": "psnr_db_mean", "batch": "24"}
    rows += [{**pictures, "case": f"{name}/timestep", "median": "50.0"} for name in PIPELINES]
    assert scaling_front(rows[1:]).startswith("No rows yet")  # one shape was not timed
    lines = scaling_front(rows).splitlines()[-3:]  # planned, the same with kept steps, a scale a token
    assert [line.split(" | ")[-1].strip(" |") for line in lines] == ["0.50", "0.58", "0.50"]


def test_ways_are_shares_of_compiled_stock_run_by_run(tmp_path):
    path = tmp_path / "results.csv"
    timed = {"suite": "picture", "case": "flux_1024", "gpu": "H200", "metric": "time", "unit": "s"}
    runs = {
        "a": (5, ("sageattention_2", "flash_attn_4")),
        "b": (4, ("sageattention_2",)),
        "c": (None, ("torchao_fp8",)),
    }
    for commit, (compiled, others) in runs.items():
        if compiled:
            append_row(path, **timed, commit=commit, provider="torch_compiled_cudnn", median=compiled)
        append_row(path, **timed, commit=commit, provider="sage_kernels", recipe=DEFAULT_RECIPE, median=4,
                   rel_l2_error="0.00000" if commit == "b" else "0.01200")  # fmt: skip
        for provider in others:
            append_row(path, **timed, commit=commit, provider=provider, median=3)
    lines = peer_models(read_rows(path)).splitlines()
    assert lines[0] == "| model | commit | qk_int8_pv_bf16 | flash_attn_4 | sageattention_2 |"  # c: no compiled stock
    assert lines[2:] == [
        "| flux_1024 | a | 0.80 (1.2%) | 0.60 | 0.60 |",
        "| flux_1024 | b | 1.00 (all in 16 bit) | – | 0.75 |",
    ]
