"""Tensors that PyTorch's dispatcher resolves before an op runs: the bits of the plain tensor, or a typed error.

Eager calls of ours go round the dispatcher where it has nothing to do. A kernel reads memory, and what these tensors
say of themselves is not what lies there.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import sage_kernels
from sage_kernels import DEFAULT_RECIPE, append_kv, compat, new_head_state, sage_attention, sage_decode_attention
from sage_kernels.ops import replay
from sage_kernels.planning.state import ScaleState, Site
from tests.kernels.attention.attention_cases import Attend, normal
from tests.kernels.decode import decode_cases


def negative(x):
    """x, as the negative of what lies in memory."""
    return torch._neg_view(-x) if x.dtype != torch.bool else x


def imaginary(x):
    """x, as the imaginary part of a conjugate: strides of two, and the negative bit."""
    kind = {torch.float16: torch.complex32, torch.float32: torch.complex64}[x.dtype]
    return torch.view_as_complex(torch.stack([x, -x], -1)).to(kind).conj().imag


def leaked(transform):
    """What a transform of torch.func wraps x in, when it is over."""

    def make(x):
        seen = []
        transform(lambda y: (seen.append(y), y.sum())[1])(x)
        return seen[0]

    return make


RESOLVED = {"negative": negative, "imaginary": imaginary, "wrapped": torch._to_functional_tensor}
REFUSED = {
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.flatten(0, 2).to_sparse_csr(),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "complex": lambda x: torch.complex(x.float(), x.float()).conj(),
    "meta": lambda x: x.to("meta"),
    "batched": leaked(torch.func.vmap),
}
ORDINARY = {
    "itself": lambda x: x,
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "buffer": torch.nn.Buffer,
    "view": lambda x: x[:, :, :],
    "detached": lambda x: x.detach(),
}


def made_in_inference(x):
    with torch.inference_mode():
        return x.clone()


ORDINARY["inference"] = made_in_inference


@pytest.fixture
def attention(tier, monkeypatch):
    """sage_attention on a tier, with nothing between, and the tier's device."""
    device = Attend(tier, monkeypatch).device

    def run(*inputs, **options):
        out = sage_attention(*inputs, **options)
        return torch._from_functional_tensor(out) if torch._is_functional_tensor(out) else out

    return run, device


@pytest.fixture
def qkv():
    return normal(1, 40, 50, 2, 1, 64)


@pytest.mark.parametrize("name", RESOLVED)
def test_L20_a_tensor_that_is_not_what_lies_in_memory(attention, name, qkv):
    """The negative bit, alone and of a conjugate, and a functional wrapper: of q, of k and of v."""
    run, device = attention
    inputs = [x.to(device) for x in qkv]
    wanted = run(*inputs)
    for i in range(3):
        changed = list(inputs)
        changed[i] = RESOLVED[name](inputs[i])
        assert not replay.is_plain_call(*changed)
        assert torch.equal(run(*changed), wanted), "qkv"[i]


@pytest.mark.parametrize("which", ["attn_mask", "sinks", "plan", "plan_scale"])
def test_L20_the_negative_bit_of_what_comes_beside_q_k_and_v(attention, which, qkv):
    run, device = attention
    inputs = [x.to(device) for x in qkv]
    if which == "attn_mask":
        options = {which: torch.randn(40, 50, dtype=torch.float16).to(device)}
    elif which == "sinks":
        options = {which: torch.tensor([3.0, 5.0], device=device)}
    else:
        plan = ScaleState([Site("a", 1, 64)], device=device)
        run(*(1.5 * x for x in inputs), state=plan.head_state(0))
        plan.advance(1.0, 0.9)
        options = {"state": plan.head_state(0)}
    wanted = run(*inputs, **options)
    if "state" in options:
        given = options["state"]
        options = {"state": given._replace(**{which: negative(getattr(given, which))})}
    else:
        options = {which: negative(options[which])}
    out = run(*inputs, **options)
    assert out.isfinite().all() and torch.equal(out, wanted)


