"""The options of the swap, documented once, and the errors it raises."""

from __future__ import annotations

import math
from dataclasses import dataclass


# What a user may write, and the `scaling=` the op then gets; "timestep" also gets a state.
SCALINGS = {
    "timestep": "per_token",
    "dynamic": "per_token",
    "per_token": "per_token",
    "per_block": "per_block",
    "per_head": "per_head",
}
POLICIES = ("fallback", "strict")
# What a user can do about a reason for exact attention, where there is something.
REMEDIES = {
    "training": "the module is in training mode: call model.eval()",
    "replaced": "another processor was put there: call handle.refresh()",
    "backend": "set_attention_backend came after the swap: call handle.refresh()",
}


class UnsupportedAttentionError(NotImplementedError):
    """Raised with policy="strict" where an attention call can't run in INT8. Attributes: layer, reason."""

    def __init__(self, layer: str, reason: str):
        self.layer = layer
        self.reason = reason
        super().__init__(
            f"attention of layer {layer!r}: got a call that INT8 attention can't do (reason {reason!r}), expected a "
            f'supported one because of policy="strict"; {REMEDIES[reason] + ", or: " if reason in REMEDIES else ""}'
            'SageAttnProcessor(policy="fallback") runs such calls exactly'
        )


@dataclass(frozen=True)
class SageAttnProcessor:
    """Options of INT8 attention for diffusers models. Give it to `pipe.set_attn_processor` or `sage_processors.apply`.

    Args:
        recipe: number formats of the two matmuls, a key of `sage_kernels.RECIPES`.
        scaling: where the INT8 scales of Q and K come from.
            "timestep": per head, planned from the previous denoising step and earlier runs at the same noise level.
            "per_token", "per_block", "per_head": computed from the inputs of each call. "dynamic" means "per_token".
        margin: planned scale over the one that the largest value seen needs, > 0. Below 1, most tiles of keys get
            finer steps and those with the largest values their own larger scale: nothing is clipped at any margin.
            Only for "timestep".
        min_tokens: calls with fewer queries or keys than this run the exact attention (reason "short"): there INT8
            saves nothing.
        policy: what happens to a call that INT8 attention can't do. "fallback": the model's own exact attention runs,
            is counted per layer with its reason and logged once. "strict": UnsupportedAttentionError.
    Raises: TypeError or ValueError for an option of wrong type or value.
    """

    recipe: str = "qk_int8_pv_bf16"
    scaling: str = "timestep"
    margin: float = 0.9
    min_tokens: int = 128
    policy: str = "fallback"

    def __post_init__(self):
        from sage_kernels import RECIPES

        for name, allowed in (("recipe", RECIPES), ("scaling", SCALINGS), ("policy", POLICIES)):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name}: got {type(value).__name__}, expected one of {sorted(allowed)}")
            if value not in allowed:
                raise ValueError(f"{name}: got {value!r}, expected one of {sorted(allowed)}")
        if isinstance(self.margin, bool) or not isinstance(self.margin, (int, float)):
            raise TypeError(f"margin: got {type(self.margin).__name__}, expected a number > 0")
        if not (math.isfinite(self.margin) and self.margin > 0):
            raise ValueError(f"margin: got {self.margin}, expected a finite number > 0")
        if isinstance(self.min_tokens, bool) or not isinstance(self.min_tokens, int):
            raise TypeError(f"min_tokens: got {type(self.min_tokens).__name__}, expected an int >= 1")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens: got {self.min_tokens}, expected at least 1")

    @property
    def call_scaling(self) -> str:
        """The `scaling=` argument of `sage_kernels.sage_attention`."""
        return SCALINGS[self.scaling]

    def __call__(self, *args, **kwargs):
        """Always raises: a model put these options on its modules as if they were a processor."""
        raise TypeError(
            "processor: got SageAttnProcessor itself on an attention module, expected one processor per module; "
            "write pipe.set_attn_processor(sage_processors.SageAttnProcessor(...)) for a pipeline, or "
            "sage_processors.apply(model, sage_processors.SageAttnProcessor(...)) for a model. "
            "Load the model again first: its own processors were replaced"
        )
