"""State kept on a repeated block or an attention module: one object, `module._sage`.

Linear layers, norms and attention processors have objects of other classes under this name: LinearState, NormState,
ProcessorState.
"""

from __future__ import annotations

from typing import Any

from .patched import Owner


class BlockState:
    """State of one block or attention module. An attribute that no swap has set is None.

    Attributes:
        enclosure: postponed.enclosure.Enclosure of a block in which results may be postponed.
        rotations: Owner of the swap that lets an attention module rotate heads in one pass.
        counters: counters of an attention module's calls, by name and numbers of the implementation
            (language.report.Calls).
        handle: language.generation.handle.LanguageHandle of a transformers model.
        leaving: the same, once it is removed, until the `generate` that was running then has ended.
        is_compared: a CUDA graph is replayed only while these attributes are as they were at its capture.
    """

    enclosure: Any = None
    rotations: Owner | None = None
    counters: dict[tuple[str, str], Any] | None = None
    handle: Any = None
    leaving: Any = None
    is_compared = True


def block_state(module: Any) -> BlockState:
    """Return the BlockState of a module, made if there is none."""
    own: BlockState = module.__dict__.setdefault("_sage", BlockState())
    return own


def has_place(module: Any) -> bool:
    """Return True unless the module's `_sage` is an object of another class."""
    return type(module.__dict__.get("_sage")) in (type(None), BlockState)


def forget(module: Any, name: str) -> None:
    """Unset one attribute of a module's BlockState. An empty BlockState goes, too."""
    own = module.__dict__.get("_sage")
    if isinstance(own, BlockState):
        own.__dict__.pop(name, None)
        if not own.__dict__:
            del module.__dict__["_sage"]
