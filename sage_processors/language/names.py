"""Names of our attention implementations in transformers, and the options of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import sage_kernels
from sage_kernels.facts.recipe import ROTATIONS

from ..options import ON_UNSUPPORTED, TRAININGS


# Parts of a name that mean something to transformers. It looks for a name with "flash" among its own kernels.
MEANINGFUL = ("flash", "/", "|", "sdpa", "flex_attention")


@dataclass(frozen=True)
class Implementation:
    """Options of one registered name, as in `register_transformers`.

    Attributes:
        numbers: the options that decide the result of an INT8 call, in words. Each pair of name and numbers has
            counters of its own.
    """

    name: str
    recipe: str = sage_kernels.DEFAULT_RECIPE
    min_tokens: int | None = None
    on_unsupported: str = "fallback"
    training: str = "16bit"
    smooth_k: bool | None = None
    rotation: str = "none"
    numbers: str = field(init=False)

    scaling = "per_token"  # a scale shared by tokens would depend on padding and on the other sequences of a batch

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


IMPLEMENTATIONS: dict[str, Implementation] = {}  # all registered names


def name_of(recipe: str) -> str:
    """Return the standard name of a recipe: "sage_" and the recipe, without the words of MEANINGFUL."""
    return f"sage_{recipe.replace('int_flash', 'int_fa')}"


def standard() -> dict[str, Implementation]:
    """Return {name: options} of the names that `import sage_processors` registers."""
    plain = [Implementation("sage_int8", rotation="hadamard")]
    # one min_tokens for all GPUs and shapes: a prefix must run in the same precision alone and before more tokens
    plain.append(Implementation("sage_int8_causal", min_tokens=2, smooth_k=False, rotation="hadamard"))
    plain += [Implementation(name_of(recipe), recipe) for recipe in sage_kernels.RECIPES]
    strict = [
        Implementation(f"{x.name}_strict", x.recipe, x.min_tokens, "raise", smooth_k=x.smooth_k, rotation=x.rotation)
        for x in plain
    ]
    return {implementation.name: implementation for implementation in (*plain, *strict)}
