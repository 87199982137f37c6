"""What diffusers and torch do to a model with our processors: it works, or the report says what happened.

The case IDs in the names are those of the project's list of failure cases.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn

import sage_processors as sp
from sage_processors.diffusion.calls import processors, sage_class
from sage_processors.diffusion.host.discovery import attention_modules
from tests.diffusion.calls.test_processors import attention_inputs, counted, forward, sqnr_db
from tests.diffusion.test_apply import processors_of
from tests.support.combinations import shows  # noqa: F401 (pytest finds fixtures here)
from tests.support.tiny_models import MODELS, OLDEST, rand
from tests.support.tiny_pipelines import flux_pipe, sd_controlnet_pipe


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)
DYNAMIC = sp.SageAttnProcessor(min_tokens=1, scaling="dynamic")


def statuses(handle):
    return {row["status"] for row in handle.report().rows}


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


# --- P01, P02: copies and files ---


@pytest.mark.parametrize("name", ["flux", "unet_sd15"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded]
)
def test_P01_X13_a_copied_model_gives_the_same_and_shares_nothing(name, duplicate, shows):  # noqa: F811
    model, inputs = MODELS[name]()
    stock = forward(model, inputs)
    with sp.apply(model, DYNAMIC) as handle:
        int8 = forward(model, inputs)
        twin = duplicate(model)
        assert torch.equal(forward(twin, inputs), int8)
        calls = handle.report().calls
        assert calls == len(processors_of(model)) and sp.handle_of(twin) is None
    # the original's handle is gone, the copy goes on; a handle of its own counts for it and can take INT8 out
    assert torch.equal(forward(twin, inputs), int8)
    with sp.apply(twin, DYNAMIC) as handle:
        assert torch.equal(forward(twin, inputs), int8) and handle.report().calls == calls
        shows(handle.report(), int8, stock)
    assert not any(sage_class.is_sage(p) for p in processors_of(twin).values())
    assert torch.equal(forward(twin, inputs), stock)


def test_P01_a_copy_has_no_planned_scales_and_leaves_those_of_the_original_alone():
    model, inputs = MODELS["flux"]()
    with sp.apply(model, DYNAMIC):
        dynamic = forward(model, inputs)
    with sp.apply(model, EVERYTHING):
        forward(model, inputs)
        planned = forward(model, inputs)
    with sp.apply(model, EVERYTHING):
        forward(model, inputs)
        twin = copy.deepcopy(model)
        for _ in range(2):
            assert torch.equal(forward(twin, inputs), dynamic)  # documented: a copy has scales of each call
        assert torch.equal(forward(model, inputs), planned)


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["flux", "unet_sd15"])
def test_P02_saved_model_is_stock_byte_for_byte(name, tmp_path):
    model, inputs = MODELS[name]()
    model.save_pretrained(tmp_path / "stock")
    with sp.apply(model, EVERYTHING):
        forward(model, inputs)
        model.save_pretrained(tmp_path / "int8")
    assert files_of(tmp_path / "stock") == files_of(tmp_path / "int8") and len(files_of(tmp_path / "stock")) == 2
    loaded = type(model).from_pretrained(tmp_path / "int8")
    assert not any(sage_class.is_sage(p) for p in processors_of(loaded).values()) and sp.handle_of(loaded) is None


# --- P05, P06, P08, P09: processors and handles ---


def test_P05_a_processor_of_ours_that_is_given_to_other_layers_is_reported_and_healed():
    model, inputs = MODELS["unet_sd15"]()
    original, stock = processors_of(model), forward(model, inputs)
    with sp.apply(model, EVERYTHING) as handle:
        forward(model, inputs)
        first, *others = processors_of(model)
        model.set_attn_processor(processors_of(model)[first])
        by_layer = {row["layer"]: row["status"] for row in handle.report().rows}
        assert by_layer[first] == "active" and {by_layer[name] for name in others} == {"replaced"}
        assert sqnr_db(forward(model, inputs), stock) > 20  # scales of another layer cost precision, nothing else
        assert handle.report().fallbacks == {"replaced": len(others)}
        handle.refresh()
        assert len({id(p) for p in processors_of(model).values()}) == len(original)
        assert statuses(handle) == {"active"} and sqnr_db(forward(model, inputs), stock) > 30
    assert all(p is original[name] for name, p in processors_of(model).items())


def test_P05_one_stand_alone_processor_serves_all_layers():
    model, inputs = MODELS["unet_sd15"]()
    inputs |= {"sample": rand(1, 4, 16, 16)}
    stock = forward(model, inputs)
    shared = sp.SageAttnProcessor2_0()
    model.set_attn_processor(shared)
    assert sqnr_db(forward(model, inputs), stock) > 30
    counts = counted(shared)
    assert counts == {"called": len(processors_of(model))}


def test_P08_what_was_set_meanwhile_is_kept_when_the_original_objects_return():
    model, inputs = MODELS["flux"]()
    original, stock = processors_of(model), forward(model, inputs)
    attributes = {name: dict(vars(p)) for name, p in original.items()}
    for _ in range(2):
        handle = sp.apply(model, EVERYTHING)
        forward(model, inputs)
    handle.remove()
    assert all(p is original[name] and vars(p) == attributes[name] for name, p in processors_of(model).items())
    with sp.apply(model, EVERYTHING):
        model.set_attention_backend("native")
    assert all(
        p is original[name] and p._attention_backend.value == "native" for name, p in processors_of(model).items()
    )
    assert torch.equal(forward(model, inputs), stock)


def test_P08_an_apply_that_fails_leaves_nothing_behind():
    good, bad = MODELS["flux"]()[0], MODELS["unet_sd15"]()[0]
    original = processors_of(good)
    next(attention_modules(bad))[1].processor = sp.SageAttnProcessor()
    pipe = type("Pipe", (), {"components": {"transformer": good, "unet": bad, "scheduler": None}})()
    with pytest.raises(TypeError, match="load the model again"):
        sp.apply(pipe)
    assert processors_of(good) == original and not good._forward_pre_hooks and not bad._forward_pre_hooks


def fail_at(model, calls):
    """A hook that raises in the last block of the model, at its call number `calls`."""
    left = [calls]

    def hook(module, args):
        left[0] -= 1
        if left[0] == 0:
            raise InterruptedError("stop here")

    return model.single_transformer_blocks[-1].attn.to_v.register_forward_pre_hook(hook)


@pytest.mark.parametrize("config", [EVERYTHING, DYNAMIC])
def test_P09_after_an_exception_the_next_run_is_right(config):
    pipe, run = flux_pipe()
    stock = run()
    with sp.apply(pipe, config):
        fresh, warm = run(), run()
    with sp.apply(pipe, config) as handle:
        failing = fail_at(pipe.transformer, 3)
        with pytest.raises(InterruptedError):
            run()
        failing.remove()
        assert processors._running.processor is None and processors._running.calls == 0
        # the third step's first layer ran before the exception
        assert [row["calls"] for row in handle.report().rows] == [3, 2] and handle.report().fallbacks == {}
        after = run()
        assert sqnr_db(after, stock) > 25
        assert torch.equal(after, fresh)  # planned scales have kept nothing of the broken run
        handle.reset()
        assert torch.equal(run(), fresh) and torch.equal(run(), warm)


# --- T02, D02: training, dropout, autocast ---


def test_T02_training_mode_is_exact_counted_and_named():
    model, inputs = MODELS["unet_sd15"]()
    stock = forward(model, inputs)
    with sp.apply(model, EVERYTHING) as handle:
        assert torch.equal(forward(model.train(), inputs), stock)
        report = handle.report()
        assert report.calls == 0 and report.fallbacks == {"training": len(report.rows)}
        assert all("model.eval()" in row["note"] for row in report.rows)
        assert not torch.equal(forward(model.eval(), inputs), stock)
        report = handle.report()
        assert report.calls == len(report.rows) and not any(row["note"] for row in report.rows)


class MixedSDPA:
    """Query, key and value of the dtypes in `dtypes`, through torch's function."""

    dtypes = (torch.float32, torch.bfloat16, torch.float32)

    def __call__(self, attn, x):
        q, k, v = (y.unflatten(-1, (4, -1)).to(d) for y, d in zip((x, x * 0.5, x + 1), self.dtypes, strict=True))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class MixedDispatch(MixedSDPA):
    """The same through diffusers' function."""

    def __call__(self, attn, x):
        q, k, v = (y.unflatten(-1, (4, -1)).to(d) for y, d in zip((x, x * 0.5, x + 1), self.dtypes, strict=True))
        return dispatch_attention_fn(q, k, v, backend=None).flatten(2)


