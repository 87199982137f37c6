"""Suite models, at sizes for a CPU: every case runs, rows are those of the table, and a failure ends nothing else."""

from __future__ import annotations

import sys

import pytest
import torch

from sage_kernels.results import read_rows
from sage_processors.presets import PRESETS


NAMES = (
    "flux2_dev_1024", "hunyuan_544x960x61", "wan_14b_480p81", "qwen_image_1328", "z_image_1024", "ltx_512x768x121",
    "sd35_large_1024", "cogvideox_49", "chroma_1024", "mochi", "lumina2_1024", "flux_1024", "sdxl_1024",
    "wan21_1_3b_480p81",
)  # fmt: skip


def test_the_suite_has_these_models(bench):
    assert tuple(bench.SUITE) == NAMES


def test_ways_after_which_a_model_has_no_weights_of_its_own_come_last(bench):
    order = list(sys.modules["ways"].NAMES)
    freeing = [name for name, options in PRESETS.items() if options["linears"].drop_weights]
    assert freeing and order[-len(freeing) :] == freeing and len(order) == len(set(order))


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(x, marks=pytest.mark.slow("one more model")) for x in NAMES[1:11])]
)
def test_a_model_of_the_suite_runs(bench, name):
    case = bench.SUITE[name].tiny()
    model = bench.make_model(case, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        out = model(**bench.make_inputs(case, 1, "cpu", torch.float32), return_dict=False)[0]
    assert (out[0] if isinstance(out, list) else out).isfinite().all()
    assert bench.SUITE[name].attention()["seq_q"] > 4000


def test_rows_and_models_and_ways_that_fail(bench, sageattention, tmp_path, capsys, monkeypatch):
    path, make_model = tmp_path / "rows.csv", bench.make_model

    def failing(case, *args):
        if case.name.startswith("mochi"):
            raise RuntimeError("no such model\nmore")
        return make_model(case, *args)

    monkeypatch.setattr(bench, "make_model", failing)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)  # as where it is not installed
    cases = [x for name in ("mochi", "qwen_image_1328") for x in ("--case", name)]
    cases += ["--ways", "cudnn", "fast", "sageattention_2", "torchao_int8"]
    assert bench.main(["--tiny", "--device", "cpu", "--csv", str(path), *cases]) == 1
    printed = capsys.readouterr().out
    assert (
        "FAILED mochi/tiny: RuntimeError: no such model\n" in printed
        and "torchao_int8" in printed
        and "qwen_image_1328/tiny" in printed
    )
    rows = read_rows(path)
    assert {row["case"] for row in rows} == {"qwen_image_1328/tiny"} and {row["suite"] for row in rows} == {"models"}
    assert [(row["provider"], row["recipe"], row["metric"]) for row in rows] == [
        ("torch_sdpa_cudnn", "", "time"), ("torch_sdpa_cudnn", "", "peak_memory"),
        *(("sage_kernels", "preset_fast", metric) for metric in ("time", "peak_memory", "rel_l1")),
        *(("sageattention_2.2.0", "", metric) for metric in ("time", "peak_memory", "rel_l1")),
    ]  # fmt: skip
