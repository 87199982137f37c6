"""What a handle compiles ahead: the kinds of calls its layers make, when it is started, and what it says of it."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("diffusers")
import sage_processors as sp  # noqa: E402
import tests.support.tiny_image_models  # noqa: E402, F401 (registers them)
from sage_kernels import qk_norm_rope  # noqa: E402
from sage_kernels.facts.few_rows import WEIGHT_ONLY  # noqa: E402
from sage_kernels.ops.warm_up import LONG, SHORT, CallKind, LinearKind, heads_call, linear_calls  # noqa: E402
from sage_processors.diffusion.denoiser import Denoiser  # noqa: E402
from sage_processors.diffusion.reports import warm_up  # noqa: E402
from sage_processors.diffusion.reports.warm_up import call_kinds, heads_kinds, linear_kinds  # noqa: E402
from sage_processors.linears.weights.linear_state import LinearState  # noqa: E402
from tests.support.tiny_models import MODELS  # noqa: E402


CUDA = torch.device("cuda")
FP8 = "qk_int8_pv_fp8"
FLOAT, BF16 = torch.float32, torch.bfloat16


class Job:
    """Stands for one that is done."""

    def __init__(self, kind, cached=False):
        self.kind, self.cached, self.error = kind, cached, None

    class finished:  # noqa: N801 (an attribute)
        wait = staticmethod(lambda: True)


class Started:
    known = set()

    def __init__(self, jobs=()):
        self.jobs = list(jobs)

    def wait(self):
        pass


@pytest.fixture
def started(monkeypatch):
    """Kinds of calls that were started, one list a time, as if all models were on a GPU."""
    calls = []

    def compile_ahead(kinds, device, others):
        calls.append(list(kinds))
        return Started(Job(kind) for kind in kinds)

    monkeypatch.setattr(warm_up, "compile_ahead", compile_ahead)
    monkeypatch.setattr(warm_up, "_on_a_gpu", lambda denoiser: True)
    monkeypatch.setattr(warm_up, "closing_call", lambda state, device: None)
    return calls


def test_the_report_names_what_was_compiled_and_how_long_it_took(monkeypatch):
    from sage_kernels._triton.compat import LoadedKernel

    loaded = [LoadedKernel("_of_an_earlier_swap", False, 9.0)]
    monkeypatch.setattr(warm_up, "loaded_kernels", lambda: list(loaded))
    model, _ = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor()) as handle:
        assert "kernels were loaded" not in str(handle.report())
        loaded += [LoadedKernel("_prologue_kernel", True, 0.0)]
        note = "1 kernels were loaded in this process since the swap, 1 of them without compiling."
        assert note in handle.report().notes
        loaded += [LoadedKernel("_some", False, 0.5), LoadedKernel("_other", False, 2.25)]
        (note,) = [x for x in handle.report().notes if "were loaded" in x]
        assert note.startswith("3 kernels") and note.endswith(
            "1 of them without compiling; compiled: _other 2.2 s, _some 0.5 s."
        )
        loaded += [LoadedKernel("_small", False, 0.1)] * warm_up.SHOWN
        assert "_small 0.1 s and 2 more." in str(handle.report().notes)


def test_kernels_of_a_preset_compile_while_its_weights_are_made(monkeypatch):
    """Those of linear layers, too: all are under way before the first weight is quantised."""
    seen, own = [], LinearState.prepare
    monkeypatch.setattr(warm_up, "_on_a_gpu", lambda denoiser: True)
    monkeypatch.setattr(warm_up, "closing_call", lambda state, device: None)
    monkeypatch.setattr(
        warm_up, "compile_ahead", lambda kinds, device, others: seen.append((len(kinds), len(others))) or Started()
    )
    monkeypatch.setattr(LinearState, "prepare", lambda *args: seen.append("weight") or own(*args))
    model, _ = MODELS["flux"]()
    linears = sp.Linears("int8", min_features=0)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, linears=linears)) as handle:
        first, last = seen[0], seen[-1]
        assert "weight" not in (first, last) and first == last and "weight" in seen
        heads = len(heads_kinds(handle._denoisers[0], CUDA))
        assert first[0] > 0 and first[1] == heads + 3 * len(linear_kinds(handle._denoisers[0])) > heads


@pytest.mark.parametrize(("device", "format", "begun"), [("cuda", "int8", 3), ("cuda", "none", 1), ("cpu", "int8", 0)])
def test_what_a_process_does_once_is_begun_before_anything_is_swapped(device, format, begun, monkeypatch):
    """And the kernels that quantise weights, without and with a balance, if there will be any."""
    seen = []
    monkeypatch.setattr(warm_up, "get_ready", lambda: seen.append("ready"))
    monkeypatch.setattr(warm_up, "compile_ahead", lambda kinds, where, calls: seen.extend(calls))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
    bare, model = (SimpleNamespace(parameters=lambda own=own: iter(own)) for own in ([], [first]))
    warm_up.KernelsAhead().get_ready([bare, model, model], format)
    assert len(seen) == begun and seen[:1] == ["ready"] * bool(begun)


def test_a_swap_begins_it_first(monkeypatch):
    seen, install = [], Denoiser.install
    monkeypatch.setattr(
        warm_up.KernelsAhead, "get_ready", lambda self, models, format: seen.append((len(models), format))
    )
    monkeypatch.setattr(Denoiser, "install", lambda self: seen.append("swapped") or install(self))
    with sp.apply(MODELS["flux"]()[0], sp.SageAttnProcessor(linears=sp.Linears("fp8"))):
        assert seen == [(1, "fp8"), "swapped"]


@pytest.mark.parametrize("recipe", ["qk_int8_pv_bf16", FP8])
def test_the_kinds_of_a_models_calls_before_and_after_its_first(recipe):
    model, inputs = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor(recipe=recipe, min_tokens=0)) as handle:
        (denoiser,) = handle._denoisers
        expected = CallKind(FLOAT, 16, recipe, keeps_rows=recipe == FP8, tokens=(LONG, SHORT))
        assert call_kinds(denoiser, CUDA, all_steps=True) == [expected]
        # nobody has told of steps: no row maxima are kept
        assert call_kinds(denoiser, CUDA) == [expected._replace(keeps_rows=False)]
        assert call_kinds(denoiser, CUDA, only_seen=True) == []
        handle.new_run()
        with torch.no_grad():
            model(**inputs)
        assert call_kinds(denoiser, CUDA, only_seen=True) == [expected._replace(tokens=(SHORT,))]


def test_masks_and_types_are_those_that_a_layer_met():
    model, inputs = MODELS["qwen_image_padded"]()
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=0, scaling="per_block")) as handle, torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs)
        found = call_kinds(handle._denoisers[0], CUDA)
        assert found and {(kind.by_key is None, kind.dtype, kind.scaling) for kind in found} == {
            (False, BF16, "per_block")
        }


def test_options_by_layer_decide_and_short_calls_need_nothing(monkeypatch):
    model, _ = MODELS["flux"]()
    config = sp.SageAttnProcessor(rotation="hadamard", min_tokens=0, layers={"single*": {"scaling": "per_token"}})
    with sp.apply(model, config) as handle:
        found = call_kinds(handle._denoisers[0], CUDA)
    assert {(kind.scaling, kind.rotation) for kind in found} == {("planned", "hadamard"), ("per_token", "hadamard")}
    with sp.apply(model, dataclasses.replace(config, layers={"*": {"recipe": "16bit"}})) as handle:
        assert call_kinds(handle._denoisers[0], CUDA) == []
    for least, lengths in ((SHORT, (LONG, SHORT)), (LONG, (LONG,)), (2**30, ())):
        with sp.apply(model, sp.SageAttnProcessor(min_tokens=least)) as handle:
            found = call_kinds(handle._denoisers[0], CUDA)
        assert [kind.tokens for kind in found] == [lengths] * bool(lengths)


@pytest.mark.parametrize(
    "name", ["flux", "flux2", "chroma", "qwen_image", "wan_t2v", "z_image", "hunyuan_video", "unet_sd15"]
)
def test_heads_are_made_ready_by_the_kernel_that_was_compiled_ahead(name, monkeypatch):
    """Not the lengths: what a kernel is specialised for are types, constants, and strides as 1 or multiples of 16."""
    pytest.importorskip("triton")
    from sage_kernels._triton.heads import qk_norm_rope as heads
    from sage_processors.diffusion.heads import postponed_heads

    kinds = set()

    def launch(kernel, programs, *arguments, **constants):
        names = list(inspect.signature(kernel.fn).parameters)
        kind = {key: x.dtype for key, x in zip(names, arguments, strict=False) if isinstance(x, torch.Tensor)}
        strides = {key: x for key, x in zip(names, arguments, strict=False) if key.startswith("stride")}
        kind |= {key: (x == 1, x % 16 == 0) for key, x in strides.items()}
        assert len(kind) == 8 + 10
        kinds.add(frozenset((kind | constants).items()))

    def made_ready(*arguments, norm, eps, cos, sin, pairs, across_heads):
        heads.launch_qk_norm_rope(*arguments, norm, eps, cos, sin, pairs, across_heads)
        options = {"eps": eps, "cos": cos, "sin": sin, "pairs": pairs, "across_heads": across_heads}
        return qk_norm_rope(*arguments, norm=norm, **options)

    monkeypatch.setattr(heads, "launch", launch)
    model, inputs = MODELS[name]()
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=0)) as handle, torch.no_grad():
        (denoiser,) = handle._denoisers
        for kind in heads_kinds(denoiser, CUDA):
            heads_call(kind, torch.device("cpu"))()
        expected = kinds.copy()
        assert len(expected) == {"unet_sd15": 0, "hunyuan_video": 2}.get(name, 1)
        kinds.clear()
        monkeypatch.setattr(postponed_heads, "qk_norm_rope", made_ready)
        for _ in range(2):
            model(**inputs)
    assert kinds == expected


def test_heads_too_wide_for_any_kernel_need_none(monkeypatch):
    model, _ = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=0, scaling="per_block")) as handle:
        monkeypatch.setattr(warm_up, "discover_sites", lambda *_: [(2, 512)])
        assert call_kinds(handle._denoisers[0], CUDA) == []


def test_the_swap_starts_and_the_first_two_forwards(started):
    model, inputs = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor(recipe=FP8, min_tokens=0)) as handle, torch.no_grad():
        assert [kind.keeps_rows for kind in started[0]] == [False] and len(started) == 1
        handle.new_run()
        for _ in range(4):
            model(**inputs)
    assert len(started) == 3
    assert [kind.keeps_rows for kind in started[1]] == [True]  # as a run was told of
    assert [kind.tokens for kind in started[2]] == [(SHORT,)]


def test_heads_of_several_widths_wait_for_the_first_forward(started):
    model, inputs = MODELS["unet_sd15"]()
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=0)) as handle, torch.no_grad():
        several = {kind.head_dim for kind in call_kinds(handle._denoisers[0], CUDA)}
        assert len(several) == 2
        model(**inputs)
        assert not started
        model(**inputs)
    assert len(started) == 1 and {kind.head_dim for kind in started[0]} == several


def test_what_fails_in_the_background_is_said_by_warm_up(started, monkeypatch):
    def fails(*_):
        raise NotImplementedError("GPU: too old")

    monkeypatch.setattr(warm_up, "compile_ahead", fails)
    model, inputs = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=0)) as handle, torch.no_grad():
        model(**inputs)
        with pytest.raises(NotImplementedError, match="too old"):
            handle.warm_up(device="cuda")


def test_warm_up_says_what_it_did(started, capsys):
    model, _ = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=0)) as handle:
        done = handle.warm_up(device="cuda", progress=False)
        assert (done.kernels, done.cached) == (1, 0) and done.seconds >= 0
        assert not capsys.readouterr().out
        handle.warm_up(device="cuda")
        assert "compiling kernels" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="removed"):
        handle.warm_up()


def test_on_a_cpu_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(warm_up, "compile_ahead", None)  # not called
    model, inputs = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor()) as handle, torch.no_grad():
        model(**inputs)
        done = handle.warm_up()
        assert (done.kernels, done.cached) == (0, 0)


# --- the command ---


def test_the_command_reads_configs_and_compiles(started, monkeypatch):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from sage_processors.cli import main
    from sage_processors.cli import warm_up as command

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(main.app, ["warm-up", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    assert "Nothing to warm up: a CPU" in invoke("tiny_flux", "--device", "cpu")
    assert "Invalid value for --recipe" in invoke("tiny_flux", "--recipe", "int3", code=2)
    assert "--dtype" in invoke("tiny_flux", "--dtype", "int8", code=2)
    monkeypatch.setattr(command, "torch_device", lambda name: CUDA)
    output = invoke("tiny_flux", "--min-tokens", "0", "--dtype", "float16", "--recipe", FP8)
    assert "1 kernels in" in output and "0 of them from the cache" in output
    (kind,) = started[-1]
    assert (kind.dtype, kind.recipe, kind.keeps_rows, kind.scaling) == (torch.float16, FP8, True, "planned")
    assert "no call of this model is long enough" in invoke("tiny_flux", "--min-tokens", str(2**40))


@pytest.mark.gpu
def test_after_a_warm_up_a_run_compiles_nothing(monkeypatch):
    """Seven steps: row maxima come into use in the fifth."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA GPU that has FP8")
    import triton

    model, inputs = MODELS["flux"]()
    inputs = {name: x.to("cuda", BF16 if name != "timestep" else FLOAT) for name, x in inputs.items()}
    compiled = []
    with sp.apply(model.to("cuda", BF16), sp.SageAttnProcessor(recipe=FP8, min_tokens=0)) as handle, torch.no_grad():
        handle.new_run()
        done = handle.warm_up(progress=False)
        assert done.kernels >= 5 and handle.warm_up(progress=False).cached >= done.kernels
        monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
        for step in range(7):
            model(**inputs | {"timestep": torch.tensor([1.0 - step / 8], device="cuda")})
        report = handle.report()
    assert report.calls == 7 * 2 and not report.fallbacks.get("short")
    assert not compiled


