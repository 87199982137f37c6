"""The names under which transformers knows our attention, and the options that each one stands for."""

from __future__ import annotations

from dataclasses import dataclass, field

import sage_kernels
from sage_kernels.facts.recipe import ROTATIONS

from ..options import ON_UNSUPPORTED, TRAININGS


# Parts of a name that mean something to transformers: a name with "flash" in it is looked for among its own kernels.
MEANINGFUL = ("flash", "/", "|", "sdpa", "flex_attention")


@dataclass(frozen=True)
class Implementation:
    """Options of one registered name, as in `register_transformers`.

    Attributes:
        numbers: the options that decide what an INT8 call computes, in words; its counters go by name and numbers.
    """

    name: str
    recipe: str = sage_kernels.DEFAULT_RECIPE
    min_tokens: int | None = None
    on_unsupported: str = "fallback"
    training: str = "16bit"
    smooth_k: bool | None = None
    rotation: str = "none"
    numbers: str = field(init=False)

    scaling = "per_token"  # a scale that tokens share would follow the longest of a batch, padding and all

    def __post_init__(self) -> None:
        allowed = {
            "recipe": sage_kernels.RECIPES,
            "on_unsupported": ON_UNSUPPORTED,
            "training": TRAININGS,
            "rotation": ROTATIONS,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {sorted(values)}")
        tokens = self.min_tokens
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
            raise ValueError(f"min_tokens: got {tokens!r}, expected None or an int >= 0")
        if tokens is not None and tokens >= 2**63:
            raise ValueError(f"min_tokens: got an int of {tokens.bit_length()} bits, expected an int64")
        smooths = not sage_kernels.RECIPES[self.recipe].plain
        if self.smooth_k not in (None, False, smooths):
            raise ValueError(f"smooth_k: got {self.smooth_k!r}, expected None, False{' or True' * smooths}")
        object.__setattr__(self, "smooth_k", smooths if self.smooth_k is None else self.smooth_k)
        more = [] if self.smooth_k or not smooths else ["not smoothed"]
        more += [] if self.rotation == "none" else [self.rotation]
        object.__setattr__(self, "numbers", ", ".join((self.recipe, self.scaling, *more)))


IMPLEMENTATIONS: dict[str, Implementation] = {}  # those that are registered


def name_of(recipe: str) -> str:
    """The standard name of a recipe: "sage_" and its own, without what is in MEANINGFUL."""
    return f"sage_{recipe.replace('int_flash', 'int_fa')}"


def standard() -> dict[str, Implementation]:
    """The names that `import sage_processors` registers."""
    plain = [Implementation("sage_int8")]
    # one length for all: a prefix alone and the same one in front of more tokens must not run in different precisions
    plain.append(Implementation("sage_int8_causal", min_tokens=2, smooth_k=False, rotation="hadamard"))
    plain += [Implementation(name_of(recipe), recipe) for recipe in sage_kernels.RECIPES]
    strict = [
        Implementation(f"{x.name}_strict", x.recipe, x.min_tokens, "raise", smooth_k=x.smooth_k, rotation=x.rotation)
        for x in plain
    ]
    return {implementation.name: implementation for implementation in (*plain, *strict)}
