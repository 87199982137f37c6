"""Decode steps from graphs: eager steps' tokens, in every way to generate, over caches that come and go.

On a CPU `Recorder` stands in for CUDA: its replays compute what was captured, on its tensors, with an error if asked.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import transformers.modeling_utils  # noqa: F401 (models of transformers are imported when they are used)

import sage_processors as sp
from sage_processors.language.generation import decode_graphs
from sage_processors.language.generation.decode_graphs import DecodeGraphs
from sage_processors.language.generation.step_cache import MOST_SETS, StepCache
from sage_processors.language.kv_layers import BUFFERS
from sage_processors.language.kv_room import bucket
from sage_processors.reporting.event_counter import collected
from tests.support import cpu_graphs
from tests.support.tiny_language_models import MODELS, VOCABULARY


ROOM = 200


class Recorder(cpu_graphs.Recorder):
    """Its replays count nothing, as CUDA runs no Python. fault: raised by them."""

    fault = None

    def again(self, run):
        if self.fault is not None:
            raise self.fault
        with collected():
            return run()


def ids_of(batch=2, length=70, seed=3):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def graphs(monkeypatch):
    """A function that returns (model, its DecodeGraphs with a Recorder), as graphs="auto" has them."""
    monkeypatch.setattr(DecodeGraphs, "device_type", "cpu")

    def make(name="llama", **options):
        model = MODELS[name]()[0]
        handle = sp.apply(model, sp.SageAttnProcessor(graphs="auto", **options))
        handle.graphs.record = Recorder()
        return model, handle.graphs

    return make


def tokens(model, cache=None, ids=None, **options):
    """Generated tokens, with a cache or with the one that `generate` makes."""
    torch.manual_seed(1)
    given = {} if cache is None else {"past_key_values": cache}
    ids = ids_of() if ids is None else ids
    return model.generate(ids, **given, **({"do_sample": False, "max_new_tokens": 20} | options))


def eager(name, capacity, **options):
    """The same tokens without graphs."""
    model = MODELS[name]()[0]
    with sp.apply(model, sp.SageAttnProcessor()):
        return tokens(model, sp.Int8KVCache(model.config, capacity), **options)


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several": {"num_return_sequences": 2},
}
WAYS["several"]["do_sample"] = True
CASES = [("llama", None), ("llama", ROOM), ("gemma3", ROOM), ("gpt_oss", ROOM)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "capacity"), CASES)
def test_graphs_generate_what_eager_steps_do(name, capacity, way, graphs):
    want = eager(name, capacity, **WAYS[way])
    model, made = graphs(name)
    for number in range(3):  # a new cache finds the graph of the one before
        assert torch.equal(tokens(model, sp.Int8KVCache(model.config, capacity), **WAYS[way]), want)
        assert made.record.captures == 1 and made.replays == 19 * (number + 1) - decode_graphs.WARM_UP
    assert not made.eager and len(made.buffers.sets) == 1
    calls = sum(row["cache_calls"] for row in model._sage.handle.report().rows)
    assert calls == 3 * 19 * model.config.num_hidden_layers


def test_left_padding_goes_on_and_hides_what_it_hides(graphs):
    mask = torch.ones(2, 70, dtype=torch.int64)
    mask[0, :9] = 0
    want = eager("llama", ROOM, attention_mask=mask)
    model, made = graphs()
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM), attention_mask=mask), want)
    assert made.replays == 17 and not made.eager
    mask[0, :9], mask[1, :20] = 1, 0
    want = eager("llama", ROOM, attention_mask=mask)
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM), attention_mask=mask), want)
    assert made.replays == 17 + 19 and made.record.captures == 1


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("window", {"name": "gemma3", "capacity": None}),
        ("mask", {"name": "gemma3", "capacity": ROOM, "padded": True}),
        ("first_tokens", {"name": "llama", "capacity": None, "length": 30}),
    ],
)
def test_what_cannot_be_captured_is_eager_and_counted(reason, options, graphs):
    name, ids = options["name"], ids_of(length=options.get("length", 70))
    mask = torch.ones_like(ids)
    mask[0, : 9 * options.get("padded", False)] = 0
    want = eager(name, options["capacity"], ids=ids, attention_mask=mask)
    model, made = graphs(name)
    assert torch.equal(
        tokens(model, sp.Int8KVCache(model.config, options["capacity"]), ids, attention_mask=mask), want
    )
    assert dict(made.eager) == {reason: 19} and not made.replays
    assert f"{reason} 19" in str(model._sage.handle.report())


def test_assisted_decoding_drops_tokens_of_borrowed_buffers(graphs):
    ids = ids_of(1)
    want = eager("llama", None, ids=ids, prompt_lookup_num_tokens=3)
    model, made = graphs()
    for _ in range(2):
        assert torch.equal(tokens(model, sp.Int8KVCache(model.config), ids, prompt_lookup_num_tokens=3), want)
    assert torch.equal(tokens(model, None, ids, assistant_model=MODELS["llama"]()[0]), want)


def test_a_cache_that_outgrows_its_buffers_moves_on(graphs):
    length = bucket(70) - 75
    ids = ids_of(length=length)
    want = eager("llama", None, ids=ids, max_new_tokens=90)
    model, made = graphs()
    cache = sp.Int8KVCache(model.config)
    assert torch.equal(tokens(model, cache, ids, max_new_tokens=90), want)
    assert made.record.captures == 2 and len(made.buffers.sets) == 2
    assert cache.layers[0].k_codes.shape[2] == bucket(length + 89)


def test_caches_alive_at_once_never_share(graphs):
    model, made = graphs()
    ids = [ids_of(seed=seed) for seed in range(MOST_SETS + 2)]
    wants = [eager("llama", ROOM, ids=one) for one in ids]
    caches = [sp.Int8KVCache(model.config, ROOM) for _ in ids]
    with torch.no_grad():  # prompts first, then one token of each in turn
        now = [model(one, past_key_values=cache, use_cache=True) for one, cache in zip(ids, caches, strict=True)]
        texts = [one.logits[:, -1:].argmax(-1) for one in now]
        for _ in range(8):
            for i, cache in enumerate(caches):
                made_now = model(texts[i][:, -1:], past_key_values=cache, use_cache=True)
                texts[i] = torch.cat([texts[i], made_now.logits[:, -1:].argmax(-1)], 1)
    for text, want in zip(texts, wants, strict=True):
        assert torch.equal(text, want[:, 70:79])
    assert len(made.buffers.sets) == MOST_SETS and made.eager["buffers"] == 2 * 8
    held = [layer.k_codes.data_ptr() for cache in caches for layer in cache.layers]
    assert len(set(held)) == len(held)


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # with rings of sliding windows, too
def test_a_prompt_goes_into_the_buffers_of_a_cache_that_is_gone(name, graphs):
    """No second set of buffers beside the model's own, and nothing of what is in them is seen."""
    model, made = graphs(name)
    tokens(model, sp.Int8KVCache(model.config, ROOM))
    (held,) = made.buffers.sets
    captures = made.record.captures
    for seed in (5, 6):
        for own in held.layers:
            for x in own.tensors.values():
                x.fill_(99)
        cache, ids = sp.Int8KVCache(model.config, ROOM), ids_of(length=90 - seed, seed=seed)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        for i, own in enumerate(held.layers):
            assert all(getattr(cache.layers[i], each) is own.tensors[each] for each in BUFFERS)
        cache.reset()
        text = tokens(model, cache, ids)
        assert torch.equal(text, eager(name, ROOM, ids=ids))
        del cache
    assert made.buffers.sets == [held] and made.record.captures == captures and made.replays


