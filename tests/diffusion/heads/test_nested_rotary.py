"""Rotary embeddings that a processor defines in its own code: known ones wait for attention, others stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn

import sage_processors as sp
from sage_processors.diffusion.heads.nested_rotary import replaced
from tests.diffusion.heads.test_postponed_heads import Model, Passes, config


pytestmark = pytest.mark.usefixtures("library_tests")
TOKENS, HEADS, WIDTH = 20, 2, 16


def made(processor):
    """A model whose one attention layer has norms across heads, with this processor."""
    model = Model(processor, across=True)
    for norm in (model.attn.norm_q, model.attn.norm_k):
        torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    return model


class Processor:
    """use: what it does with queries and keys before they are rotated, given what was normed. split: into heads."""

    use = None
    split = (HEADS, -1)

    def __call__(self, attn, x, angles):
        given = q = attn.to_q(x)
        q, k, v = attn.norm_q(q), attn.norm_k(attn.to_k(x)), attn.to_v(x)
        q, k, v = (each.unflatten(2, self.split) for each in (q, k, v))

        def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
            x1, x2 = hidden_states.unflatten(-1, (-1, 2)).unbind(-1)
            cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
            out = torch.empty_like(hidden_states)
            out[..., 0::2] = x1 * cos - x2 * sin
            out[..., 1::2] = x1 * sin + x2 * cos
            return out.type_as(hidden_states)

        if self.use is not None:
            q, k = self.use(q, k, given)
        q, k = apply_rotary_emb(q, *angles), apply_rotary_emb(k, *angles)
        return dispatch_attention_fn(q, k, v).flatten(2, 3).type_as(q)


def angles():
    torch.manual_seed(2)
    phase = torch.rand(1, TOKENS, 1, WIDTH // 2).repeat_interleave(2, -1)
    return phase.cos(), phase.sin()


X = torch.linspace(-1, 1, 2 * TOKENS * HEADS * WIDTH).sin().view(2, TOKENS, HEADS * WIDTH) * 3


def ran(processor, forwards=3, table=None):
    """Passes over queries and keys in each forward; results are the model's, up to the error of 8 bit."""
    model, table, found = made(processor), table or angles(), []
    expected = model(X, table)
    with sp.apply(model, config()) as handle:
        for _ in range(forwards):
            with Passes() as passes:
                got = model(X, table)
            assert type(got) is torch.Tensor
            assert (got - expected).norm() < 0.02 * expected.norm()
            found.append(len(passes.calls))
        assert handle.report().calls == forwards
    return found


def test_it_waits_for_attention_with_a_norm_across_heads():
    assert ran(Processor()) == [1, 1, 1]


USES = {
    "arithmetic": lambda q, k, given: (q * 2 - q, k + 0),
    "a part of it": lambda q, k, given: (torch.cat([q[:, :5], q[:, 5:]], 1), k[:, :]),
    "in place": lambda q, k, given: (q.mul_(1.5), k),
    "its memory in place": lambda q, k, given: (q, k, q.flatten(2).mul_(1.5), k.view(-1).mul_(0.5))[:2],
    "queries as keys": lambda q, k, given: (q, q),
    "another cast": lambda q, k, given: (q.double().type_as(k), k),
}


@pytest.mark.parametrize("use", USES)
def test_whatever_becomes_of_the_heads_the_numbers_are_the_models(use):
    processor = Processor()
    processor.use = USES[use]
    ran(processor)


class Split(Processor):
    """Writes to what it splits into heads, before or after."""

    when = ""

    def __call__(self, attn, x, angles):
        def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
            x1, x2 = hidden_states.unflatten(-1, (-1, 2)).unbind(-1)
            cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
            out = torch.empty_like(hidden_states)
            out[..., 0::2] = x1 * cos - x2 * sin
            out[..., 1::2] = x1 * sin + x2 * cos
            return out.type_as(hidden_states)

        whole, k = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)).unflatten(2, (HEADS, -1))
        if self.when == "before":
            whole.mul_(1.5)
        q, other = whole.unflatten(2, (HEADS, -1)), whole.unflatten(-1, (HEADS, WIDTH))
        if self.when == "after a view of a view":
            q = q[:, :][:, :]
            whole.mul_(1.5)
        if self.when == "after a first use":
            first, second = apply_rotary_emb(q, *angles) + 0, apply_rotary_emb(q, *angles)
            whole.mul_(1.5)
            v, k = attn.to_v(x).unflatten(2, (HEADS, -1)), apply_rotary_emb(k, *angles)
            return dispatch_attention_fn(second * 1.0 + 0 * first, k, v).flatten(2, 3)
        if self.when == "after":
            whole.mul_(1.5)
        if self.when == "in the other":
            other.mul_(1.5)
        if self.when == "in three":
            q = whole.unflatten(2, (HEADS, 2, -1)).flatten(3)
        v = attn.to_v(x).unflatten(2, (HEADS, -1))
        q, k = apply_rotary_emb(q, *angles), apply_rotary_emb(k, *angles)
        return dispatch_attention_fn(q, k, v).flatten(2, 3)


