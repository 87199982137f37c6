"""What a watch on functions sees, and what it costs to ask."""

from __future__ import annotations

import sys
import time
import types

import pytest
import torch.nn.functional as F
from torch import nn

from sage_processors.patching.patched import Watch, with_helpers


SOURCE = """
import torch
import torch.nn.functional as F
from torch.nn.functional import silu

LIMIT = 3


def helper(x):
    return x


def uses(x):
    y = [helper(v) for v in x]
    return F.relu(torch.nn.functional.gelu(silu(y)), LIMIT)


def plain(x):
    return x


def outer(x):
    return [uses(y) for y in x] + [outer(x[1:])]


class Base:
    def forward(self, x):
        return x


class Derived(Base):
    pass
"""


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("a_library")
    exec(compile(SOURCE, "a_library.py", "exec"), module.__dict__)
    for cls in (module.Base, module.Derived):
        cls.__module__ = "a_library"
    monkeypatch.setitem(sys.modules, "a_library", module)
    return module


def _other(*args):
    return args


@pytest.mark.parametrize("name", ["helper", "silu", "LIMIT", "F", "torch"])
def test_a_global_that_a_function_uses_is_seen_replaced_and_put_back(library, name):
    watch = Watch([library.uses])
    assert not watch.changed() and not watch.names()
    own = getattr(library, name)
    setattr(library, name, _other)
    assert watch.changed() and watch.names() == [f"a_library.{name}"]
    setattr(library, name, own)
    assert not watch.changed() and not watch.names()
    delattr(library, name)
    assert watch.changed()


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_what_a_function_uses_of_a_module_is_seen(library, name, monkeypatch):
    watch = Watch([library.uses])
    monkeypatch.setattr(F, name, _other)
    assert watch.names() == [f"torch.nn.functional.{name}"]


def test_a_global_of_equal_value_is_another_one(library):
    library.LIMIT = 1
    watch = Watch([library.uses])
    library.LIMIT = True
    assert watch.changed()


def test_what_a_function_does_not_use_is_not_watched(library):
    watch = Watch([library.plain])
    library.helper = library.LIMIT = library.F = _other
    assert not watch.changed()


def test_the_code_of_a_function_is_watched(library):
    watch = Watch([library.plain])
    library.plain.__code__ = _other.__code__
    assert watch.names() == ["a_library.plain.__code__"]


def test_methods_are_watched_also_where_a_base_class_has_them(library):
    watch = Watch(methods=[(library.Derived, "forward")])
    own = library.Base.forward
    library.Base.forward = _other
    assert watch.changed() and watch.names() == ["a_library.Derived.forward"]
    library.Base.forward = own
    assert not watch.changed()
    library.Derived.forward = _other
    assert watch.changed()
    del library.Derived.forward
    assert not watch.changed()
    del library.Base.forward
    assert watch.changed()


def test_functions_of_modules_are_watched(library):
    watch = Watch(methods=[(library, "plain")])
    library.plain = _other
    assert watch.changed() and watch.names() == ["a_library.plain"]


def test_helpers_are_functions_of_the_module_that_are_used_by_name(library):
    assert with_helpers(library.outer) == [library.outer, library.uses, library.helper]
    assert with_helpers(library.plain) == [library.plain]


def test_asking_takes_microseconds():
    """A processor, its block's and its layers' forwards: what is asked before each forward of a model."""
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    blocks = [flux.FluxTransformerBlock, flux.FluxSingleTransformerBlock, nn.Linear, nn.LayerNorm, nn.RMSNorm]
    watch = Watch([flux.FluxAttnProcessor.__call__], [(cls, "forward") for cls in blocks])
    for cls in blocks:
        watch.function(cls.forward)
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        assert not watch.changed()
        best = min(best, time.perf_counter() - start)
    assert best < 50e-6