def test_two_new_caches_do_not_take_the_same_buffers(graphs):
    model, made = graphs()
    tokens(model, sp.Int8KVCache(model.config, ROOM))
    caches = [sp.Int8KVCache(model.config, ROOM) for _ in range(2)]
    ids = [ids_of(seed=seed) for seed in (7, 8)]
    for cache in caches:  # as two threads may, before either has allocated
        made.buffers.offer(cache)
    assert caches[0].layers[0].lent is not None and caches[1].layers[0].lent is None
    with torch.no_grad():
        for cache, one in zip(caches, ids, strict=True):
            model(one, past_key_values=cache, use_cache=True)
    held = [layer.k_codes.data_ptr() for cache in caches for layer in cache.layers]
    assert len(set(held)) == len(held)
    for cache, one in zip(caches, ids, strict=True):
        cache.reset()
        assert torch.equal(tokens(model, cache, one), eager("llama", ROOM, ids=one))


def test_a_cache_of_another_batch_takes_buffers_of_its_own(graphs):
    model, made = graphs()
    tokens(model, sp.Int8KVCache(model.config, ROOM))
    (held,) = made.buffers.sets
    before = held.layers[0].tensors["k_codes"].clone()
    ids, other = ids_of(3), sp.Int8KVCache(model.config, ROOM)
    assert torch.equal(tokens(model, other, ids), eager("llama", ROOM, ids=ids))
    assert torch.equal(held.layers[0].tensors["k_codes"], before) and len(made.buffers.sets) == 2
    cache = sp.Int8KVCache(model.config, ROOM)  # gets them, though the other lives
    with torch.no_grad():
        model(ids_of(), past_key_values=cache, use_cache=True)
    assert cache.layers[0].k_codes is held.layers[0].tensors["k_codes"] and other.layers[0].k_codes.shape[0] == 3