def test_L21_zeros_that_have_no_memory(attention, qkv):
    """torch._efficientzerotensor, which autograd hands out."""
    run, device = attention
    inputs = [x.to(device) for x in qkv]
    for i in range(3):
        zeros, plain = list(inputs), list(inputs)
        zeros[i] = torch._efficientzerotensor(inputs[i].shape, dtype=inputs[i].dtype, device=device)
        plain[i] = torch.zeros_like(inputs[i])
        assert zeros[i].data_ptr() == 0 and not replay.is_plain_call(*zeros)
        assert torch.equal(run(*zeros), run(*plain)), "qkv"[i]


@pytest.mark.filterwarnings("ignore")  # of PyTorch: prototypes
@pytest.mark.parametrize("name", REFUSED)
def test_L22_a_tensor_without_strides_in_memory_is_refused(name, qkv):
    for i in range(3):
        changed = list(qkv)
        changed[i] = REFUSED[name](qkv[i])
        assert not replay.is_plain_call(*changed)
        with pytest.raises((TypeError, ValueError), match="expected"):
            sage_attention(*changed)
        assert sage_kernels.unsupported(*changed, enable_gqa=True) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sparse", "nested", "mkldnn", "quantised"])
def test_L22_of_the_cache_too(name):
    q, k, v = decode_cases.inputs(1, 1, 9, 2, 1, 64)
    cache = decode_cases.filled(k, v)
    with pytest.raises((TypeError, ValueError), match="expected"):
        sage_decode_attention(REFUSED[name](q), *cache, lengths=decode_cases.length(k))
    with pytest.raises((TypeError, ValueError), match="expected"):
        append_kv(REFUSED[name](k), v, cache[4], *cache[:4], position=0)


@pytest.mark.parametrize("name", ORDINARY)
def test_L23_ordinary_tensors_go_round_the_dispatcher(name, qkv):
    """Else the short way would be of no use, and nobody would notice."""
    assert compat.SEES_DISPATCH
    changed = [ORDINARY[name](x) for x in qkv]
    assert replay.is_plain_call(*changed, None)
    with torch.inference_mode():
        assert replay.is_plain_call(*changed)
    assert torch.equal(sage_attention(*changed), sage_attention(*qkv))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ORDINARY)
def test_L23_on_a_gpu(name, qkv):
    assert replay.is_plain_call(*(ORDINARY[name](x.cuda()) for x in qkv))


