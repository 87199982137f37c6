"""A step of a server that runs out of memory: at every allocation, what its sequences hold stays as it was."""

from __future__ import annotations

import itertools

import pytest
import torch

from sage_processors.language.generation import paged_cache
from tests.language.generation.test_batching import cache_of, make, prompts, serve, texts
from tests.support.out_of_memory import OutOfMemory


MOST_ALLOCATIONS = 2000


def memory_of(cache):
    return [cache.cache_tensor] if hasattr(cache, "cache_tensor") else [*cache.key_cache, *cache.value_cache]


def bits(memory):
    return [x.clone() for x in memory]


def same(found, wanted):
    return all(map(torch.equal, found, wanted))


class Steps:
    """Attention calls of a server: each as (memory before it, the call, its result, memory after it)."""

    def __init__(self, monkeypatch):
        self.seen, own = [], paged_cache.Int8PagedCache.attend

        def attend(cache, number, *args, **kwargs):
            memory, before = memory_of(cache), bits(memory_of(cache))
            given = [copied(x) for x in args], {name: copied(x) for name, x in kwargs.items()}
            out = own(cache, number, *args, **kwargs)

            def again():
                return own(cache, number, *given[0], **given[1])

            self.seen.append((memory, before, again, out.clone(), bits(memory)))
            return out

        monkeypatch.setattr(paged_cache.Int8PagedCache, "attend", attend)


def copied(x):
    """Arguments of a step, which the server writes the next one's over."""
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, dict):
        return {name: copied(value) for name, value in x.items()}
    return type(x)(map(copied, x)) if type(x) in (list, tuple) else x


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.slow("as llama, with windows"))])
def test_out_of_memory_at_any_allocation_of_a_step_spares_what_is_stored(name, monkeypatch):
    """A failed call has written at most the tokens that it brought, and repeated it does what it would have done."""
    model = make(name)
    model.set_attn_implementation("sage_int8")
    steps = Steps(monkeypatch)
    try:
        texts(serve(model, prompts(5, 9), new=3, persistent=True))
        assert cache_of(model).nbytes()
        for memory, before, again, out, after in (steps.seen[0], steps.seen[-1]):  # a prompt's, and a decode step's
            kept = [x == y for x, y in zip(before, after, strict=True)]  # the step writes to the others
            assert not all(x.all() for x in kept)
            for n in itertools.count(1):
                assert n < MOST_ALLOCATIONS
                for x, then in zip(memory, before, strict=True):
                    x.copy_(then)
                failing = OutOfMemory(n)
                try:
                    with failing:
                        again()
                except torch.OutOfMemoryError as error:
                    assert str(error) == "injected"
                else:
                    break
                assert all(
                    torch.equal(x[held], then[held]) for x, then, held in zip(memory, before, kept, strict=True)
                ), n
                assert torch.equal(again(), out) and same(memory, after), n
            assert n > 5
    finally:
        model.destroy_cached_continuous_batching_manager()