def test_a_copy_of_a_cache_and_what_a_dead_one_gave_out_are_left_alone(graphs):
    model, made = graphs()
    cache = sp.Int8KVCache(model.config, ROOM)
    tokens(model, cache)
    twin, shown = copy.deepcopy(cache), cache.layers[0].keys
    before = twin.layers[0].k_codes.clone(), shown.k_codes.clone()
    del cache
    gc.collect()
    tokens(model, sp.Int8KVCache(model.config, ROOM), ids_of(seed=9))
    assert torch.equal(twin.layers[0].k_codes, before[0]) and torch.equal(shown.k_codes, before[1])
    assert len(made.buffers.sets) == 2  # as `shown` still holds the layer


def test_a_static_cache_knows_its_length_after_replays(graphs):
    model, made = graphs()
    cache = sp.Int8KVCache(model.config, ROOM)
    tokens(model, cache)
    assert int(cache.get_seq_length()) == 89 and made.replays
    cache.crop(-3)
    assert int(cache.get_seq_length()) == 86 and int(cache.layers[0].cumulative_length) == 86
    cache.reset()
    again = tokens(model, cache, ids_of(seed=5))
    assert torch.equal(again, eager("llama", ROOM, ids=ids_of(seed=5)))


def test_a_replay_with_other_bits_is_dropped_and_no_token_comes_from_it(graphs):
    want = eager("llama", ROOM)
    model, made = graphs()
    made.record = Recorder(error=0.5)
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want)
    assert made.eager["differs"] and made.replays <= len(decode_graphs.COMPARED)
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want) and made.record.captures == 1


def test_a_length_taken_for_a_constant_is_noticed(graphs, monkeypatch):
    want = eager("llama", ROOM)
    model, made = graphs()
    record = made.record

    def with_constant(run, device):
        held = made.buffers.sets[-1]
        then = held.seen.clone()

        def constant():
            held.seen.copy_(then)
            return run()

        return record(constant, device)

    made.record = with_constant
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want)
    assert made.eager["differs"]


def _fail(*args, **kwargs):
    raise RuntimeError("injected")


