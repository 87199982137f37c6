"""What the tests of 8-bit linear layers share: the ops on each of their implementations, and derived error bounds."""

from __future__ import annotations

import pytest
import torch

import sage_kernels.ops.linear_dynamic
from sage_kernels import QuantizedRows, quantize_activation, quantize_weight, quantized_linear, weight_only_linear
from sage_kernels.facts.recipe import GATED
from sage_kernels.ops import linear
from sage_kernels.reference.linear import ref_quantize_activation


FORMATS = ("int8", "fp8")
NORMS = ("none", "layer", "rms")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", *GATED)
_FP32 = 2.0**-24  # half a unit in the last place
_HALF_UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: _FP32}
_SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}


class Linears:
    """The ops, all of them, on one implementation of their kernels. Tensors go to its device, results come back.

    tier: "reference", "interpreter" (the Triton kernels on CPU tensors) or "cuda". `patch` is pytest's monkeypatch.
    """

    def __init__(self, tier: str, patch):
        self.tier, self.tile = tier, None
        self.device = torch.device("cuda" if tier == "cuda" else "cpu")
        if tier == "reference":
            return
        from sage_kernels._triton.linear import launch
        from sage_kernels._triton.linear.quantize_weight import launch_quantize_weight

        def launch_linear(*given, **options):
            return launch.launch_quantized_linear(*given, **options, tile=self.tile)

        def launch_weight_only(*given, **options):
            return launch.launch_weight_only_linear(*given, **options, tile=self.tile)

        # a call that is made again has its tile from the first one
        for module in (linear, sage_kernels.ops.linear_dynamic):
            patch.setattr(module, "try_replay", lambda *_, **__: (None, None))
        if tier == "interpreter":
            patch.setattr(linear.reference, "ref_quantize_activation", launch.launch_quantize_activation)
            patch.setattr(linear.reference, "ref_quantize_weight", launch_quantize_weight)
            patch.setattr(linear.reference, "ref_quantized_linear", launch_linear)
            patch.setattr(linear.reference, "ref_weight_only_linear", launch_weight_only)
        else:
            table, few = launch._device_tile, launch.choose_weight_only_tile
            patch.setattr(launch, "_device_tile", lambda *a, **k: self.tile or table(*a, **k))
            patch.setattr(launch, "choose_weight_only_tile", lambda *a, **k: self.tile or few(*a, **k))

    def to_device(self, x):
        if isinstance(x, QuantizedRows):
            return QuantizedRows(self.to_device(x.codes), self.to_device(x.scale))
        if not isinstance(x, torch.Tensor) or x.device == self.device:
            return x
        # as it lies: .to() would write strided memory anew
        whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        return whole.to(self.device).as_strided(x.shape, x.stride(), x.storage_offset())

    def quantize(self, x, **options) -> QuantizedRows:
        skip_without_fp8(self.device, options.get("format"))
        result = quantize_activation(self.to_device(x), **{n: self.to_device(y) for n, y in options.items()})
        columns = x.shape[-1] + (options["beside"].shape[-1] if options.get("beside") is not None else 0)
        assert isinstance(result, QuantizedRows) and result.codes.shape == (*x.shape[:-1], columns)
        assert result.scale.shape == x.shape[:-1] and result.scale.dtype == torch.float32
        assert (
            result.scale.is_contiguous() and result.codes.stride() == linear._new_rows(x, columns, torch.int8).stride()
        )
        return QuantizedRows(*(y.cpu() for y in result))

    def quantize_weight(self, weight, **options) -> QuantizedRows:
        skip_without_fp8(self.device, options.get("format"))
        options = {n: self.to_device(y) for n, y in options.items()}
        return QuantizedRows(*(y.cpu() for y in quantize_weight(self.to_device(weight), **options)))

    def multiply(self, x, weight, bias=None, tile=None, **options):
        self.tile = tile
        skip_without_fp8(self.device, x.format)
        if tile is not None and tile.kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no Hopper")
        options = {n: self.to_device(y) for n, y in options.items()}
        out = quantized_linear(self.to_device(x), self.to_device(weight), self.to_device(bias), **options)
        columns = weight.codes.shape[0] // (2 if options.get("activation", "none") in GATED else 1)
        assert out.shape == (*x.codes.shape[:-1], columns) and out.is_contiguous()
        assert out.dtype == options.get("dtype", torch.bfloat16)
        return out.cpu()

    def weight_only(self, x, weight, bias=None, tile=None, **options):
        self.tile = tile
        skip_without_fp8(self.device, weight.format)
        options = {n: self.to_device(y) for n, y in options.items()}
        out = weight_only_linear(self.to_device(x), self.to_device(weight), self.to_device(bias), **options)
        columns = weight.codes.shape[0] // (2 if options.get("activation") in GATED else 1)
        assert out.shape == (*x.shape[:-1], columns) and out.is_contiguous()
        assert out.dtype == options.get("dtype", x.dtype)
        return out.cpu()

    def check_weight_only(self, x, weight, bias=None, tile=None, **options):
        """As `weight_only`, held against exact arithmetic on the same codes."""
        out = self.weight_only(x, weight, bias, tile, **options)
        wanted, bound = exact_weight_only(x, weight, bias, tier=self.tier, **options)
        error = (out.double() - wanted).abs()
        assert (error <= bound).all(), f"{(error / bound).max():.3f} times the bound"
        return out

    def check(self, x, weight, bias=None, **options):
        """As `multiply`, held against exact arithmetic on the same codes."""
        out = self.multiply(x, weight, bias, **options)
        options.pop("tile", None)
        wanted, bound = exact(x, weight, bias, tier=self.tier, **options)
        error = (out.double() - wanted).abs()
        assert (error <= bound).all(), (
            f"{(error / bound).max():.3f} times the bound, at {int((error / bound).argmax())}"
        )
        return out


