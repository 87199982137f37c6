"""The documentation's tables come from results.csv and from nowhere else."""

import shutil
from pathlib import Path

import pytest

from sage_kernels.facts.recipe import DEFAULT_RECIPE
from sage_kernels.results import append_row, is_without_int8, read_rows
from tests.support.repository import ROOT
from tools.headline import FIGURES, figures_markdown
from tools.kernel_tables import cold_start, linear_rivals, linears, many_gpus, mixed
from tools.pages import PAGES, main, replace_sections, sections, update
from tools.peer_tables import peer_models, peers, whole_pictures
from tools.tables import LANGUAGE, results_markdown


QUALITY = {"suite": "quality", "provider": "sage_kernels", "recipe": "r", "batch": 32, "unit": "dB", "gpu": "cpu"}
TIMED = {"suite": "attention_fwd", "provider": "sage_kernels", "recipe": "r", "gpu": "H200", "unit": "TFLOPS"}
TIMED |= {"case": "D128_N4096_full", "metric": "throughput", "includes_quantization": True}


BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def test_the_documentation_is_what_results_csv_says():
    results = ROOT / "kernels" / "benchmarks" / "results.csv"
    found = sections(read_rows(results))
    shown = set()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == replace_sections(text, found), f"{page}: run `python -m tools.pages`"
        shown |= {name for name in found if f"<!-- {name}:begin -->" in text}
    assert shown == set(found)


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
    for provider, median in ((figure.same_way, 900), ("torch_flex", 800), ("sageattention_9", 500)):
        append_row(path, **timed, provider=provider, commit="b", median=median)
    append_row(path, **timed | {"gpu": "H100"}, provider="torch_sdpa_flash", commit="b", median=1)
    append_row(path, **timed, **ours, commit="b", median=600)
    append_row(path, **timed, provider=figure.same_way, commit="b", median=1200)  # of a run that follows
    append_row(path, **timed | {"gpu": "cpu"}, **ours, commit="b", median=1)
    text, shown = figures_markdown(read_rows(path)), figure.number
    assert f"{shown(900)}: 1.50× | FlexAttention, {shown(800)}: 1.33× |" in text
    assert text.endswith("Measured on: H200. Above 1× ours is better, below it stock is.")
    assert text.startswith(f"- **Time**: {shown(600)} a picture of FLUX.1")


def test_quality_says_of_how_many_pictures(tmp_path):
    path = tmp_path / "results.csv"
    figure = FIGURES[0]
    timed = {"suite": figure.suite, "case": figure.case, "gpu": "H200", "metric": "time", "unit": "ms", "median": 1}
    for provider, recipe in ((figure.same_way, ""), ("sage_kernels", figure.recipe)):
        append_row(path, **timed, provider=provider, recipe=recipe)
    quality = QUALITY | {"recipe": DEFAULT_RECIPE, "metric": "psnr_db_mean", "gpu": "H200", "case": "tiny_sd/timestep"}
    for pictures, value in ((256, 48.0), (256, 49.26), (32, 60.0)):
        append_row(path, **quality | {"batch": pictures}, median=value)
    (said,) = (line for line in figures_markdown(read_rows(path)).splitlines() if line.startswith("- **Quality**"))
    assert "pipelines of our own, 49.3 dB (tiny_sd, 256 pictures);" in said


def test_peers_are_of_the_newest_run_with_others(tmp_path):
    path = tmp_path / "results.csv"
    timed = TIMED | {"case": "D128_N16384_full"}
    for commit, other, ours in (("a", 100, 200), ("b", 110, 210)):
        append_row(path, **timed | {"provider": "sageattention_9", "recipe": ""}, commit=commit, median=other)
        append_row(path, **timed | {"recipe": DEFAULT_RECIPE}, commit=commit, median=ours, rel_l2_error="0.0123")
    append_row(path, **timed | {"recipe": DEFAULT_RECIPE}, commit="c", median=900)  # without others
    text = peers(read_rows(path))
    assert "| D128_N16384_full | b | 210 (1.2%) | 110 |" in text and "900" not in text
    assert text.startswith(f"| shape | commit | {DEFAULT_RECIPE} | sageattention_9 |")
    whole = timed | {"suite": "end_to_end", "case": "flux_1024", "metric": "time", "unit": "ms", "recipe": ""}
    for provider, median in (("torch_sdpa_cudnn", 170), ("attention_removed", 120), ("flash_attn_3", 165)):
        append_row(path, **whole | {"provider": provider}, commit="d", median=median)
    text = peer_models(read_rows(path))
    assert "| flux_1024 | d | 170 | 165 |" in text and "120" not in text


