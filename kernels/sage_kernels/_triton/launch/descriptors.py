"""Tensor descriptors of replayed launches, whose tensor maps are encoded once for each address.

Triton's launcher encodes a tensor map for each descriptor of each launch, which takes the host as long as the rest of
a launch. PyTorch's allocator gives out the same memory in each step of a model, so addresses come back.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compat import find


_MOST = 256  # addresses of one descriptor whose tensor map is kept


class _Address:
    """A stand-in for a tensor that only has an address."""

    __slots__ = ("address",)

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address


class Described:
    """The fields of a tensor descriptor of one recorded launch, without its tensor.

    Attributes: encoded: what Triton passes to the kernel for it; None until it was launched at this address.
    """

    def __init__(self, fields: dict[str, Any]):
        self.__dict__.update(fields)
        self.encoded: Any = None
        self._places: dict[int, Described] = {}

    def at(self, address: int) -> Described:
        """Return the descriptor of a tensor at this address; the same object each time."""
        here = self._places.get(address)
        if here is None:
            if len(self._places) >= _MOST:
                self._places.clear()
            here = Described({k: x for k, x in vars(self).items() if k not in ("encoded", "_places")})
            here.base = _Address(address)
            self._places[address] = here
        return here


def encode_once() -> None:
    """Let Triton's launchers reuse the tensor maps of replayed launches.

    Call it before any kernel is loaded. If Triton has no function of this name, each launch encodes anew.
    """
    driver = find("triton.backends.nvidia.driver")
    encode = getattr(driver, "make_tensordesc_arg", None)
    if encode is None or hasattr(encode, "__wrapped__"):
        return

    @functools.wraps(encode)
    def make_tensordesc_arg(arg: Any, *metadata: Any) -> Any:
        if type(arg) is not Described:
            return encode(arg, *metadata)
        if arg.encoded is None:
            arg.encoded = encode(arg, *metadata)
        return arg.encoded

    driver.make_tensordesc_arg = make_tensordesc_arg