@pytest.mark.parametrize("kind", [MixedSDPA, MixedDispatch])
def test_D02_mixed_dtypes_run_under_autocast_as_in_sdpa(kind):
    attention, x = attention_inputs()
    stock, sage = kind(), sage_class.swap(kind(), DYNAMIC, "layer")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, result = stock(attention, x), sage(attention, x)
        assert result.dtype == expected.dtype == torch.bfloat16
        assert sqnr_db(result, expected) > 30 and counted(sage) == {"called": 1}
        # autocast leaves fp64 alone, and so does SDPA
        stock.dtypes = sage.dtypes = (torch.float64,) * 3
        expected, result = stock(attention, x), sage(attention, x)
        assert result.dtype == torch.float64 and torch.equal(result, expected)
        assert counted(sage) == {"called": 1, "dtype": 1}


@pytest.mark.parametrize("kind", [MixedSDPA, MixedDispatch])
def test_D02_mixed_dtypes_without_autocast_are_left_to_sdpa(kind):
    attention, x = attention_inputs()
    sage = sage_class.swap(kind(), DYNAMIC, "layer")
    with pytest.raises(RuntimeError, match="dtype") as stock:
        kind()(attention, x)
    with pytest.raises(RuntimeError, match="dtype") as ours:
        sage(attention, x)
    assert str(ours.value) == str(stock.value) and counted(sage) == {"mixed_dtype": 1}
    strict = sage_class.swap(kind(), sp.SageAttnProcessor(on_unsupported="raise"), "layer")
    with pytest.raises(sp.UnsupportedAttentionError, match="mixed_dtype"):
        strict(attention, x)


