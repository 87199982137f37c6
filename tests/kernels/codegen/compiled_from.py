"""What the table of machine code is made of: Triton's version, and a hash of the kernels and of what compiles them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import triton

from sage_kernels.results import kernel_sources


HERE = Path(__file__).resolve().parent


def compiled_from() -> dict[str, str]:
    """The `meta` of a table that is made now."""
    digest = hashlib.sha256(kernel_sources().encode())
    for name in ("codegen.py", "sass.py"):
        digest.update((HERE / name).read_bytes())
    return {"triton": triton.__version__, "sources": digest.hexdigest()}
