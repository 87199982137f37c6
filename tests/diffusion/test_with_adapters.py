"""INT8 attention with adapters and changed projections: cases X21 to X32, each of the state that cases.json says."""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch

import sage_processors as sp
from tests.diffusion.calls.test_processors import forward
from tests.diffusion.test_lifecycle_adapters import flux_with_adapter, sd_with_adapter
from tests.support.combinations import shows  # noqa: F401 (pytest finds fixtures here)
from tests.support.placing import placed
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import sd_controlnet_pipe, sd_pipe


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)


@pytest.fixture(scope="module")
def lora():
    """(weights of a LoRA for the tiny FLUX, a function that makes the model, its inputs)."""
    peft = pytest.importorskip("peft")
    model, inputs = MODELS["flux"]()
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    model.add_adapter(config)
    return peft.get_peft_model_state_dict(model), lambda: MODELS["flux"]()[0], inputs


def with_and_without(make, inputs, change, shows):  # noqa: F811
    """`change` done to a stock model, and to one that is swapped already."""
    stock, model = make(), make()
    change(stock)
    with sp.apply(model, EVERYTHING) as handle:
        change(model)
        out = forward(model, inputs)
        shows(handle.report(), out, forward(stock, inputs))
    assert not torch.equal(forward(make(), inputs), forward(stock, inputs)), "nothing was changed"


def test_X21_lora_loaded_before_and_after_the_swap(lora, shows):  # noqa: F811
    weights, make, inputs = lora
    with_and_without(make, inputs, lambda model: model.load_lora_adapter(weights, prefix=None), shows)
    model, stock = make(), make()
    for each in (model, stock):
        each.load_lora_adapter(weights, prefix=None)
    with sp.apply(model, EVERYTHING) as handle:
        out = forward(model, inputs)
        shows(handle.report(), out, forward(stock, inputs))


def test_X22_lora_with_a_scale_and_switched_off(lora, shows):  # noqa: F811
    weights, make, inputs = lora

    def half(model):
        model.load_lora_adapter(weights, prefix=None, adapter_name="a")
        model.set_adapters("a", weights=0.5)

    with_and_without(make, inputs, half, shows)
    model, stock = make(), make()
    with sp.apply(model, EVERYTHING) as handle:
        half(model)
        model.disable_lora()
        out = forward(model, inputs)
        shows(handle.report(), out, forward(stock, inputs))


def test_X23_lora_fused_and_unfused(lora, shows):  # noqa: F811
    weights, make, inputs = lora

    def fused(model):
        model.load_lora_adapter(weights, prefix=None)
        model.fuse_lora()

    with_and_without(make, inputs, fused, shows)


def test_X24_lora_that_is_swapped_for_another_in_place(lora, shows):  # noqa: F811
    weights, make, inputs = lora
    others = {name: -2 * weight for name, weight in weights.items()}

    def hot(model):
        model.load_lora_adapter(weights, prefix=None, adapter_name="a")
        forward(model, inputs)
        model.load_lora_adapter(others, prefix=None, adapter_name="a", hotswap=True)

    with_and_without(make, inputs, hot, shows)


def drawn_with_and_without(make, shows):  # noqa: F811
    """An IP-Adapter loaded in a stock pipeline, and in one that is swapped already: nobody calls refresh."""
    pipe, _, _, run_with_image, load = make()
    load()
    stock = run_with_image()
    pipe, _, run, run_with_image, load = make()
    with sp.apply(pipe, EVERYTHING) as handle:
        run()
        load()
        out = run_with_image()
        shows(handle.report(), out, stock)


def test_X25_ip_adapter_in_a_unet(shows):  # noqa: F811
    drawn_with_and_without(sd_with_adapter, shows)


def test_X26_ip_adapter_in_flux(shows):  # noqa: F811
    drawn_with_and_without(flux_with_adapter, shows)


@pytest.mark.slow("Dynamo traces blocks twice; the eager one swaps at the same place")
def test_X26_ip_adapter_in_a_compiled_model(shows):  # noqa: F811
    torch._dynamo.reset()
    pipe, _, run, run_with_image, load = flux_with_adapter()
    load()
    stock = run_with_image()
    pipe, model, run, run_with_image, load = flux_with_adapter()
    with sp.apply(pipe, EVERYTHING) as handle:
        model.compile_repeated_blocks(backend="eager", fullgraph=True)
        run()
        load()
        out = run_with_image()
        shows(handle.report(), out, stock)
    torch._dynamo.reset()


