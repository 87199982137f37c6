"""torch.cat of two inputs of a block that are neighbours in memory: read where they are, or copied."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from diffusers import FluxTransformer2DModel

import sage_processors as sp
from sage_processors.postponed.joins import JoinedParts, SequencePart, with_parts
from sage_processors.postponed.region import opened
from sage_processors.postponed.tensor import ChangedInputError


class Other(torch.Tensor):
    pass


def neighbours(batch=1, rows=(3, 5), channels=8, dtype=torch.bfloat16):
    whole = torch.randn(batch, sum(rows), channels).to(dtype)
    return whole, whole[:, : rows[0]], whole[:, rows[0] :]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dim", [1, -2])
def test_neighbours_are_read_where_they_are_and_copied_for_a_writer(batch, dim):
    whole, first, second = neighbours(batch)
    before = whole.clone()
    (x,), kwargs = with_parts((second,), {"text": first, "other": 3})
    assert type(x) is type(kwargs["text"]) is SequencePart and kwargs["other"] == 3
    with opened() as region:
        made = torch.cat([kwargs["text"], x], dim)
        assert type(made) is JoinedParts and region.has_joins
        assert made.shape == whole.shape and made.is_contiguous()
        assert made.stored().data_ptr() == whole.data_ptr() and torch.equal(made.stored(), whole)
        made.mul_(2)  # a tensor of its own, as that of torch.cat
        assert made.stored() is None and torch.equal(made + 0, before * 2)
        assert torch.equal(whole, before)


def test_anybody_else_gets_the_inputs_themselves():
    _, first, second = neighbours()
    (a, b), _ = with_parts((first, second), {})
    with opened() as region:
        assert torch.equal(torch.cat([b, a], 1), torch.cat([second, first], 1))  # in another order
        assert torch.equal(torch.cat([a, b, a], 1), torch.cat([first, second, first], 1))
        assert not region.has_joins
        assert a.tensor() is first and b.tensor() is second
        assert type(torch.cat([a, b], 1)) is torch.Tensor  # somebody may write to them now


def test_a_write_behind_the_join_is_refused():
    _, first, second = neighbours()
    (a, b), _ = with_parts((first, second), {})
    with opened():
        made = torch.cat([a, b], 1)
        second.mul_(2)
        for use in (made.stored, made.tensor, made.value):
            with pytest.raises(ChangedInputError, match=r"input \(1, 8, 8\) of a block"):
                use()
        del made, use  # else the region's end would ask for it


def test_a_write_to_the_second_part_that_counts_apart_is_refused():
    whole, first, _ = neighbours()
    second = whole.data[:, 3:]
    (a, b), _ = with_parts((first, second), {})
    with opened():
        made = torch.cat([a, b], 1)
        second.mul_(2)
        with pytest.raises(ChangedInputError):
            made.stored()
        del made


def test_under_vmap_nothing_is_joined():
    seen = []
    torch.func.vmap(lambda x: seen.append(with_parts((x[:, :3], x[:, 3:]), {})) or x)(torch.randn(2, 1, 8, 8))
    assert seen == [None]


def other_tensors():
    whole, first, second = neighbours()
    yield "of two memories", (first, second.clone()), {}
    yield "the same twice", (first, first), {}
    yield "not adjacent", (whole[:, :2], second), {}
    yield "overlapping", (whole[:, :4], second), {}
    yield "a third of the memory", (first, second, whole), {}
    yield "a flat one of the memory", (first, second), {"other": whole.view(-1)}
    yield "a parameter of the memory", (first, second), {"other": torch.nn.Parameter(whole, requires_grad=False)}
    yield "in a list of the memory", (first, second), {"other": [3, {"x": whole[0]}]}
    yield "a tensor of another class", (first, second), {"other": torch.nn.Buffer(whole).as_subclass(Other)}
    yield "of other channels", (whole[..., :4], whole[..., 4:]), {}
    yield "with a gradient", tuple(x.requires_grad_() for x in neighbours()[1:]), {}
    yield "alone", (first,), {}
    two = torch.randn(2, 8, 8)
    yield "of more rows than both", (two[:, :3], two[:, 3:6]), {}


@pytest.mark.parametrize("name", [name for name, *_ in other_tensors()])
def test_other_tensors_stay_as_they_are(name):
    (args, kwargs) = next((args, kwargs) for other, args, kwargs in other_tensors() if other == name)
    assert with_parts(args, kwargs) is None
    with torch.inference_mode():
        assert with_parts(neighbours()[1:], {}) is None


def test_memory_of_the_inputs_is_freed_with_the_parts():
    whole, first, second = neighbours()
    gone = weakref.ref(whole.untyped_storage())
    gc.disable()
    try:
        with opened():
            parts = with_parts((first, second), {})
            made = torch.cat(list(parts[0]), 1)
            made.stored()
        del whole, first, second, parts, made
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("batch", [1, 2])
def test_single_blocks_of_flux_have_the_bits_of_a_copy(batch, monkeypatch):
    """Between blocks nothing is copied; the first block gets text and image apart."""
    torch.manual_seed(0)
    config = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 3, "attention_head_dim": 16}
    config |= {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = FluxTransformer2DModel(**config, axes_dims_rope=(4, 4, 8)).to(torch.bfloat16).eval().requires_grad_(False)

    def numbers(*shape):
        return torch.randn(*shape).to(torch.bfloat16)

    inputs = {
        "hidden_states": numbers(batch, 20, 4), "encoder_hidden_states": numbers(batch, 7, 32),
        "pooled_projections": numbers(batch, 32), "timestep": torch.full((batch,), 0.5, dtype=torch.bfloat16),
        "img_ids": torch.rand(20, 3), "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip
    with torch.no_grad(), sp.quantize_linears(model, min_features=0):
        first = model(**inputs).sample
        joined, copies, made = [], [], JoinedParts.__init__
        monkeypatch.setattr(JoinedParts, "__init__", lambda self, *a: joined.append(1) or made(self, *a))
        monkeypatch.setattr(JoinedParts, "_compute", lambda self: copies.append(1))
        later = model(**inputs).sample
        assert len(joined) == 2 and not copies
        for block in model.single_transformer_blocks:  # results that lie apart are copied
            block.register_forward_hook(lambda module, args, result: tuple(x.clone() for x in result))
        copied = model(**inputs).sample
        assert len(joined) == 2
    assert torch.equal(first, later) and torch.equal(later, copied)
