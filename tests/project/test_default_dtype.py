"""torch.set_default_dtype and torch.set_default_device are the user's: nothing of ours has another dtype or other
numbers because of them, or lies elsewhere."""

from __future__ import annotations

import ast
import copy

import pytest
import torch

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import make_qkv
from sage_processors.diffusion.steps.noise_level import Run, TimestepReader
from tests.diffusion.calls.test_processors import forward
from tests.support.repository import files
from tests.support.tiny_language_models import MODELS as LANGUAGE
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe


DTYPES = (torch.bfloat16, torch.float16, torch.float64)
# what makes a tensor of numbers that say nothing of a dtype, or Python's floats
MAKERS = {
    *("empty", "zeros", "ones", "full", "rand", "randn", "normal", "linspace", "logspace", "eye", "tensor", "complex"),
    *("as_tensor", "asarray", "scalar_tensor", "empty_strided", "hann_window", "hamming_window", "blackman_window"),
}
WHOLE = {"arange", "range"}  # of ints unless there is a fraction
DRAWN = {"randint", "randperm"}  # of ints


def is_fraction(node) -> bool:
    """Whether an argument is seen to be no int."""
    return any(
        (isinstance(x, ast.Constant) and isinstance(x.value, float)) or isinstance(x, ast.Div) for x in ast.walk(node)
    )


def is_number(node) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    is_constant = isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.inf", "torch.nan", "math.inf")
    is_choice = isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.where" and chooses_numbers(node)
    return is_constant or is_choice or (isinstance(node, ast.Constant) and isinstance(node.value, float))


def chooses_numbers(call) -> bool:
    return len(call.args) == 3 and all(map(is_number, call.args[1:]))


