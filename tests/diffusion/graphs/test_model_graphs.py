"""Forwards from CUDA graphs draw what eager ones draw, whatever changes in between; what can't be replayed is counted.

What stands in for captures on a CPU is in tests/support/cpu_graphs.py.
"""

from __future__ import annotations

import collections
import dataclasses

import diffusers
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

import sage_processors as sp
from sage_processors.diffusion.graphs.call_graphs import MOST_GRAPHS
from sage_processors.diffusion.graphs.model_graphs import WARM_UP
from sage_processors.linears import modules
from sage_processors.linears.weights import layers
from sage_processors.linears.weights.linear_state import linear_state
from sage_processors.patching import nested
from tests.diffusion.test_lifecycle import accelerate_offload, group_offload
from tests.support.cpu_graphs import OnCpu, Recorder, captures, frozen, options
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe


@pytest.fixture
def flux():
    pipe, draw = flux_pipe()
    return pipe, draw


@pytest.mark.parametrize(
    "kept", [{}, {"keep": {"first_steps": 2}}, {"linears": {"format": "int8", "min_features": 0}}]
)
def test_P66_pictures_are_those_of_eager_forwards(flux, kept):
    pipe, draw = flux
    with sp.apply(pipe, options(**kept)) as handle:
        wanted = [draw(steps=8, seed=seed) for seed in (0, 1, 2)]
        expected = handle.report()
    with sp.apply(pipe, options(**kept)) as handle:
        graphs, recorder = captures(handle)
        found = [draw(steps=8, seed=seed) for seed in (0, 1, 2)]
        report = handle.report()
    assert all(map(torch.equal, wanted, found)) and not torch.equal(*found[:2])
    kinds = 1 + ("keep" in kept)
    assert recorder.captures == kinds
    assert graphs.replays == 24 - kinds * WARM_UP and graphs.eager == {"warm_up": kinds * WARM_UP}
    assert f"{graphs.replays} forwards of transformer came from CUDA graphs, eager ones: warm_up" in str(report)
    assert report.fallbacks.get("window", 0) >= expected.fallbacks.get("window", 0)


def test_P66_frozen_scales_have_a_graph_of_their_own(flux):
    pipe, draw = flux
    found = []
    for graphs in (False, True):
        with sp.apply(pipe, options()) as handle:
            recorder = captures(handle)[1] if graphs else None
            found.append([draw(steps=8)])
            handle.freeze_scales()
            found[-1] += [draw(steps=8), draw(steps=8, seed=1)]
            handle.reset()
            found[-1].append(draw(steps=8))
    assert all(map(torch.equal, *found)) and recorder.captures == 2
    assert not torch.equal(found[0][0], found[0][1]) and torch.equal(found[0][0], found[0][3])


def test_short_linear_calls_are_in_8_bit_in_eager_forwards_too(monkeypatch):
    """As they are in a graph: else the first picture, whose first steps are eager, would be another one."""
    monkeypatch.setattr(modules, "is_timed", lambda device: True)
    monkeypatch.setattr(layers, "MIN_FEATURES", 32)
    model, inputs = MODELS["flux"]()
    with torch.no_grad(), sp.apply(model, options(scaling="dynamic", linears="int8")) as handle:
        for _ in range(4):  # known as short by now
            short = model(**inputs, return_dict=False)[0]
        graphs, recorder = captures(handle)
        outs = [model(**inputs, return_dict=False)[0] for _ in range(WARM_UP + 2)]
        assert graphs.replays == 2 and all(torch.equal(x, outs[0]) for x in outs)
        handle._denoisers[0].use_graphs(None)
        again = model(**inputs, return_dict=False)[0]
        assert torch.equal(again, short) and not torch.equal(again, outs[0])
        rows = [row for row in handle.report().linears.rows if row["format"]]
        assert {(row["calls"], row["fallbacks"]["short"]) for row in rows} == {(WARM_UP + 2, 5)}


# --- what a graph takes for granted ---


def replayed_model(name="flux", record=frozen, before=lambda model: None, **kwargs):
    """(handle, graphs, model, inputs) of a model that answers from a graph by now; before: done before the swap."""
    model, inputs = MODELS[name]()
    before(model)
    handle = sp.apply(model, options(scaling="dynamic", **kwargs))
    graphs = OnCpu(handle, handle._denoisers[0], record)
    handle._denoisers[0].use_graphs(graphs)
    with torch.no_grad():
        for _ in range(WARM_UP + 2):
            out = model(**inputs, return_dict=False)[0]
    assert graphs.replays == 2
    return handle, graphs, model, inputs, out


