"""Results that wait: known continuations take one pass, everything else gets the 16-bit tensor."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sage_processors as sp
from sage_processors.postponed.tensor import Postponed
from tests.linears.counting import OpCounter, expected_error, relative_error


def linear_pair(k=48, n=64, dtype=torch.float32):
    torch.manual_seed(0)
    stock = nn.Linear(k, n).to(dtype).eval().requires_grad_(False)
    return stock, copy.deepcopy(stock)


pytestmark = pytest.mark.usefixtures("waiting")


@pytest.fixture
def linear():
    stock, twin = linear_pair()
    with sp.quantize_linears(twin, min_features=0):
        yield stock, twin, torch.randn(2, 6, 48)


CONTINUED = {
    "gelu": lambda y, g, r: F.gelu(y),
    "gelu_tanh": lambda y, g, r: F.gelu(y, approximate="tanh"),
    "gelu_module": lambda y, g, r: nn.GELU("tanh")(y),
    "silu": lambda y, g, r: F.silu(y),
    "silu_module": lambda y, g, r: nn.SiLU()(y),
    "dropout": lambda y, g, r: nn.Dropout(0.5).eval()(y),
    "gate": lambda y, g, r: g * y,
    "gate_after": lambda y, g, r: y * g,
    "gate_vector": lambda y, g, r: y * g[0, 0],
    "residual": lambda y, g, r: r + y,
    "residual_after": lambda y, g, r: y + r,
    "gate_residual": lambda y, g, r: r + g * y,
    "all": lambda y, g, r: r + g * nn.Dropout(0.1).eval()(F.gelu(y, approximate="tanh")),
    "silu_gate_residual": lambda y, g, r: F.silu(y) * g + r,
    "rescaled": lambda y, g, r: r + y / 1.0,
}


@pytest.mark.parametrize("name", CONTINUED)
def test_known_continuations_are_one_op(linear, name):
    stock, twin, x = linear
    gate, residual = torch.randn(2, 1, 64), torch.randn(2, 6, 64)
    with OpCounter() as ops:
        got = CONTINUED[name](twin(x), gate, residual)
        got = got.tensor() if isinstance(got, Postponed) else got
    assert (ops.quantized, ops.multiplied) == (1, 1)
    expected = CONTINUED[name](stock(x), gate, residual)
    assert relative_error(got, expected) < 1.5 * expected_error(x, stock.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_and_wider_gates_are_of_the_same_op(dtype):
    stock, twin = linear_pair(dtype=dtype)
    x, gate, residual = torch.randn(2, 6, 48).to(dtype), torch.randn(2, 1, 64), torch.randn(2, 6, 64).to(dtype)
    calls = {
        "gate in fp32": lambda layer: residual.float() + layer(x) * gate,
        "cast before": lambda layer: layer(x).float() * gate + residual,
        "cast alone": lambda layer: layer(x).float(),
        "cast behind": lambda layer: F.gelu(layer(x)).to(torch.float32),
    }
    with sp.quantize_linears(twin, min_features=0):
        for name, call in calls.items():
            with OpCounter() as ops:
                got = call(twin)
                got = got.tensor() if isinstance(got, Postponed) else got
            expected = call(stock)
            assert got.dtype == expected.dtype == torch.float32, name
            assert ops.multiplied == 1  # of rows that are quantised once for all of them
            bound = 1.5 * expected_error(x, stock.weight) + torch.finfo(dtype).eps
            assert relative_error(got, expected) < bound, name


OTHERS = {
    "relu": lambda y, r: torch.relu(y),
    "add_number": lambda y, r: y + 1.5,
    "subtract": lambda y, r: 1 - y,
    "gate_per_token": lambda y, r: y * r,
    "view": lambda y, r: y.view(2, 6, 4, 16).transpose(1, 2),
    "unflatten": lambda y, r: y.unflatten(-1, (4, 16)),
    "index": lambda y, r: y[:, 2:],
    "cat": lambda y, r: torch.cat([r, y], dim=1),
    "stack": lambda y, r: torch.stack((y, y)),
    "chunk": lambda y, r: y.chunk(2, dim=-1)[1],
    "chunk_tokens": lambda y, r: y.chunk(2, dim=1)[1],
    "halves_added": lambda y, r: sum(y.chunk(2, dim=-1)),
    "matmul": lambda y, r: y @ r.mT,
    "softmax": lambda y, r: y.softmax(-1),
    "gelu_twice": lambda y, r: F.gelu(F.gelu(y)),
    "gelu_after_gate": lambda y, r: F.gelu(y * r[:1, :1]),
    "sum_of_two": lambda y, r: F.silu(y) + y,
    "out": lambda y, r: torch.add(r, y, out=torch.empty_like(r)),
    "in_place_on_other": lambda y, r: r.clone().add_(y),
    "iadd": lambda y, r: r.clone().__iadd__(y),
    "keyword": lambda y, r: torch.clamp(input=y, min=-0.1),
    "type": lambda y, r: y.to(torch.bfloat16),
    "double": lambda y, r: y.double(),
    "where": lambda y, r: torch.where(r > 0, y, r),
    "einsum": lambda y, r: torch.einsum("bsn,btn->bst", y, r),
    "autograd": lambda y, r: y.detach().clone().requires_grad_(),
    "numpy": lambda y, r: torch.from_numpy(y.numpy().copy()),
    "list": lambda y, r: torch.tensor(y.tolist()),
    "deepcopy": lambda y, r: copy.deepcopy(y),
    "pickle": lambda y, r: pickle.loads(pickle.dumps(y)),
    "norm": lambda y, r: F.layer_norm(y, (64,)),
    "dlpack": lambda y, r: torch.from_dlpack(y),
    "subclass": lambda y, r: y.as_subclass(torch.Tensor),
    "real": lambda y, r: y.real,
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_gets_the_16_bit_tensor(linear, name):
    _, twin, x = linear
    residual = torch.randn(2, 6, 64)
    ordinary = twin(x).tensor()
    assert type(ordinary) is torch.Tensor
    got, expected = OTHERS[name](twin(x), residual), OTHERS[name](ordinary, residual)
    assert type(got) is not type(twin(x)) or got.tensor() is not None
    got = got.tensor() if isinstance(got, Postponed) else got
    assert got.dtype == expected.dtype and got.stride() == expected.stride()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_what_is_asked_without_numbers_computes_nothing(linear):
    _, twin, x = linear
    with OpCounter() as ops:
        y = twin(x)
        assert y.shape == (2, 6, 64) and y.size() == y.shape and y.size(-1) == 64 and y.dim() == y.ndim == 3
        assert y.dtype == torch.float32 and y.device == x.device and not y.is_cuda and y.numel() == 768
        assert y.is_contiguous() and y.contiguous() is y and y.to(torch.float32) is y and y.type_as(x) is y
        assert isinstance(y, torch.Tensor) and not y.requires_grad and y.is_floating_point() and len(y.shape) == 3
    assert ops.multiplied == 0
    assert repr(y) == repr(y.tensor()) and f"{y[0, 0, 0]}" and len(y) == 2
    assert torch.equal(y, y.tensor()) and torch.equal(y.tensor(), y) and y.stride() == (384, 64, 1)
    file = io.BytesIO()
    torch.save(y, file)
    assert type(torch.load(io.BytesIO(file.getvalue()), weights_only=True)) is torch.Tensor


def test_operations_in_place_change_what_later_uses_see(linear):
    _, twin, x = linear
    for change in (lambda y: y.mul_(2), lambda y: y[:, 0].zero_(), lambda y: y.data.fill_(3)):
        y, ordinary = twin(x), twin(x).tensor()
        change(y)
        change(ordinary)
        for use in (lambda y: F.gelu(y), lambda y: torch.ones(2, 6, 64) + y, lambda y: y * torch.ones(64)):
            assert torch.equal(use(y), use(ordinary))


def test_a_gate_that_was_written_to_is_an_error(linear):
    _, twin, x = linear
    gate = torch.ones(2, 1, 64)
    y = gate * twin(x)
    gate.add_(1)
    with pytest.raises(sp.ChangedInputError, match="gate of .*written to in place.*layers="):
        torch.zeros(2, 6, 64) + y


def test_a_gate_without_a_version_does_not_wait(linear):
    _, twin, x = linear
    with torch.inference_mode():
        gate = torch.ones(2, 1, 64)
        y = gate * twin(x)
        assert type(y) is torch.Tensor
        gate.add_(1)
    assert torch.equal(y, twin(x).tensor())


class Three(nn.ModuleList):
    """Layers that are given one input, which may become another one behind the first."""

    change = staticmethod(lambda x: x)

    def forward(self, x):
        first = self[0](x) + 0
        y = self.change(x)
        return first, *(module(y) + 0 for module in self[1:])


@pytest.mark.parametrize(
    "change, number",
    [(lambda x: x, 1), (lambda x: x.add_(1), 2), (lambda x: x.view(2, 2, 48), 2), (lambda x: x.clone(), 2)],
)
def test_one_input_is_quantised_once_for_all_layers(change, number):
    block = Three(nn.Linear(48, 32) for _ in range(3)).eval().requires_grad_(False)
    block.change = change
    with sp.quantize_linears(block, min_features=0):
        x = torch.randn(4, 48)
        wanted = [block[0](x.clone()) + 0, *(module(change(x.clone())) + 0 for module in block[1:])]
        with OpCounter() as ops:
            got = block(x)
        assert (ops.quantized, ops.multiplied) == (number, 3)
        assert all(map(torch.equal, got, wanted))


def test_inference_tensors_do_not_know_their_writes():
    block = Three(nn.Linear(48, 32) for _ in range(3)).eval().requires_grad_(False)
    block.change = lambda y: y.mul_(3)
    with sp.quantize_linears(block, min_features=0), torch.inference_mode():
        y = torch.randn(4, 48)
        wanted = block[1](3 * y) + 0
        with OpCounter() as ops:
            got = Three.forward(block, y)[1]  # without what has the forward of a model count them
        assert torch.equal(got, wanted) and ops.quantized == 3


def test_a_result_has_the_bias_of_its_call(linear):
    _, twin, x = linear
    expected = twin(x).tensor()
    y = twin(x)
    twin.bias.add_(1)
    later = twin(x).tensor()
    assert torch.equal(y.tensor(), expected) and torch.allclose(later, expected + 1, atol=1e-5)


def test_a_half_is_memory_of_the_whole(linear):
    _, twin, x = linear
    y = twin(x)
    half, other = y.chunk(2, -1)
    half.mul_(0)
    assert not y.tensor()[..., :32].any() and y.tensor()[..., 32:].any()
    assert torch.equal(other.tensor(), y.tensor()[..., 32:]) and not other.is_contiguous()
    z = twin(x)
    part = z.chunk(2, -1)[0]
    part.mul_(0)
    assert not F.gelu(z)[..., :32].any()


def test_what_was_handed_out_is_an_ordinary_tensor_from_then_on(linear):
    _, twin, x = linear
    y = twin(x)
    memory = y.tensor()
    memory.data.fill_(2)  # a write that nobody counts
    assert torch.equal(y + torch.ones(2, 6, 64), torch.full((2, 6, 64), 3.0))
    assert torch.equal(F.silu(y), F.silu(memory)) and torch.equal(y * torch.ones(64), memory)


# --- norms ---


class Normed(nn.Module):
    """A block as models write them: a norm, maybe modulated, in front of two layers."""

    def __init__(self, norm, k=48, n=64):
        super().__init__()
        self.norm, self.one, self.two = norm, nn.Linear(k, n), nn.Linear(k, n)
        self.change = None

    def forward(self, x, scale=None, shift=None):
        y = self.norm(x)
        if scale is not None:
            y = y * (1 + scale[:, None])
        if shift is not None:
            y = y + shift[:, None]
        if self.change is not None:
            self.change(x, y, scale)
        return self.one(y) + 0, self.two(y) + 0


def norms():
    from diffusers.models.normalization import FP32LayerNorm, RMSNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return {
        "layer": lambda: nn.LayerNorm(48),
        "layer_plain": lambda: nn.LayerNorm(48, elementwise_affine=False, eps=1e-6),
        "layer_no_bias": lambda: nn.LayerNorm(48, bias=False),
        "rms": lambda: nn.RMSNorm(48),
        "rms_plain": lambda: nn.RMSNorm(48, eps=1e-5, elementwise_affine=False),
        "diffusers_rms": lambda: RMSNorm(48, eps=1e-6),
        "diffusers_fp32": lambda: FP32LayerNorm(48, elementwise_affine=False, eps=1e-6),
        "llama": lambda: LlamaRMSNorm(48),
        "gemma": lambda: GemmaRMSNorm(48),
    }


def normed(name, dtype=torch.float32):
    torch.manual_seed(0)
    block = Normed(norms()[name]())
    for parameter in block.norm.parameters():
        nn.init.normal_(parameter, 0.7, 0.3)
    return block.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("modulated", ["", "scale", "both"])
@pytest.mark.parametrize("name", norms())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_modulation_are_one_op(name, modulated, dtype):
    block = normed(name, dtype)
    x = (3 * torch.randn(2, 6, 48) + 1).to(dtype)
    scale = torch.randn(2, 48).to(dtype) if modulated else None
    shift = torch.randn(2, 48).to(dtype) if modulated == "both" else None
    expected = block(x, scale, shift)
    with sp.quantize_linears(block, min_features=0):
        for _ in range(3):
            with OpCounter() as ops:
                got = block(x, scale, shift)
            assert (ops.quantized, ops.multiplied) == (1, 2)
            for a, b in zip(got, expected, strict=True):
                assert relative_error(a, b) < 0.02 + 4 * torch.finfo(dtype).eps
        assert type(block.norm(x)) is not torch.Tensor
        torch.testing.assert_close(block.norm(x).tensor(), type(block.norm)._sage_base.forward(block.norm, x))
    assert all(torch.equal(a, b) for a, b in zip(block(x, scale, shift), expected, strict=True))


def test_a_norm_that_computes_something_else_is_left_alone():
    class ShiftedNorm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    block = Normed(ShiftedNorm(48)).eval()
    with sp.quantize_linears(block, min_features=0):
        assert type(block.norm) is ShiftedNorm


def test_an_input_that_the_model_overwrites_is_noticed_in_the_first_call():
    block = normed("layer")
    block.change = lambda x, y, scale: x.add_(1)
    stock = copy.deepcopy(block)
    with sp.quantize_linears(block, min_features=0):
        for _ in range(3):
            x = torch.randn(2, 6, 48)
            expected = stock(x.clone())
            for a, b in zip(block(x), expected, strict=True):
                assert relative_error(a, b) < 0.02


def test_a_modulation_that_is_overwritten_is_an_error():
    block = normed("layer")
    with sp.quantize_linears(block, min_features=0):
        x, scale = torch.randn(2, 6, 48), torch.ones(48)
        block(x)
        y = block.norm(x) * scale
        scale.add_(1)
        with pytest.raises(sp.ChangedInputError, match="input or parameter of norm"):
            y.sum()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_of_a_norm_that_is_overwritten_is_an_error(name):
    block = normed("layer")
    x = torch.randn(2, 6, 48)
    expected = block(x)[0]
    with sp.quantize_linears(block, min_features=0):
        y = block.norm(x)  # its first call: the result is kept
        getattr(block.norm, name).add_(1)
        assert relative_error(block.one(y) + 0, expected) < 0.02
        block.norm._sage.is_postponed = True
        block(x)
        y = block.norm(x)
        getattr(block.norm, name).add_(1)
        for use in (block.one, torch.sum):
            with pytest.raises(sp.ChangedInputError, match="input or parameter of norm"):
                use(y)


def test_an_input_that_is_overwritten_later_is_an_error():
    block = normed("layer")
    with sp.quantize_linears(block, min_features=0):
        x, scale = torch.randn(2, 6, 48), torch.zeros(2, 48)
        block(x, scale)
        block.change = lambda x, y, scale: x.add_(1)
        with pytest.raises(sp.ChangedInputError, match="input or parameter of norm.*in place.*layers="):
            block(x, scale)
        with pytest.raises(sp.ChangedInputError):
            y = block.norm(x)
            x.add_(1)
            y.sum()


@pytest.mark.parametrize("change", [lambda x, y, scale: y.mul_(2), lambda x, y, scale: y[:, 0].fill_(7.0)])
def test_a_normed_tensor_written_to_is_quantised_as_it_is(change):
    block = normed("layer")
    block.change = change
    stock = copy.deepcopy(block)
    with sp.quantize_linears(block, min_features=0):
        for _ in range(3):
            x, scale = torch.randn(2, 6, 48), torch.randn(2, 48)
            for a, b in zip(block(x, scale), stock(x, scale), strict=True):
                assert relative_error(a, b) < 0.02


def test_inference_mode_does_not_wait_for_what_it_can_not_watch():
    block = normed("layer")
    stock = copy.deepcopy(block)
    with sp.quantize_linears(block, min_features=0), torch.inference_mode():
        x = torch.randn(2, 6, 48)
        assert type(block.norm(x)) is torch.Tensor
        for a, b in zip(type(block).forward(block, x), stock(x), strict=True):
            assert relative_error(a, b) < 0.02


def test_casts_of_a_norm_wait_too():
    block = normed("layer_plain")
    low = copy.deepcopy(block).to(torch.bfloat16)
    with sp.quantize_linears(low, min_features=0):
        x = torch.randn(2, 6, 48).to(torch.bfloat16)
        for _ in range(2):
            with OpCounter() as ops:
                y = (low.norm(x.float()) * torch.ones(2, 1, 48) + torch.zeros(48)).type_as(x)
                low.one(y) + 0
            assert ops.quantized == 1 and y.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_vectors_that_are_no_modulation_are_multiplied_as_they_are(dtype):
    block = normed("layer")
    x, vector = torch.randn(2, 6, 48), (torch.arange(48) % 3).to(dtype)
    norm, layer = block.norm(x), block.one(x)
    with sp.quantize_linears(block, min_features=0):
        block(x)
        for got, expected in (
            (block.norm(x) * vector, norm * vector),
            (vector * block.norm(x), norm * vector),
            (block.one(x) * vector[:1].expand(64), layer * vector[:1].expand(64)),
        ):
            assert type(got) is torch.Tensor and got.dtype == expected.dtype
            assert (got.double() - expected.double()).abs().max() < 0.1


def test_a_norm_of_memory_that_does_not_lie_in_one_piece_is_computed_at_once():
    block = normed("rms")
    x = torch.randn(2, 48, 6).mT
    expected = block.norm(x)
    with sp.quantize_linears(block, min_features=0):
        got = block.norm(x)
        assert type(got) is torch.Tensor and torch.equal(got, expected) and got.stride() == expected.stride()
        assert type(block.norm(x.contiguous())) is not torch.Tensor


# --- gated activations ---


@pytest.mark.parametrize("kind", ["GEGLU", "SwiGLU"])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_modules_of_diffusers_are_one_op(kind, bias):
    from diffusers.models import activations

    torch.manual_seed(0)
    block = getattr(activations, kind)(48, 64, bias=bias).eval().requires_grad_(False)
    x = torch.randn(2, 6, 48)
    expected, plain = block(x), block.proj(x)
    with sp.quantize_linears(block, min_features=0):
        for _ in range(2):
            with OpCounter() as ops:
                got = block(x.clone()) + 0
            assert (ops.quantized, ops.multiplied) == (1, 1)
            assert relative_error(got, expected) < 2 * expected_error(x, block.proj.weight)
        # whoever wants the layer's own columns gets them in their order
        assert relative_error(block.proj(x) + 0, plain) < 1.3 * expected_error(x, block.proj.weight)
        gate, residual = torch.rand(128), torch.rand(2, 6, 128)
        assert relative_error(residual + block.proj(x) * gate, residual + plain * gate) < 0.02
        block.proj.weight.mul_(2)
        assert relative_error(block.proj(x) + 0, nn.Linear.forward(block.proj, x)) < 0.02
    block.proj.weight.div_(2)
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("activation", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh")])
@pytest.mark.parametrize("order", [0, 1])
def test_gates_on_either_half(activation, order):
    stock, twin = linear_pair()

    def gated(layer, x):
        halves = layer(x).chunk(2, dim=-1)
        return activation(halves[order]) * halves[1 - order]

    x = torch.randn(2, 6, 48)
    with sp.quantize_linears(twin, min_features=0):
        for _ in range(2):
            with OpCounter() as ops:
                got = gated(twin, x) + 0
            assert ops.multiplied == 1
            assert relative_error(got, gated(stock, x)) < 2 * expected_error(x, stock.weight)
        torch.testing.assert_close(copy.deepcopy(twin)(x) + 0, twin(x) + 0)


def test_gate_and_value_of_two_layers_are_one_op():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    block = (
        LlamaMLP(LlamaConfig(hidden_size=48, intermediate_size=96, num_attention_heads=4, mlp_bias=True))
        .eval()
        .requires_grad_(False)
    )
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    stock, x = copy.deepcopy(block), torch.randn(2, 6, 48)
    expected, alone = block(x), block.up_proj(x)
    with sp.quantize_linears(block, min_features=0) as swap:
        for _ in range(2):
            with OpCounter() as ops:
                got = block(x.clone()) + 0
            assert (ops.quantized, ops.multiplied) == (2, 2)
            assert relative_error(got, expected) < 0.04
        assert relative_error(block.up_proj(x) + 0, alone) < 1.3 * expected_error(x, block.up_proj.weight)
        for each in (block, stock):
            each.gate_proj.weight.mul_(-1)  # one of the two is quantised anew
        assert relative_error(block(x) + 0, stock(x)) < 0.04
        assert swap.report().fallbacks == {}


def test_a_pair_the_other_way_round_is_no_pair():
    """One layer's activation gates the other one's value, then the other way round: both are right."""
    torch.manual_seed(0)
    block = nn.ModuleList(nn.Linear(48, 64) for _ in range(2)).eval().requires_grad_(False)
    stock, x = copy.deepcopy(block), torch.randn(2, 6, 48)
    with sp.quantize_linears(block, min_features=0):
        for value, gate in ((0, 1), (1, 0), (0, 1), (1, 0)):
            y = x.clone()
            got = block[value](y) * F.silu(block[gate](y)) + 0
            assert relative_error(got, stock[value](x) * F.silu(stock[gate](x))) < 0.03