def test_pictures_are_of_the_newest_run_of_each_model(tmp_path):
    path = tmp_path / "results.csv"
    row = {"suite": "picture", "gpu": "H200", "metric": "time", "unit": "s", "provider": "torch_sdpa_cudnn"}
    for commit, whole in (("a", 9), ("b", 5)):
        for part, median in (("", whole), ("/first", 20), ("/step", 0.1), ("/rest", 0.5)):
            append_row(path, **row, case=f"flux_1024{part}", commit=commit, median=median)
    append_row(path, **row | {"metric": "peak_memory"}, case="flux_1024", commit="b", median=33.33)
    text = whole_pictures(read_rows(path))
    assert (
        "| flux_1024 | b | torch_sdpa_cudnn | 20.00 | 5.00 | 0.100 | 0.50 | 33.3 | – |" in text and "9.00" not in text
    )


def test_many_gpus_are_compared_with_one_gpu_of_the_same_run(tmp_path):
    path = tmp_path / "results.csv"
    row = {
        "suite": "parallel",
        "gpu": "H200",
        "metric": "time",
        "unit": "ms",
        "provider": "sage_kernels",
        "commit": "b",
    }
    for case, recipe, median in (("x1", "preset_fast", 40), ("x2_ring", "preset_fast", 25), ("x2_ring", "", 50)):
        append_row(path, **row | {"recipe": recipe}, case=f"wan/{case}", median=median, ratio_vs_cudnn="2.000")
    text = many_gpus(read_rows(path))
    assert "| wan | 1 | – | – | – | 40.0, 2.000 × | H200 | b |" in text
    assert "| wan | 2 | ring | – | – | 25.0, 2.000 ×, 0.80 | H200 | b |" in text


def test_the_summary_shows_the_largest_run_on_a_gpu_and_lengths_worth_int8(tmp_path):
    path = tmp_path / "results.csv"
    quality = QUALITY | {"recipe": DEFAULT_RECIPE, "metric": "psnr_db_mean"}
    for gpu, pictures, values in (("H200", 8, (1.0, 2.0)), ("H200", 256, (51.0, 52.0)), ("cpu", 512, (61.0, 62.0))):
        for way, value in zip(("dynamic", "timestep"), values, strict=True):
            append_row(path, **quality | {"gpu": gpu, "batch": pictures}, case=f"tiny_sd/{way}", median=value)
    append_row(path, **quality | {"gpu": "H200", "batch": 999}, case="tiny_sd/policy", median=3.0)  # another question
    sqnr = {"metric": "attention_sqnr_db_mean", "gpu": "H200"}
    for way, value in (("dynamic", 45.5), ("timestep", 44.25)):
        append_row(path, **quality | sqnr, case=f"tiny_sd/{way}", median=value)
    append_row(path, **quality | {"gpu": "H200"}, case="tiny_sd_Euler:20/timestep", median=4.0)
    for case in (
        "D128_N4096_full",
        "D128_N512_full",
        "D128_N4096_full/per_block",
        "D40_N4096_full",
        "flux_1024",
        "D128_N4096_full_BH16",
    ):
        append_row(path, **TIMED | {"case": case}, median=650)
    text = results_markdown(read_rows(path))
    assert "| tiny_sd | H200 | 256 | 51.00 | 52.00 | – | – | – | 45.50 | 44.25 |" in text and "Euler" not in text
    assert text.count("| tiny_sd |") == 1
    assert text.count("| D128_N4096_full | H200 |") == text.count("| flux_1024 | H200 |") == 1
    assert not any(name in text for name in ("N512", "per_block", "D40", "BH16"))


