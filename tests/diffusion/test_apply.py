"""The swap on real pipelines and models: one line in, one line out, and a report of what really ran."""

from __future__ import annotations

import diffusers
import pytest
import torch
import torch.nn.functional as functional

import sage_processors as sp
from sage_processors.diffusion.calls import sage_class
from sage_processors.diffusion.host.discovery import attention_modules
from tests.diffusion.calls.test_processors import SDPA, sqnr_db
from tests.support.tiny_models import MODELS


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)


def processors_of(model):
    return {name: module.processor for name, module in attention_modules(model)}


def test_P08_apply_again_replaces_the_options_and_remove_gives_the_originals_back():
    model, inputs = MODELS["flux"]()
    original = processors_of(model)
    first = sp.apply(model, EVERYTHING)
    second = sp.apply(model, sp.SageAttnProcessor(min_tokens=1, scaling="per_head"))
    assert sp.handle_of(model) is second and len(model._forward_pre_hooks) == 2
    with torch.no_grad():
        model(**inputs)
    assert {row["scaling"] for row in second.report().rows} == {"per_head"} and first.report().calls == 0
    first.remove()  # has nothing left to remove
    assert all(sage_class.is_sage(p) for p in processors_of(model).values())
    second.remove()
    assert all(p is original[name] for name, p in processors_of(model).items())


def test_P04_report_shows_what_was_replaced_and_refresh_swaps_it():
    model, inputs = MODELS["sd3"]()
    stock_classes = {name: type(p).__name__ for name, p in processors_of(model).items()}
    with torch.no_grad():
        stock = model(**inputs).sample
        with sp.apply(model, EVERYTHING) as handle:
            model.fuse_qkv_projections()
            report = handle.report()
            assert {row["status"] for row in report.rows} == {"replaced"} and "FusedJoint" in report.rows[0]["note"]
            handle.refresh()
            assert sqnr_db(model(**inputs).sample, stock) > 30
            report = handle.report()
            assert all(row["status"] == "active" and row["calls"] == 1 for row in report.rows), str(report)
            assert {row["processor"] for row in report.rows} == {"SageFusedJointAttnProcessor2_0"}
        assert {type(p).__name__ for p in processors_of(model).values()} == {"FusedJointAttnProcessor2_0"}
        model.unfuse_qkv_projections()  # puts back what was there when it fused: ours, retired by now
        assert torch.equal(model(**inputs).sample, stock)
    assert set(stock_classes.values()) == {"JointAttnProcessor2_0"}


def test_P03_processors_made_anew_by_diffusers_are_healed():
    model, inputs = MODELS["unet_sd15"]()
    original = processors_of(model)
    with sp.apply(model, EVERYTHING) as handle, torch.no_grad():
        model.set_attn_processor(
            {name: type(p)() for name, p in model.attn_processors.items()}
        )  # as unload_ip_adapter does
        model(**inputs)
        assert {row["status"] for row in handle.report().rows} == {"replaced"}
        handle.refresh()
        model(**inputs)
        assert all(row["status"] == "active" and row["calls"] == 1 for row in handle.report().rows)
        model.set_attn_processor({name: type(p)() for name, p in model.attn_processors.items()})
    assert all(p is original[name] for name, p in processors_of(model).items())


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


def test_P05_one_processor_object_shared_by_all_layers():
    from diffusers.models.attention_processor import AttnProcessor2_0

    model, inputs = MODELS["unet_sd15"]()
    shared = AttnProcessor2_0()
    model.set_attn_processor(shared)
    with sp.apply(model, EVERYTHING) as handle, torch.no_grad():
        model(**inputs)
        assert len({id(p) for p in processors_of(model).values()}) == len(processors_of(model))
        assert all(row["calls"] == 1 for row in handle.report().rows)
    assert all(p is shared for p in processors_of(model).values())


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
    with torch.no_grad():
        model(**inputs)
    assert sp.handle_of(model).report().calls == len(original) == len(kept)
    assert all(sage_class.is_sage(p) for p in kept.values())
    sp.handle_of(model).remove()
    assert all(p is original[name] for name, p in processors_of(model).items())
    with pytest.raises(TypeError, match="sage_processors.apply"):
        sp.processors_for(MODELS["z_image"]()[0])


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ((3,), TypeError, "target: got int"),
        ((torch.nn.Linear(2, 2),), ValueError, "no attention processor"),
        ((None, None), TypeError, "target: got NoneType"),
    ],
)
def test_apply_bad_target(arguments, error, match):
    with pytest.raises(error, match=match):
        sp.apply(*arguments)


