"""How diffusers shows that it put other processors into a model: IP-Adapters, and projections that were fused.

It calls nobody then, but leaves a sign: another image projection on the model, or a flag on its attention modules. A
user who sets a processor leaves none, and that one stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any


_PROJECTIONS = ("encoder_hid_proj", "image_proj")  # of images: in UNets and FLUX; in SD3


def signs_of(model: Any, modules: Iterable[Any]) -> tuple[Any, ...]:
    """What is equal until diffusers loads or unloads an adapter, fuses projections or unfuses them.

    modules: the attention modules to look at.
    """
    projections = (getattr(model, name, None) for name in _PROJECTIONS)
    fused = (getattr(module, "fused_projections", False) for module in modules)
    # weakly: an adapter that is unloaded takes its memory along
    return (*(None if found is None else weakref.ref(found) for found in projections), *fused)
