"""Head norms and rotary embedding that wait for attention: one pass where they can, the model's own bits elsewhere."""

from __future__ import annotations

import copy
import functools
import pickle
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch.utils._python_dispatch import TorchDispatchMode

import sage_processors as sp
from sage_processors.diffusion.heads import rotary
from sage_processors.linears.modules import is_swapped
from sage_processors.linears.postponed.norm_layers import NormState
from sage_processors.patching.nested import mapped
from tests.support.tiny_models import MODELS


pytestmark = pytest.mark.usefixtures("library_tests")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# model → passes over queries and keys in a forward, one for each attention layer whose heads are turned as one
WAIT = {
    "flux": 2, "flux2": 2, "chroma": 2, "bria": 2, "ovis_image": 2, "longcat_image": 2, "qwen_image": 1,
    "wan_t2v": 1, "wan_i2v": 1, "wan_vace": 3, "skyreels": 1, "chrono_edit": 1, "z_image": 3, "hunyuan_video": 2,
    "sd35_dual": 3,
}  # fmt: skip
NOT_TURNED = ("sd35_dual",)


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device(request.param)


class Passes(TorchDispatchMode):
    """Counts passes over queries and keys, and what each was given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "sage_kernels.qk_norm_rope" in str(func):
            self.calls.append({"parts": len(args[0]), "norm": args[4], "angles": len(args[6])})
        return func(*args, **(kwargs or {}))


def built(name, device="cpu", dtype=torch.float32):
    """A tiny model whose norms' weights are no ones, and inputs."""
    model, inputs = MODELS[name]()
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "norm" in key and parameter.dim() == 1:
            parameter.data = torch.rand_like(parameter) + 0.5
    inputs = {key: mapped(value, lambda x: x.to(device)) for key, value in inputs.items()}
    return model.to(device, dtype), inputs


def result(model, inputs):
    made = model(**inputs)[0]
    return made[0] if isinstance(made, list) else made


@contextmanager
def nothing_waits(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rotary, "CAN_WAIT", False)
        patch.setattr("sage_processors.linears.postponed.norm_layers.CAN_WAIT", False)
        yield


def config(**options):
    return sp.SageAttnProcessor(scaling="dynamic", min_tokens=0, **options)


def norms_of(model):
    return [m for m in model.modules() if isinstance(m.__dict__.get("_sage"), NormState) or is_swapped(m)]


@pytest.mark.parametrize("name", WAIT)
def test_one_pass_makes_what_the_model_makes(name, device, monkeypatch):
    model, inputs = built(name, device)
    with sp.apply(model, config()) as handle:
        with nothing_waits(monkeypatch), Passes() as passes:
            expected = result(model, inputs)
        assert not passes.calls
        for _ in range(2):  # the first one computes what waits as well
            with Passes() as passes:
                got = result(model, inputs)
            assert len(passes.calls) == WAIT[name]
            assert all(call["norm"] and bool(call["angles"]) != (name in NOT_TURNED) for call in passes.calls)
            # codes of Q and K that were rounded the other way
            assert (got - expected).norm() < 2e-3 * expected.norm()
        assert handle.report().calls and not handle.report().fallbacks


@pytest.mark.parametrize("name", ["flux", "wan_i2v", "z_image", "hunyuan_video", "sd35_dual"])
def test_queries_and_keys_are_the_models_own_to_the_last_rounding(name, monkeypatch):
    """Of every call: to fp32's, where the model rounds nothing in between."""
    from sage_processors.diffusion.calls import processors

    model, inputs = built(name)
    seen = []
    compute_heads = processors.compute_heads

    def compare(query, key):
        made = compute_heads(query, key)
        if type(query) is not torch.Tensor:
            seen.extend(zip(made, (query.value(), key.value()), strict=True))
        return made

    monkeypatch.setattr(processors, "compute_heads", compare)
    with sp.apply(model, config()):
        model(**inputs)
        model(**inputs)
    assert len(seen) == {"flux": 8, "wan_i2v": 12, "z_image": 12, "hunyuan_video": 8, "sd35_dual": 12}[name]
    for got, expected in seen:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flux", "qwen_image", "wan_i2v", "sd35_dual"])
