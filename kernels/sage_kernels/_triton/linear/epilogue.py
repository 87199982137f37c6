"""What follows the sums of a tile: dequantisation, bias, activation function, gate, residual, all in fp32."""

import triton
import triton.language as tl


_GELU_SCALE = tl.constexpr(2 * 0.7978845608028654)  # 2 · sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        y = y * 0.5 * (1.0 + tl.erf(y * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        y = y * _sigmoid(y * (1.0 + _GELU_CUBIC * y * y) * _GELU_SCALE)
    elif ACTIVATION == "silu":
        y = y * _sigmoid(y)
    return y


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def finish_tile(
    sums, m, first, x_scale, w_scale_ptr, bias_ptr, gate_ptr, rows, columns, columns_out, tokens, stride_gb, stride_gt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """The outputs but for the residual, fp32 [BLOCK_M, BLOCK_N or half of it], of sums [BLOCK_M, BLOCK_N].

    m, x_scale: the rows and their scales [BLOCK_M]. first: the first of the weight's rows. GATED: column 2i is a value,
    2i + 1 its gate. GATE: "none", "all" (one vector for all rows) or "row".
    """
    n = first + tl.arange(0, BLOCK_N)
    w_scale = tl.load(w_scale_ptr + n, mask=n < columns, other=0.0)
    y = sums.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if not GATED:
        y = _activated(y, ACTIVATION)
        o = n
    else:
        value, gate = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
        y = value * _activated(gate, ACTIVATION)
        o = first // 2 + tl.arange(0, BLOCK_N // 2)
    if GATE == "all":
        y *= tl.load(gate_ptr + o, mask=o < columns_out, other=0.0).to(tl.float32)[None, :]
    if GATE == "row":
        base = (m // tokens).to(tl.int64) * stride_gb + (m % tokens).to(tl.int64) * stride_gt
        inside = (m < rows)[:, None] & (o < columns_out)[None, :]
        y *= tl.load(gate_ptr + base[:, None] + o[None, :], mask=inside, other=0.0).to(tl.float32)
    return y
