"""Sage classes in the lists in which diffusers looks processors up by their exact class."""

from __future__ import annotations

import logging
import sys


logger = logging.getLogger("sage_processors")

# Which default processor `set_default_attn_processor` chooses: tuples that the models' modules import by name.
_DEFAULTS_OF = ("ADDED_KV_ATTENTION_PROCESSORS", "CROSS_ATTENTION_PROCESSORS")


def list_beside(cls: type, base: type) -> None:
    """Have diffusers treat the Sage class `cls` as it treats its `base`."""
    _for_layer_skip(cls, base)
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("diffusers.")]:
        for name in _DEFAULTS_OF:
            known = vars(module).get(name)
            if isinstance(known, tuple) and base in known and cls not in known:
                setattr(module, name, (*known, cls))


def _for_layer_skip(cls, base) -> None:
    """The layer-skip and PAG hooks."""
    try:
        from diffusers.hooks._helpers import AttentionProcessorRegistry
    except ImportError:
        logger.debug(
            "this diffusers has no AttentionProcessorRegistry: its layer-skip hooks can't meet Sage processors"
        )
        return
    try:
        metadata = AttentionProcessorRegistry.get(base)
    except ValueError:
        return  # the hooks don't know the base class either
    AttentionProcessorRegistry.register(cls, metadata)
