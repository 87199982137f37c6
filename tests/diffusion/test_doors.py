"""The lines that people try first: on a model, on one module, twice, with slicing, and reports after the end."""

from __future__ import annotations

import logging

import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.calls import sage_class
from sage_processors.diffusion.host.discovery import attention_modules
from tests.diffusion.calls.test_processors import forward
from tests.diffusion.test_apply import processors_of
from tests.support.combinations import shows  # noqa: F401 (pytest finds fixtures here)
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe, sd_controlnet_pipe


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)
SMALL = sp.SageAttnProcessor("small", min_tokens=1, linears=sp.Linears("int8", min_features=1, drop_weights=True))
MADE = ("unet_sd15", "flux")


@pytest.mark.parametrize("make", [flux_pipe, sd_controlnet_pipe])
def test_X84_a_models_own_method_does_what_the_pipelines_does(make, shows):  # noqa: F811
    pipe, run = make()
    stock = run()
    with pipe.set_attn_processor(EVERYTHING) as handle:
        expected = run()
        calls = handle.report().calls
    model = getattr(pipe, "unet", None) or pipe.transformer
    with model.set_attn_processor(EVERYTHING) as handle:
        drawn = run()
        shows(handle.report(), drawn, stock)
    assert torch.equal(run(), stock)
    if make is flux_pipe:  # the only denoiser: its steps are the pipeline's, so options of steps work, too
        assert torch.equal(drawn, expected) and handle.report().calls == calls
        with model.set_attn_processor(sp.SageAttnProcessor(min_tokens=1, keep={"first_steps": 1})) as handle:
            run()
        assert handle.report().fallbacks.keys() == {"window"}
    else:  # the user named the unet alone
        assert 0 < handle.report().calls < calls and all("controlnet" not in r["layer"] for r in handle.report().rows)


@pytest.mark.parametrize("name", MADE)
def test_options_for_single_modules_are_refused_before_anything_is_overwritten(name):
    model, inputs = MODELS[name]()
    before, stock = processors_of(model), forward(model, inputs)
    for last in (sp.SageAttnProcessor(), sp.SageAttnProcessor("fast")):
        mapping = dict(model.attn_processors)
        mapping[list(mapping)[-1]] = last
        with pytest.raises(TypeError, match="in a dict of processors, at .*`layers` chooses single layers"):
            model.set_attn_processor(mapping)
        with pytest.raises(TypeError, match="for one attention module.*model.set_attn_processor"):
            next(attention_modules(model))[1].set_processor(last)
    assert processors_of(model) == before and torch.equal(forward(model, inputs), stock)
    model.set_attn_processor(dict(model.attn_processors))  # diffusers' own use is as before
    assert processors_of(model) == before and torch.equal(forward(model, inputs), stock)


@pytest.mark.parametrize("name", MADE)
def test_a_report_after_the_end_has_what_ran_until_then(name):
    model, inputs = MODELS[name]()
    with sp.apply(model, EVERYTHING) as handle:
        forward(model, inputs)
        during = handle.report()
    forward(model, inputs)
    after = handle.report()
    assert after.rows == during.rows and after.calls == during.calls == len(during.rows)
    assert after.notes[0].startswith("This handle was removed") and after.notes[1:] == during.notes
    handle.remove()
    assert handle.report() is after and "Nothing ran" not in str(after)
    unused = sp.apply(model, EVERYTHING)
    unused.remove()
    assert str(unused.report()).startswith("Nothing ran")


@pytest.mark.parametrize("second", [EVERYTHING, sp.SageAttnProcessor(min_tokens=1, scaling="per_block")])
def test_a_second_apply_replaces_the_first_and_leaves_one_layer_of_ours(second):
    model, inputs = MODELS["unet_sd15"]()
    originals, stock = processors_of(model), forward(model, inputs)
    first = model.set_attn_processor(EVERYTHING)
    forward(model, inputs)
    with sp.apply(model, second) as handle:
        assert sp.handle_of(model) is handle and len(handle.report().rows) == len(originals)
        assert not any(sage_class.is_sage(p._sage_base) for p in processors_of(model).values())
        first.remove()  # of a replaced handle: the second one's is left alone
        with pytest.raises(RuntimeError, match="handle that was removed"):
            first.refresh()
        forward(model, inputs)
        assert handle.report().calls == first.report().calls == len(originals)
    assert processors_of(model) == originals and torch.equal(forward(model, inputs), stock)


def test_slicing_that_is_on_is_named_and_one_layer_that_has_it_stays():
    from diffusers.models.attention_processor import SlicedAttnProcessor

    model, inputs = MODELS["unet_sd15"]()
    own = next(attention_modules(model))[1]
    original = own.processor
    own.set_processor(SlicedAttnProcessor(1))
    with sp.apply(model, EVERYTHING) as handle:
        forward(model, inputs)
    rows = handle.report().rows
    assert [row["status"] for row in rows] == ["not swappable", *["active"] * (len(rows) - 1)]
    assert type(own.processor) is SlicedAttnProcessor
    own.set_processor(original)
    model.set_attention_slice("max")
    with pytest.raises(ValueError, match=r"slicing is on: call pipe\.disable_attention_slicing\(\)"):
        sp.apply(model, EVERYTHING)


def test_X83_dropped_weights_stay_in_8_bit_and_the_next_handle_takes_them_over(caplog, shows):  # noqa: F811
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    with caplog.at_level(logging.WARNING, "sage_processors"), sp.apply(model, SMALL) as handle:
        small = forward(model, inputs)
        rows = handle.report().linears.rows
    shows(handle.report(), small, stock)
    count = sum(row["format"] is not None for row in rows)
    said = [message for message in caplog.messages if "stay in 8 bit" in message]
    assert len(said) == 1 and f"{count} linear layers stay" in said[0] and said[0] in handle.report().notes
    assert not any(map(sage_class.is_sage, processors_of(model).values())) and sp.handle_of(model) is None
    alone = forward(model, inputs)
    assert not torch.equal(alone, small)
    with sp.apply(model, SMALL) as handle:
        assert torch.equal(forward(model, inputs), small)
        assert handle.report().linears.calls == count
    with sp.apply(model, sp.SageAttnProcessor(recipe="16bit")):
        assert torch.equal(forward(model, inputs), alone)
    with pytest.raises(RuntimeError, match="16-bit weights were dropped"):
        sp.apply(model, sp.SageAttnProcessor("fast", linears={"format": "fp8", "min_features": 1}))
    assert torch.equal(forward(model, inputs), alone)
    with pytest.raises(KeyError, match="of the user"), sp.apply(model, SMALL):
        raise KeyError("of the user")
