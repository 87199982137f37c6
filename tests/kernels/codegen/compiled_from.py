"""What the table of machine code is made of: Triton's version, the kernels, what compiles them, and its own rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import triton

from sage_kernels.results import SOURCES, kernel_sources


HERE = Path(__file__).resolve().parent


def compiled_from(rows: dict[str, Any]) -> dict[str, str]:
    """The `meta` of a table of these rows that is made now. With the rows' hash a table that was put together of two,
    or edited, is not taken for one that was compiled."""
    rooms = (SOURCES / name for name in ("_triton", "facts"))  # the others launch no kernel themselves
    sources = hashlib.sha256("".join(map(kernel_sources, rooms)).encode())
    for name in ("codegen.py", "sass.py"):
        sources.update((HERE / name).read_bytes())
    own = hashlib.sha256(json.dumps(rows, sort_keys=True).encode())
    return {"triton": triton.__version__, "sources": sources.hexdigest(), "rows": own.hexdigest()}
