"""The swap on real pipelines and models: one line in, one line out, and a report of what really ran."""

from __future__ import annotations

import diffusers
import pytest
import torch
import torch.nn.functional as functional

import sage_processors as sp
from sage_processors.diffusion.calls import sage_class
from sage_processors.diffusion.host.discovery import attention_modules
from tests.diffusion.calls.test_processors import sqnr_db
from tests.support.tiny_models import MODELS


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)


def processors_of(model):
    return {name: module.processor for name, module in attention_modules(model)}


class OddProcessor:
    """An attention processor of somebody else, whose module keeps its number of heads under names of its own."""

    def __call__(self, attn, x):
        batch, tokens, _ = x.shape
        q, k, v = (x @ w for w in attn.weights)
        q, k, v = (y.view(batch, tokens, attn.real_heads, -1).transpose(1, 2) for y in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OddAttention(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("weights", torch.randn(3, 32, 32) / 6)
        self.real_heads = 4
        vars(self).update(attributes)
        self.processor = OddProcessor()

    def forward(self, x, timestep):
        return self.processor(self, x)


@pytest.mark.parametrize("attributes", [{}, {"heads": 2, "head_dim": 16}, {"num_heads": 8, "head_dim": 8}])
def test_layout_that_was_not_or_wrongly_told_runs_dynamic_until_refresh(attributes):
    model, x = OddAttention(**attributes).eval(), torch.randn(2, 40, 32)
    with torch.no_grad():
        stock = model(x, torch.tensor(1.0))
        with sp.apply(model, EVERYTHING) as handle:
            for _ in range(3):
                assert sqnr_db(model(x, torch.tensor(1.0)), stock) > 30
            (row,) = handle.report().rows
            assert (row["calls"], row["dynamic_calls"]) == (3, 3) and "refresh" in row["note"]
            handle.refresh()
            for t in (1.0, 0.8, 0.6):
                assert sqnr_db(model(x, torch.tensor(t)), stock) > 30
            (row,) = handle.report().rows
            assert (row["calls"], row["dynamic_calls"], row["scaling"], row["note"]) == (6, 4, "timestep", "")


def test_processors_set_by_the_user_after_the_swap_are_the_ones_given_back():
    model, inputs = MODELS["unet_sd15"]()
    with sp.apply(model, EVERYTHING) as handle, torch.no_grad():
        theirs = {name: type(p)._sage_base() for name, p in model.attn_processors.items()}
        model.set_attn_processor(dict(theirs))
        handle.refresh()
        model(**inputs)
        assert all(row["status"] == "active" and row["calls"] == 1 for row in handle.report().rows)
    assert all(p is theirs[name] for name, p in model.attn_processors.items())


def test_only_denoisers_of_a_pipeline_are_swapped():
    kinds = ("transformer", "text_encoder", "vae", "image_encoder_2", "controlnet")
    models = {kind: MODELS["flux"]()[0] for kind in kinds} | {"upscaler": MODELS["unet_sd15"]()[0]}
    pipe = type("Pipe", (), {"components": models | {"scheduler": None}})()
    with sp.apply(pipe, EVERYTHING):
        swapped = {key for key, model in models.items() if all(map(sage_class.is_sage, processors_of(model).values()))}
    assert swapped == {"transformer", "controlnet", "upscaler"}


def test_options_on_a_module_raise_and_name_the_right_line():
    model, inputs = MODELS["unet_sd15"]()
    for _, module in attention_modules(model):
        module.processor = sp.SageAttnProcessor()
    with torch.no_grad(), pytest.raises(TypeError, match=r"pipe\.set_attn_processor.*sage_processors\.apply"):
        model(**inputs)
    with pytest.raises(TypeError, match="load the model again"):
        sp.apply(model)


def test_P06_processors_for_fits_the_dict_form_of_diffusers():
    model, inputs = MODELS["unet_sd15"]()
    original = processors_of(model)
    mapping = sp.processors_for(model, EVERYTHING)
    kept = dict(mapping)
    model.set_attn_processor(mapping)
    assert mapping == {}  # diffusers empties what it is given
    with torch.no_grad():
        model(**inputs)
    assert sp.handle_of(model).report().calls == len(original) == len(kept)
    assert all(sage_class.is_sage(p) for p in kept.values())
    sp.handle_of(model).remove()
    assert all(p is original[name] for name, p in processors_of(model).items())
    with pytest.raises(TypeError, match="sage_processors.apply"):
        sp.processors_for(MODELS["z_image"]()[0])


def test_P35_a_target_without_attention_names_its_components():
    for wrong in (3, None):
        with pytest.raises(TypeError, match=f"target: got {type(wrong).__name__}"):
            sp.apply(wrong)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"model: got no attention processor .* in the model \(Linear\)"):
        sp.apply(model)
    model, _ = MODELS["unet_sd15"]()
    model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    pipe = type("P", (), {"components": {"unet": model}, "scheduler": None})()
    with pytest.raises(ValueError, match=r"pipe: got no attention processor .* in unet \(UNet2DConditionModel\)"):
        sp.apply(pipe)


@pytest.mark.parametrize("scaling", ["timestep", "dynamic"])
def test_swap_inside_inference_mode_serves_outside_of_it(scaling):
    model, inputs = MODELS["flux"]()
    with torch.inference_mode():
        handle = sp.apply(model, sp.SageAttnProcessor(min_tokens=1, scaling=scaling))
        model(**inputs)
    with torch.no_grad():
        model(**inputs)
    assert handle.report().calls == 4
