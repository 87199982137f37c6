"""Norm, rotary embedding and joint sequence of Q and K in one pass, against their definition in fp64."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from sage_kernels import qk_norm_rope
from sage_kernels.ops import heads


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HALF_UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
EPS = 1e-3


@pytest.fixture
def make(tier, monkeypatch):
    """`qk_norm_rope` on a tier; tensors go to its device as they lie, results come back."""
    device = torch.device("cuda" if tier == "cuda" else "cpu")
    if tier == "interpreter":
        from sage_kernels._triton.heads.qk_norm_rope import launch_qk_norm_rope

        monkeypatch.setattr(heads, "ref_qk_norm_rope", launch_qk_norm_rope)

    def there(x):
        if x is None or device.type == "cpu":
            return x
        whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())

    def call(*lists, **options):
        options = {n: [there(x) for x in v] if isinstance(v, (list, tuple)) else v for n, v in options.items()}
        q, k = qk_norm_rope(*([there(x) for x in values] for values in lists), **options)
        assert q.is_contiguous() and k.is_contiguous()
        return q.cpu(), k.cpu()

    call.cut_off = tier == "interpreter"  # it cuts bf16 off where a GPU rounds
    return call


def inputs(parts, heads, kv_heads, width, dtype=torch.float32, seed=0, across=False):
    """Q, K of a merged projection, which lie between each other, and their norms' weights, other ones for each."""
    torch.manual_seed(seed)
    merged = [torch.randn(2, tokens, heads + 2 * kv_heads, width).to(dtype) for tokens in parts]
    of = [width * (count if across else 1) for count in (heads, kv_heads)]
    weights = [[(torch.rand(numbers) + 0.5).to(dtype) for _ in parts] for numbers in of]
    return [x[:, :, :heads] for x in merged], [x[:, :, heads : heads + kv_heads] for x in merged], *weights


