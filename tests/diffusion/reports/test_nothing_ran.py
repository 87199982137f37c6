"""Models in which nothing can run in INT8 are told of at once, and no picture is compared with itself."""

from __future__ import annotations

import logging

import pytest
import torch
from rich.console import Console

import sage_processors as sp
from sage_processors.evaluation import quality
from tests.diffusion.steps.test_windows import denoise, flux_pipe, options
from tests.support.tiny_models import MODELS


PICTURE = torch.rand(1, 3, 16, 16)
NOTHING = quality.compare("timestep", "qk_int8_pv_bf16", PICTURE, PICTURE, (0, 7))


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "sage_processors" and r.levelno == logging.WARNING]


# --- apply ---


def test_P28_a_model_in_training_mode_is_a_warning_at_once(caplog):
    pipe, model, _ = flux_pipe()
    with sp.apply(pipe, options()):
        assert warnings_of(caplog) == []
    model.train()
    with sp.apply(pipe, options()):
        (warning,) = warnings_of(caplog)
    assert warning.startswith("transformer: got a model in which no attention layer can run in INT8")
    assert "model.eval()" in warning
    caplog.clear()
    model.eval()
    next(iter(model.modules())).transformer_blocks[0].attn.train()
    with sp.apply(model, options()):
        (warning,) = warnings_of(caplog)
    assert warning.startswith("FluxTransformer2DModel: got a model in which some layers run in 16 bit")


@pytest.mark.parametrize("why", ["kept", "float64", "heads"])
def test_P28_a_model_in_which_no_layer_can_run_is_a_warning_at_once(why, caplog):
    pipe, model, _ = flux_pipe()
    config, words = options(), "cast the model to float16, bfloat16 or float32"
    if why == "kept":
        config, words = options(layers={"*": {"recipe": "16bit"}}), "kept in 16 bit by the options"
    elif why == "float64":
        model.double()
    else:
        words = "head_dim 512, at most 256 is possible"
        for name, module in model.named_modules():
            if name.endswith(".attn"):
                module.head_dim = 512
    with sp.apply(pipe, config):
        (warning,) = warnings_of(caplog)
    assert "no attention layer can run in INT8" in warning and words in warning


# --- comparisons ---


def test_P29_a_row_of_results_needs_a_call_that_ran(tmp_path):
    with pytest.raises(ValueError, match="no call ran in INT8"):
        list(NOTHING.rows("tiny_sd"))
    ours = quality.compare("timestep", "qk_int8_pv_bf16", PICTURE, PICTURE * 0.9, (7, 0))
    with pytest.raises(ValueError, match="no call ran in INT8"):
        quality.append_results(tmp_path / "results.csv", "tiny_sd", [ours, NOTHING], device="cpu")
    assert not (tmp_path / "results.csv").exists()


def test_P29_a_probe_without_an_int8_call_says_so():
    pipe, model, inputs = flux_pipe()
    console = Console(width=200, record=True)
    with sp.apply(pipe, options(layers={"*": {"recipe": "16bit"}})) as handle, handle.probe(every=1) as probe:
        denoise(pipe, model, inputs, steps=2)
        probe.print(console)
    assert console.export_text().strip() == "no call ran in INT8: nothing was compared"


def test_P28_models_of_which_nothing_is_known_are_not_told_of(caplog):
    for name in ("unet_sd15", "wan_t2v"):
        with sp.apply(MODELS[name]()[0]):
            assert warnings_of(caplog) == []
