"""Keys and values of one layer as INT8 codes and scales, for our attention functions only.

A QuantizedKV is no tensor. Any other function that uses it raises, so codes can't be mistaken for keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from sage_kernels import sage_decode_attention


class Int8KVCacheError(NotImplementedError):
    """An INT8 cache was used for something that needs 16-bit keys and values."""


_REMEDY = (
    'call model.set_attn_implementation("sage_int8") after `import sage_processors`, or pass a 16-bit cache '
    "(transformers.DynamicCache)"
)


@dataclass(slots=True, eq=False, repr=False)
class QuantizedKV:
    """Keys and values of one layer of an INT8 cache. The layer's `update` returns it as key and as value.

    Attributes:
        k_codes, v_codes: int8 [B, H_kv, S, D].
        k_scale, v_scale: bf16 [B, H_kv, S].
        k_mean, k_balance: fp32 [B, H_kv, D], centre and balance. k_codes * k_scale is (key - k_mean) * k_balance.
        lengths: None if all S tokens are valid; else an integer tensor [] on the device, the number appended so far.
        ring: True if the buffers are a ring; see `sage_decode_attention`.
        dtype: dtype of the appended keys and values.
        owner: the cache layer.
    """

    k_codes: torch.Tensor
    k_scale: torch.Tensor
    v_codes: torch.Tensor
    v_scale: torch.Tensor
    k_mean: torch.Tensor
    k_balance: torch.Tensor
    lengths: torch.Tensor | None
    ring: bool
    dtype: torch.dtype
    owner: object

    @property
    def shape(self) -> torch.Size:
        """Shape [B, H_kv, S, D] of the keys, and of the values."""
        return self.k_codes.shape

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.k_codes.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape or one dimension of it, as torch.Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return 4, the number of dimensions."""
        return 4

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Int8KVCacheError(f"{name}: got a layer of an Int8KVCache, expected 16-bit keys and values; {_REMEDY}")

    def __getitem__(self, index: object) -> NoReturn:
        raise Int8KVCacheError(f"indexing: got a layer of an Int8KVCache, expected a tensor; {_REMEDY}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise Int8KVCacheError(f"{name}: got a layer of an Int8KVCache, expected tensors; {_REMEDY}")


def quantized_kv_of(key: object, value: object) -> QuantizedKV | None:
    """Return the QuantizedKV passed to an attention function as key and value; None for ordinary tensors.

    Raises: TypeError if only one of them is a QuantizedKV, or if they belong to two layers.
    """
    if not isinstance(key, QuantizedKV) and not isinstance(value, QuantizedKV):
        return None
    # two objects may belong together: models that keep an encoder's keys read layer.keys and then layer.values
    if (
        not (isinstance(key, QuantizedKV) and isinstance(value, QuantizedKV))
        or key.owner is not value.owner
        or key.shape != value.shape
    ):
        raise TypeError(
            f"key, value: got {type(key).__name__} and {type(value).__name__} that do not belong together, expected "
            "both as one update of one layer of an Int8KVCache returned them"
        )
    return key


def attend(
    query: torch.Tensor,
    stored: QuantizedKV,
    *,
    attn_mask: torch.Tensor | None = None,
    causal: bool | str = False,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Run attention of the newest tokens' queries over a layer of an INT8 cache.

    Args:
        query: [B, S_q, H, D], any S_q and any strides.
        stored: as the layer returned it.
        attn_mask: its columns are the tokens counted by the layer's get_mask_sizes, oldest first.
        causal, window, softcap, sinks, scale: as in `sage_kernels.sage_decode_attention`.
    Returns: [B, S_q, H, D], contiguous.
    Raises: as `sage_kernels.sage_decode_attention`.
    """
    return sage_decode_attention(
        query, stored.k_codes, stored.k_scale, stored.v_codes, stored.v_scale, stored.k_mean, lengths=stored.lengths,
        ring=stored.ring, attn_mask=attn_mask, causal=causal, window=window, softcap=softcap, sinks=sinks, scale=scale,
        k_balance=stored.k_balance,
    )  # fmt: skip