def tables(tokens, width, half):
    """cos and sin that are no angle's: every element counts."""
    return [[torch.randn(n, width // 2 if half else width) for n in tokens] for _ in "cs"]


def defined(parts, weights, norm, cos, sin, pairs, across=False):
    """In fp64, by indices of channels."""
    done, first = [], 0
    for i, (x, weight) in enumerate(zip(parts, weights, strict=True)):
        width = x.shape[-1]
        y = x.double().flatten(2) if across else x.double()
        if norm:
            y = F.rms_norm(y, y.shape[-1:], None if weight is None else weight.double(), EPS)
        y = y.reshape(x.shape)
        if cos:
            of_part = len(cos) > 1
            if of_part and cos[i] is None:
                done.append(y)
                continue
            rows = slice(0, x.shape[1]) if of_part else slice(first, first + x.shape[1])
            c, s = (t[i if of_part else 0][rows].double() for t in (cos, sin))
            channel = torch.arange(width)
            if pairs:
                partner, sign, angle = channel ^ 1, torch.where(channel % 2 == 0, -1.0, 1.0), channel // 2
            else:
                partner = (channel + width // 2) % width
                sign, angle = torch.where(channel < width // 2, -1.0, 1.0), channel % (width // 2)
            angle = angle if c.shape[1] < width else channel
            y = y * c[:, None, angle] + y[..., partner] * sign * s[:, None, angle]
        done.append(y)
        first += x.shape[1]
    return torch.cat(done, 1)


def check(make, q, k, q_weight, k_weight, *, norm=True, cos=(), sin=(), pairs=True, across=False):
    got = make(q, k, q_weight, k_weight, norm=norm, eps=EPS, cos=cos, sin=sin, pairs=pairs, across_heads=across)
    dtype = q[0].dtype
    for result, parts, weights in zip(got, (q, k), (q_weight, k_weight), strict=True):
        expected = defined(parts, weights, norm, cos, sin, pairs, across)
        assert result.dtype == dtype and result.shape == expected.shape
        # fp32 sums of 8192 squares at most, five products; then one rounding
        most = max([1.0, *(t.abs().max().item() for t in (*cos, *sin) if t is not None and t.numel())])
        largest = most * max(x.abs().max().item() for x in parts if x.numel())
        half_unit = _HALF_UNIT[dtype] * (2 if make.cut_off and dtype == torch.bfloat16 else 1)
        bound = expected.abs() * half_unit + 2.0**-18 * largest + 2.0**-25
        assert bool(((result.double() - expected).abs() <= bound).all())
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["none", "plain", "affine"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_of_every_kind(make, number, norm, dtype):
    parts = (5, 9)
    q, k, *weights = inputs(parts, 3, 3, 64, dtype)
    weights = weights if norm == "affine" else [[None, None]] * 2
    for pairs, half in itertools.product((True, False), (True, False)) if number else [(True, False)]:
        cos, sin = tables({0: [], 1: [sum(parts)], 2: parts}[number], 64, half)
        check(make, q, k, *weights, norm=norm != "none", cos=cos, sin=sin, pairs=pairs)


@pytest.mark.parametrize("width", [2, 10, 64, 72, 128, 200, 256])
def test_of_any_even_width(make, width):
    q, k, *weights = inputs((7,), 2, 2, width)
    for pairs in (True, False):
        check(make, q, k, *weights, cos=(t := tables([7], width, False))[0], sin=t[1], pairs=pairs)


@pytest.mark.parametrize("parts", [(1,), (4,), (3, 1, 6), (0, 5), (5, 0)])
@pytest.mark.parametrize("counts", [(1, 1), (8, 2), (9, 9), (17, 1)])
def test_any_number_of_parts_tokens_and_heads(make, parts, counts):
    q, k, *weights = inputs(parts, *counts, 16)
    cos, sin = tables([sum(parts)], 16, False)
    check(make, q, k, *weights, cos=cos, sin=sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(1, 1), (3, 3), (12, 2), (17, 9), (40, 40)])
def test_a_norm_across_heads(make, counts, dtype):
    """One RMSNorm over all heads of a token, as Wan's, whose size differs from head to head."""
    parts = (5, 3)
    for width, affine, pairs in [(16, True, True), (10, False, False), (128, True, True)]:
        q, k, *weights = inputs(parts, *counts, width, dtype, across=True)
        for x in (*q, *k):
            x *= torch.logspace(-1, 1, x.shape[2])[:, None].to(dtype)
        weights = weights if affine else [[None, None]] * 2
        cos, sin = tables([sum(parts)], width, True)
        check(make, q, k, *weights, cos=cos, sin=sin, pairs=pairs, across=True)
        check(make, q, k, *weights, across=True)


@pytest.mark.parametrize("turned", [(True, False), (False, True), (False, True, False), (False, False)])
@pytest.mark.parametrize("half", [True, False])
def test_parts_that_are_not_rotated(make, turned, half):
    parts = (5, 9, 3)[: len(turned)]
    for pairs, across in ((True, False), (False, True)):
        q, k, *weights = inputs(parts, 3, 2, 32, across=across)
        cos, sin = ([x if on else None for x, on in zip(t, turned, strict=True)] for t in tables(parts, 32, half))
        check(make, q, k, *weights, cos=cos, sin=sin, pairs=pairs, across=across)


def test_angles_of_every_second_channel(make):
    """The tables of Wan, whose cosines and sines lie at even and at odd channels."""
    q, k, *weights = inputs((9,), 3, 3, 32, across=True)
    cos, sin = torch.randn(2, 1, 9, 1, 32)
    check(make, q, k, *weights, cos=[cos[0, :, 0, 0::2]], sin=[sin[0, :, 0, 1::2]], across=True)


def test_angles_that_lie_between_others(make):
    """Complex numbers, of which cos and sin are views, at odd addresses."""
    q, k, *weights = inputs((3, 5), 2, 2, 32)
    complex_ = [torch.randn(n, 17, 2)[:, 1:] for n in (3, 5)]
    check(make, q, k, *weights, cos=[x[..., 0] for x in complex_], sin=[x[..., 1] for x in complex_])


def test_what_is_not_finite_stays_in_its_head(make):
    q, k, *weights = inputs((6,), 3, 3, 32)
    cos, sin = tables([6], 32, False)
    clean = make(q, k, *weights, cos=cos, sin=sin)
    q[0][1, 2, 1, 5], k[0][0, 4, 2, 0] = torch.nan, torch.inf
    for got, expected, at in zip(make(q, k, *weights, cos=cos, sin=sin), clean, ((1, 2, 1), (0, 4, 2)), strict=True):
        assert got[at].isnan().any()
        got[at] = expected[at]
        assert torch.equal(got, expected)


def test_nothing_in_it(make):
    q, k, *weights = inputs((0,), 2, 2, 16)
    assert [x.shape for x in make(q, k, *weights)] == [(2, 0, 2, 16)] * 2


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_and_compiled_as_eager(device):
    q, k, *weights = ([x.to(device) for x in values] for values in inputs((3, 5), 2, 1, 16))
    cos, sin = ([x.to(device) for x in values] for values in tables([8], 16, False))
    op = torch.ops.sage_kernels.qk_norm_rope.default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, (q, k, *weights, True, EPS, cos, sin, True, False), test_utils=tests)
    torch.library.opcheck(op, (q, k, [None] * 2, [None] * 2, False, EPS, [], [], True, False), test_utils=tests)
    torch.library.opcheck(op, (q, k, [None] * 2, [None] * 2, True, EPS, [], [], True, True), test_utils=tests)

    def call(q, k):
        return qk_norm_rope(q, k, *weights, cos=cos, sin=sin)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k), call(q, k), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
def test_a_replayed_call_reads_its_own_tensors():
    from sage_kernels.ops import replay

    replay.forget()
    for seed in range(3):
        given = [[x.cuda() for x in values] for values in inputs((4, 6), 8, 8, 128, torch.bfloat16, seed)]
        cos, sin = ([x.cuda() + seed for x in values] for values in tables([10], 128, False))
        got = qk_norm_rope(*given, eps=EPS, cos=cos, sin=sin)
        expected = qk_norm_rope(
            *([x.cpu() for x in v] for v in given), eps=EPS, cos=[cos[0].cpu()], sin=[sin[0].cpu()]
        )
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=2**-7, atol=2**-7)
    assert any(key[0] == "heads" for key in replay.replays), "no call was remembered"


Q = torch.randn(2, 4, 3, 16)
W = torch.ones(16)
TABLE = torch.zeros(4, 16)


def bad(q=(Q,), k=(Q,), *weights, **options):
    return lambda: qk_norm_rope(list(q) if isinstance(q, tuple) else q, list(k), *weights, **options)


LOW = "expected one of (torch.float16, torch.bfloat16, torch.float32)"
CALLS = {
    "no list": (bad(Q), TypeError, "q: got Tensor, expected a list with one tensor for each part"),
    "no part": (bad((), ()), ValueError, "got lists of 0, 0, 0, 0, expected lists of one length"),
    "one part less": (bad((Q, Q)), ValueError, "got lists of 2, 1, 2, 2, expected lists of one length"),
    "no tensor": (bad((1.0,)), TypeError, "q[0]: got float, expected a tensor"),
    "double": (bad((Q.double(),)), TypeError, f"q[0]: got torch.float64, {LOW}"),
    "another type": (bad((Q,), (Q.half(),)), ValueError, "k[0]: got torch.float16 on cpu, expected torch.float32"),
    "another type of a part": (bad((Q, Q.half()), (Q, Q)), TypeError, "q[1]: got torch.float16, expected one of"),
    "an odd width": (bad((Q[..., :15],)), ValueError, "q[0]: got shape (2, 4, 3, 15)"),
    "too wide": (bad((torch.zeros(1, 1, 1, 258),)), ValueError, "with an even D <= 256 of stride 1"),
    "three dimensions": (bad((Q[0],)), ValueError, "q[0]: got shape (4, 3, 16)"),
    "a stride": (bad((Q.mT.contiguous().mT,)), ValueError, "of stride 1"),
    "another batch": (bad((Q,), (Q[:1],)), ValueError, "k[0]: got shape (1, 4, 3, 16), expected the samples, heads"),
    "other heads of a part": (
        bad((Q, Q[:, :, :1]), (Q, Q)),
        ValueError,
        "q[1]: got shape (2, 4, 1, 16)",
    ),
    "other tokens": (bad((Q,), (Q[:, :3],)), ValueError, "k[0]: got 3 tokens, expected 4 as q[0]"),
    "one weight": (bad((Q,), (Q,), [W], [None]), ValueError, "q_weight, k_weight: got some that are None"),
    "a short weight": (
        bad((Q,), (Q,), [W[1:]], [W]),
        ValueError,
        "q_weight[0]: got shape (15,) on cpu",
    ),
    "weights of no norm": (bad((Q,), (Q,), [W], [W], norm=False), ValueError, "with norm=False, expected None"),
    "one head's weight": (
        bad((Q,), (Q,), [W], [W], across_heads=True),
        ValueError,
        "q_weight[0]: got shape (16,) on cpu, expected [48], contiguous",
    ),
    "across heads without a norm": (bad(norm=False, across_heads=True), ValueError, "got True with norm=False"),
    "eps": (bad(eps=-1.0), ValueError, "eps: got -1.0, expected a finite number >= 0"),
    "no sin": (bad(cos=[TABLE]), ValueError, "cos, sin: got 1 and 0 tables"),
    "too many tables": (bad(cos=[TABLE] * 2, sin=[TABLE] * 2), ValueError, "cos, sin: got 2 and 2 tables"),
    "no table at all": (bad(cos=[None], sin=[None]), TypeError, "cos[0]: got NoneType, expected a tensor"),
    "a part with half of its angles": (
        bad((Q, Q), (Q, Q), cos=[TABLE, None], sin=[TABLE, TABLE]),
        TypeError,
        "cos[1]: got NoneType, expected a tensor",
    ),
    "a part with the other half": (
        bad((Q, Q), (Q, Q), cos=[TABLE, TABLE], sin=[TABLE, None]),
        TypeError,
        "sin[1]: got NoneType, expected a tensor",
    ),
    "a short table": (bad(cos=[TABLE[1:]], sin=[TABLE]), ValueError, "cos[0]: got shape (3, 16), expected one of"),
    "a narrow sin": (bad(cos=[TABLE], sin=[TABLE[:, :8]]), ValueError, "sin[0]: got shape (4, 8), expected one of"),
    "a gradient": (
        bad((Q.clone().requires_grad_(),)),
        NotImplementedError,
        "q[0]: got a tensor that requires",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_named_before_a_launch(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_tangents_are_refused_and_own_parameters_are_not():
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="got a tangent"):
        qk_norm_rope([forward_ad.make_dual(Q, Q)], [Q])
    weight = [torch.nn.Parameter(W)]
    assert not any(x.requires_grad for x in qk_norm_rope([Q], [Q], weight, weight))