def left_to_the_default(source: str) -> list[str]:
    """The calls whose result has the default dtype, or is made on the default device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
            continue
        name = ast.unparse(node.func).removeprefix("torch.")
        names = {keyword.arg for keyword in node.keywords}
        if name in MAKERS or (name in WHOLE and any(map(is_fraction, node.args))):
            bare = not names & {"dtype", None, "out"}
        else:
            bare = name == "where" and chooses_numbers(node)
        if name in MAKERS | WHOLE | DRAWN and not names & {"device", None, "out"}:
            bare = True
        if bare:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "source, is_bare",
    {
        "torch.zeros(3)": True,
        "torch.zeros(3, dtype=d)": True,
        "torch.zeros(3, device=d)": True,
        "torch.zeros(3, dtype=d, device=e)": False,
        "torch.randperm(3)": True,
        "torch.zeros(3, **like)": False,
        "torch.arange(n, device=d)": False,
        "torch.arange(n / 2, device=d)": True,
        "torch.arange(0, 1, 0.1, device=d)": True,
        "torch.where(x, 1.0, -torch.inf)": True,
        "torch.where(x, 2.0, torch.where(x, 1.0, 0.5))": True,
        "torch.where(x, y, 1.0)": False,
        "x.new_zeros(3)": False,
    }.items(),
)
def test_what_is_looked_for_is_found(source, is_bare):
    assert bool(left_to_the_default(source)) == is_bare


def test_no_tensor_is_made_with_the_default_dtype_or_device():
    sources = files("sage_processors", "kernels/sage_kernels")
    found = {str(path): calls for path in sources if (calls := left_to_the_default(path.read_text("utf-8")))}
    assert not found, found


@pytest.fixture(params=DTYPES, ids=str)
def under(request):
    """Runs a function under another default dtype."""

    def run(function, *args):
        torch.set_default_dtype(request.param)
        try:
            return function(*args)
        finally:
            torch.set_default_dtype(torch.float32)

    return run


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, (tuple, list)):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


def ran(model, inputs, config, forwards=3):
    """What forwards of a swapped model give, steps of planned scales in between, and what the report says."""
    model = copy.deepcopy(model)
    timestep = next((x for x in ("timestep", "timesteps", "t") if x in inputs), None)
    made = []
    with sp.apply(model, config) as handle:
        for step in range(forwards):
            later = {} if timestep is None else {timestep: inputs[timestep] * (1 - 0.1 * step)}
            made.append(forward(model, inputs | later))
        report = handle.report()
    return made, report.calls, report.fallbacks, [row["dynamic_calls"] for row in report.rows]


SCALINGS = {
    **{name: {"scaling": name} for name in ("timestep", "delayed", "timestep_adaptive", "per_block", "per_head")},
    **{name: {"recipe": name} for name in ("qk_int8_pv_fp8", "qk_int8_pv_int8", "qk_fp8_pv_fp8")},
    "int_flash_full": {"recipe": "int_flash_full", "scaling": "per_token"},
    **{f"mixed {base}": {"recipe": "mixed", "mixed": {"base": base}} for base in ("int4", "mxfp4", "nvfp4")},
    "rotated": {"rotation": "hadamard"},
    "linears": {"linears": {"format": "int8", "min_features": 0}},
    "fp8 linears": {"linears": {"format": "fp8", "min_features": 0}},
}


@pytest.mark.slow("whole models twice; the test of sources finds what makes such tensors")
@pytest.mark.parametrize("options", SCALINGS.values(), ids=SCALINGS)
def test_a_denoiser_runs_as_ever(options, under):
    model, inputs = MODELS["flux"]()
    config = sp.SageAttnProcessor(min_tokens=0, **options)
    expected = ran(model, inputs, config)
    assert expected[1] and not expected[2]
    same(under(ran, model, inputs, config), expected)


PIPELINES = {
    "planned": {},
    "static": {"scaling": "static"},
    "sigma_power": {"scaling": "sigma_power"},
    "auto": {"rotation": "auto"},
    "skip": {"skip": {}},
    "windows": {"keep": {"noise": (0.0, 0.4), "first_steps": 1}},
}


@pytest.mark.slow("whole models twice; the test of sources finds what makes such tensors")
@pytest.mark.parametrize("options", PIPELINES.values(), ids=PIPELINES)
def test_a_pipeline_runs_as_ever(options, under):
    def drawn(pipe, draw):
        with sp.apply(pipe, sp.SageAttnProcessor(min_tokens=0, **options)) as handle:
            made = [draw(steps=6), draw(steps=6, seed=1)]
            handle.freeze_scales()
            made.append(draw(steps=6))
            report = handle.report()
            return made, report.calls, report.fallbacks, [row["dense"] for row in report.rows]

    same(under(drawn, *flux_pipe()), drawn(*flux_pipe()))


@pytest.mark.slow("whole models twice; the test of sources finds what makes such tensors")
def test_a_decoder_runs_as_ever(under):
    model, inputs = LANGUAGE["llama"]()

    def generated():
        made = []
        for linears in (False, True):
            own = copy.deepcopy(model)
            own.set_attn_implementation("sage_int8")
            if linears:
                sp.quantize_linears(own, min_features=0)
            mask = torch.ones_like(inputs["input_ids"])
            mask[0, :5] = 0
            for cache in (sp.Int8KVCache(own.config), sp.Int8KVCache(own.config, max_cache_len=64)):
                given = inputs | {"attention_mask": mask, "past_key_values": cache}
                made.append(own.generate(**given, max_new_tokens=8, do_sample=False, output_logits=True, **LOGITS))
        return [(x.sequences, list(x.logits)) for x in made]

    sp.register_transformers()
    same(under(generated), generated())


LOGITS = {"return_dict_in_generate": True}


def _masked(recipe="qk_int8_pv_bf16", **options):
    q, k, v = (x.to(torch.float16) for x in make_qkv("outlier_channels", 2, 70, 90, 4, 2, 32, seed=0))
    return sage_kernels.sage_attention(q, k, v, recipe=recipe, **options)


def _planned():
    q, k, v = (x.to(torch.float16) for x in make_qkv("normal", 1, 70, 90, 2, 2, 32, seed=0))
    state = sage_kernels.new_head_state(2, 32, torch.device("cpu"))
    made = [sage_kernels.sage_attention(q * (1 + i), k, v, state=state) for i in range(3)]
    return made, list(state)


def _trained():
    q, k, v = (x.requires_grad_() for x in make_qkv("normal", 1, 70, 90, 2, 2, 32, seed=0))
    out = sage_kernels.differentiable_attention(q, k, v, attn_mask=torch.arange(90)[None, None, None] < 80)
    out.square().sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def _varlen():
    q, k, v = (x[0].to(torch.float16) for x in make_qkv("normal", 1, 90, 90, 4, 2, 32, seed=0))
    ends = torch.tensor([0, 40, 90], dtype=torch.int32)
    return sage_kernels.sage_attention_varlen(q, k, v, ends, ends, 50, 50, return_lse=True)


def _linear():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 96, generator=generator, dtype=torch.float32) for n in (40, 64))
    made = []
    for format in ("int8", "fp8"):
        rows = sage_kernels.quantize_weight(weight, format=format)
        made += [rows, sage_kernels.quantized_linear(sage_kernels.quantize_activation(x, format=format), rows, None)]
    return [*made, sage_kernels.weight_only_linear(x, sage_kernels.quantize_weight(weight), None)]


OPS = {
    "bool mask": lambda: _masked(attn_mask=(torch.arange(90) < 80)[None, None, None], return_lse=True),
    "mask of rows": lambda: _masked(attn_mask=torch.eye(70, 90, dtype=torch.float32)[None, None]),
    "causal": lambda: _masked(causal="top_left", scaling="per_block"),
    "sinks": lambda: _masked(sinks=torch.linspace(-1, 1, 4, dtype=torch.float32)),
    "int8 values": lambda: _masked("qk_int8_pv_int8", rotation="hadamard"),
    "fp8 values": lambda: _masked("qk_int8_pv_fp8", attn_mask=(torch.arange(90) < 80)[None, None, None]),
    "planned": _planned,
    "trained": _trained,
    "varlen": _varlen,
    "linear": _linear,
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_an_op_gives_what_it_gives(op, under):
    same(under(op), op())


class Scheduler:
    """Of somebody else: its timesteps are a list."""

    config = None

    def __init__(self, timesteps):
        self.timesteps = timesteps


@pytest.mark.parametrize("kind", ["list", "tensor"])
@pytest.mark.parametrize("steps", [[999, 998, 997, 2, 1], [999.5, 999.25, 998.0, 2.5, 1.0]], ids=["int", "float"])
def test_a_step_is_found_by_its_timestep(kind, steps, under):
    timesteps = torch.tensor(steps) if kind == "tensor" else steps

    def levels():
        told = []

        class Listener:
            def begin_run(self, level):
                told.append(float(level))

            def advance(self, finished, level):
                told.append(float(finished))

        scheduler = Scheduler(timesteps)
        run = Run(scheduler)
        listener = Listener()
        run.listeners.append(listener)
        run.start()
        for step in steps[1:]:  # as if the first one had been left out: of equally near ones the next in turn counts
            run.finish_step(float(step))
        return told

    expected = levels()
    assert len(set(expected)) == len(steps)
    assert under(levels) == expected


def test_a_timestep_is_read_as_it_is(under):
    def read():
        reader = TimestepReader(lambda self, timestep: None, torch.device("cpu"))
        return [reader.read(t)[1].clone() for t in (999.5, 981.25, torch.tensor(21.5, dtype=torch.float64), 1)]

    same(under(read), read())
