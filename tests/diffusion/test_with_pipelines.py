"""INT8 attention with pipelines of several models, quantised linear layers and training: cases X45 to X62."""

from __future__ import annotations

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_processors as sp
from sage_kernels.testing import relative_l2, sqnr_db
from tests.diffusion.calls.test_processors import forward
from tests.support.combinations import CLOSE_DB, shows  # noqa: F401 (pytest finds fixtures here)
from tests.support.placing import device, placed
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import sd_pipe


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)


# --- pipelines ---


def wan_with_two_experts():
    """A Wan 2.2 pipeline whose second expert draws below 0.875 of the noise, and its run."""
    pipe = diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=MODELS["wan_t2v"]()[0], transformer_2=MODELS["wan_t2v"]()[0], boundary_ratio=0.875,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    words = placed(torch.randn(1, 8, pipe.transformer.config.text_dim, generator=torch.Generator().manual_seed(1)))

    def run():
        return pipe(
            prompt_embeds=words, negative_prompt_embeds=-words, height=64, width=64, num_frames=5,
            num_inference_steps=4, generator=torch.Generator().manual_seed(0), output_type="latent",
        ).frames  # fmt: skip

    return pipe, run


def test_X45_two_experts(shows):  # noqa: F811
    pipe, run = wan_with_two_experts()
    stock = run()
    with sp.apply(pipe, EVERYTHING) as handle:
        out = run()
        report = handle.report()
        calls = {part: sum(r["calls"] for r in report.rows if r["layer"].startswith(f"{part}.")) for part in (
            "transformer", "transformer_2"
        )}  # fmt: skip
        assert all(calls.values()) and calls["transformer_2"] > calls["transformer"]
        assert all(
            row["dynamic_calls"] < row["calls"] for row in report.rows if row["layer"].startswith("transformer_2")
        )
        shows(report, out, stock)


def test_X46_from_pipe_and_a_second_pipeline_of_the_same_model(shows):  # noqa: F811
    pipe, _ = sd_pipe()

    def run(pipe):
        embeds = placed(torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2)))
        return pipe(
            image=torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(3)), strength=0.7,
            prompt_embeds=embeds[:1], negative_prompt_embeds=embeds[1:], num_inference_steps=4,
            generator=torch.Generator().manual_seed(0), output_type="latent",
        ).images  # fmt: skip

    def other(pipe):
        made = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe, scheduler=diffusers.DDIMScheduler())
        made.set_progress_bar_config(disable=True)
        return made

    stock = run(other(pipe))
    with sp.apply(pipe, EVERYTHING) as handle:
        out = run(other(pipe))
        shows(handle.report(), out, stock)


@pytest.mark.parametrize("guider", ["ClassifierFreeGuidance", "AdaptiveProjectedGuidance", "SkipLayerGuidance"])
def test_X47_modular_pipelines_with_guiders(guider, shows):  # noqa: F811
    """The denoising loop of a modular pipeline, as it drives a guider and a model."""
    guiders = pytest.importorskip("diffusers.guiders")
    options = {"skip_layer_guidance_layers": [0]} if guider == "SkipLayerGuidance" else {}
    model, inputs = MODELS["cogview4"]()
    words = inputs["encoder_hidden_states"]

    @torch.no_grad()
    def run():
        guide = getattr(guiders, guider)(**options)
        latents, steps = inputs["hidden_states"], torch.linspace(1000, 250, 4)
        scheduler.set_timesteps(4, device=device())
        for i, t in enumerate(scheduler.timesteps):
            guide.set_state(step=i, num_inference_steps=4, timestep=steps[i])
            state = guide.prepare_inputs({"encoder_hidden_states": (words, -words)})
            for batch in state:
                guide.prepare_models(model)
                given = inputs | {"hidden_states": latents, "timestep": t.reshape(1)}
                batch.noise_pred = model(**given | {"encoder_hidden_states": batch.encoder_hidden_states}).sample
                guide.cleanup_models(model)
            latents = scheduler.step(guide(state)[0], t, latents).prev_sample
        return latents

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    stock = run()
    with sp.apply(model, EVERYTHING) as handle:
        out = run()
        shows(handle.report(), out, stock)


# --- linear layers that others quantised ---


class Coded(nn.Linear):
    """A linear layer as bitsandbytes and SDNQ make them: a subclass with codes for a weight and its own forward."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight / scale).round().to(torch.int8), requires_grad=False)
        self.bias, self.scale = layer.bias, scale

    def forward(self, x):
        return F.linear(x, (self.weight * self.scale).to(x.dtype), self.bias)


class CodedTensor(torch.Tensor):
    """A weight as torchao makes them: a subclass of Tensor that holds codes, in an ordinary nn.Linear."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight):
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.codes = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes * weight.scale, *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(f"{func}: a weight of codes is for linear layers alone")


