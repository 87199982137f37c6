"""The notebooks run as they stand, small; what is committed of them is the outcome of their sources."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from sage_processors.option_groups import SCALINGS
from tests.support.repository import ROOT


for _needed in ("jupytext", "nbclient", "nbformat", "ipykernel", "matplotlib"):
    pytest.importorskip(_needed, reason="the notebooks extra is not installed")

import nbformat  # noqa: E402
from IPython.core.formatters import DisplayFormatter  # noqa: E402
from PIL import Image  # noqa: E402

import sage_processors as sp  # noqa: E402
from sage_kernels import RECIPES  # noqa: E402
from sage_processors.evaluation import quality  # noqa: E402


FOLDER = ROOT / "notebooks"
sys.path.append(str(FOLDER))

import measure  # noqa: E402
import replay  # noqa: E402
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


def test_parameters_go_behind_the_tagged_cell():
    notebook = run.with_parameters(run.read(FOLDER / "quality_budget.py"), SIZE="small", FIGURES="x")
    place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    assert notebook.cells[place + 1].source == "SIZE = 'small'\nFIGURES = 'x'"


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


class Deadline:
    """Says that time is over from the `after`-th question on."""

    def __init__(self, after: int):
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def variants():
    warm = quality.Variant("timestep_warm", sp.SageAttnProcessor(), warm=True)
    return [quality.Variant("dynamic", sp.SageAttnProcessor(scaling="dynamic")), warm]


def measured(folder: Path, variants, *deadlines) -> list[dict]:
    size, real = measure.Size(images=2, steps=1, batch=1), torch.rand(64, 32, dtype=torch.float64)
    for over in deadlines:
        run_ = measure.Measurement("tiny_sd", size, "cpu", folder)
        done = [run_.run(variant, over) for variant in variants]
    assert all(done)
    return run_.rows("qk_int8_pv_bf16", [variant.name for variant in variants], real)


@pytest.mark.slow("draws pictures in several runs")
def test_measure_goes_on_where_it_stopped(tmp_path, variants, capsys):
    at_once = measured(tmp_path / "one", variants, Deadline(100))
    # out of time after the first picture of the first variant, then in the middle of the second
    assert measured(tmp_path / "two", variants, Deadline(3), Deadline(4), Deadline(100)) == at_once
    assert [row["scaling"] for row in at_once] == ["dynamic"] * 4 + ["timestep_warm"] * 4
    assert all(float(row["value"]) > 40 for row in at_once if row["unit"] == "dB")
    with pytest.raises(ValueError, match="work: .*options.json was made with .*choose another folder"):
        measure.Measurement("tiny_sd", measure.Size(images=3, steps=1, batch=1), "cpu", tmp_path / "one")
    # the table: rows of the same pipeline, recipe and device are replaced, others stay
    table = tmp_path / "table.csv"
    measure.write_table(table, [{**row, "device": "GPU"} for row in at_once])
    measure.write_table(table, at_once)
    measure.write_table(table, [{**row, "value": "1"} for row in at_once])
    read = measure.read_table(table)
    assert len(read) == 2 * len(at_once) and {r["value"] for r in read if r["device"] == "cpu"} == {"1"}
    assert {key: read[0][key] for key in measure.COLUMNS} == {
        k: str({**at_once[0], "device": "GPU"}[k]) for k in read[0]
    }
    measure.append_to_results(tmp_path / "results.csv", at_once)
    appended = measure.read_table(tmp_path / "results.csv")
    assert appended[0]["case"] == "tiny_sd/dynamic" and appended[0]["gpu"] == "cpu" and appended[0]["batch"] == "2"


# --- measure_skipping.py ---


@pytest.mark.slow("draws clips")
def test_skipping_is_measured_with_prompts_that_stay_and_that_change(tmp_path, monkeypatch):
    import measure_skipping
    import measure_video

    # the fewest tokens that have lists
    monkeypatch.setitem(measure_video.SIZES, "wide", {"height": 80, "width": 80, "num_frames": 21})
    size, real = measure.Size(images=2, steps=4, batch=2), torch.rand(64, 32, dtype=torch.float64)
    skips = measure_skipping.options(skip={"limit": 0.9, "first_steps": 1})
    stock, found = {}, {}
    for switched in (False, True):
        variants = {"skips": skips} if switched else {"dense": measure_skipping.options(), "skips": skips}
        clips = measure_skipping.SkipMeasurement("wide", size, "cpu", tmp_path, switched)
        assert all(clips.run(quality.Variant(name, config)) for name, config in variants.items())
        stock[switched] = clips.stock(0)
        found[switched] = {(r["scaling"], r["metric"]): float(r["value"]) for r in clips.rows("r", [*variants], real)}
    assert not torch.allclose(stock[False], stock[True], atol=0.1)
    for numbers in found.values():
        assert 0 < numbers["skips", "skipped_mean"] < 1 and 0 < numbers["skips", "lost_max"] < 1
    steady = found[False]
    assert steady["dense", "skipped_mean"] == steady["dense", "lost_max"] == 0
    assert steady["skips", "psnr_db_mean"] < steady["dense", "psnr_db_mean"]
    assert ("skips", "obeyed_mean") in steady and ("skips", "obeyed_mean") not in found[True]


@pytest.mark.slow("draws clips")
def test_what_calibrate_promised_is_in_the_table(tmp_path, monkeypatch):
    import measure_skipping
    import measure_video

    monkeypatch.setattr(measure_skipping, "LIMITS", (0.1,))
    monkeypatch.setattr(measure_video, "TRUE_CLIPS", 8)
    asked = {}

    def calibrate(pipe, prompts, *, path, **options):
        """What it would write after drawing many clips."""
        asked.update(options, prompts=prompts)
        config = measure_skipping.options(skip={"limit": 0.05})
        result = {"psnr_db": 41.25, "skipped_fraction": 0.125}
        found = sp.Calibration(config, True, {"target_psnr": options["target_psnr"]}, result, [], [])
        found.save(path)
        return found

    monkeypatch.setattr(sp, "calibrate", calibrate)
    work, out = tmp_path / "work", tmp_path / "table.csv"
    command = f"measure_skipping.py --size small --clips 2 --steps 1 --batch 2 --search 3 --work {work} --out {out}"
    monkeypatch.setattr(sys, "argv", command.split())
    assert measure_skipping.main() == 0
    table = measure.read_table(out)
    numbers = {(r["pipeline"], r["scaling"], r["metric"]): float(r["value"]) for r in table}
    dense = numbers["tiny_wan_small", "dense", "psnr_db_mean"]
    assert asked["target_psnr"] == pytest.approx(dense - measure_skipping.LOSS_DB, abs=1e-4)
    assert len(asked["prompts"]) == len(asked["held_out"]) == 3
    promised = [row for row in table if row["metric"].startswith("promised_")]
    assert [(r["metric"], r["unit"], r["value"], r["low"], r["high"]) for r in promised] == [
        ("promised_psnr_db", "dB", *["41.25"] * 3),
        ("promised_skipped", "1", *["0.125"] * 3),
    ]
    assert {(r["pipeline"], r["scaling"], r["images"]) for r in promised} == {("tiny_wan_small", "calibrated", "3")}
    drawn = {r["pipeline"] for r in table if r["scaling"] == "calibrated" and r["metric"] == "skipped_mean"}
    assert drawn == {"tiny_wan_small", "tiny_wan_small_switched"}
    assert all(r["low"] == r["value"] == r["high"] for r in table if r["metric"] == "lost_max")


# --- replay.py ---


def recording(steps: int = 3, growth: float = 1.0) -> replay.Recording:
    """Two layers of random q, k, v whose keys grow by `growth` from step to step, and never stray from ±3."""
    generator = torch.Generator().manual_seed(0)
    found = replay.Recording(levels=[1.0 - 0.25 * i for i in range(steps)])
    for step in range(steps):
        calls = {}
        for layer, seq in (("a", 200), ("b", 131)):
            q, k, v = (torch.rand(1, seq, 2, 32, generator=generator) * 6 - 3 for _ in range(3))
            calls[layer] = [(q, k * growth**step, v)]
        found.steps.append(calls)
    return found


def test_replay_of_known_plans():
    found, state = replay.replay(sp.SageAttnProcessor(scaling=sp.Scaling("timestep", margin=4.0)), recording())
    assert [step.planned for step in found] == [0, 1, 1] and found[1].beyond == 0
    # uniform values reach the largest seen in every tile of 128 x 32: a quarter of the range is used
    assert found[2].utilisation == pytest.approx(0.25, abs=0.01) and len(state.sites) == 2
    assert (
        replay.replay(sp.SageAttnProcessor(scaling=sp.Scaling("timestep", margin=0.5)), recording())[0][2].beyond == 1
    )
    half, whole = (
        replay.replay(sp.SageAttnProcessor(scaling=sp.Scaling("timestep", margin=m)), recording())[0][2].sqnr_db
        for m in (2.0, 1.0)
    )
    assert abs(whole - half) < 0.1  # a tile that uses less than 7/8 of its plan takes a scale of its own
    dynamic, state = replay.replay(sp.SageAttnProcessor(scaling="dynamic"), recording())
    assert state is None and dynamic[0].planned == 0 and dynamic[0].beyond != dynamic[0].beyond


def test_replay_learns_from_a_first_run():
    first, second = recording(), recording()
    found, _ = replay.replay(sp.SageAttnProcessor(scaling="static"), second, first)
    assert found[0].planned == 1
    assert replay.replay(sp.SageAttnProcessor(scaling="static"), second)[0][0].planned == 0


def test_without_guard_the_right_exponent_wins():
    # keys halve while u falls linearly: s ∝ u is right, s ∝ 1/u clips late or wastes early
    data = recording(steps=3, growth=0.5)
    data.levels = [1.0, 0.5, 0.25]
    printed, one, corrected = (sum(replay.without_guard(data, exponent)) for exponent in (-1.0, 0.0, 1.0))
    assert corrected > one > printed


def test_record_keeps_what_attention_was_given():
    pipe = measure.load("tiny_sd", "cpu")
    found = replay.record(pipe, measure.prompts(1), [0], steps=2)
    assert len(found.steps) == len(found.levels) == 2 and found.levels[0] > found.levels[1]
    assert [site.head_dim for site in found.sites()] == [64] * 4  # cross attention to 77 tokens is short
    assert all(q.shape == k.shape == v.shape for step in found.steps for calls in step.values() for q, k, v in calls)
    assert not any(hooks for module in pipe.unet.modules() if (hooks := module._forward_pre_hooks))