def test_X27_ip_adapter_in_sd3(shows):  # noqa: F811
    model, inputs = MODELS["sd3"]()
    made = diffusers.models.attention_processor.SD3IPAdapterJointAttnProcessor2_0
    inner = model.inner_dim
    torch.manual_seed(3)
    weights = {}
    for i in range(len(model.transformer_blocks)):
        processor = made(hidden_size=inner, ip_hidden_states_dim=24, head_dim=16, timesteps_emb_dim=32)
        weights |= {f"{i}.{name}": torch.randn(p.shape) * 0.2 for name, p in processor.state_dict().items()}
    tokens = placed(torch.randn(1, 5, 24))
    inputs = inputs | {"joint_attention_kwargs": {"ip_hidden_states": tokens, "temb": placed(torch.randn(1, 32))}}

    def load(model):
        model.set_attn_processor(
            {
                name: placed(made(hidden_size=inner, ip_hidden_states_dim=24, head_dim=16, timesteps_emb_dim=32))
                for name in model.attn_processors
            }
        )
        for i, processor in enumerate(model.attn_processors.values()):
            own = {name.split(".", 1)[1]: w for name, w in weights.items() if name.split(".")[0] == str(i)}
            processor.load_state_dict(own)
        model.image_proj = torch.nn.Identity()  # what diffusers' loader leaves last

    stock = copy.deepcopy(model)
    load(stock)
    with sp.apply(model, EVERYTHING) as handle:
        forward(model, inputs | {"joint_attention_kwargs": None})
        load(model)
        out = forward(model, inputs)
        shows(handle.report(), out, forward(stock, inputs))


@pytest.mark.parametrize("name", ["unet_sd15", "sd3", "flux"])
def test_X28_fused_projections(name, shows):  # noqa: F811
    model, inputs = MODELS[name]()
    stock = forward(model, inputs)
    with sp.apply(model, EVERYTHING) as handle:
        forward(model, inputs)
        model.fuse_qkv_projections()
        out = forward(model, inputs)
        shows(handle.report(), out, stock)
        model.unfuse_qkv_projections()
        shows(handle.report(), forward(model, inputs), stock)
        assert {row["status"] for row in handle.report().rows} == {"active"}


def test_X29_free_u(shows):  # noqa: F811
    def drawn(swap):
        pipe, run = sd_pipe()
        plain = run()
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
        handle = sp.apply(pipe, EVERYTHING) if swap else None
        out = run()
        assert not torch.allclose(out, plain, rtol=1e-2)
        return handle, out

    (handle, out), (_, stock) = drawn(True), drawn(False)
    shows(handle.report(), out, stock)


def test_X30_controlnet(shows):  # noqa: F811
    pipe, run = sd_controlnet_pipe()
    stock = run()
    with sp.apply(pipe, EVERYTHING) as handle:
        out = run()
        report = handle.report()
        assert all(row["calls"] for row in report.rows) and {row["layer"].split(".")[0] for row in report.rows} == {
            "unet", "controlnet"
        }  # fmt: skip
        shows(report, out, stock)


def test_X31_t2i_adapter(shows):  # noqa: F811
    model, inputs = MODELS["unet_sd15"]()
    torch.manual_seed(5)
    residuals = placed([torch.randn(1, 16, 8, 8), torch.randn(1, 32, 4, 4)])
    with_adapter = lambda: inputs | {"down_intrablock_additional_residuals": [x.clone() for x in residuals]}  # noqa: E731
    stock = forward(model, with_adapter())
    assert not torch.equal(stock, forward(model, inputs))
    with sp.apply(model, EVERYTHING) as handle:
        out = forward(model, with_adapter())
        shows(handle.report(), out, stock)


def test_X32_processors_that_a_user_puts_there(shows):  # noqa: F811
    """They are the user's later word: not swapped, counted, until refresh()."""
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    with sp.apply(model, EVERYTHING) as handle:
        model.set_attn_processor(diffusers.models.transformers.transformer_flux.FluxAttnProcessor())
        out = forward(model, inputs)
        shows(handle.report(), out, stock, exact={"replaced"})
