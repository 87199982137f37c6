"""Attention of other packages, if they are installed, beside ours in bench.py and in whole models.

How each was built for the rows of results.csv: docs/comparison.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional
from replaced_attention import attention_as
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class Rival(NamedTuple):
    """One function of another package.

    Attributes:
        provider: of its rows in results.csv.
        attend: function of (query, key, value, is_causal, scale) in [B, H, S, D], with equal numbers of heads; None
            for FlexAttention, which is compiled for a case (`flex`).
    """

    provider: str
    attend: Callable | None


def _sageattention_1() -> Rival:
    version = importlib.metadata.version("sageattention")
    if not version.startswith("1."):
        raise ImportError(f"sageattention {version}")
    from sageattention import sageattn

    def attend(q, k, v, causal, scale):
        return sageattn(q, k, v, is_causal=causal, sm_scale=scale)

    return Rival(f"sageattention_{version}", attend)


def _sageattention_2() -> Rival:
    version = importlib.metadata.version("sageattention")
    if not version.startswith("2."):
        raise ImportError(f"sageattention {version}")
    from sageattention import sageattn_qk_int8_pv_fp8_cuda_sm90 as sageattn

    def attend(q, k, v, causal, scale):
        return sageattn(q, k, v, tensor_layout="HND", is_causal=causal, sm_scale=scale)

    return Rival(f"sageattention_{version}", attend)


def _flash_attn_3() -> Rival:
    from flash_attn_interface import flash_attn_func

    def attend(q, k, v, causal, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal).transpose(1, 2)

    return Rival("flash_attn_3", attend)


def _flash_attn_4() -> Rival:
    from flash_attn.cute import flash_attn_func

    def attend(q, k, v, causal, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)[0].transpose(1, 2)

    return Rival("flash_attn_4", attend)


def _torchao_fp8_attention() -> Rival:
    """FlashAttention 3's FP8 kernel behind torchao's quantisation by head."""
    from flash_attn_interface import flash_attn_func
    from torchao.prototype.attention.quantization import _fp8_sdpa_quantize

    def attend(q, k, v, causal, scale):
        *codes, q_scale, k_scale, v_scale = _fp8_sdpa_quantize(q, k, v)
        scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
        out = flash_attn_func(*(x.transpose(1, 2) for x in codes), softmax_scale=scale, causal=causal, **scales)
        return out.transpose(1, 2)

    return Rival("torchao_fp8_attention", attend)


ATTENTION_RIVALS = {
    "torch_flex": lambda: Rival("torch_flex", None),
    "sageattention_1": _sageattention_1,
    "sageattention_2": _sageattention_2,
    "flash_attn_3": _flash_attn_3,
    "flash_attn_4": _flash_attn_4,
    "torchao_fp8_attention": _torchao_fp8_attention,
}
# Largest relative L2 error of 8-bit attention, by the first letters of the provider: loose bounds, which only detect a
# result that is no attention
QUANTIZING = {"sageattention": 0.1, "torchao": 0.3}


WIDEST = 128  # head_dim that all of them take; a VAE has wider heads


def bound(provider: str) -> float | None:
    """Largest error allowed to another package's 8-bit attention; None for a provider that is none."""
    return QUANTIZING.get(provider.partition("_")[0])


def imported(names: Iterable[str]) -> Iterator[Rival]:
    """Yield those of the named rivals whose package is installed; say of the others that they are not."""
    for name in names:
        try:
            yield ATTENTION_RIVALS[name]()
        except (ImportError, AttributeError) as error:
            print(f"{name}: not installed here: {error}", flush=True)


def of_case(rival: Rival, case) -> Callable:
    """Return attention of a case of cases.py in [B, S, H, D], with K and V repeated for heads that share them."""
    if rival.attend is None:
        return flex(case)

    def run(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if case.heads != case.kv_heads:
            k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
        return rival.attend(q, k, v, case.causal, None).transpose(1, 2)

    return run


def flex(case) -> Callable:
    """Return torch's FlexAttention, compiled for this shape, without copies of K and V for GQA."""
    block_mask = None
    if case.causal:
        offset = case.seq_kv - case.seq_q
        block_mask = create_block_mask(
            lambda b, h, row, key: row + offset >= key, None, None, case.seq_q, case.seq_kv, device="cuda"
        )
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=case.heads != case.kv_heads).transpose(1, 2)

    return run


@contextmanager
def rival_attention(rival: Rival, model: nn.Module):
    """Run a rival in place of a model's scaled_dot_product_attention inside of the with-statement.

    Calls with a mask, dropout, heads that share keys or heads wider than WIDEST go to PyTorch as before, and those of
    FlexAttention with a causal mask too.
    """
    stock, forward, attend = torch.nn.functional.scaled_dot_product_attention, model.forward, rival.attend or _flex()

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        plain = attn_mask is None and not dropout_p and query.shape[1] == key.shape[1]
        if not plain or query.shape[-1] > WIDEST or (is_causal and rival.attend is None):
            return stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return attend(query, key, value, is_causal, scale)

    @functools.wraps(forward)
    def with_rival(*args, **options):
        with attention_as(attention):
            return forward(*args, **options)

    model.forward = with_rival
    try:
        yield
    finally:
        del model.forward


def _flex() -> Callable:
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v, causal, scale: compiled(q, k, v, scale=scale)