@pytest.mark.parametrize(
    "tier", ["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_L24_the_negative_bit_of_a_cache_and_of_what_is_appended(tier, monkeypatch):
    decode = decode_cases.Decode(tier, monkeypatch)
    if tier == "interpreter":
        from sage_kernels._triton.decode.append_kv import launch_append_kv

        monkeypatch.setattr(sage_kernels.reference, "ref_append_kv", launch_append_kv_as(launch_append_kv))
    q, k, v = (x.to(decode.device) for x in decode_cases.inputs(1, 1, 9, 2, 1, 64))
    cache = [x.to(decode.device) for x in decode_cases.filled(k.cpu(), v.cpu(), capacity=10)]
    lengths = torch.tensor(9, device=decode.device)
    for _ in range(3):  # the third one is made again
        wanted = sage_decode_attention(q, *cache, lengths=lengths)
    assert torch.equal(sage_decode_attention(negative(q), *cache, lengths=lengths), wanted)
    assert torch.equal(sage_decode_attention(q, *cache, lengths=negative(lengths)), wanted)
    for i in range(5):
        changed = list(cache)
        changed[i] = negative(cache[i])
        assert torch.equal(sage_decode_attention(q, *changed, lengths=lengths), wanted), i

    def appended(k, v, mean, buffers):
        append_kv(k, v, mean, *buffers, position=9)
        return [x.clone() for x in buffers]

    token = k[:, :, :1], v[:, :, :1], cache[4]
    for _ in range(3):
        right = appended(*token, [x.clone() for x in cache[:4]])
    for i in range(3):
        changed = list(token)
        changed[i] = negative(token[i])
        written = appended(*changed, [x.clone() for x in cache[:4]])
        assert all(torch.equal(a, b) for a, b in zip(written, right, strict=True)), i
    for name, x in zip(("k_codes", "k_scale", "v_codes", "v_scale"), cache, strict=False):
        buffers = [negative(x) if x is y else y for y in cache[:4]]
        with pytest.raises(ValueError, match=f"{name}: got a view with its negative bit set"):
            append_kv(*token, *buffers, position=9)


@pytest.mark.parametrize("name", ["stats", "counts", "row_max_next"])
def test_L20_what_is_written_must_be_memory(name, qkv):
    plan = new_head_state(1, 64, "cpu")._replace(row_max_next=torch.zeros(1, 2, 40))
    with pytest.raises(ValueError, match=f"state.{name}: got a view with its negative bit set"):
        sage_attention(*qkv, state=plan._replace(**{name: negative(getattr(plan, name))}))


def launch_append_kv_as(launch):
    def append(*tensors, position, ring, k_balance):
        launch(*tensors, position=None, start=position, ring=ring, k_balance=k_balance)

    return append


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
def test_L20_no_call_with_a_negative_bit_is_replayed(planned, qkv):
    """After calls of the same layout that were: their guards and keys must tell them apart."""
    inputs = [x.cuda() for x in qkv]

    def run(*inputs):
        options = {"state": new_head_state(1, 64, "cuda")} if planned else {}
        return sage_attention(*inputs, **options)

    wanted = [run(*inputs) for _ in range(4)][-1]
    known = len(replay.replays)
    for i in range(3):
        changed = list(inputs)
        changed[i] = negative(inputs[i])
        assert torch.equal(run(*changed), wanted), "qkv"[i]
    assert known and len(replay.replays) >= known


def test_E20_a_derivative_is_refused_not_lost(qkv):
    """Forward mode, whose tangents the kernels do not have: the result would pass for a constant."""
    q, k, v = (x.float() for x in qkv)
    with pytest.raises(NotImplementedError, match="q: got a tangent"):
        torch.func.jvp(lambda x: sage_attention(x, k, v), (q,), (q,))
    cache = decode_cases.filled(k.transpose(1, 2), v.transpose(1, 2))
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, torch.ones_like(x)) for x in (q, k, v)]
        assert not replay.is_plain_call(dual[0])  # or a GPU would make the call again, unchecked
        for i in range(3):
            changed = [q, k, v]
            changed[i] = dual[i]
            with pytest.raises(NotImplementedError, match=f"{'qkv'[i]}: got a tangent"):
                sage_attention(*changed)
            assert sage_kernels.unsupported(*changed, enable_gqa=True) == "requires_grad"
        for name, x in (("attn_mask", torch.zeros(40, 50)), ("sinks", torch.zeros(2))):
            with pytest.raises(NotImplementedError, match=f"{name}: got a tangent"):
                sage_attention(q, k, v, **{name: forward_ad.make_dual(x, torch.ones_like(x))})
        with pytest.raises(NotImplementedError, match="q: got a tangent"):
            sage_decode_attention(dual[0][:, :1], *cache)
        with pytest.raises(NotImplementedError, match="v: got a tangent"):
            append_kv(k.transpose(1, 2), dual[2].transpose(1, 2), cache[4], *cache[:4], position=0)
        assert torch.equal(sage_attention(q, k, v), sage_attention(q, k, v))  # what has none runs
        assert sage_kernels.unsupported(q, k, v, enable_gqa=True) is None


