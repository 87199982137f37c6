"""What an INT8 cache hands to attention: codes and scales instead of keys and values, for our attention only.

It is no tensor. Anything but our attention functions that touches it raises: codes can't be mistaken for keys.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from sage_kernels import sage_decode_attention


class Int8KVCacheError(NotImplementedError):
    """Something asked an INT8 cache for what only 16-bit keys and values can give."""


_REMEDY = (
    'call model.set_attn_implementation("sage_int8") after `import sage_processors`, or pass a 16-bit cache '
    "(transformers.DynamicCache)"
)


class QuantizedKV:
    """The keys and values of one layer as an INT8 cache holds them. `update` returns it both as key and as value.

    Attributes:
        k_codes, v_codes: int8 [B, H_kv, S, D]. k_scale, v_scale: bf16 [B, H_kv, S]. k_mean, k_balance: fp32
            [B, H_kv, D]; codes · scale of a key are (key - k_mean) · k_balance.
        lengths: None where all S tokens count, else an integer tensor [] on the device: how many were appended.
        ring: the buffers are a ring, see `sage_decode_attention`.
        dtype: of the keys and values that went in. owner: the layer that they are of.
    """

    __slots__ = (
        "k_codes", "k_scale", "v_codes", "v_scale", "k_mean", "k_balance", "lengths", "ring", "dtype", "owner",
    )  # fmt: skip

    def __init__(
        self,
        k_codes: torch.Tensor,
        k_scale: torch.Tensor,
        v_codes: torch.Tensor,
        v_scale: torch.Tensor,
        k_mean: torch.Tensor,
        k_balance: torch.Tensor,
        lengths: torch.Tensor | None,
        ring: bool,
        dtype: torch.dtype,
        owner: object,
    ) -> None:
        self.k_codes, self.k_scale, self.v_codes, self.v_scale = k_codes, k_scale, v_codes, v_scale
        self.k_mean, self.k_balance, self.lengths, self.ring = k_mean, k_balance, lengths, ring
        self.dtype, self.owner = dtype, owner

    @property
    def shape(self) -> torch.Size:
        """[B, H_kv, S, D], of keys and of values."""
        return self.k_codes.shape

    @property
    def device(self) -> torch.device:
        return self.k_codes.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
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
    """The QuantizedKV that an attention function was given as key and value; None if they are ordinary tensors.

    Raises: TypeError if only one of them is stored, or they are of two layers.
    """
    if not isinstance(key, QuantizedKV) and not isinstance(value, QuantizedKV):
        return None
    # models that keep the keys of an encoder read them from the layer, and then the values
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
    """Attention of the newest tokens' queries [B, S_q, H, D] (any strides) over a layer of an INT8 cache.

    Any S_q; the codes are read as they are. Arguments and errors as `sage_kernels.sage_decode_attention`; a mask's
    columns are the tokens that the layer's get_mask_sizes counted, oldest first. Returns: [B, S_q, H, D] contiguous.
    """
    return sage_decode_attention(
        query, stored.k_codes, stored.k_scale, stored.v_codes, stored.v_scale, stored.k_mean, lengths=stored.lengths,
        ring=stored.ring, attn_mask=attn_mask, causal=causal, window=window, softcap=softcap, sinks=sinks, scale=scale,
        k_balance=stored.k_balance,
    )  # fmt: skip