def test_layers_that_stay_exact_keep_the_models_bits(name, device):
    model, inputs = built(name, device, torch.bfloat16)
    half = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image", "pooled_projections")
    inputs = {k: v.bfloat16() if k in half else v for k, v in inputs.items()}
    expected = model(**inputs)[0]
    with sp.apply(model, config(layers={"*": {"recipe": "16bit"}})) as handle, Passes() as passes:
        for _ in range(3):
            assert torch.equal(model(**inputs)[0], expected)
        assert not passes.calls and not handle.report().calls
    assert torch.equal(model(**inputs)[0], expected)


def test_remove_and_copies_put_the_norms_back():
    model, inputs = built("flux")
    expected, classes = model(**inputs)[0], [type(m) for m in model.modules()]
    handle = sp.apply(model, config())
    assert len(norms_of(model)) == 6  # of queries and keys: two each of image and text, and of the single block
    handle.refresh()
    assert len(norms_of(model)) == 6
    twin = copy.deepcopy(model)
    swapped = model(**inputs)[0]
    assert torch.equal(twin(**inputs)[0], swapped)
    assert type(pickle.loads(pickle.dumps(norms_of(model)[0]))) is type(norms_of(model)[0])
    other = sp.apply(twin, config())
    assert torch.equal(twin(**inputs)[0], swapped)
    for one, of in ((other, twin), (handle, model)):
        one.remove()
        assert [type(m) for m in of.modules()] == classes and not norms_of(of)
        assert torch.equal(of(**inputs)[0], expected)


@pytest.mark.parametrize("linears", ["none", "int8"])
def test_with_8_bit_linear_layers_beside_it(linears):
    model, inputs = built("flux")
    with sp.apply(model, config(linears={"format": linears, "min_features": 0})), Passes() as passes:
        model(**inputs)
    assert [call["parts"] for call in passes.calls] == [2, 1]
    assert not norms_of(model)


def test_a_model_whose_rotary_embedding_is_not_known_is_left_alone():
    model, inputs = built("ltx")
    with sp.apply(model, config()), Passes() as passes:
        assert not norms_of(model)
        model(**inputs)
    assert not passes.calls


# what a processor may do with queries and keys