def eager(handle, model, inputs):
    handle._denoisers[0].use_graphs(None)
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def add_lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))


def in_place(model, change):
    """Of a weight of the last block that is left in 16 bit and of one that is not."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj_out.weight") or "to_q.weight" in name:
                change(parameter)


class Wrapped(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs) * 1.5


def wrap(model):
    model.proj_out = Wrapped(model.proj_out)


def exchange(model):
    model.proj_out.weight = torch.nn.Parameter(model.proj_out.weight * 1.5)


def exchange_data(model):
    model.proj_out.weight.data = model.proj_out.weight.data * 1.5


def patch(model):
    module, forward = model.proj_out, model.proj_out.forward
    module.forward = lambda x: forward(x) * 1.5


CHANGES = {
    "lora's scale": lambda model: [m.set_scale("default", 3.0) for m in model.modules() if hasattr(m, "set_scale")],
    "lora off": lambda model: model.disable_adapters(),
    "weight in place": lambda model: in_place(model, lambda x: x.mul_(1.5)),
    "weight exchanged": exchange,
    "weight's memory": exchange_data,
    "weights loaded": lambda model: model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}),
    "module exchanged": wrap,
    "forward exchanged": patch,
    "hook": lambda model: model.proj_out.register_forward_hook(lambda module, args, out: out * 1.5),
    "hook before": lambda model: model.proj_out.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)),
    "processors": lambda model: model.set_attn_processor(diffusers.models.attention_processor.FluxAttnProcessor2_0()),
    "state of a processor": lambda model: [setattr(x._sage, "kept", True) for x in model.attn_processors.values()],
    "flag": lambda model: setattr(model.norm_out.norm, "eps", 0.5),
    "fused": lambda model: model.fuse_qkv_projections(),
}


@pytest.mark.parametrize("linears", ["none", "int8"])
@pytest.mark.parametrize("name", CHANGES)
def test_P66_no_replay_after_a_change_of_the_model(name, linears):
    kwargs = {} if linears == "none" else {"linears": {"format": "int8", "min_features": 0}}
    before = add_lora if "lora" in name else lambda model: None
    handle, graphs, model, inputs, old = replayed_model(before=before, **kwargs)
    CHANGES[name](model)
    with torch.no_grad():
        new = model(**inputs, return_dict=False)[0]
    assert graphs.replays == 2 and (name in ("processors", "fused") or not torch.equal(new, old))
    assert torch.equal(new, eager(handle, model, inputs))
    handle.remove()


def test_a_tensor_of_the_same_number_is_another_one():
    """A graph reads the memory of the old one."""
    handle, graphs, model, inputs, _ = replayed_model(before=lambda model: model.register_buffer("one", torch.ones(1)))
    model.one = torch.ones(1)
    with torch.no_grad():
        model(**inputs, return_dict=False)
    assert graphs.eager["changed"] == 1


def test_no_replay_after_a_hook_of_all_modules():
    handle, graphs, model, inputs, old = replayed_model()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        with torch.no_grad():
            for _ in range(WARM_UP + 2):
                assert torch.equal(model(**inputs, return_dict=False)[0], old)
    finally:
        hook.remove()
    assert graphs.replays == 2 and (graphs.eager["changed"], graphs.eager["hooks"]) == (1, 1)


def test_scales_of_unets_are_compared(monkeypatch):
    """FreeU writes attributes of blocks; layers that are sliced get other processors."""
    handle, graphs, model, inputs, old = replayed_model("unet_sd15")
    with torch.no_grad():
        model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        new = model(**inputs, return_dict=False)[0]
        assert graphs.replays == 2 and not torch.equal(new, old) and torch.equal(new, eager(handle, model, inputs))


def test_a_weight_that_nobody_counted_is_compared_first():
    """Written through `.data`, and told by what a run's beginning looks at: quantised anew where the graph reads."""
    captured = []
    record = lambda run: captured.append(run) or frozen(run)  # noqa: E731
    kwargs = {"linears": {"format": "int8", "min_features": 0}}
    handle, graphs, model, inputs, old = replayed_model(record=record, **kwargs)
    for module in model.modules():
        if linear_state(module) is not None:
            module._parameters["weight"].data.mul_(1.5)
    handle._denoisers[0].linears.begin_run()
    with torch.no_grad():
        new = [model(**inputs, return_dict=False)[0] for _ in range(WARM_UP + 3)]
    assert graphs.eager["changed"] == 1 and graphs.replays == 4 and len(captured) == 2
    assert all(torch.equal(new[0], x) for x in new) and not torch.equal(new[0], old)


