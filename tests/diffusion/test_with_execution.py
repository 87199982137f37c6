"""INT8 attention with ways to run, place and copy a model: cases X01 to X20, of the state in cases.json."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers import hooks

import sage_processors as sp
from tests.diffusion.calls.test_processors import flat, forward
from tests.diffusion.test_lifecycle import accelerate_offload
from tests.support.combinations import shows  # noqa: F401 (pytest finds fixtures here)
from tests.support.placing import device
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe, sd_pipe


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)


@pytest.fixture
def flux():
    """(model, inputs, what stock attention makes of them)."""
    torch._dynamo.reset()
    model, inputs = MODELS["flux"]()
    yield model, inputs, forward(model, inputs)
    torch._dynamo.reset()


def cast(inputs, dtype, device=None):
    """Inputs of a model in another floating type, on another device."""
    moved = {name: x.to(device or x.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    return {name: x.to(dtype) if getattr(x, "is_floating_point", bool)() else x for name, x in moved.items()}


def swapped(model, inputs, run=forward, before=lambda model: None):
    """(report, output) with INT8 attention; before: what is done to the model once it is swapped."""
    with sp.apply(model, EVERYTHING) as handle:
        before(model)
        out = run(model, inputs)
        return handle.report(), out


def test_X02_torch_compile_of_repeated_blocks(flux, shows):  # noqa: F811
    model, inputs, stock = flux
    before = lambda model: model.compile_repeated_blocks(backend="eager", fullgraph=True)  # noqa: E731
    shows(*swapped(model, inputs, before=before), stock)


@pytest.mark.gpu
@torch.no_grad()
def test_X03_cuda_graphs(flux, shows):  # noqa: F811
    model, inputs, _ = flux
    model, inputs = model.to("cuda", torch.bfloat16), cast(inputs, torch.bfloat16, "cuda")
    stock = forward(model, inputs).float()
    with sp.apply(model, EVERYTHING) as handle:
        for _ in range(3):  # compiles kernels and makes plans
            model(**inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(**inputs).sample
        graph.replay()
        shows(handle.report(), flat(out).float(), stock)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_X05_models_in_fp16_bf16_and_fp32(dtype, shows):  # noqa: F811
    model, inputs = MODELS["flux"]()
    model, inputs = model.to(dtype), cast(inputs, dtype)
    stock = forward(model, inputs)
    report, out = swapped(model, inputs)
    assert out.dtype == stock.dtype == dtype
    shows(report, out.float(), stock.float())


def test_X06_autocast(flux, shows):  # noqa: F811
    model, inputs, _ = flux
    with torch.autocast(device().type, dtype=torch.bfloat16):
        shows(*swapped(model, inputs), forward(model, inputs))


def test_X07_models_of_64_bits(shows):  # noqa: F811
    model, inputs = MODELS["sd3"]()
    model, inputs = model.double(), cast(inputs, torch.float64)
    shows(*swapped(model, inputs), forward(model, inputs), exact={"dtype"})


def test_X11_layerwise_casting(flux, shows):  # noqa: F811
    model, inputs, _ = flux
    model.enable_layerwise_casting(**EIGHT_BIT)
    shows(*swapped(model, inputs), forward(model, inputs))


EIGHT_BIT = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.float32}
HOOKS = {  # of one layer: each break of a graph takes Dynamo seconds
    "cast": lambda layer: hooks.apply_layerwise_casting(layer, **EIGHT_BIT),
    "sequential": lambda layer: accelerate_offload(layer, device()),
}


@pytest.mark.slow("each break of a graph takes Dynamo seconds")
@pytest.mark.parametrize("linears", ["none", "int8"])
@pytest.mark.parametrize("hooked", HOOKS)
@torch.no_grad()
def test_X99_compiled_blocks_whose_layers_have_hooks(hooked, linears, flux, shows):  # noqa: F811
    """Hooks break the graph inside of a processor. Dynamo keeps the pieces with its code, which stock's shares."""
    model, inputs, _ = flux
    HOOKS[hooked](model.transformer_blocks[0].attn.to_q)
    stock = forward(model, inputs)
    model.compile_repeated_blocks(backend="eager")
    assert torch.equal(forward(model, inputs), stock)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, linears=sp.Linears(linears, min_features=0))) as handle:
        out = forward(model, inputs)
        for _ in range(2):
            assert torch.equal(forward(model, inputs), out)
        waiting = model.transformer_blocks[0].attn.processor._sage.waiting
        assert not waiting._enclosure.modules, "Dynamo compiles what is called there, so no result waits"
        report = handle.report()
    assert torch.equal(forward(model, inputs), stock)
    shows(report, out, stock)


def test_X12_attention_slicing(shows):  # noqa: F811
    pipe, run = sd_pipe()
    with sp.apply(pipe, EVERYTHING) as handle:
        pipe.enable_attention_slicing()
        handle.refresh()
        out = run()
        report = handle.report()
    pipe.enable_attention_slicing()
    shows(report, out, run())


def test_X14_threads_with_pipelines_that_share_a_model(shows):  # noqa: F811
    pipe, run = flux_pipe()
    stock = run()
    with sp.apply(pipe, sp.SageAttnProcessor(min_tokens=1, scaling="dynamic")) as handle:
        alone = run()
        pipes = [flux_pipe() for _ in range(2)]
        for other, _ in pipes:
            other.transformer = pipe.transformer
        with ThreadPoolExecutor(2) as pool:
            pictures = list(pool.map(lambda both: both[1](), pipes))
        assert all(torch.equal(picture, alone) for picture in pictures)
        shows(handle.report(), pictures[0], stock)


def test_X15_runs_that_are_interrupted(shows):  # noqa: F811
    pipe, run = flux_pipe()
    stock = run(steps=3)
    with sp.apply(pipe, EVERYTHING) as handle:
        undisturbed = run(steps=3)
        step = pipe.scheduler.step

        def interrupting(*args, **options):
            pipe._interrupt = True
            return step(*args, **options)

        pipe.scheduler.step = interrupting  # as a user's callback_on_step_end does: the other steps are left out
        run(steps=3)
        del pipe.scheduler.step
        out = run(steps=3)
        assert torch.equal(out, undisturbed)
        report = handle.report()
        assert {row["calls"] for row in report.rows} == {3 + 1 + 3}
        shows(report, out, stock)