class Attention(torch.nn.Module):
    """An attention layer whose processor is given. across: its norms are over all heads of a token."""

    def __init__(self, across=False, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (torch.nn.Linear(width, width) for _ in "qkv")
        self.norm_q, self.norm_k = (torch.nn.RMSNorm(width if across else width // heads, eps=1e-6) for _ in "qk")
        self.processor = None

    def forward(self, x, angles):
        return self.processor(self, x, angles)


class Model(torch.nn.Module):
    def __init__(self, processor, across=False):
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attention(across)
        self.attn.processor = processor
        self.eval().requires_grad_(False)

    def forward(self, x, angles):
        return self.attn(x, angles)


class Processor:
    """use: what it does with queries and keys before attention, given what the queries were before their norm."""

    use = None

    def __call__(self, attn, x, angles):
        q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        given = q
        q, k = attn.norm_q(q), attn.norm_k(k)
        q = apply_rotary_emb(q, angles, sequence_dim=1)
        k = apply_rotary_emb(k, angles, sequence_dim=1)
        if self.use is not None:
            q, k = self.use(q, k, given)
        return dispatch_attention_fn(q, k, v).flatten(2)


class Transposing(Processor):
    def __call__(self, attn, x, angles):
        q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = apply_rotary_emb(attn.norm_q(q), angles, sequence_dim=1), attn.norm_k(k)
        k = apply_rotary_emb(k.transpose(1, 2), angles)
        q, v = q.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def angles(tokens=20, width=16):
    torch.manual_seed(2)
    phase = torch.rand(tokens, width // 2).repeat_interleave(2, -1)
    return phase.cos(), phase.sin()


def _turned_by_parts(x):
    first = tuple(t[:5] for t in angles())
    return torch.cat([apply_rotary_emb(x[:, :5], first, sequence_dim=1), x[:, 5:]], dim=1)


X = torch.linspace(-1, 1, 2 * 20 * 32).sin().view(2, 20, 32) * 3

USES = {
    "nothing": None,
    "a part turned": lambda q, k, given: (_turned_by_parts(q), _turned_by_parts(k)),
    "a part in place": lambda q, k, given: (q[:, :5].mul_(2), q, k)[1:],
    "a part of a part": lambda q, k, given: (torch.cat([q[:, :2], q[:, 2:][:, :-2], q[:, -2:]], 1), k),
    "tokens of an array": lambda q, k, given: (q[np.arange(2), :20], k[..., :]),
    "tokens apart": lambda q, k, given: (torch.cat([q[:, ::2], q[:, 1::2]], 1), k[:, [*range(20)]]),
    "arithmetic": lambda q, k, given: (q * 2 - q, k + 0),
    "a part of it": lambda q, k, given: (torch.cat([q[:, :5], q[:, 5:]], 1), k[:, :]),
    "queries alone": lambda q, k, given: (q.clone(), k),
    "in place": lambda q, k, given: (q.mul_(1.5), k),
    "queries as keys": lambda q, k, given: (q, q),
    "other parts": lambda q, k, given: (torch.cat([q, q], 1)[:, :20], k),
    "twice": lambda q, k, given: (apply_rotary_emb(q, angles(), sequence_dim=1), k),
    "asked": lambda q, k, given: (q, k) if q.dim() == 4 and q.layout is torch.strided and not q.is_nested else None,
}


class Apart(Processor):
    """Rotates the first tokens alone, as HunyuanVideo's single blocks; imports the function where it is called."""

    def __call__(self, attn, x, angles):
        from diffusers.models.embeddings import apply_rotary_emb

        q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        first = tuple(t[:5] for t in angles)
        q = torch.cat([apply_rotary_emb(q[:, :5], first, sequence_dim=1), q[:, 5:]], dim=1)
        k = torch.cat([apply_rotary_emb(k[:, :-15], first, sequence_dim=1), k[:, -15:]], dim=1)
        return dispatch_attention_fn(q, k, v).flatten(2)


class HeadsFirst(Processor):
    """Heads before tokens, joined and without a rotary embedding, as SD 3.5's."""

    def __call__(self, attn, x, angles):
        q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        given = q
        q, k = attn.norm_q(q), attn.norm_k(k)
        if self.use is not None:
            q, k = self.use(q, k, given)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _in_turns(q, k, given):
    """Written to under another name once it was transposed."""
    turned = q.transpose(1, 2)
    q.mul_(2)
    return turned.transpose(1, 2), k


FIRST = {  # (what becomes of queries and keys, segments in one pass or None)
    "nothing": (None, 1),
    "joined": (lambda q, k, given: (torch.cat([q, q], 2)[:, :, :20], torch.cat([k, k], dim=-2)[:, :, :20]), None),
    "joined by name": (lambda q, k, given: tuple(torch.cat(tensors=[x, x], dim=2)[:, :, :20] for x in (q, k)), None),
    "there and back": (lambda q, k, given: tuple(x.transpose(-2, 1).transpose(1, -2) for x in (q, k)), 1),
    "other dimensions": (
        lambda q, k, given: (q.transpose(2, 3).transpose(2, 3), k.transpose(0, 1).transpose(0, 1)),
        None,
    ),
    "heads joined": (
        lambda q, k, given: (torch.cat([q[:, :1], q[:, 1:]], 1), torch.cat([k[:, :1], k[:, 1:]], 1)),
        None,
    ),
    "joined twice": (lambda q, k, given: (torch.cat([q, q], 1)[:, :2], torch.cat([k, k], 1)[:, :2]), None),
    "joined both ways": (
        lambda q, k, given: tuple(torch.cat([torch.cat([x] * 2, 2)] * 2, 1)[:, :2, :20] for x in (q, k)),
        None,
    ),
    "in place": (lambda q, k, given: (q.mul_(2), k), None),
    "in turns": (_in_turns, None),
    "permuted": (lambda q, k, given: (q.permute(0, 1, 2, 3), k), None),
    "named": (lambda q, k, given: (q.transpose(dim0=1, dim1=2).transpose(1, 2), k), None),
}


@pytest.mark.parametrize("use", FIRST)
def test_heads_that_come_before_tokens(use):
    processor = HeadsFirst()
    processor.use, parts = FIRST[use]
    model = Model(processor)
    torch.nn.init.uniform_(model.attn.norm_q.weight, 0.5, 2.0)
    expected = model(X, angles())
    with sp.apply(model, config()) as handle:
        for _ in range(3):
            with Passes() as passes:
                got = model(X, angles())
            assert [call["parts"] for call in passes.calls] == ([] if parts is None else [parts])
            assert (got - expected).norm() < 0.02 * expected.norm()
        assert handle.report().calls == 3


class TwoStreams(Processor):
    """Text and image, each with its own norms, joined with heads first."""

    axis = 2

    def __call__(self, attn, x, angles):
        q, k, v = (
            layer(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        q = torch.cat([attn.norm_q(q[:, :, :5]), attn.norm_k(q[:, :, 5:])], dim=self.axis)
        k = torch.cat([attn.norm_q(k[:, :, :5]), attn.norm_k(k[:, :, 5:])], dim=self.axis)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_two_streams_are_one_pass_in_their_order():
    model = Model(TwoStreams())
    torch.nn.init.uniform_(model.attn.norm_q.weight, 0.5, 2.0)
    expected = model(X, angles())
    with sp.apply(model, config()):
        for _ in range(2):
            with Passes() as passes:
                got = model(X, angles())
            assert [(call["parts"], call["angles"]) for call in passes.calls] == [(2, 0)]
            assert (got - expected).norm() < 0.02 * expected.norm()


class Quarters(Processor):
    """Heads and tokens joined, in this order: segments of one pass are of all heads."""

    def __call__(self, attn, x, angles):
        q, k, v = (
            layer(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        joined = []
        for norm, given in ((attn.norm_q, q), (attn.norm_k, k)):
            left = torch.cat([norm(given[:, :1, :5]), norm(given[:, 1:, :5])], 1)
            right = torch.cat([norm(given[:, :1, 5:]), norm(given[:, 1:, 5:])], 1)
            joined.append(torch.cat([left, right], 2))
        return F.scaled_dot_product_attention(*joined, v).transpose(1, 2).flatten(2)


class TurnedBefore(Processor):
    """A rotary embedding of tokens before heads, then the other way round."""

    def joined(self, norm, x):
        return norm(x)

    def __call__(self, attn, x, angles):
        q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = self.joined(attn.norm_q, q), self.joined(attn.norm_k, k)
        q, k = apply_rotary_emb(q, angles, sequence_dim=1), apply_rotary_emb(k, angles, sequence_dim=1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class TurnedTogether(TurnedBefore):
    """The same of two segments that are turned as one."""

    def joined(self, norm, x):
        return torch.cat([norm(x[:, :5]), norm(x[:, 5:])], 1)


@pytest.mark.parametrize(("kind", "passes_made"), [(Quarters, 0), (TurnedBefore, 1), (TurnedTogether, 0)])
def test_what_one_pass_does_not_know_is_the_models_own(kind, passes_made):
    model = Model(kind())
    torch.nn.init.uniform_(model.attn.norm_q.weight, 0.5, 2.0)
    expected = model(X, angles())
    with sp.apply(model, config()):
        for _ in range(2):
            with Passes() as passes:
                assert (model(X, angles()) - expected).norm() < 0.02 * expected.norm()
            assert len(passes.calls) == passes_made


def test_a_part_that_is_not_rotated_is_of_the_same_pass():
    model = Model(Apart())
    expected = model(X, angles())
    with sp.apply(model, config()):
        for _ in range(2):
            with Passes() as passes:
                got = model(X, angles())
            assert [(call["parts"], call["angles"]) for call in passes.calls] == [(2, 2)]
            assert (got - expected).norm() < 0.02 * expected.norm()


class Importing(Processor):
    """Imports more than the function, also names that another version of diffusers has."""

    def __call__(self, attn, x, angles):
        from diffusers.models.activations import ACT2CLS

        try:
            from diffusers.models.embeddings import a_name_of_another_version, apply_rotary_emb
        except ImportError as error:
            if "diffusers.models.embeddings" not in str(error):
                raise
            from diffusers.models.embeddings import TimestepEmbedding, apply_rotary_emb

            a_name_of_another_version = TimestepEmbedding
        if not isinstance(ACT2CLS, dict) or not isinstance(a_name_of_another_version, type):
            raise TypeError(ACT2CLS)
        q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = (apply_rotary_emb(each, angles, sequence_dim=1) for each in (attn.norm_q(q), attn.norm_k(k)))
        return dispatch_attention_fn(q, k, v).flatten(2)


def test_other_imports_are_as_they_were():
    model = Model(Importing())
    expected = model(X, angles())
    with sp.apply(model, config()):
        for _ in range(2):
            with Passes() as passes:
                got = model(X, angles())
            assert len(passes.calls) == 1 and (got - expected).norm() < 0.02 * expected.norm()


def test_an_import_of_a_replaced_function_gets_the_replacement(monkeypatch):
    """A user's function must not be given what waits."""
    model, seen = Model(Apart()), []

    def mine(x, *args, **kwargs):
        seen.append(type(x))
        return apply_rotary_emb(x, *args, **kwargs)

    mine.__code__ = mine.__code__.replace(co_filename="/elsewhere/mine.py")  # not a library's, as tests are here
    expected = model(X, angles())
    with sp.apply(model, config()):
        for is_mine in (True, False, True):
            with monkeypatch.context() as patch:
                if is_mine:
                    patch.setattr("diffusers.models.embeddings.apply_rotary_emb", mine)
                with Passes() as passes:
                    got = model(X, angles())
            assert (got - expected).norm() < 0.02 * expected.norm()
            assert bool(passes.calls) != is_mine
    assert seen == [torch.Tensor] * 4


@pytest.mark.parametrize("use", [*USES, "transposed"])
def test_whatever_becomes_of_the_heads_the_numbers_are_the_models(use):
    processor = Transposing() if use == "transposed" else Processor()
    processor.use = USES.get(use)
    model = Model(processor)
    expected = model(X, angles())
    with sp.apply(model, config()) as handle:
        for _ in range(3):
            got = model(X, angles())
            assert type(got) is torch.Tensor
            assert (got - expected).norm() < 0.02 * expected.norm()
        assert handle.report().calls == 3


class Unlike(Processor):
    """Queries and keys that one pass can't make together: `kind` says why."""

    kind = ""

    def __call__(self, attn, x, angles):
        q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q = attn.norm_q(q)
        k = k if self.kind == "norm of queries alone" else attn.norm_k(k)
        of_keys = tuple(t.flip(0) for t in angles) if "other angles" in self.kind else angles
        if self.kind == "other angles of two parts":
            q, k = (torch.cat([attn.norm_q(v[:, :5]), attn.norm_q(v[:, 5:])], 1) for _ in "qk")
        q = apply_rotary_emb(q, angles, sequence_dim=1)
        if self.kind == "pairs":
            k = apply_rotary_emb(k, angles, use_real_unbind_dim=-2, sequence_dim=1)
        elif self.kind != "angles of queries alone":
            k = apply_rotary_emb(k, of_keys, sequence_dim=1)
        return dispatch_attention_fn(q, k, v).flatten(2)


@pytest.mark.parametrize(
    "kind",
    ["other angles", "other angles of two parts", "pairs", "angles of queries alone", "norm of queries alone", "eps",
     "weight of queries alone"],
)  # fmt: skip
def test_queries_and_keys_that_differ_are_made_one_by_one(kind):
    processor = Unlike()
    processor.kind = kind
    model = Model(processor)
    if kind == "eps":
        model.attn.norm_k.eps = 0.3
    if kind == "weight of queries alone":
        model.attn.norm_k = torch.nn.RMSNorm(16, eps=1e-6, elementwise_affine=False)
    torch.nn.init.uniform_(model.attn.norm_q.weight, 0.5, 2.0)
    expected = model(X, angles())
    with sp.apply(model, config()), Passes() as passes:
        for _ in range(2):
            assert (model(X, angles()) - expected).norm() < 0.02 * expected.norm()
    assert not passes.calls


def test_an_input_that_the_processor_overwrites_is_noticed_in_the_first_call():
    processor = Processor()
    processor.use = lambda q, k, given: (q, k, given.zero_())[:2]
    model = Model(processor)
    expected = model(X, angles())
    with sp.apply(model, config()), Passes() as passes:
        for _ in range(3):
            assert (model(X, angles()) - expected).norm() < 0.02 * expected.norm()
    assert not any(call["norm"] for call in passes.calls)  # angles may still wait


@pytest.mark.parametrize("what", ["input", "angles"])
def test_what_is_overwritten_later_is_an_error(what):
    processor, table = Processor(), angles()
    model = Model(processor)
    with sp.apply(model, config()):
        model(X, table)
        processor = model.attn.processor
        written = {"input": lambda given: given.zero_(), "angles": lambda given: table[1].zero_()}[what]
        object.__setattr__(processor, "use", lambda q, k, given: (q, k, written(given))[:2])
        with pytest.raises(sp.ChangedInputError, match=r"queries or keys of attn.*in place.*layers="):
            model(X, table)


OTHER_ANGLES = {
    "double": lambda cos, sin: (cos.double(), sin.double()),
    "bfloat16": lambda cos, sin: (cos.bfloat16(), sin.bfloat16()),
    "one for all": lambda cos, sin: (cos[:1], sin[:1]),
    "a list": lambda cos, sin: [cos, sin],
}


@pytest.mark.parametrize("kind", OTHER_ANGLES)
def test_angles_of_other_kinds_are_the_models_own(kind):
    given = OTHER_ANGLES[kind](*angles())
    model = Model(Processor())
    expected = model(X, given)
    with sp.apply(model, config()), Passes() as passes:
        for _ in range(2):
            assert (model(X, given) - expected).norm() < 0.02 * expected.norm()
    assert bool(passes.calls) == (kind == "a list")


@pytest.mark.parametrize(
    ("given", "options"), [((True, -1, 1, 2), {}), ((), {"sequence_dim": 1, "dim": 2}), ((True, -3, 1), {})]
)
def test_wrong_arguments_of_a_rotary_embedding_are_the_models_error(given, options):
    class Wrong(Processor):
        def __call__(self, attn, x, angles):
            q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
            q = apply_rotary_emb(q, angles, *given, **options)
            return dispatch_attention_fn(q, k, v).flatten(2)

    model = Model(Wrong())
    with pytest.raises((TypeError, ValueError)) as stock:
        model(X, angles())
    with sp.apply(model, config()), pytest.raises(type(stock.value)):
        model(X, angles())


@pytest.mark.parametrize("mode", ["autocast", "inference_mode", "inference_mode_inside"])
def test_under_autocast_nothing_waits_and_in_inference_mode_what_counts_its_writes(mode):
    model = Model(Processor())
    table = angles()
    expected = model(X, table)
    context = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else torch.inference_mode()
    with sp.apply(model, config()), context, Passes() as passes:
        called = model if mode != "inference_mode_inside" else functools.partial(type(model).forward, model)
        for _ in range(2):
            got = called(X.clone(), tuple(x.clone() for x in table)).float()
    assert len(passes.calls) == (2 if mode == "inference_mode" else 0)
    assert (got - expected).norm() < 0.03 * expected.norm()


def test_norms_whose_weights_are_there_for_their_own_forward_alone_change_no_bit():
    """As offloading by leaves has it: heads are made in the same pass, from a copy of the weights."""
    from diffusers.hooks.hooks import HookRegistry, ModelHook

    class OnlyThen(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            module.weight.data = self.weight
            return args, kwargs

        def post_forward(self, module, output):
            module.weight.data = torch.full_like(self.weight, torch.nan)
            return output

    model, inputs = MODELS["flux"]()
    model.to(torch.bfloat16)
    inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}

    def forwards():
        with torch.no_grad(), sp.apply(model, sp.SageAttnProcessor(min_tokens=0)) as handle:
            outputs = [model(**inputs, return_dict=False)[0] for _ in range(3)]
            assert handle.report().calls
        return outputs

    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    norms = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    for module in norms:
        module.weight.data = 0.5 + torch.rand_like(module.weight)
    expected = forwards()
    for module in norms:
        hook = OnlyThen()
        hook.weight = module.weight.data
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "only_then")
    assert all(torch.equal(a, b) for a, b in zip(forwards(), expected, strict=True))
