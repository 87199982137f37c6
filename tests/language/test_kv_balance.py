"""The INT8 cache's channel balance: channels far larger or smaller than the others cost the others nothing."""

from __future__ import annotations

import copy

import pytest
import torch

import sage_processors as sp
from sage_kernels import append_kv, sage_decode_attention
from sage_kernels.reference import ref_append_kv
from sage_kernels.testing import relative_l2
from sage_processors.evaluation import language
from sage_processors.language.kv_layers import Int8Layer
from sage_processors.language.kv_static_layers import Int8StaticSlidingLayer
from sage_processors.language.kv_vectors import BALANCE_LIMIT, choose_vectors
from tests.kernels.decode.decode_cases import Decode, exact, filled, inputs, length
from tests.kernels.decode.test_append_kv import GUARD, buffers, tokens
from tests.support.language_calls import ANY_LENGTH


@pytest.fixture
def decode(tier, monkeypatch):
    return Decode(tier, monkeypatch)


def balance_of(batch, heads, head_dim, seed=0):
    """Powers of two from 2^-9 to 2^9."""
    exponents = torch.randint(-9, 10, (batch, heads, head_dim), generator=torch.Generator().manual_seed(seed))
    return torch.exp2(exponents.float())


def unbalanced(batch, seq_q, seq_kv, heads, kv_heads, head_dim):
    """q, k, v and the balance that suits them."""
    q, k, v = inputs(batch, seq_q, seq_kv, heads, kv_heads, head_dim)
    balance = balance_of(batch, kv_heads, head_dim)
    q = (q.float().unflatten(2, (kv_heads, -1)) * balance[:, None, :, None]).flatten(2, 3)
    return q, k.float() / balance[:, :, None], v, balance


# --- the op ---


@pytest.mark.parametrize("head_dim", [64, 7])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_V30_append_kernel_balances_as_the_reference(kernel_device, head_dim, power_of_two):
    from sage_kernels._triton.decode.append_kv import launch_append_kv

    k, v = tokens(17, head_dim)
    balance = balance_of(*k.shape[:2], head_dim) * (1.0 if power_of_two else 1.1)
    mean, device = k.float().mean(2), kernel_device
    want, got = buffers(33, head_dim), buffers(33, head_dim, device)
    ref_append_kv(k, v, mean, *want, position=3, ring=False, k_balance=balance)
    launch_append_kv(
        k.to(device), v.to(device), mean.to(device), *got, position=None, start=3, ring=False,
        k_balance=balance.to(device),
    )  # fmt: skip
    for x, y in zip(want, got, strict=True):
        assert torch.equal(x, y.cpu())
    plain = buffers(33, head_dim)
    ref_append_kv(k, v, mean, *plain, position=3, ring=False)
    assert not torch.equal(plain[0], want[0]) and all(
        torch.equal(a, b) for a, b in zip(plain[2:], want[2:], strict=True)
    )


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window": 40}, {"softcap": 5.0}, {"sinks": torch.linspace(-3, 6, 4)}], ids=str
)
def test_V30_queries_are_divided_by_what_the_keys_were_multiplied_with(decode, options, splits):
    """Any balance leaves attention what it is; the mean that the log-sum-exp needs is not balanced."""
    decode.splits = splits
    q, k, v, balance = unbalanced(2, 3, 133, 4, 2, 64)
    out, lse = decode.check(q, filled(k, v, k_balance=balance), lengths=length(k), k_balance=balance, **options)
    rest = {name: options[name] for name in ("softcap", "sinks") if name in options}
    seen = torch.ones(3, 133, dtype=torch.bool)
    seen = seen.tril(130).triu(130 - 39) if "window" in options else seen
    want, want_lse = exact(q, k, v, mask=seen, **rest)
    assert relative_l2(out, want) < 0.015 and (lse - want_lse).abs().max() < 0.02


def test_V30_odd_channels_are_balanced_too(decode):
    q, k, v, balance = unbalanced(1, 1, 40, 2, 1, 63)
    decode.check(q, filled(k, v, k_balance=balance), lengths=length(k), k_balance=balance)


