"""An Int8KVCache that runs out of memory is as it was: at every allocation of every operation of every kind."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch

import sage_processors as sp
from sage_processors.language.kv_layers import Int8Layer
from sage_processors.language.kv_static_layers import Int8StaticSlidingLayer
from sage_processors.language.quantized_kv import QuantizedKV, attend
from tests.language.tiny_cache_models import BUFFERS, HEAD_DIM, HEADS, states
from tests.support.out_of_memory import OutOfMemory
from tests.support.tiny_language_models import MODELS


MOST_ALLOCATIONS = 500
CAPACITY = {"growing": None, "static": 96}
SLIDING, FULL = 0, 1  # layers of the model


@functools.cache
def a_config():
    config = MODELS["gemma3"]()[0].config
    config.num_key_value_heads = HEADS
    return config


def new_cache(kind):
    return sp.Int8KVCache(a_config(), CAPACITY[kind])


def filled(kind, *numbers):
    cache = new_cache(kind)
    for seed, number in enumerate(numbers):
        for layer in (SLIDING, FULL):
            cache.update(*states(number, seed=seed), layer)
    return cache


def kept(layer):
    """Of the buffers, the slots that hold tokens."""
    if type(layer) is Int8Layer:
        return slice(layer.begin, layer.end)
    seen = int(layer.cumulative_length)
    return slice(0, min(seen, layer.ring) if isinstance(layer, Int8StaticSlidingLayer) else seen)


def state(cache):
    """Everything that a layer is, to the bit; room for tokens to come by its size."""
    found = []
    for layer in cache.layers:
        fields = {}
        for name, x in vars(layer).items():
            if isinstance(x, torch.Tensor):
                held = x[:, :, kept(layer)] if name in BUFFERS[:4] else x
                bits = held.flatten().contiguous().view(torch.uint8).numpy().tobytes() if held.numel() else b""
                x = (x.shape, x.device, bits)
            fields[name] = x
        found.append(fields)
    return found


def update(layer, number, batch=2):
    return lambda cache: cache.update(*states(number, batch, seed=77), layer)


def on_layer(layer, method, *args):
    return lambda cache: getattr(cache.layers[layer], method)(*args)


def on_cache(method, *args):
    return lambda cache: getattr(cache, method)(*args)


FLIP = torch.tensor([1, 0])
EARLY = ("early_initialization", 2, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
# name: (tokens that came before, operation, batch afterwards)
OPERATIONS = {
    "first update, sliding": ((), update(SLIDING, 30), 2),
    "first update, short": ((), update(SLIDING, 5), 2),
    "first update, full": ((), update(FULL, 30), 2),
    "first update after early initialization": (EARLY, update(FULL, 30), 2),
    "early initialization": ((), on_cache(*EARLY), 2),
    "initialization of a layer": ((), on_layer(FULL, "lazy_initialization", *states(0)), 2),
    "one token, sliding": ((13, 1), update(SLIDING, 1), 2),
    "one token, full": ((13, 1), update(FULL, 1), 2),
    "some tokens, sliding": ((13, 1), update(SLIDING, 6), 2),
    "all of the window anew": ((13, 1), update(SLIDING, 25), 2),
    "more than there is room for": ((5, 9), update(FULL, 60), 2),
    "a ring that goes round": ((5, 5), update(SLIDING, 7), 2),
    "first update after reset": ((13, "reset"), update(FULL, 9), 2),
    "reorder": ((13, 1), on_cache("reorder_cache", FLIP), 2),
    "repeat": ((13, 1), on_cache("batch_repeat_interleave", 2), 4),
    "select": ((13, 1), on_cache("batch_select_indices", torch.tensor([1])), 1),
    "select as many": ((13, 1), on_cache("batch_select_indices", FLIP), 2),
    "reorder a layer": ((13, 1), on_layer(FULL, "reorder_cache", FLIP), 2),
    "reorder a sliding layer": ((13, 1), on_layer(SLIDING, "reorder_cache", FLIP), 2),
    "crop": ((5, 3), on_cache("crop", -2), 2),
    "crop all": ((5, 3), on_cache("crop", -8), 2),
}
QUICK = ("first update, full", "one token, sliding", "reorder", "crop")


def prepared(kind, before):
    if before is EARLY:
        cache = new_cache(kind)
        on_cache(*EARLY)(cache)
        return cache
    cache = filled(kind, *(number for number in before if number != "reset"))
    if "reset" in before:
        cache.reset()
    return cache


def outcome(cache, batch):
    """What a layer holds and what attention makes of it, after one more token."""
    query = torch.randn(batch, 1, 2 * HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    result = []
    for layer in (SLIDING, FULL):
        got = cache.update(*states(1, batch, seed=99), layer)[0]
        if isinstance(got, QuantizedKV):
            assert got.owner is cache.layers[layer]
            result.append(attend(query, got))
    return result, state(cache)


def assert_whole_or_nothing(make, operation, batch, most=MOST_ALLOCATIONS):
    """Fail at each allocation in turn; compare with a cache that never failed. Returns how many there are."""
    never_failed = make()
    operation(never_failed)
    after, (want, last) = state(never_failed), outcome(never_failed, batch)
    for n in itertools.count(1):
        assert n < most
        cache = make()
        before = state(cache)
        try:
            with OutOfMemory(n):
                operation(cache)
            assert state(cache) == after
            return n - 1
        except torch.OutOfMemoryError as error:
            assert str(error) == "injected"
        assert state(cache) == before, f"changed by a failure at allocation {n}"
        operation(cache)
        assert state(cache) == after
        if n % 10 == 1:  # the same bits give the same result
            got, left = outcome(cache, batch)
            assert left == last
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", CAPACITY)
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow("a run for each allocation")) for n in OPERATIONS],
)
def test_C10_out_of_memory_at_any_allocation_leaves_the_cache_as_it_was(kind, name):
    before, operation, batch = OPERATIONS[name]
    number = assert_whole_or_nothing(lambda: prepared(kind, before), operation, batch)
    assert number or (name.startswith("crop") and kind == "growing")  # a growing layer only counts back


@pytest.fixture
def moves(monkeypatch):
    """Moves to another device, of which there is none here, copy."""
    move = torch.Tensor.to

    def to(x, *args, **kwargs):
        return x.clone() if kwargs.get("non_blocking") else move(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)


@pytest.mark.parametrize("kind", CAPACITY)
@pytest.mark.parametrize("layer", [SLIDING, FULL])
@pytest.mark.parametrize("method", ["offload", "prefetch"])
def test_C10_out_of_memory_while_a_layer_moves_leaves_all_of_it_where_it_was(kind, layer, method, moves):
    for n in range(1, len(BUFFERS) + 1):
        moved = filled(kind, 13, 1).layers[layer]
        moved.device = torch.device("cpu", 0)  # not where its tensors say they are
        before = {name: getattr(moved, name) for name in BUFFERS}
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(n):
            getattr(moved, method)()
        assert all(getattr(moved, name) is x for name, x in before.items())


class Stream:
    """Of a device that has no streams."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("kind", CAPACITY)