def of_block(model):
    """(parent, attribute, linear layer) of every linear layer of the blocks."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "transformer_blocks" in name:
            yield model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module


def replaced_by(make):
    def quantize(model):
        for parent, name, layer in of_block(model):
            if isinstance(parent, nn.ModuleList):
                parent[int(name)] = make(layer)
            else:
                setattr(parent, name, make(layer))

    return quantize


def coded_weights(model):
    for _, _, layer in of_block(model):
        layer.weight = nn.Parameter(CodedTensor(layer.weight.detach()), requires_grad=False)


def by_torchao(model):
    quantization = pytest.importorskip("torchao.quantization")
    of_blocks = lambda module, name: isinstance(module, nn.Linear) and "transformer_blocks" in name  # noqa: E731
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=of_blocks)


def by_bitsandbytes(model):
    bnb = pytest.importorskip("bitsandbytes")

    def made(layer):
        coded = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, bias=layer.bias is not None, has_fp16_weights=False
        )
        coded.load_state_dict(layer.state_dict())
        return coded

    replaced_by(made)(model)
    model.to(device())  # where it makes codes of its weights


def quantized(quantize):
    """(report, output, output with stock attention) of a model whose linear layers were quantised."""
    model, inputs = MODELS["flux"]()
    plain = forward(model, inputs)
    quantize(model)
    stock = forward(model, inputs)
    assert not torch.equal(stock, plain)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, linears=sp.Linears("int8", min_features=1))) as handle:
        out = forward(model, inputs)
        report = handle.report()
        assert not any("blocks" in row["layer"] and row["calls"] for row in report.linears.rows), "codes of codes"
        number = sum("transformer_blocks" in name for name, x in model.named_modules() if isinstance(x, nn.Linear))
        assert f"{number} linear layers are of another kind and left to it" in str(report)
    assert torch.equal(forward(model, inputs), stock)
    return report, out, stock


def test_X48_linear_layers_of_torchao(shows):  # noqa: F811
    shows(*quantized(coded_weights))


def test_X49_X50_linear_layers_of_bitsandbytes_and_sdnq(shows):  # noqa: F811
    shows(*quantized(replaced_by(Coded)))


@pytest.mark.parametrize("quantize", [by_torchao, by_bitsandbytes])
def test_linear_layers_of_the_libraries_themselves(quantize):
    report, out, stock = quantized(quantize)
    assert report.calls == 2 and not report.fallbacks and sqnr_db(out, stock) > CLOSE_DB


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_X51_linear_layers_in_8_bit_of_our_own(format, shows):  # noqa: F811
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, linears=sp.Linears(format, min_features=1))) as handle:
        out = forward(model, inputs)
        report = handle.report()
        assert report.linears.calls
        shows(report, out, stock)


# --- training ---


def gradient(model, inputs):
    parameter = model.transformer_blocks[0].attn.to_q.weight.requires_grad_(True)
    model.train()
    # by PyTorch 2.11 on an H200, its own choice, the gradient of this model in bf16 had numbers of 1e36
    with sdpa_kernel(SDPBackend.MATH):
        out = model(**inputs, return_dict=False)[0]
    (found,) = torch.autograd.grad(out.square().mean(), [parameter])
    return found


def test_X55_training_as_it_is_by_default(shows):  # noqa: F811
    model, inputs = MODELS["flux"]()
    stock = gradient(model, inputs)
    with sp.apply(model, EVERYTHING) as handle:
        out = gradient(model, inputs)
        shows(handle.report(), out, stock, exact={"training"})


def trained():
    """The tiny FLUX and its inputs. On a GPU in bf16: FlashAttention, whose gradient it is, takes 16 bit alone."""
    model, inputs = MODELS["flux"]()
    if device().type == "cpu":
        return model, inputs
    return model.bfloat16(), {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}


def test_X56_training_in_int8_on_request(shows):  # noqa: F811
    model, inputs = trained()
    stock = gradient(model, inputs)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, training="int8")) as handle:
        out = gradient(model, inputs)
        shows(handle.report(), out, stock)
    assert relative_l2(out, stock) < 0.05


def test_X57_gradient_checkpointing(shows):  # noqa: F811
    model, inputs = trained()
    stock = gradient(model, inputs)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, training="int8")) as handle:
        model.enable_gradient_checkpointing()
        out = gradient(model, inputs)
        report = handle.report()
        assert report.calls > len(report.rows), "a checkpointed layer runs twice"
        shows(report, out, stock)


def test_X58_a_gradient_asked_of_a_model_in_eval_mode(shows):  # noqa: F811
    model, inputs = MODELS["flux"]()

    def of_input():
        x = inputs["hidden_states"].clone().requires_grad_(True)
        return torch.autograd.grad(model(**inputs | {"hidden_states": x}).sample.square().mean(), [x])[0]

    stock = of_input()
    with sp.apply(model, EVERYTHING) as handle:
        out = of_input()
        shows(handle.report(), out, stock, exact={"requires_grad"})