def test_attention_table_sets_cudnn_beside_ours(tmp_path):
    path = tmp_path / "results.csv"
    stock = {"provider": "torch_sdpa_cudnn", "recipe": "", "includes_quantization": False}
    append_row(path, **TIMED | stock, median=620, ratio_vs_cudnn=1.0)
    append_row(path, **TIMED, median=600, ratio_vs_cudnn=0.97)
    append_row(path, **TIMED, median=650, ratio_vs_cudnn=1.05, rel_l2_error=0.011)  # newer
    append_row(path, **TIMED | {"recipe": "s"}, median=640, ratio_vs_cudnn=1.03)
    append_row(path, **TIMED | {"metric": "time", "unit": "ms"}, median=3)
    text = results_markdown(read_rows(path))
    assert "| shape | on | cuDNN | timestep, r | timestep, s |" in text
    assert "| D128_N4096_full | H200 | 620 | 650 (1.05×) | 640 (1.03×) |" in text
    assert "| r | timestep | 0.011 |" in text and "| s | timestep | – |" in text
    assert text.count("| D128_N4096_full |") == 1 and "No rows yet: `python kernels/benchmarks/bench_rules.py" in text


def test_decoding_is_held_against_the_fastest_other_of_its_run(tmp_path):
    path = tmp_path / "results.csv"
    timed = {"suite": "decode", "gpu": "H200", "metric": "time", "unit": "ms"}
    for case, provider, median in (
        ("llama/cuda_graph", "flash", 3.0), ("llama/packed/cuda_graph", "cudnn", 2.0), ("llama", "flash", 1.0),
        ("llama/cuda_graph", "sage_kernels", 1.6), ("llama", "sage_kernels", 2.0),
    ):  # fmt: skip
        append_row(path, **timed, case=case, provider=provider, median=median)
    text = results_markdown(read_rows(path))
    assert "| llama | cuda_graph | H200 | 1.6 | 2.0 | cudnn | 1.25 |" in text
    assert "| llama | as called | H200 | 2.0 | 1.0 | flash | 0.50 |" in text


def test_whole_models_sets_ours_beside_the_others(tmp_path):
    path = tmp_path / "results.csv"
    timed = {"suite": "end_to_end", "case": "flux_2048", "gpu": "H200", "metric": "time", "unit": "ms"}
    memory = timed | {"metric": "peak_memory", "unit": "GiB"}
    ours = {"provider": "sage_kernels", "recipe": "r"}
    for median in (900, 858):  # the second is the newer one
        append_row(path, **timed, provider="torch_sdpa_cudnn", median=median, ratio_vs_cudnn=1.0)
    append_row(path, **memory, provider="torch_sdpa_cudnn", median=30.5)
    append_row(path, **timed, provider="attention_removed", median=536)
    append_row(path, **timed, **ours, median=750, ratio_vs_cudnn=1.144)
    append_row(path, **memory, **ours, median=31)
    append_row(path, **timed | {"metric": "rel_l1", "unit": "1"}, **ours, median=0.02)
    text = results_markdown(read_rows(path))
    assert "| flux_2048 | r | H200 | 750 | 858 | – | 536 | 1.144 | 30.5 | 31 | 0.02 |" in text
    assert text.count("| flux_2048 |") == 1 and "bench_end_to_end.py" not in text
    append_row(path, **timed | {"case": "flux_2048/min_tokens0"}, **ours, median=740, ratio_vs_cudnn=1.16)
    rows = read_rows(path)
    summary = results_markdown(rows)
    assert "| flux_2048 |" in summary and "| flux_2048/min_tokens0 |" not in summary  # what a user gets
    others = [row for row in rows if row["case"] != "flux_2048" or row["provider"] != "sage_kernels"]
    assert "| flux_2048/min_tokens0 |" in results_markdown(others)
    # of two runs with one commit, each has the others' rows that came before its own
    again = [row | {"recipe": row["recipe"] and "s", "median": str(2 * float(row["median"]))} for row in rows]
    twice = results_markdown(rows + again)
    assert "| flux_2048 | r | H200 | 750 | 858 | – | 536 |" in twice
    assert "| flux_2048 | s | H200 | 1500.0 | 1716.0 | – | 1072.0 |" in twice
    # a later run of the others belongs to a later one of ours
    later = [row | {"commit": "later", "median": "1000"} for row in rows if row["provider"] == "torch_sdpa_cudnn"]
    assert "| flux_2048 | r | H200 | 750 | 858 | – | 536 | 1.144 | 30.5 | 31 | 0.02 |" in results_markdown(
        rows + later
    )


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
    text, none = results_markdown(read_rows(path)), "none: no call ran in INT8"
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