def test_E24_an_op_called_by_its_own_name_refuses_derivatives(qkv):
    """A transform hides tangents from an op's implementation, and would give the result a tangent of zeros."""
    q, k, v = (x.float() for x in qkv)
    ops, options = torch.ops.sage_kernels, (None, None, 0.1, "per_token", True, "", None, 0.0, DEFAULT_RECIPE, "none")
    state = sage_kernels.new_head_state(k.shape[2], q.shape[3], "cpu")
    cache = decode_cases.filled(k.transpose(1, 2), v.transpose(1, 2), capacity=k.shape[1])
    before = [x.clone() for x in (*state, *(x for x in cache if x is not None))]
    calls = {
        "attention": lambda x: ops.attention(x, k, v, *options),
        "attention with LSE": lambda x: ops.attention_lse(x, k, v, *options)[0],
        "attention with a plan": lambda x: ops.attention_planned(x, k, v, *options, *state),
        "decode_attention": lambda x: ops.decode_attention(
            x[:, :1], *cache, None, None, None, False, True, None, 0.0, 0.1, None
        ),
        "append_kv": lambda x: ops.append_kv(
            x.transpose(1, 2)[:, : k.shape[2], :1],
            v.transpose(1, 2)[:, :, :1],
            cache[4],
            *cache[:4],
            None,
            0,
            False,
            None,
        ),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"{name.split()[0]}: got a call under forward-mode"):
            torch.func.jvp(call, (q,), (q,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="there is no derivative"):
            call(forward_ad.make_dual(q, torch.ones_like(q)))
    after = [*state, *(x for x in cache if x is not None)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    # what does not hang on x is a constant of it, and runs
    weight, tangent = torch.func.jvp(lambda x: x * sage_attention(q, k, v)[..., :1], (q,), (q,))
    assert torch.equal(weight, tangent)
    assert torch.equal(sage_attention(q, k, v), ops.attention(q, k, v, *options[:2], q.shape[3] ** -0.5, *options[3:]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_E24_a_call_that_was_made_before_refuses_derivatives_too(device):
    """Whoever looks on has to be seen again: what the dispatcher hands on is not asked whether somebody does."""
    ops, x = torch.ops.sage_kernels, torch.randn(1, 256, 2, 64, device=device)
    weight = sage_kernels.quantize_weight(torch.randn(64, 64, device=device))
    of_rows, of_product = ("int8", "none", None, None, 1e-6, *(None,) * 4), (*weight, None, "none", None, None)
    rows = sage_kernels.quantize_activation(x)
    options = (None, None, 0.1, "per_token", True, "", None, 0.0, DEFAULT_RECIPE, "none")
    calls = {
        "attention": lambda x: ops.attention(x, x, x, *options),
        "qk_norm_rope": lambda x: ops.qk_norm_rope([x], [x + 0], [None], [None], True, 1e-6, [], [], True, False)[0],
        "quantize_activation": lambda x: ops.quantize_activation(x, *of_rows)[1],
        "quantized_linear": lambda x: ops.quantized_linear(*rows, *weight, None, "none", None, x, torch.float32),
        "dynamic_linear": lambda x: ops.dynamic_linear(x, *of_rows, *of_product, torch.float32),
    }
    for name, call in calls.items():
        sage_kernels.ops.replay.forget()
        for _ in range(3):
            call(x)
        assert device == "cpu" or name == "attention" or sage_kernels.ops.replay.replays, name
        with pytest.raises(NotImplementedError, match=f"{name}: got a call under forward-mode"):
            torch.func.jvp(call, (x,), (x,))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_E21_transforms_and_tracers_see_the_op(attention, qkv):
    run, device = attention
    q, k, v = (x.to(device) for x in qkv)
    several = torch.stack([q, q.flip(1)])
    mapped = torch.func.vmap(lambda x: sage_attention(x, k, v))(several)
    assert all(torch.equal(a, run(b, k, v)) for a, b in zip(mapped, several, strict=True))
    assert torch.equal(torch.func.functionalize(lambda x: sage_attention(x, k, v))(q), run(q, k, v))
    for pre_dispatch in (False, True):
        graph = make_fx(lambda *x: sage_attention(*x), pre_dispatch=pre_dispatch)(q, k, v).graph
        targets = [str(node.target) for node in graph.nodes]
        assert "sage_kernels.attention.default" in targets, targets


def test_a_window_may_be_a_number_that_a_tracer_knows_by_name(qkv):
    x = qkv[1].float()
    traced = make_fx(lambda x: sage_attention(x, x, x, causal=True, window=x.shape[1] // 2), tracing_mode="symbolic")(
        x
    )
    assert torch.equal(traced(x), sage_attention(x, x, x, causal=True, window=x.shape[1] // 2))
