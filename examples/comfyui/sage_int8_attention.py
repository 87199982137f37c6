"""Two nodes: one gives a model INT8 attention, the other says what really ran.

ComfyUI asks a model's `optimized_attention_override`, in `model_options["transformer_options"]`, with the attention
function that it would have called, and that call's arguments. Nothing else is touched: other models, the VAE and text
encoders run as before, and taking the node out of the graph undoes it.
"""

import logging
from collections import Counter

import torch

import sage_kernels
from sage_kernels.facts import crossover


OVERRIDE = "optimized_attention_override"
SCALINGS = ["per_token", "per_block", "per_head"]
# arguments that say nothing about the result
IGNORED = {"transformer_options"}

logger = logging.getLogger("sage_processors")


class Int8Attention:
    """An override: INT8 attention where it can, else the function that it is given, counted with its reason.

    Args: recipe, scaling: as of sage_kernels.sage_attention. min_tokens: calls with fewer queries or keys run the
        given function; None: as measured for the running GPU.
    Attributes: counts: calls by reason, those in INT8 as "int8".
    """

    def __init__(self, recipe, scaling, min_tokens):
        self.recipe, self.scaling, self.min_tokens = recipe, scaling, min_tokens
        self.counts = Counter()

    def __call__(self, func, *args, **kwargs):
        """func: of ComfyUI, called with all else if the call stays exact."""
        try:
            call = _read(*args, **kwargs)
        except TypeError:  # other arguments than we know
            call = "unknown_argument"
        reason = call if isinstance(call, str) else self._reason_against(**call)
        if reason is not None:
            if not self.counts[reason] and not torch.compiler.is_compiling():
                logger.warning("INT8 attention: some calls run ComfyUI's own attention (reason: %s)", reason)
            self.counts[reason] += 1
            return func(*args, **kwargs)
        self.counts["int8"] += 1
        out = sage_kernels.sage_attention(
            call["q"], call["k"], call["v"], attn_mask=call["mask"], scale=call["scale"], recipe=self.recipe,
            scaling=self.scaling,
        )  # fmt: skip
        return out.transpose(1, 2) if call["heads_first"] else out.flatten(2)

    def _reason_against(self, q, k, v, mask, scale, enable_gqa, heads_first):
        if scale is not None and (isinstance(scale, torch.Tensor) or scale < 0):
            return "softmax_scale"
        reason = sage_kernels.unsupported(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)
        if reason is None and crossover.is_short(
            q.device, batch=q.shape[0], heads=q.shape[2], seq_q=q.shape[1], seq_kv=k.shape[1], head_dim=q.shape[3],
            causal=False, recipe=self.recipe, min_tokens=self.min_tokens,
        ):  # fmt: skip
            return "short"
        return reason


def _read(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
    low_precision_attention=True, enable_gqa=False, scale=None, **others,
):  # fmt: skip
    """What a call asks for, q, k and v as views [B, S, H, D]; or why it has to stay exact."""
    # a name with an underscore in front is ComfyUI's own bookkeeping
    if any(x is not None and name not in IGNORED and name[0] != "_" for name, x in others.items()):
        return "unknown_argument"
    if not low_precision_attention:
        return "low_precision_attention"  # the model says that it can't bear it
    if attn_precision is not None and attn_precision != q.dtype:
        return "attn_precision"
    if not q.dim() == k.dim() == v.dim() == (4 if skip_reshape else 3):
        return "rank"
    if skip_reshape:  # [B, H, S, D]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if q.shape[2] != heads:
            return "heads"
    else:  # [B, S, H·D]
        head_dim = q.shape[2] // heads
        if head_dim == 0 or any(x.shape[2] % head_dim for x in (q, k, v)) or q.shape[2] != heads * head_dim:
            return "heads"
        q, k, v = (x.unflatten(2, (-1, head_dim)) for x in (q, k, v))
    if isinstance(mask, torch.Tensor):
        if mask.dim() == 2 and (tuple(mask.shape) != (q.shape[1], k.shape[1]) or q.shape[0] == q.shape[1]):
            return "mask_shape"  # of keys [B, S_kv]? Not every attention function of ComfyUI reads it as that
        if mask.dim() == 3:  # [B or 1, S_q, S_kv]
            mask = mask.unsqueeze(1)
    call = {"q": q, "k": k, "v": v, "mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return call | {"heads_first": skip_output_reshape}


class SageInt8Attention:
    """Node: the model, with INT8 attention."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches"

    @classmethod
    def INPUT_TYPES(cls):
        """What ComfyUI shows; min_tokens -1 is "as measured for this GPU"."""
        return {
            "required": {
                "model": ("MODEL",),
                "recipe": (sorted(sage_kernels.RECIPES), {"default": sage_kernels.DEFAULT_RECIPE}),
                "scaling": (SCALINGS, {"default": "per_token"}),
                "min_tokens": ("INT", {"default": -1, "min": -1, "max": 2**31 - 1}),
            }
        }

    def patch(self, model, recipe, scaling, min_tokens):
        """(A clone of the model with the override,). The model itself is as before."""
        patched = model.clone()
        override = Int8Attention(recipe, scaling, None if min_tokens < 0 else min_tokens)
        options = patched.model_options
        inner = {**options.get("transformer_options", {}), OVERRIDE: override}
        patched.model_options = {**options, "transformer_options": inner}
        return (patched,)


class SageInt8AttentionReport:
    """Node: how many calls ran in INT8, and why others did not. The latent is handed on: it says when to look."""

    RETURN_TYPES = ("LATENT", "STRING")
    FUNCTION = "report"
    CATEGORY = "model_patches"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        """The model that the sampler got, and what came out of it."""
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, **_):
        """Counts grow although the inputs stay: always look again."""
        return float("nan")

    def report(self, model, latent):
        """(The latent, the counts as text.)"""
        override = model.model_options.get("transformer_options", {}).get(OVERRIDE)
        if isinstance(override, Int8Attention):
            exact = ", ".join(f"{reason} {n}" for reason, n in override.counts.items() if reason != "int8" and n)
            text = f"INT8 attention: {override.counts['int8']} calls; 16 bit: {exact or 0}"
        else:
            text = "INT8 attention: this model has none"
        logger.info(text)
        return latent, text