def test_8_bit_linear_layers_are_compiled_ahead_with_what_usually_surrounds_them():
    model, _ = MODELS["flux"]()
    assert not linear_kinds(sp.apply(model, sp.SageAttnProcessor())._denoisers[0])
    handle = sp.apply(model, sp.SageAttnProcessor(linears=sp.Linears("int8", min_features=0)))
    kinds, ff = linear_kinds(handle._denoisers[0]), model.transformer_blocks[0].ff
    up, down = ff.net[0].proj, ff.net[2]
    plain = LinearKind(FLOAT, "int8", up.in_features, up.out_features, True)
    norms, activations = ("none", "layer"), ("none", "gelu_tanh")
    assert {plain._replace(norm=x, activation=y) for x in norms for y in activations} <= set(kinds)
    assert LinearKind(FLOAT, "int8", down.in_features, down.out_features, True, adds=True) in kinds
    assert not any(kind.adds for kind in kinds if kind.columns == up.out_features)
    assert not any(kind.format == WEIGHT_ONLY for kind in kinds)
    single = model.single_transformer_blocks[0]  # attention's result beside the feed-forward's
    joined = {kind.beside for kind in kinds if kind.depth == single.proj_out.in_features}
    assert joined == {single.proj_mlp.out_features} and len({kind.beside for kind in kinds}) == 2