def test_times_that_lie_far_apart_are_shown_with_how_far(tmp_path):
    path = tmp_path / "results.csv"
    timed = {"suite": "end_to_end", "case": "model", "gpu": "H200", "metric": "time", "unit": "ms", "recipe": ""}
    append_row(path, **timed, provider="torch_sdpa_cudnn", median=70.0, p20=60.0, p80=75.0)
    append_row(path, **timed, provider="attention_removed", median=50.0)
    append_row(
        path, **timed | {"recipe": "r"}, provider="sage_kernels", median=71.0, p20=64.0, p80=80.4, ratio_vs_cudnn=0.986
    )
    text = results_markdown(read_rows(path))
    assert "| model | r | H200 | 71.0 (64.0 – 80.4) | 70.0 | – | 50.0 | 0.986 |" in text


def test_update_rewrites_between_the_markers_only(tmp_path):
    page, path = tmp_path / "page.md", tmp_path / "results.csv"
    for way in ("dynamic", "timestep"):
        ours = QUALITY | {"recipe": DEFAULT_RECIPE}
        append_row(path, **ours, case=f"tiny_sd/{way}", metric="psnr_db_mean", median=61.0)
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    assert update([page], path) and not update([page], path)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n### Picture quality") and text.endswith(f"\n{END}\nafter\n")
    assert "61.0" in text and "old" not in text


def test_update_writes_nothing_where_one_page_has_no_markers(tmp_path):
    good, bad, path = tmp_path / "good.md", tmp_path / "bad.md", tmp_path / "results.csv"
    append_row(path, **TIMED, median=650)
    good.write_text(f"{BEGIN}{END}", encoding="utf-8")
    bad.write_text("no markers", encoding="utf-8")
    with pytest.raises(ValueError, match="bad.md: text: got no markers"):
        update([good, bad], path)
    assert good.read_text(encoding="utf-8") == f"{BEGIN}{END}"