def test_P35_a_target_without_attention_names_its_components():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"model: got no attention processor .* in the model \(Linear\)"):
        sp.apply(model)
    model, _ = MODELS["unet_sd15"]()
    model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    pipe = type("P", (), {"components": {"unet": model}, "scheduler": None})()
    with pytest.raises(ValueError, match=r"pipe: got no attention processor .* in unet \(UNet2DConditionModel\)"):
        sp.apply(pipe)


def test_apply_bad_options():
    from diffusers.models.attention_processor import AttnProcessor2_0

    pipe = diffusers.DDPMPipeline(MODELS["unet_unconditional"]()[0], diffusers.DDIMScheduler())
    for wrong in (AttnProcessor2_0(), "int8", None):
        with pytest.raises(TypeError, match="expected sage_processors.SageAttnProcessor"):
            pipe.set_attn_processor(wrong)
    for name, value, error in (
        ("recipe", "int4", ValueError),
        ("recipe", None, TypeError),
        ("scaling", "sometimes", ValueError),
        ("scaling", {"margin": 0}, ValueError),
        ("scaling", {"margin": "1"}, TypeError),
        ("scaling", {"margin": float("nan")}, ValueError),
        ("graphs", "on", ValueError),
        ("min_tokens", -1, ValueError),
        ("min_tokens", 1.5, TypeError),
        ("on_unsupported", "maybe", ValueError),
    ):
        with pytest.raises(error, match=f"{name}.*: got .*expected"):
            sp.SageAttnProcessor(**{name: value})
    with pytest.raises(TypeError, match="unknown option 'linear', .*; the closest is 'linears'"):
        sp.SageAttnProcessor(linear="int8")
    sp.apply(
        pipe.unet, sp.SageAttnProcessor(scaling=sp.Scaling("timestep", margin=10**30))
    ).remove()  # an int that no tensor of ints holds
    with pytest.raises(AttributeError):
        sp.SageAttnProcessor().recipe = "other"


def test_P02_saving_loading_and_state_dict_are_untouched(tmp_path):
    model, inputs = MODELS["flux"]()
    keys = model.state_dict().keys()
    with sp.apply(model, EVERYTHING), torch.no_grad():
        assert model.state_dict().keys() == keys
        model.save_pretrained(tmp_path)
        loaded = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).sample, model(**inputs).sample)  # other memory, other vector lanes


@pytest.mark.parametrize("scaling", ["timestep", "dynamic"])
def test_swap_inside_inference_mode_serves_outside_of_it(scaling):
    model, inputs = MODELS["flux"]()
    with torch.inference_mode():
        handle = sp.apply(model, sp.SageAttnProcessor(min_tokens=1, scaling=scaling))
        model(**inputs)
    with torch.no_grad():
        model(**inputs)
    assert handle.report().calls == 4


def test_P04_layer_skip_hook_of_diffusers_knows_our_classes():
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    model, inputs = MODELS["cogview4"]()
    skip = LayerSkipConfig(indices=[0], skip_attention=False, skip_attention_scores=True, skip_ff=False)
    with torch.no_grad():
        with sp.apply(model, EVERYTHING) as handle:
            apply_layer_skip(model, skip)
            perturbed = model(**inputs).sample
            assert handle.report().fallbacks == {"function_mode": 1}
        assert torch.equal(perturbed, model(**inputs).sample)


def test_compiled_wrapper_of_a_model_is_looked_through():
    model, _ = MODELS["flux"]()
    with sp.apply(torch.compile(model, backend="eager"), EVERYTHING):
        assert all(sage_class.is_sage(p) for p in processors_of(model).values())


def test_package_names_are_stable_whatever_is_imported():
    import sage_processors.calibration as by_import
    from sage_processors.diffusion.handle import apply

    assert sp.apply is apply and sp.calibration is by_import and callable(sp.calibrate)
    assert {"apply", "SageAttnProcessor", "processors_for"} <= set(dir(sp))
    assert SDPA is torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(AttributeError, match="nothing_here"):
        sp.nothing_here  # noqa: B018
