"""Options of a wrong name, type or value are refused at once, with what was got and what is expected."""

from __future__ import annotations

import math

import diffusers
import pytest
from diffusers.models.attention_processor import AttnProcessor2_0

import sage_processors as sp
from tests.support.tiny_models import MODELS


def rule(**options):
    return {"layers": {"a": options}}


V, T = ValueError, TypeError
# options, error, words of the message
REFUSED = [
    ({"recipe": "int4"}, V, "recipe: got .*expected"), ({"recipe": None}, T, "recipe: got .*expected"),
    ({"scaling": "sometimes"}, V, "scaling: got .*expected"), ({"scaling": 3}, T, "scaling"),
    ({"scaling": {"margin": 0}}, V, "margin: got .*expected"), ({"scaling": {"margin": "1"}}, T, "margin: got"),
    ({"scaling": {"margin": math.nan}}, V, "margin: got .*expected"), ({"graphs": "on"}, V, "graphs: got .*expected"),
    ({"min_tokens": -1}, V, "min_tokens: got .*expected"), ({"min_tokens": 1.5}, T, "min_tokens: got .*expected"),
    ({"on_unsupported": "maybe"}, V, "on_unsupported: got .*expected"),
    ({"training": "fp8"}, V, "training: got 'fp8', expected one of"), ({"training": True}, T, "training: got bool"),
    ({"linear": "int8"}, T, "unknown option 'linear', .*; the closest is 'linears'"),
    ({"kep": {}}, T, "unknown option 'kep'.*the closest is 'keep'"),
    # presets
    ({"preset": "fats"}, V, "preset: got 'fats', expected one of .*'fast'.*; the closest is 'fast'"),
    ({"preset": "qk_int8_pv_bf16"}, V, "preset: got 'qk_int8_pv_bf16', expected one of"),
    ({"preset": 8}, T, "preset: got int, expected one of"),
    ({"preset": "fast", "linear": "int8"}, T, "unknown option 'linear'.*; the closest is 'linears'"),
    ({"preset": "fast", "scaling": "per_token", "skip": {}}, V, "expected a planned scaling"),
    # steps and noise levels
    ({"keep": {"first_steps": -1}}, V, "keep.first_steps: got -1, expected at least 0"),
    ({"keep": {"last_steps": 1.0}}, T, "keep.last_steps: got float"),
    ({"keep": {"first_steps": True}}, T, "keep.first_steps: got bool"),
    ({"keep": {"first": 1}}, T, "keep: got the unknown option 'first'.*the closest is 'first_steps'"),
    ({"keep": 3}, T, "keep: got int, expected a Keep or a dict"), ({"keep": [1]}, T, "keep"),
    ({"keep": {"noise": 0.2}}, T, "keep.noise: got 0.2, expected .. or .low, high."),
    ({"keep": {"noise": (0.2,)}}, T, "keep.noise: got"), ({"keep": {"noise": (0.2, "1")}}, T, "keep.noise: got"),
    ({"keep": {"noise": (False, True)}}, T, "keep.noise: got"),
    ({"keep": {"noise": (0.5, 0.5)}}, V, "keep.noise: got .0.5, 0.5., .*low < high"),
    ({"keep": {"noise": (-0.1, 0.5)}}, V, "keep.noise: got"), ({"keep": {"noise": (0.5, 1.1)}}, V, "keep.noise: got"),
    ({"keep": {"noise": (0, math.nan)}}, V, "keep.noise: got"),
    # rules of layers
    ({"layers": "unet"}, T, "layers: got str, expected a dict"), ({"layers": [3]}, T, "layers: got"),
    ({"layers": {1: {"recipe": "16bit"}}}, T, "layers: got .*layer pattern"), ({"layers": [["a"]]}, T, "layers: got"),
    ({"layers": ("a", "per_token")}, T, "layers: got a, expected a dict"),
    ({"layers": {"a": "per_token"}}, T, "layers..a..: got .*expected a dict with some of"),
    ({"layers": [{"pattern": 3, "recipe": "16bit"}]}, T, "layers: got"), (rule(), T, "layers..a..: got"),
    ({"layers": [("a", "b", "c")]}, T, "layers: got"), (rule(recipe=3), T, "layers..a..: recipe: got int"),
    (rule(scalin="per_token"), T, "unknown option 'scalin'.*the closest is 'scaling'"),
    (rule(scaling="exact"), V, "layers..a..: scaling: got 'exact', expected one of"),
    (rule(scaling="delayed"), V, "one rule plans all layers"),
    (rule(recipe="qk_int4"), V, "recipe: got 'qk_int4', expected one of"),
    (rule(keep_noise=0.2), T, "layers..a..: keep_noise: got 0.2"),
    (rule(keep_noise=(0.5, 0.2)), V, "layers..a..: keep_noise: got"),
    ({"keep": {"noise": (0, 0.1)}, "layers": {"a": {"keep_noise": (0, 0.2)}, "b": {"keep_noise": (0, 0.3)}}}, V,
     "layers: got 3 different ranges of keep_noise, that of keep included, expected at most 2"),
    # skipping
    ({"skip": {"limits": 0.1}}, T, "the closest is 'limit'"), ({"skip": {"limit": 0.0}}, V, "0 < limit < 1"),
    ({"skip": {"limit": 1.0}}, V, "0 < limit < 1"), ({"skip": {"every": 0}}, V, "at least 1"),
    ({"skip": {"every": 2**30}}, V, "at most"), ({"skip": {"first_steps": -1}}, V, "at least 0"),
    ({"skip": "temporal"}, T, "skip: got str"), ({"scaling": "per_token", "skip": {}}, V, "planned scaling"),
    ({"recipe": "qk_fp8_pv_fp8", "skip": {}}, V, "skip: got a Skip with recipe 'qk_fp8_pv_fp8', expected None"),
    (rule(skip_limit=0.1), V, "without skip"),
    *(({"skip": {"noise": noise}}, V, "skip.noise: got .*ascending")
      for noise in ([0.5, 0.25], [0.25, 0.25], [0.0, 0.5], [0.5, 1], [0.1, 0.2, 0.3, 0.4], [0.1] * 10**4)),
    *(({"skip": {"noise": noise}}, T, "skip.noise") for noise in (0.5, ["0.5"], [True], [[0.5]])),
    *(({"skip": {"noise": (0.25, 0.5)}} | rule(skip_limit=limit), V, f"skip_limit: got {words}")
      for limit, words in ((1.0, "1.0"), (-1e-9, "-1e-09"), (math.nan, "nan"), ([], "0 limits"),
                           ([0.1, 0.2], "2 limits, expected one, or one for"), ([0.1] * 10**4, "10000 limits"))),
    *(({"skip": {"noise": (0.25, 0.5)}} | rule(skip_limit=limit), T, "skip_limit")
      for limit in ("0.1", True, [0.1, [0.1], 0.1])),
    # mixed precision
    ({"mixed": "nvfp4"}, T, "mixed: got str"), ({"mixed": {"format": "nvfp4"}}, T, r"unknown options \['format'\]"),
    ({"mixed": {"budget": 2}}, V, "budget: got 2"), ({"mixed": {"keep_blocks": 1}}, T, "keep_blocks: got int"),
    ({"recipe": "mixed", "rotation": "hadamard"}, V, "rotation: got 'hadamard' with recipe .mixed."),
    ({"recipe": "mixed", "training": "int8"}, V, "training: got 'int8' with recipe .mixed."),
    ({"recipe": "mixed", "skip": {}}, V, "skip: got Skip.* with recipe .mixed."),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_options_that_make_no_sense_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        sp.SageAttnProcessor(**options)


@pytest.mark.parametrize(
    ("kind", "wrong", "closest"),
    [
        (sp.Keep, "first_step", "first_steps"), (sp.Skip, "limits", "limit"), (sp.Scaling, "margn", "margin"),
        (sp.Linears, "min_feature", "min_features"), (sp.LayerRule, "recip", "recipe"),
        (sp.SageConfig, "layer", "layers"),
    ],
)  # fmt: skip
def test_an_unknown_option_of_a_group_names_the_closest(kind, wrong, closest):
    with pytest.raises(TypeError, match=f"{kind.__name__}: got the unknown option '{wrong}'.*closest is '{closest}'"):
        kind(**{wrong: 1})


def test_a_preset_is_the_only_argument_without_a_name():
    with pytest.raises(TypeError, match="multiple values for argument 'preset'"):
        sp.SageAttnProcessor("fast", preset="small")
    with pytest.raises(TypeError, match="positional"):
        sp.SageAttnProcessor("fast", "int8")


def test_a_method_takes_options_alone_and_they_do_not_change():
    pipe = diffusers.DDPMPipeline(MODELS["unet_unconditional"]()[0], diffusers.DDIMScheduler())
    for wrong in (AttnProcessor2_0(), "int8", None):
        with pytest.raises(TypeError, match="expected sage_processors.SageAttnProcessor"):
            pipe.set_attn_processor(wrong)
    large = sp.Scaling("timestep", margin=10**30)  # an int that no tensor of ints holds
    sp.apply(pipe.unet, sp.SageAttnProcessor(scaling=large)).remove()
    with pytest.raises(AttributeError):
        sp.SageAttnProcessor().recipe = "other"
