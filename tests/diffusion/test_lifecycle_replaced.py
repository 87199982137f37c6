"""Processors that diffusers puts in place of ours, as a whole or within a step: reported, with a remedy that helps."""

from __future__ import annotations

import diffusers
import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.calls import processors
from sage_processors.unsupported import PAG_REMEDY
from tests.diffusion.calls.test_processors import forward, sqnr_db
from tests.diffusion.test_apply import processors_of
from tests.diffusion.test_lifecycle import statuses
from tests.diffusion.test_lifecycle_adapters import EVERYTHING, STRICT
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import sd_pipe


@pytest.mark.parametrize("name", ["unet_sd15", "unet_sdxl", "unet_simple_cross", "prior", "controlnet"])
def test_P33_default_processors_of_models_that_compare_classes(name):
    """Stock ones are put there, as without us: the report says so, refresh() swaps them, remove() leaves them."""
    model, inputs = MODELS[name]()
    model.set_default_attn_processor()
    kinds = {key: type(processor) for key, processor in processors_of(model).items()}
    model, inputs = MODELS[name]()
    stock = first_tensor(forward(model, inputs))
    with sp.apply(model, EVERYTHING) as handle:
        model.set_default_attn_processor()
        assert {key: type(processor) for key, processor in processors_of(model).items()} == kinds
        assert statuses(handle) == {"replaced"}
        torch.testing.assert_close(first_tensor(forward(model, inputs)), stock)
        assert handle.report().calls == 0 and handle.report().fallbacks == {"replaced": len(kinds)}
        handle.refresh()
    assert {key: type(processor) for key, processor in processors_of(model).items()} == kinds


def test_P33_hand_written_attention_is_told_who_does_the_same_with_sdpa():
    model, inputs = MODELS["unet_sd15"]()
    with sp.apply(model, EVERYTHING) as handle:
        calls = len(handle.report().rows)
        model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
        remedy = "model.set_attn_processor(AttnProcessor2_0())"
        assert all(row["note"].endswith(f", as AttnProcessor2_0: {remedy}") for row in handle.report().rows)
        handle.refresh()
        assert all(row["note"].endswith(remedy) for row in handle.report().rows)
        model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor2_0())
        handle.refresh()
        forward(model, inputs)
        assert handle.report().calls == calls


def first_tensor(output):
    return output if isinstance(output, torch.Tensor) else first_tensor(output[0])


def test_P34_the_remedy_under_perturbed_attention_guidance_is_one(caplog, monkeypatch):
    monkeypatch.setattr(processors._fallbacks, "logged", set())
    pipe, run = sd_pipe(diffusers.StableDiffusionPAGPipeline, pag_applied_layers="mid")
    stock = run()
    with sp.apply(pipe, EVERYTHING) as handle:
        run()
        handle.refresh()  # does not help: the pipeline puts them there in every step
        run()
        report = handle.report()
        assert report.fallbacks == {"replaced": 6}
        said = [record.getMessage() for record in caplog.records if "replaced" in record.getMessage()]
        assert len(said) == 1 and "set_pag_applied_layers" in said[0] and "call handle.refresh()" not in said[0]
        (note,) = (note for note in report.notes if note.startswith('"replaced"'))
        assert note in f'"replaced" in unet: {PAG_REMEDY}.' and PAG_REMEDY in said[0]
        handle.reset()
        assert not [note for note in handle.report().notes if note.startswith('"replaced"')]
        remedy = PAG_REMEDY[PAG_REMEDY.index("pipe.") : PAG_REMEDY.rindex(" runs")]
        eval(remedy, {"pipe": pipe, "layers": "mid", "sage_processors": sp})  # what the text says, as it stands
        assert sqnr_db(run(), stock) > 25
        report = handle.report()
        assert report.fallbacks == {} and report.calls == 3 * len(processors_of(pipe.unet)), str(report)
        (guest,) = (row for row in report.rows if row["note"] == "put there by the pipeline")
        assert (guest["layer"], guest["calls"]) == ("unet.SagePAGCFGIdentitySelfAttnProcessor2_0", 3)
        assert statuses(handle) == {"active"}
    with sp.apply(pipe, STRICT):
        pipe.set_pag_applied_layers("mid")
        with pytest.raises(sp.UnsupportedAttentionError, match="set_pag_applied_layers"):
            run()