def test_a_weight_that_was_only_looked_at_is_compared_and_stays():
    handle, graphs, model, inputs, old = replayed_model(linears={"format": "int8", "min_features": 0})
    assert model.transformer_blocks[0].attn.to_q.weight is not None  # whoever has it may write to it
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(**inputs, return_dict=False)[0], old)
    assert graphs.eager == {"warm_up": WARM_UP} and graphs.replays == 5


def test_kinds_of_calls_have_graphs_of_their_own():
    model, inputs = MODELS["flux"]()
    others = inputs | {"hidden_states": inputs["hidden_states"][:, :8], "img_ids": inputs["img_ids"][:8]}
    twice = {n: x.repeat(2, *[1] * (x.dim() - 1)) if not n.endswith("ids") else x for n, x in inputs.items()
             if isinstance(x, torch.Tensor)}  # fmt: skip
    with torch.no_grad(), sp.apply(model, options(scaling="dynamic")) as handle:
        graphs, recorder = captures(handle)
        for given in (inputs, others, twice, inputs | {"joint_attention_kwargs": {"scale": 1.0}}):
            outs = [model(**given, return_dict=False)[0] for _ in range(WARM_UP + 2)]
            assert all(torch.equal(x, outs[0]) for x in outs)
        assert recorder.captures == 4 and graphs.replays == 8
        for i in range(MOST_GRAPHS):
            for _ in range(WARM_UP + 1):
                model(**inputs, joint_attention_kwargs={"scale": 1.0 + i}, return_dict=False)
        assert len(graphs.whole.graphs) == MOST_GRAPHS
        model(**inputs, return_dict=False)
        assert recorder.captures == 4 + MOST_GRAPHS  # the first kind was let go, and is captured again


def test_what_was_returned_stays_when_the_next_replay_comes():
    handle, graphs, model, inputs, _ = replayed_model(record=Recorder())
    with torch.no_grad():
        first = model(**inputs, return_dict=False)[0]
        kept, given = first.clone(), inputs["hidden_states"].clone()
        second = model(**inputs | {"hidden_states": inputs["hidden_states"] * 2}, return_dict=False)[0]
        assert torch.equal(first, kept) and not torch.equal(first, second)
        assert torch.equal(inputs["hidden_states"], given)  # nor is it the caller's tensors that a graph reads
        whole = model(**inputs)
    assert type(whole).__name__ == "Transformer2DModelOutput"


def test_arguments_and_results_are_taken_apart_and_put_together():
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    output = Transformer2DModelOutput(sample=x)
    value = ((x, [y, 1.0], {"a": x, "b": None}), output)
    assert [id(tensor) for tensor in nested.tensors_of(value)] == [id(x), id(y), id(x), id(x)]
    other = nested.mapped(value, lambda tensor: tensor + 1)
    assert type(other[1]) is type(output) and torch.equal(other[1].sample, y) and torch.equal(other[0][1][0], y + 1)
    assert nested.kind_of(other) == nested.kind_of(value) and hash(nested.kind_of(value)) is not None
    kinds = [(x,), [x], (x, x), (x.double(),), (x[:1],), (1,), (1.0,), (True,), ({"a": 1},), ({"b": 1},), ((1,),)]
    assert len({nested.kind_of(kind) for kind in kinds}) == len(kinds)
    for unknown in (object(), {1}, torch.nn.Parameter(x), collections.OrderedDict(a=x), (object(),)):
        with pytest.raises(nested.UnknownValueError):
            nested.kind_of(unknown)


# --- what is not replayed ---


def offloaded(model):
    accelerate_offload(model, "cpu")