# --- P07: offloading and casting ---


def accelerate_offload(model, device):
    pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device(device))


def model_offload(model, device):
    pytest.importorskip("accelerate").cpu_offload_with_hook(model, torch.device(device))


def group_offload(kind, **options):
    def enable(model, device):
        if OLDEST and device == "cpu":
            pytest.skip("this version of diffusers offloads groups from a GPU only")
        options["num_blocks_per_group"] = 1 if kind == "block_level" else None
        model.enable_group_offload(
            onload_device=torch.device(device), offload_device=torch.device("cpu"), offload_type=kind, **options
        )

    return enable


@pytest.mark.parametrize("name", ["flux", "unet_sd15"])
@pytest.mark.parametrize(
    "offload",
    [model_offload, accelerate_offload, group_offload("leaf_level"), group_offload("block_level")],
    ids=["model", "sequential", "group_leaf", "group_block"],
)
def test_P07_X08_X09_X10_offloading_hooks_change_no_bit(name, offload, shows):  # noqa: F811
    model, inputs = MODELS[name]()
    key = next(key for key in ("timestep", "timesteps", "t") if key in inputs)
    steps = [inputs | {key: inputs[key] * factor} for factor in (1.0, 0.8, 0.6)]
    stock = forward(model, steps[2])
    with sp.apply(model, EVERYTHING):
        expected = [forward(model, step) for step in steps]
    with sp.apply(model, EVERYTHING) as handle:
        assert torch.equal(forward(model, steps[0]), expected[0])
        offload(model, "cpu")
        assert torch.equal(forward(model, steps[1]), expected[1])
        handle.refresh()  # must not take the place where the weights rest for the place where they run
        assert torch.equal(forward(model, steps[2]), expected[2])
        assert all((row["calls"], row["dynamic_calls"]) == (3, 1) for row in handle.report().rows)
        shows(handle.report(), expected[2], stock)


def offload_pipeline(pipe, how):
    if how == "none":
        pipe.to("cuda")
    elif how in ("model", "sequential"):
        pytest.importorskip("accelerate")
        getattr(pipe, f"enable_{how}_cpu_offload")(device="cuda")
    else:
        kind, *stream = how.split("+")
        pipe.to("cuda")
        for key in ("unet", "transformer", "controlnet"):
            if getattr(pipe, key, None) is not None:
                group_offload(kind, use_stream=bool(stream))(getattr(pipe, key), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [flux_pipe, sd_controlnet_pipe])
@pytest.mark.parametrize(
    "how", ["model", "sequential", "leaf_level", "block_level", "leaf_level+stream", "block_level+stream"]
)
def test_P07_offloading_changes_no_bit_on_a_gpu(make, how):
    def runs(how):
        pipe, run = make()
        offload_pipeline(pipe, how)
        handle = pipe.set_attn_processor(EVERYTHING)
        pictures = [run(seed=0).cpu()]
        handle.refresh()
        pictures.append(run(seed=1).cpu())
        report = handle.report()
        assert report.fallbacks == {} and statuses(handle) == {"active"}
        return pictures, [(row["calls"], row["dynamic_calls"]) for row in report.rows]

    (plain, plain_calls), (offloaded, calls) = runs("none"), runs(how)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True)) and calls == plain_calls