def test_layers_of_one_row_a_sample_are_compiled_ahead_with_one_row(monkeypatch):
    """They are swapped when 16-bit weights are dropped, after the other layers' kernels were begun."""
    seen = []
    monkeypatch.setattr(warm_up, "_on_a_gpu", lambda denoiser: True)
    monkeypatch.setattr(warm_up, "_compile", lambda denoiser, *_, linears=None, **__: seen.append(
        [kind.format for kind in linear_kinds(denoiser, linears)]
    ))  # fmt: skip
    model, _ = MODELS["flux"]()
    handle = sp.apply(model, sp.SageAttnProcessor(linears=sp.Linears(min_features=0, drop_weights=True)))
    assert "int8" in seen[0] and WEIGHT_ONLY not in seen[0] and WEIGHT_ONLY in seen[-1]
    kinds = [kind for kind in linear_kinds(handle._denoisers[0]) if kind.format == WEIGHT_ONLY]
    for layer in (model.transformer_blocks[0].norm1.linear, model.single_transformer_blocks[0].norm.linear):
        assert LinearKind(FLOAT, WEIGHT_ONLY, layer.in_features, layer.out_features, True) in kinds
    assert {(kind.norm, kind.activation, kind.adds, kind.beside) for kind in kinds} == {("none", "none", False, 0)}
    pytest.importorskip("triton")
    from sage_kernels._triton.linear import launch

    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("weight_only", "quantized"):
            patch.setattr(launch, f"launch_{name}_linear", lambda x, *_, name=name, **__: asked.append((name, x)))
        for call in linear_calls(kinds[0], torch.device("cpu"), (4096, 512)):
            call()
    assert [(name, x.shape, x.dtype) for name, x in asked] == [("weight_only", (1, kinds[0].depth), FLOAT)]