def test_an_offloaded_cache_holds_what_one_that_stays_does(kind, moves, monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    offloaded, stays = new_cache(kind), new_cache(kind)
    offloaded.offloading, offloaded.only_non_sliding, offloaded.prefetch_stream = True, False, Stream()
    for seed, number in enumerate((13, 1, 5, 1)):
        for layer in (SLIDING, FULL):
            for cache in (offloaded, stays):
                cache.update(*states(number, seed=seed), layer)
        assert state(offloaded) == state(stays)


@pytest.mark.slow("fails at every allocation of an update")
@pytest.mark.parametrize("kind", CAPACITY)
@pytest.mark.parametrize("layer", [SLIDING, FULL])
@pytest.mark.parametrize("number", [1, 25])
def test_C10_a_token_is_not_stored_twice_where_offloading_runs_out_of_memory(kind, layer, number, moves, monkeypatch):
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())

    def make():
        cache = filled(kind, 13, 1)
        cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, False, Stream()
        return cache

    # the layer's move to the CPU comes after the update
    assert assert_whole_or_nothing(make, update(layer, number), 2) >= len(BUFFERS)


def test_C11_a_crop_that_one_layer_refuses_crops_none():
    cache = filled("growing", 5, 3)
    cache.update(*states(9), SLIDING)  # its window is full now, that of the other has no end
    before = state(cache)
    cache.layers.reverse()
    with pytest.raises(RuntimeError, match="window of 11 is full"):
        cache.crop(-2)
    cache.layers.reverse()
    assert state(cache) == before


@pytest.mark.parametrize("kind", CAPACITY)
def test_C11_a_batch_operation_that_one_layer_refuses_changes_none(kind):
    cache = filled(kind, 5, 3)
    other = copy.deepcopy(cache)
    cache.layers[FULL] = filled(kind, 5).layers[FULL]
    cache.layers[FULL].batch_select_indices(torch.tensor([0]))
    before = state(cache)
    with pytest.raises(IndexError):
        cache.reorder_cache(FLIP)
    assert state(cache) == before
    cache.layers[FULL] = other.layers[FULL]
    cache.reorder_cache(FLIP)
    other.reorder_cache(FLIP)
    assert state(cache) == state(other)


def test_C11_states_of_linear_attention_go_with_the_others():
    """A model with layers of both kinds: where ours runs out of memory, theirs is not reordered either."""
    from transformers.cache_utils import LinearAttentionLayer

    def make():
        cache = filled("growing", 13)
        linear = LinearAttentionLayer()
        linear.update_conv_state(torch.arange(8.0).view(2, 1, 4))
        linear.update_recurrent_state(torch.arange(6.0).view(2, 3))
        cache.layers.insert(0, linear)
        return cache

    def tensors(cache):
        linear = cache.layers[0]
        return [linear.conv_states[0].clone(), linear.recurrent_states[0].clone(), cache.layers[2].k_codes.clone()]

    for n in itertools.count(1):
        cache = make()
        before = tensors(cache)
        try:
            with OutOfMemory(n):
                cache.reorder_cache(FLIP)
            break
        except torch.OutOfMemoryError:
            assert all(torch.equal(a, b) for a, b in zip(tensors(cache), before, strict=True))
        cache.reorder_cache(FLIP)
        assert all(torch.equal(a, b.flip(0)) for a, b in zip(tensors(cache), before, strict=True))
    assert n > 2 + 2 * len(BUFFERS)