OBSTACLES = [  # reason, what is done to the model, number of its two blocks that are replayed all the same
    ("offload", offloaded, 0),
    ("hooks", lambda model: group_offload("block_level")(model, "cpu"), 0),
    ("hooks", lambda model: model.proj_out.register_forward_hook(lambda module, args, out: None), 2),
    ("hooks", lambda model: model.proj_out.register_forward_pre_hook(lambda module, args: None), 2),
    ("compiled", lambda model: model.transformer_blocks[0].compile(backend="eager"), 1),
    ("device", lambda model: model.register_buffer("elsewhere", torch.empty(1, device="meta")), 0),
]


@pytest.mark.parametrize("reason, put, blocks", OBSTACLES)
def test_P66_models_that_no_graph_could_hold_run_eagerly(reason, put, blocks):
    model, inputs = MODELS["flux"]()
    put(model)
    with torch.no_grad(), sp.apply(model, options(scaling="dynamic")) as handle:
        graphs, recorder = captures(handle)
        outs = [model(**inputs, return_dict=False)[0] for _ in range(WARM_UP + 3)]
        assert all(torch.equal(x, outs[0]) for x in outs)
        partly = 2 if blocks else 0
        assert recorder.captures == blocks and graphs.eager == {"warm_up": WARM_UP, reason: 3 - partly}
        assert (graphs.partly, graphs.block_replays) == (partly, partly * blocks)
        assert f"{reason}: {3 - partly}" in str(handle.report())


class Looking(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_P66_calls_that_no_graph_could_stand_for_run_eagerly():
    handle, graphs, model, inputs, old = replayed_model()
    with torch.enable_grad():
        model(**inputs)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):  # a kind of its own, for the same arguments
            model(**inputs, return_dict=False)
        with Looking():
            model(**inputs)
        model(**inputs | {"joint_attention_kwargs": {"ip_hidden_states": [object()]}})
        assert graphs.replays == 2
        assert torch.equal(model(**inputs, return_dict=False)[0], old) and graphs.replays == 3
        handle.probe(every=1)
        model(**inputs)
    reasons = ("gradient", "observed", "arguments", "probe")
    assert graphs.eager == {"warm_up": WARM_UP + 1} | dict.fromkeys(reasons, 1)


def test_results_that_can_not_be_copied_are_not_replayed(monkeypatch):
    class Odd:
        def __init__(self, sample):
            self.sample = sample

    model, inputs = MODELS["flux"]()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **kwargs: Odd(forward(**kwargs)[0]))
    with torch.no_grad(), sp.apply(model, options(scaling="dynamic")) as handle:
        graphs, recorder = captures(handle)
        outs = [model(**inputs, return_dict=False).sample for _ in range(WARM_UP + 3)]
        assert graphs.replays == 0 and graphs.eager == {"warm_up": WARM_UP, "results": 1} and graphs.partly == 2
        assert len({x.data_ptr() for x in outs}) == len(outs) and recorder.captures == 3


@pytest.mark.parametrize("recipe", ["qk_int8_pv_bf16", "qk_int8_pv_fp8"])
def test_row_maxima_are_not_kept(recipe, flux):
    """Of 8-bit P: a replay would not count its calls, and the next eager one would meet those of another."""
    pipe, draw = flux
    with sp.apply(pipe, options(recipe=recipe)) as handle:
        graphs, _ = captures(handle)
        draw(steps=8)
        assert not handle._denoisers[0].state.kept.row_maxima._kept and graphs.replays == 8 - WARM_UP


# --- its life ---


def test_refresh_captures_anew():
    """What Python does outside of the model's attributes is not seen: refresh() is what a user calls after it."""
    handle, graphs, model, inputs, old = replayed_model()
    handle.refresh()
    with torch.no_grad():
        again = [model(**inputs, return_dict=False)[0] for _ in range(WARM_UP + 1)]
    assert graphs.eager["warm_up"] == 2 * WARM_UP and graphs.replays == 3 and torch.equal(again[-1], old)


def test_a_cpu_has_no_graphs_and_the_report_says_so(flux):
    pipe, draw = flux
    with sp.apply(pipe, options()) as handle:
        wanted = draw(steps=3)
        assert "CUDA graphs" not in str(handle.report()) and pipe.transformer._compiled_call_impl is None
    with sp.apply(pipe, options(graphs="auto")) as handle:
        assert torch.equal(draw(steps=3), wanted)
        assert "0 forwards of transformer came from CUDA graphs, eager ones: device: 3." in str(handle.report())