@pytest.mark.parametrize("text", ["none", BEGIN, f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"])
def test_missing_markers_raise(text):
    with pytest.raises(ValueError, match="begin.*end.* once each"):
        replace_sections(text, {"results": ""})


def test_language_rows_stay_out_of_the_picture_table():
    """Every metric that `bench language` writes has a heading of its own: the committed rows are such."""
    rows = [
        row for row in read_rows(ROOT / "kernels" / "benchmarks" / "results.csv") if row["case"].startswith("tiny_lm/")
    ]
    assert rows and {row["metric"] for row in rows} <= set(LANGUAGE)
    assert "tiny_lm" not in results_markdown(rows).split("### Language models")[0]


def test_linear_layers_of_the_newest_run_beside_their_peers():
    row = {"suite": "linear", "gpu": "H200", "case": "up", "batch": "8", "seq_q": "64", "seq_k": "32", "recipe": ""}
    rows = [
        row | {"commit": "old", "provider": "torch_bf16", "median": "1.0"},
        row | {"commit": "new", "provider": "torch_bf16", "median": "700.0"},
        row | {"commit": "new", "provider": "torchao_int8", "ratio_vs_cudnn": "1.100", "rel_l2_error": "0.02"},
        row
        | {"commit": "new", "provider": "sage_kernels", "recipe": "linears_int8"}
        | {"ratio_vs_cudnn": "1.400", "rel_l2_error": "0.01"},
    ]
    *_, line = linears(rows).splitlines()
    assert line == "| up | 8 | 32 | 64 | 700.0 | 1.400 (0.01) | 1.100 (0.02) |"
    few = row | {"commit": "new", "case": "modulation"}
    rows += [
        few | {"provider": "torch_bf16", "median": "3.0"},
        few | {"provider": "sage_kernels", "recipe": "linears_int8_weights"}
        | {"ratio_vs_cudnn": "1.900", "rel_l2_error": "0.008"},
    ]  # fmt: skip
    *_, up, modulation = linears(rows).splitlines()
    assert up == "| up | 8 | 32 | 64 | 700.0 | 1.400 (0.01) | – | 1.100 (0.02) |"
    assert modulation == "| modulation | 8 | 32 | 64 | 3.0 | – | 1.900 (0.008) | – |"
    assert linears([]).startswith("No rows yet")


def test_whole_models_beside_other_packages_linear_layers():
    row = {"suite": "end_to_end", "gpu": "H200", "case": "flux", "recipe": "", "metric": "time", "commit": "new"}
    ours = row | {"provider": "sage_kernels", "recipe": "a+linears_int8"}
    rows = [
        row | {"provider": "torchao_int8", "commit": "old", "median": "50.0"},
        row | {"provider": "torch_sdpa_cudnn", "median": "100.0"},
        row | {"provider": "attention_removed", "median": "90.0"},
        ours | {"median": "40.0"},
        ours | {"median": "0.03", "metric": "rel_l1"},
        ours | {"median": "9", "metric": "int8_calls"},
        row | {"provider": "torchao_int8", "median": "80.0"},
        row | {"provider": "torchao_int8", "median": "0.04", "metric": "rel_l1"},
        row | {"provider": "torch_sdpa_cudnn", "commit": "later", "median": "110.0"},
    ]
    *_, header, _, line = linear_rivals(rows).splitlines()
    assert header == "| model | GPU | commit | stock, ms | a+linears_int8 | torchao_int8 |"
    assert line == "| flux | H200 | new | 100.0 | 2.500 (0.03) | 1.250 (0.04) |"
    other = [x | {"case": "wan"} for x in rows if x["provider"] != "torchao_int8"]
    comfy = row | {"case": "wan", "provider": "comfy_kitchen"}
    other += [comfy | {"median": "125.0"}, comfy | {"median": "0.05", "metric": "rel_l1"}]
    *_, flux, wan = linear_rivals([*rows, *other]).splitlines()
    assert flux.endswith("| 1.250 (0.04) | – |") and wan.endswith("| 2.500 (0.03) | – | 0.800 (0.05) |")
    assert linear_rivals(rows[1:6]).startswith("No rows yet")


def test_the_wait_of_a_first_call_by_recipe_and_the_newest_row_of_each():
    row = {"suite": "cold_start", "case": "flux", "provider": "sage_kernels", "recipe": "a", "gpu": "g", "commit": "c"}
    rows = [row | {"metric": "first_forward", "median": x} for x in ("9.0", "5.0")]
    rows.append(row | {"metric": "warm_up", "median": "4.0"})
    *_, line = cold_start(rows).splitlines()
    assert line == "| flux | sage_kernels | a | g | c | 5.0 | – | 4.0 |"


def test_rows_of_other_blocks_are_not_in_the_table_of_mixed_precision():
    rows = read_rows(ROOT / "kernels" / "benchmarks" / "results.csv")
    assert any(row["case"].endswith("_rows") for row in rows)
    table = mixed(rows)
    assert "mixed/" not in table and "| clustered |" in table
    assert mixed([row for row in rows if not row["case"].endswith("_rows")]) == table