@pytest.mark.parametrize(
    "when", ["before", "after", "in the other", "in three", "never", "after a view of a view", "after a first use"]
)
def test_heads_share_memory_with_what_they_are_split_from(when):
    processor = Split()
    processor.when = when
    assert ran(processor) == ([1, 1, 1] if when == "never" else [0, 0, 0])


@pytest.mark.parametrize("when", ["after", "in the other", "after a view of a view", "after a first use"])
def test_so_they_do_once_forwards_have_shown_that_they_may_wait(when):
    processor = Split()
    model, table = made(processor), angles()
    processor.when = when
    expected = model(X, table)
    processor.when = "never"
    with sp.apply(model, config()):
        for _ in range(2):
            model(X, table)
        object.__setattr__(model.attn.processor, "when", when)
        assert (model(X, table) - expected).norm() < 0.02 * expected.norm()


class ByName(Split):
    """Calls the function by the names of its parameters, and another time by their order."""

    def __call__(self, attn, x, angles):
        def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
            x1, x2 = hidden_states.unflatten(-1, (-1, 2)).unbind(-1)
            cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
            return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).flatten(-2).type_as(hidden_states)

        q, k = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x))
        q, k, v = (each.unflatten(2, (HEADS, -1)) for each in (q, k, attn.to_v(x)))
        cos, sin = angles
        q = apply_rotary_emb(freqs_sin=sin, hidden_states=q, freqs_cos=cos)
        k = apply_rotary_emb(k, cos, freqs_sin=sin)
        return dispatch_attention_fn(q, k, v).flatten(2, 3)


def test_it_may_be_called_by_the_names_of_its_parameters():
    assert ran(ByName()) == [1, 1, 1]


OTHER_ANGLES = {
    "double": lambda cos, sin: (cos.double(), sin.double()),
    "bfloat16": lambda cos, sin: (cos.bfloat16(), sin.bfloat16()),
    "one for all": lambda cos, sin: (cos[:, :1], sin[:, :1]),
    "of each sample": lambda cos, sin: (cos.repeat(2, 1, 1, 1), sin.repeat(2, 1, 1, 1)),
    "of each head": lambda cos, sin: (cos.repeat(1, 1, 2, 1), sin.repeat(1, 1, 2, 1)),
}


@pytest.mark.parametrize("kind", OTHER_ANGLES)
def test_angles_of_other_kinds_are_the_models_own(kind):
    assert ran(Processor(), 2, OTHER_ANGLES[kind](*angles())) == [0, 0]


def test_cosines_and_sines_are_read_where_the_function_reads_them():
    """At even and at odd channels: tables whose other channels are not a number."""
    cos, sin = angles()
    cos[..., 1::2], sin[..., 0::2] = torch.nan, torch.nan
    assert ran(Processor(), 2, (cos, sin)) == [1, 1]


# functions that only look like it


def halves():
    def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
        x1, x2 = hidden_states.chunk(2, -1)
        cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
        return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


def backwards():
    def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
        x1, x2 = hidden_states.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
        return torch.stack([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1).flatten(-2)


def in_fp32():
    def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
        x1, x2 = hidden_states.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
        return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).flatten(-2)


def failing():
    def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
        raise ValueError(hidden_states)


def writing():
    def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
        x1, x2 = hidden_states.clone().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
        hidden_states.copy_(torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).flatten(-2))
        return hidden_states


def of_others():
    scale = 2.0

    def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
        return hidden_states * scale


def right():
    def apply_rotary_emb(hidden_states, freqs_cos, freqs_sin):
        x1, x2 = hidden_states.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = freqs_cos[..., 0::2], freqs_sin[..., 1::2]
        return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1).flatten(-2).type_as(hidden_states)


@pytest.mark.parametrize("function", [halves, backwards, in_fp32, failing, writing, of_others, F.silu.__code__, right])
def test_only_what_computes_the_same_is_replaced(function):
    code = getattr(function, "__code__", function)
    before = torch.random.get_rng_state()
    found, added = replaced(code, {"torch": torch, "ValueError": ValueError}, lambda: None)
    assert torch.equal(torch.random.get_rng_state(), before)  # the trial draws numbers of its own
    if function is right:
        assert found is not code and list(added) == ["_turned_by_stand_in"]
    else:
        assert found is code and not added