def skip_without_fp8(device, format: str | None) -> None:
    """Skip a test that needs what this GPU lacks."""
    if torch.device(device).type == "cuda" and format == "fp8":
        if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no FP8")


def exact(
    x, weight, bias=None, *, activation="none", gate=None, residual=None, dtype=torch.bfloat16, tier="reference"
):
    """The output in fp64, and how far the op may be from it: INT8 sums are exact, what follows is a few roundings of
    fp32 each, and one to the output's type. FP8 sums are of fp32; of what a GPU's units add at once, they drop what is
    below 2^-13 of the largest.

    The interpreter cuts bf16 off where a GPU rounds.
    """
    codes, w = x.codes.double(), weight.codes.double()
    scales = x.scale.double()[..., None] * weight.scale.double()
    y = codes @ w.mT * scales
    bias = torch.zeros(()) if bias is None else bias.double()
    error = 8 * _FP32 * (y.abs() + bias.abs())
    if x.format == "fp8":
        depth = codes.shape[-1]
        error += depth * _FP32 * (codes.abs() @ w.abs().mT) * scales
        if tier == "cuda":  # as many times as there are products, and sums of 32 of them
            largest = _largest_products(codes.abs(), w.abs())
            error += (depth + depth // 32 + 1) * 2.0**-13 * largest * scales
    return _finished(y + bias, error, activation, gate, residual, dtype, tier)


def _finished(y, error, activation, gate, residual, dtype, tier):
    """What follows a product y [..., N] in fp64, and how far the op may be from it. error: of y."""
    if activation in GATED:
        (value, y), (value_error, error) = (z.unflatten(-1, (-1, 2)).unbind(-1) for z in (y, error))
    steep = 1.0 if GATED.get(activation, activation) == "none" else 1.13  # no activation function is steeper
    error = steep * error + (16 * _FP32 * y.abs() if steep > 1 else 0)
    y = activated(y, GATED.get(activation, activation))
    if activation in GATED:
        error = value_error * y.abs() + value.abs() * error + _FP32 * (value * y).abs()
        y = value * y
    if gate is not None:
        y, error = y * gate.double(), (error + 2 * _FP32 * y.abs()) * gate.double().abs()
    if residual is not None:
        error = error + 2 * _FP32 * (y.abs() + residual.double().abs())
        y = y + residual.double()
    half_unit = _HALF_UNIT[dtype] * (2 if tier == "interpreter" and dtype == torch.bfloat16 else 1)
    return y, error + half_unit * (y.abs() + error) + _SMALLEST[dtype]


def _largest_products(codes, w):
    """[..., N] of codes [..., K] and w [N, K], on the GPU, some columns at a time: there are many products."""
    x = codes.float().cuda()
    parts = [(x[..., None, :] * part).amax(-1) for part in w.float().cuda().split(16)]
    return torch.cat(parts, -1).double().cpu()


def exact_weight_only(
    x, weight, bias=None, *, activation="none", gate=None, residual=None, dtype=None, tier="reference"
):
    """The output of `weight_only_linear` in fp64, and how far the op may be from it: products of 16 bit and a code are
    exact in fp32, each of the K sums rounds once (a GPU's matrix units cut off: twice as much), then what follows."""
    rows, codes, scale = x.double(), weight.codes.double(), weight.scale.double()
    y, bias = rows @ codes.mT * scale, torch.zeros(()) if bias is None else bias.double()
    each = _FP32 * (2 if tier == "cuda" else 1) * (2 if x.dtype == torch.float32 else 1)  # a product of fp32 rounds
    error = x.shape[-1] * each * (rows.abs() @ codes.abs().mT) * scale + 4 * _FP32 * (y.abs() + bias.abs())
    return _finished(y + bias, error, activation, gate, residual, dtype or x.dtype, tier)


def activated(y, name: str):
    """PyTorch's own activation functions."""
    if name == "silu":
        return torch.nn.functional.silu(y)
    return y if name == "none" else torch.nn.functional.gelu(y, approximate="tanh" if name == "gelu_tanh" else "none")


def oracle(x, *, format="int8", norm="none", weight=None, bias=None, eps=1e-6, gain=None, shift=None, balance=None):
    """Codes and scales of the reference."""
    options = {"format": format, "norm": norm, "weight": weight, "bias": bias, "eps": eps}
    return QuantizedRows(*ref_quantize_activation(x, **options, gain=gain, shift=shift, balance=balance))


def steps_apart(a, b):
    """How many codes lie between the codes a and b."""
    if a.dtype == torch.int8:
        return (a.int() - b.int()).abs()
    a, b = (x.view(torch.int8).int() for x in (a, b))
    a, b = (torch.where(x < 0, -(x & 127), x) for x in (a, b))
    return (a - b).abs()


def assert_same_rows(got, wanted, is_exact: bool):
    """Code for code; where a norm's sum has another order, a code near a tie may be the next one."""
    apart = steps_apart(got.codes, wanted.codes)
    if is_exact:
        assert int(apart.max()) == 0 and torch.equal(got.scale, wanted.scale)
        return
    assert int(apart.max()) <= 1 and int(apart.count_nonzero()) <= max(1, apart.numel() // 500)
    torch.testing.assert_close(got.scale, wanted.scale, rtol=16 * _FP32, atol=0)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(*shape, format="int8", seed=0) -> QuantizedRows:
    """N(0, 1), quantised."""
    return oracle(normal(*shape, seed=seed), format=format)