@pytest.mark.parametrize("op", ["append", "attend"])
@pytest.mark.parametrize(
    ("balance", "error"),
    [
        (torch.ones(2, 3, 32), ValueError),
        (torch.ones(2, 3, 64).double(), TypeError),
        (1.0, TypeError),
        (torch.ones(2, 3, 64, device="meta"), ValueError),
    ],
    ids=["shape", "dtype", "type", "device"],
)
def test_V30_a_balance_that_does_not_fit_is_refused(op, balance, error):
    k, v = tokens(4, 64)
    cache = buffers(8, 64)
    with pytest.raises(error, match="k_balance: got"):
        if op == "append":
            append_kv(k, v, None, *cache, position=0, k_balance=balance)
        else:
            sage_decode_attention(torch.zeros(2, 1, 3, 64), *cache, k_balance=balance)
    assert all((x == GUARD).all() for x in cache)


# --- how it is chosen ---


def draw(number, batch=2, heads=3, head_dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, number, head_dim, generator=generator)


def chosen(keys):
    return choose_vectors(keys, draw(keys.shape[2], head_dim=keys.shape[-1], seed=9))[1]


@pytest.mark.parametrize("number", [8, 100, 3000])
def test_V31_outliers_are_balanced_and_others_left_alone(number):
    keys = draw(number)
    factors = torch.ones(64)
    factors[[3, 17, 30]], factors[[9, 20]] = torch.tensor([8.0, 64.0, 512.0]), torch.tensor([1 / 512, 1 / 16])
    factors[32:] = factors[:32]
    got = chosen(keys * factors)
    assert torch.equal(got.log2(), got.log2().round())
    usual = factors == 1
    assert (got[..., usual] == 1).all()
    left = (got * factors)[..., ~usual].log2().abs()  # of the factor
    assert (left <= (4 if number < 100 else 2)).all()


@pytest.mark.parametrize("number", [1, 4, 7])
def test_V31_few_tokens_say_nothing_of_channels(number):
    factors = torch.ones(64)
    factors[[3, 35]], factors[[9, 41]] = 512.0, 1 / 512
    assert (chosen(draw(number) * factors) == 1).all()


@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_V31_keys_without_outliers_are_left_alone(mean):
    assert (chosen(draw(64) + mean) == 1).all()


def test_V31_a_token_that_stands_out_is_no_channel_that_does():
    keys = draw(200)
    keys[:, :, 7, 5] *= 50  # its own scale is all that it takes
    assert (chosen(keys) == 1).all()


def test_V31_a_channel_that_rotary_embedding_will_turn_is_not_taken_to_stay_small():
    """Of a pair that turns slowly the first tokens show next to nothing; later it is as large as its mean."""
    positions = torch.arange(1000.0)
    keys = draw(1000)
    angle = positions * 1e-3
    keys[..., 5], keys[..., 37] = 8 * angle.cos(), 8 * angle.sin()
    assert (chosen(keys[:, :, :16])[..., [5, 37]] <= 1).all()