PLACES = {
    "kind": (decode_graphs, "kind_of"), "hooks": (decode_graphs, "obstacle"), "state": (decode_graphs, "ModelState"),
    "borrow": (decode_graphs.Buffers, "borrow"), "lend": (StepCache, "lend"), "compare": (decode_graphs, "agree"),
    "weights": (decode_graphs, "refresh_weights"), "copy": (decode_graphs, "mapped"), "ends": (StepCache, "ends"),
    "bits": (decode_graphs, "bits_differ"), "fill": (DecodeGraphs, "_fill"), "back": (DecodeGraphs, "_given_back"),
}  # fmt: skip


@pytest.mark.slow("a run for each fault")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("first", [True, False])
def test_no_fault_ends_a_run_or_changes_it(place, first, graphs, monkeypatch):
    """A fault from the first step on, or in the middle of a run that replays."""
    want = eager("llama", ROOM)
    model, made = graphs()
    if first:
        monkeypatch.setattr(*PLACES[place], _fail)
    else:
        tokens(model, sp.Int8KVCache(model.config, ROOM))
        replay, counted = next(iter(made.buffers.sets[0].graphs.values())).replay, []

        def fails_later():
            replay()
            counted.append(1)
            if len(counted) == 4:
                monkeypatch.setattr(*PLACES[place], _fail)

        next(iter(made.buffers.sets[0].graphs.values())).replay = fails_later
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want)
    monkeypatch.undo()


@pytest.mark.parametrize("fault", [RuntimeError("captured no more"), torch.OutOfMemoryError("no memory")])
def test_a_replay_that_raises_leaves_the_step_as_if_not_tried(fault, graphs):
    want = eager("llama", ROOM)
    model, made = graphs()
    tokens(model, sp.Int8KVCache(model.config, ROOM))
    made.record.fault = fault
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want)
    assert made.eager["memory" if isinstance(fault, torch.OutOfMemoryError) else "failed"]


def test_a_forward_that_waits_for_the_gpu_is_never_captured_again(graphs):
    want = eager("llama", ROOM)
    model, made = graphs()
    forward, record = model.model.layers[1].mlp.forward, made.record

    def waits(x):
        if record.is_recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        return forward(x)

    model.model.layers[1].mlp.forward = waits
    for _ in range(2):
        assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want)
    assert record.captures == 1 and made.eager["not_capturable"] == 17 + 19


def test_hooks_that_collect_hidden_states_stop_graphs_only_while_somebody_collects(graphs):
    """transformers puts them on a model in its first call with output_hidden_states, and leaves them there."""
    model, made = graphs()
    want, cache = eager_of(model), sp.Int8KVCache(model.config, ROOM)
    assert torch.equal(tokens(model, cache), want)
    with torch.no_grad():
        states = model(ids_of(), output_hidden_states=True).hidden_states
    assert any("output_capturing" in hook.__module__ for m in model.modules() for hook in m._forward_hooks.values())
    for _ in range(2):
        before = made.replays
        assert torch.equal(tokens(model), want)
    assert made.replays == before + 19 and not made.eager["hooks"]
    options = {"output_hidden_states": True, "return_dict_in_generate": True}
    first, second = tokens(model, **options), tokens(model, **options)
    with sp.apply(model, sp.SageAttnProcessor()):
        eager = tokens(model, **options)
    for found in (first, second):
        for ours, theirs in zip(found.hidden_states, eager.hidden_states, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert len(states) == model.config.num_hidden_layers + 1


def test_a_part_of_a_model_that_collects_runs_eagerly(graphs):
    from transformers.utils.output_capturing import _active_collector

    model, made = graphs()
    with torch.no_grad():
        model(ids_of(), output_hidden_states=True)
    for _ in range(2):
        tokens(model)
    assert made.replays
    replays, taken = made.replays, _active_collector.set({"hidden_states": []})
    try:
        tokens(model)
    finally:
        _active_collector.reset(taken)
    assert made.replays == replays and made.eager["hooks"]


def test_a_changed_model_is_seen(graphs):
    """A weight written between two texts and one written within a text, and a hook, which runs."""
    model, made = graphs()
    tokens(model, sp.Int8KVCache(model.config, ROOM))
    model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    want = eager_of(model)
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want)
    assert made.eager["changed"] == 1 and made.record.captures == 2
    seen = []
    model.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want)
    assert len(seen) >= 20 and made.eager["hooks"]