def test_a_capture_that_fails_is_told_and_leaves_eager_forwards(caplog):
    def fails(run):
        run()
        raise ValueError("operation not permitted when stream is capturing")

    model, inputs = MODELS["flux"]()
    with torch.no_grad(), sp.apply(model, options(scaling="dynamic")) as handle:
        handle._denoisers[0].use_graphs(OnCpu(handle, handle._denoisers[0], fails))
        outs = [model(**inputs, return_dict=False)[0] for _ in range(WARM_UP + 3)]
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert handle._denoisers[0].graphs.eager == {"warm_up": WARM_UP, "not_capturable": 3}
        assert "0 forwards" in str(handle.report()) and "not_capturable: 3" in str(handle.report())
    told = [record.getMessage() for record in caplog.records if "graphs:" in record.getMessage()]
    assert len(told) == 3 and "FluxTransformer2DModel run eagerly" in told[0] and "not permitted" in told[0]


# --- on a GPU ---

STEPS, CALLS = 12, 2  # of a picture; forwards of a step, which guidance asks for


def on_gpu(recipe="qk_int8_pv_bf16", **kwargs):
    """(pipe, draw, options): what tiny_flux draws."""
    pipe = diffusers.FluxPipeline.from_pretrained(sp.pipelines.path("tiny_flux"), torch_dtype=torch.bfloat16)
    pipe.to("cuda").set_progress_bar_config(disable=True)

    def draw(seed=0):
        generator = torch.Generator().manual_seed(seed)
        given = sp.pipelines.call_arguments("tiny_flux") | {"num_inference_steps": STEPS, "output_type": "pt"}
        return pipe("a red circle on a blue background", generator=generator, **given).images.float().cpu()

    return pipe, draw, options(recipe=recipe, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"recipe": "qk_int8_pv_fp8"},
        {"keep": {"first_steps": 2}},
        {"linears": {"format": "int8", "min_features": 0}},
    ],
    ids=lambda kwargs: next(iter(kwargs), "default"),
)
def test_P66_pictures_from_graphs_on_a_gpu(kwargs):
    """As near to stock's as eager ones, and the same again from replays alone."""
    pipe, draw, config = on_gpu(**kwargs)
    stock = [draw(seed) for seed in (0, 1, 2)]
    with sp.apply(pipe, config) as handle:
        wanted, report = [draw(seed) for seed in (0, 1, 2)], handle.report()
    with sp.apply(pipe, dataclasses.replace(config, graphs="auto")) as handle:
        found, graphs = [draw(seed) for seed in (0, 1, 2)], handle._denoisers[0].graphs
        kinds = 1 + ("keep" in kwargs)
        assert graphs.eager == {"warm_up": kinds * WARM_UP * CALLS}
        assert graphs.replays == (3 * STEPS - kinds * WARM_UP) * CALLS
        own = handle.report()
        assert own.calls == report.calls  # a replay counts as an eager forward does
        assert (own.linears is None) == (report.linears is None)
        if own.linears is not None:
            assert own.linears.calls == report.linears.calls > 0 and own.linears.fallbacks == report.linears.fallbacks
        assert torch.equal(draw(2), found[2]) and not torch.equal(found[1], found[2])
    for exact, eager_one, own in zip(stock, wanted, found, strict=True):
        assert sp.metrics.psnr(own, exact).min() > sp.metrics.psnr(eager_one, exact).min() - 3


@pytest.mark.gpu
def test_P66_a_change_between_pictures_on_a_gpu():
    pipe, draw, config = on_gpu(linears={"format": "int8", "min_features": 0})
    with sp.apply(pipe, dataclasses.replace(config, graphs="auto")) as handle:
        before = draw()
        with torch.no_grad():
            for block in pipe.transformer.transformer_blocks:
                block.ff.net[2].weight.mul_(0.5)
        found, graphs = draw(), handle._denoisers[0].graphs
        assert graphs.eager["changed"] == 1 and graphs.replays > (STEPS - WARM_UP) * CALLS
        handle._denoisers[0].use_graphs(None)
        assert sp.metrics.psnr(found, draw()).min() > 45 and sp.metrics.psnr(found, before).max() < 45