HOSTILE = {
    "nothing": lambda k: k[:, :, :0],
    "zeros": torch.zeros_like,
    "a dead channel": lambda k: torch.cat([k[..., :10] * 0, k[..., 10:]], -1),
    "most channels dead": lambda k: torch.cat([k[..., :50] * 0, k[..., 50:]], -1),
    "one token": lambda k: k[:, :, :1],
    "the same token": lambda k: k[:, :, :1].expand_as(k),
    "denormals": lambda k: k * 1e-40,
    "huge": lambda k: k * 1e37,
    "a NaN": lambda k: k.index_fill(2, torch.tensor(3), torch.nan),
    "an inf in a channel": lambda k: torch.cat([k[..., :1] * torch.inf, k[..., 1:]], -1),
    "all NaN": lambda k: k * torch.nan,
    "half precision": lambda k: (k * 1000).half(),
    "one channel": lambda k: k[..., :1],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_V32_whatever_comes_first_the_balance_is_sane(name):
    keys = HOSTILE[name](draw(24))
    got = chosen(keys)
    assert got.shape == (2, 3, keys.shape[-1]) and got.dtype == torch.float32
    assert ((got >= 1 / BALANCE_LIMIT) & (got <= BALANCE_LIMIT)).all() and torch.equal(got.log2(), got.log2().round())
    dead = (keys == 0).all(2) if keys.shape[2] else torch.zeros(2, 3, 64, dtype=torch.bool)
    assert (got[dead] == 1).all()  # nothing is known of them
    if name in ("zeros", "all NaN", "nothing"):
        assert (got == 1).all()


@pytest.mark.parametrize("kind", ["growing", "ring"])
def test_V33_a_window_that_is_replaced_has_its_balance_chosen_anew(kind):
    layer = Int8Layer(sliding_window=8) if kind == "growing" else Int8StaticSlidingLayer(64, 8)
    factors = torch.ones(64)
    factors[3] = 256.0
    layer.update(draw(8), draw(8, seed=1))
    assert (layer.k_balance[..., 3] >= 0.5).all()
    keys = draw(20, seed=2) * factors
    keys[..., 7] += 40
    held, before = layer.k_balance, layer.k_mean.clone()
    stored, _ = layer.update(keys, draw(20, seed=3))
    assert (layer.k_mean - before)[..., 7].min() > 30
    assert (layer.k_balance[..., 3] <= 2.0**-5).all()
    assert (stored.k_balance[..., 3] >= 0.5).all()  # what these queries see was stored with the old one
    assert (layer.k_balance is held) == (kind == "ring")  # whose addresses stay
    step, _ = layer.update(draw(1, seed=4) * factors, draw(1, seed=5))
    value = (step.k_codes.float() * step.k_scale.float()[..., None]).abs()
    assert value[..., 3].max() < 30


# --- a language model ---


def planted(model, seed=0):
    """The same function: rows of k_proj times 2^3 … 2^9, those of q_proj divided by it; three to five pairs a head."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    for layer in model.model.layers:
        k, q = layer.self_attn.k_proj.weight, layer.self_attn.q_proj.weight
        factors = torch.ones(heads, dim)
        for h in range(heads):
            number = int(torch.randint(3, 6, (), generator=generator))
            pairs = torch.randperm(dim // 2, generator=generator)[:number]
            exponents = torch.randint(3, 10, (number,), generator=generator).float()
            signs = torch.randint(0, 2, (number,), generator=generator) * 2.0 - 1
            factors[h, pairs] = factors[h, pairs + dim // 2] = torch.exp2(exponents * signs)  # rotary pairs
        k.data.view(heads, dim, -1).mul_(factors[..., None])
        q.data.view(heads, -1, dim, q.shape[1]).div_(factors[:, None, :, None])
    return model


CACHE_ONLY = "sage_int8_cache_only"


@pytest.fixture(scope="module")
def text():
    sp.register_transformers(CACHE_ONLY, min_tokens=10**6)  # the prompt is exact: what is measured is the cache
    model, tokenizer = language.load()
    windows = language.heldout_windows(tokenizer, 193, count=16)
    return model, windows, language.perplexity(model, windows)


@pytest.mark.slow("reads sixteen texts in four ways")
@pytest.mark.parametrize("capacity", [None, 200], ids=["growing", "static"])
@pytest.mark.parametrize("outliers", ["none", "in both"])
def test_V34_perplexity_with_planted_outliers_is_that_of_exact_attention(text, outliers, capacity):
    """Bar: 0.1 %. Single windows differ by up to 0.4 % either way, hence so many."""
    model, windows, stock = text
    if outliers != "none":
        model = planted(model)
        assert language.perplexity(model, windows).ratio(stock)[0] == pytest.approx(1, abs=1e-5)
    model.set_attn_implementation(CACHE_ONLY)
    got = language.perplexity(
        model, windows, cache=lambda: sp.Int8KVCache(model.config, capacity), prefill=24, chunk=24
    )
    assert abs(got.ratio(stock)[0] - 1) < 1e-3
    model.set_attn_implementation(ANY_LENGTH)  # and prompts in INT8
    assert abs(language.perplexity(model, windows).ratio(stock)[0] - 1) < 1e-3
    assert sp.attention_report(model).calls > 0
    model.set_attn_implementation("sdpa")