def test_no_replay_reads_memory_that_a_weight_has_left(graphs):
    model, made = graphs()
    tokens(model, sp.Int8KVCache(model.config, ROOM))
    weight, late = model.model.layers[1].mlp.down_proj.weight, []
    graph, memory = next(iter(made.buffers.sets[0].graphs.values())), weight.data_ptr()
    replay = graph.replay
    graph.replay = lambda: (late.append(weight.data_ptr() != memory), replay())

    def moves(ids, scores):
        if ids.shape[1] == 80:
            weight.data = weight.data.clone()
        return scores

    tokens(model, sp.Int8KVCache(model.config, ROOM), logits_processor=[moves])
    assert late and not any(late) and made.eager["changed"] == 1 and weight.data_ptr() != memory


def test_a_cache_alone_replays_and_apply_takes_the_graphs_over(graphs):
    want = eager("llama", ROOM)
    model = MODELS["llama"]()[0]
    model.set_attn_implementation("sage_int8")
    cache = sp.Int8KVCache(model.config, ROOM)
    tokens(model, cache, max_new_tokens=1)
    made = model._compiled_call_impl
    made.record = Recorder()
    assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM)), want) and made.replays == 17
    assert all(row["cache_calls"] == 19 for row in sp.attention_report(model).rows)
    with sp.apply(model, sp.SageAttnProcessor()):
        assert model._compiled_call_impl is None and not made.buffers.sets
        tokens(model, sp.Int8KVCache(model.config, ROOM))
        assert model._compiled_call_impl is None


def eager_of(model):
    """A model's tokens with graphs off for a moment."""
    taken, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        return tokens(model, sp.Int8KVCache(model.config, ROOM))
    finally:
        model._compiled_call_impl = taken


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "capacity"), CASES)
def test_cuda_graphs_generate_what_eager_steps_do(name, capacity, way):
    model, ids = MODELS[name]()[0].to("cuda", torch.float16), ids_of().cuda()
    with sp.apply(model, sp.SageAttnProcessor()):
        want = tokens(model, sp.Int8KVCache(model.config, capacity), ids, **WAYS[way])
    with sp.apply(model, sp.SageAttnProcessor(graphs="auto")) as handle:
        for _ in range(3):
            assert torch.equal(tokens(model, sp.Int8KVCache(model.config, capacity), ids, **WAYS[way]), want)
        made = handle.graphs
        if (name, way) == ("gpt_oss", "beams"):  # transformers' experts copy from the CPU there
            assert set(made.eager) == {"not_capturable"} and not made.replays
        else:
            assert made.captures == 1 and made.replays == 3 * 19 - decode_graphs.WARM_UP and not made.eager


@pytest.mark.gpu
def test_a_broken_cuda_capture_leaves_sampling_as_it_was():
    model, ids = MODELS["llama"]()[0].to("cuda", torch.float16), ids_of().cuda()
    with sp.apply(model, sp.SageAttnProcessor()):
        want = tokens(model, sp.Int8KVCache(model.config, ROOM), ids, do_sample=True)
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: forward(x) * (1 if bool(x.isfinite().any()) else 0)
    with sp.apply(model, sp.SageAttnProcessor(graphs="auto")) as handle:
        for _ in range(2):
            assert torch.equal(tokens(model, sp.Int8KVCache(model.config, ROOM), ids, do_sample=True), want)
        assert handle.graphs.eager["not_capturable"] and not handle.graphs.replays
