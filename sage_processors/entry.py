"""The two calls that take any model: `apply` and `handle_of`.

A room of one file, below evaluation, calibration and the command line. It imports what a model needs when it comes:
models of transformers need no diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from .diffusion.host.discovery import is_pipeline, unwrap
from .options import SageAttnProcessor, options_of


if TYPE_CHECKING:
    from .diffusion.handle import Handle


def apply(target: Any, config: SageAttnProcessor | None = None) -> Handle:
    """Run a diffusers pipeline or model, or a transformers model, in INT8.

    Args:
        target: a DiffusionPipeline (all its denoisers: unet, transformer, transformer_2, controlnet(s); never the VAE
            or the text encoders; timestep scaling follows pipe.scheduler) or one model (timestep scaling follows its
            `timestep` argument), or a transformers model, which gets a LanguageHandle (language/generation/handle.py).
        config: options; SageAttnProcessor() if None.
    Returns: a Handle. Applying again replaces the options: the earlier handle is removed first.
    Raises: TypeError for other arguments, ValueError if there is nothing to swap, ImportError without diffusers for
        other models than those of transformers.
    """
    config, target = options_of(config), _inner(unwrap(target))
    if isinstance(target, nn.DataParallel):
        raise TypeError(
            "target: got DataParallel, which copies a model to each GPU in each call, expected the model inside of it "
            "(target.module), or one process for each GPU"
        )
    if not (is_pipeline(target) or isinstance(target, nn.Module)):
        raise TypeError(
            f"target: got {type(target).__name__}, expected a DiffusionPipeline or a model (torch.nn.Module)"
        )
    if _is_of_transformers(target):
        from .language.generation.handle import apply_to_language_model

        return apply_to_language_model(target, config)  # type: ignore[return-value]
    from .diffusion.handle import Handle, remove_handles

    remove_handles(target)
    return Handle(target, config)


def handle_of(target: Any) -> Handle | None:
    """Return the live handle of a model, or of a pipeline's first denoiser with one; else None."""
    target = _inner(unwrap(target))
    if _is_of_transformers(target):
        return getattr(vars(target).get("_sage"), "handle", None)
    from .diffusion.handle import handle_of_denoisers

    return handle_of_denoisers(target)


def _inner(target: Any) -> Any:
    """Return the model that a PeftModel wraps, or the target itself."""
    inner = getattr(target, "get_base_model", None) if type(target).__module__.startswith("peft.") else None
    if inner is not None:
        return inner()
    return target.model if type(target).__module__.startswith("peft.tuners.") else target


def _is_of_transformers(target: Any) -> bool:
    bases = ((kind.__module__, kind.__name__) for kind in type(target).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in bases
