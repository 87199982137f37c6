"""The counts of a layer: kept through a new processor, and of several attention calls the worst one is shown."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0

import sage_processors as sp
from sage_processors.diffusion.calls.processors import CallSite
from sage_processors.diffusion.reports import report
from sage_processors.reporting.event_counter import EventCounter
from tests.support.tiny_models import MODELS


def test_counts_taken_over_are_both_kinds_and_a_copy():
    earlier, counter = EventCounter(3), EventCounter(3)
    earlier.add(0), earlier.add(2), earlier.add(2)
    earlier.traced += torch.tensor([10, 20, 30])  # as a graph counts
    counter.add(1)
    counter.take_over(earlier)
    assert counter.numbers() == [11, 20, 32]
    counter.add(1)
    counter.traced[0] += 1
    assert counter.numbers() == [12, 21, 32] and earlier.numbers() == [11, 20, 32]


def test_counts_of_eager_and_compiled_calls_stay_when_a_processor_is_replaced():
    model, inputs = MODELS["unet_sd15"]()
    with torch.no_grad(), sp.apply(model, sp.SageAttnProcessor(min_tokens=1, scaling="dynamic")) as handle:
        model(**inputs)
        for layer in handle._denoisers[0].layers:
            layer.sage._sage_events.traced[0] += 5  # as a graph counts
        model.set_attn_processor(AttnProcessor2_0())
        handle.refresh()
        model(**inputs)
        assert {row["calls"] for row in handle.report().rows} == {7}


OF_SITE = ("outside", "below", "misfit", "clipped", "redone")


@pytest.mark.parametrize(
    ("of_site", "of_layer"),
    [
        ("outside", "clipped_fraction"),
        ("below", "below_fraction"),
        ("misfit", "misfit_fraction"),
        ("clipped", "v_clipped_fraction"),
        ("redone", "redone_fraction"),
    ],
)
@pytest.mark.parametrize("worst", [0, 1])
def test_a_layer_with_several_calls_shows_the_worst_of_them(of_site, of_layer, worst):
    model, _ = MODELS["flux"]()
    with sp.apply(model) as handle:
        layer = handle._denoisers[0].layers[0]
        layer.site_indices, layer.sage._sage_sites = [0, 1], (CallSite(), CallSite())
        good = {"calls": 1, "dynamic_calls": 0.0} | dict.fromkeys(OF_SITE, 0.0)
        summary = [good, good]
        summary[worst] = good | {of_site: 0.25}
        assert report._counted(layer, summary)[of_layer] == 0.25
