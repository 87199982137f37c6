"""Every attention family of transformers: with exact attention as the op nothing changes, with INT8 the op's error."""

from __future__ import annotations

import copy

import pytest
import torch

import sage_kernels
import sage_processors as sp
from sage_kernels.facts import crossover
from sage_kernels.testing import relative_l2
from tests.support.language_calls import ANY_LENGTH, exact_op, forward
from tests.support.tiny_language_models import DECODERS, MODELS, padded, tokens


INT8 = sage_kernels.sage_attention
# Relative L2 of one INT8 attention call on these inputs: 1.5 % is the bar of test_attention.py on N(0, 1); peaked
# softmaxes, which random weights of unit gain make, double it.
OP_BUDGET = 0.03


def in_double(model, inputs):
    """The same model in fp64: what is left between it and fp32 is rounding."""
    inputs = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    model = copy.deepcopy(model).double()
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # the grouped product knows no fp64
    return forward(model, inputs)


class AttentionCalls:
    """Counts the forwards of all modules that take an attention implementation: one attention call each."""

    def __init__(self, model):
        self.count = 0
        layers = {row["layer"] for row in sp.attention_report(model).rows}
        for name, module in model.named_modules():
            if name in layers:
                module.register_forward_hook(self._called)

    def _called(self, *_):
        self.count += 1


PADDED = [(name, "left" if name in DECODERS else "right") for name in MODELS if name not in ("vit", "whisper")]


@pytest.mark.parametrize(("name", "padding"), [*((name, None) for name in MODELS), *PADDED])
def test_with_exact_attention_as_the_op_the_model_is_eager(name, padding, monkeypatch):
    model, inputs = MODELS[name]()
    floor = relative_l2(forward(model, inputs), in_double(model, inputs))
    assert 0 < floor < 1e-4
    real = slice(None)
    if padding:
        inputs = padded(inputs, padding)
        if forward(model, inputs).shape[1] == inputs["input_ids"].shape[1]:
            real = inputs["attention_mask"].bool()  # rows of padding are no result
    stock = forward(model, inputs)[real]
    calls = AttentionCalls(model)
    model.set_attn_implementation(ANY_LENGTH)
    monkeypatch.setattr(sage_kernels, "sage_attention", exact_op)
    swapped = forward(model, inputs)
    assert torch.isfinite(swapped).all()  # in rows of padding, too
    # both are the model in fp32, a floor away from fp64 each, and sum in different orders
    assert relative_l2(swapped[real], stock) <= 3 * floor
    report = sp.attention_report(model)
    assert report.calls == calls.count > 0 and not report.fallbacks, str(report)


@pytest.mark.parametrize(
    ("name", "padding"), [*((name, None) for name in MODELS), ("llama", "left"), ("bert", "right")]
)
def test_INT8_logits_are_off_by_the_errors_of_its_calls(name, padding, monkeypatch):
    """The budget is measured: white noise as large as each call's INT8 error, put on the exact output of that call."""
    model, inputs = MODELS[name]()
    inputs = padded(inputs, padding) if padding else inputs
    real = inputs["attention_mask"].bool() if padding else slice(None)
    stock = forward(model, inputs)[real]
    model.set_attn_implementation(ANY_LENGTH)
    errors = []

    def measured(q, k, v, **options):
        exact = exact_op(q, k, v, **options)
        errors.append(float(relative_l2(INT8(q, k, v, **options), exact)))
        return exact

    monkeypatch.setattr(sage_kernels, "sage_attention", measured)
    forward(model, inputs)
    assert 0 < max(errors) <= OP_BUDGET
    noisy = []
    for seed in range(4):
        generator, sizes = torch.Generator().manual_seed(seed), iter(errors)

        def with_noise(q, k, v, sizes=sizes, generator=generator, **options):
            exact = exact_op(q, k, v, **options)
            noise = torch.randn(exact.shape, generator=generator)
            return exact + noise * (next(sizes) * exact.norm() / noise.norm())

        monkeypatch.setattr(sage_kernels, "sage_attention", with_noise)
        noisy.append(float(relative_l2(forward(model, inputs)[real], stock)))
    monkeypatch.setattr(sage_kernels, "sage_attention", INT8)
    error = float(relative_l2(forward(model, inputs)[real], stock))
    assert 0 < error <= 2 * max(noisy), (error, noisy, errors)


def generated(model, name, **options):
    torch.manual_seed(0)
    inputs = padded({"input_ids": tokens(2, 17)}, "left", 4)
    if options.pop("single", False):
        inputs = {key: x[1:] for key, x in inputs.items()}
    new_tokens = options.pop("max_new_tokens", 32)
    with torch.no_grad():
        return model.generate(
            **inputs, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options
        )


@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_the_eager_one(name, monkeypatch):
    """Left-padded batch, past the sliding window; every call goes through the op, one query or many."""
    model, _ = MODELS[name]()
    wanted = generated(model, name)
    calls = AttentionCalls(model)
    model.set_attn_implementation(ANY_LENGTH)
    monkeypatch.setattr(sage_kernels, "sage_attention", exact_op)
    assert torch.equal(generated(model, name), wanted)
    report = sp.attention_report(model)
    assert report.calls == calls.count == 32 * 2 and not report.fallbacks


WAYS = {
    "beam": {"num_beams": 3, "max_new_tokens": 12},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4, "single": True, "max_new_tokens": 16},
    "static": {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 16},
    "chunked_prefill": {"prefill_chunk_size": 6, "max_new_tokens": 8},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_other_ways_to_generate_are_the_eager_ones(name, way, monkeypatch):
    model, _ = MODELS[name]()
    wanted = generated(model, name, **WAYS[way])
    model.set_attn_implementation(ANY_LENGTH)
    monkeypatch.setattr(sage_kernels, "sage_attention", exact_op)
    assert torch.equal(generated(model, name, **WAYS[way]), wanted)
    report = sp.attention_report(model)
    assert report.calls > 0 and not report.fallbacks


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_INT8_generation_never_meets_NaN(name):
    """32 tokens of a left-padded batch, whose padding rows see nothing."""
    model, _ = MODELS[name]()
    model.set_attn_implementation(ANY_LENGTH)
    out = generated(model, name, output_logits=True, return_dict_in_generate=True)
    assert out.sequences.shape == (2, 17 + 32) and all(torch.isfinite(x).all() for x in out.logits)
    report = sp.attention_report(model)
    assert report.calls == 32 * 2 and not report.fallbacks


@pytest.mark.parametrize("gpu", ["hopper", "ada"])
def test_the_default_name_decodes_exactly_on_a_gpu_and_says_so(gpu, monkeypatch):
    monkeypatch.setattr(crossover, "_limits", crossover._limits.__wrapped__)
    monkeypatch.setattr(crossover, "gpu_class", lambda device: gpu)
    model, _ = MODELS["llama"]()
    wanted = generated(model, "llama")
    model.set_attn_implementation("sage_int8")
    assert torch.equal(generated(model, "llama"), wanted)
    report = sp.attention_report(model)
    assert report.calls == 0 and report.fallbacks == {"short": 32 * 2}
