"""Errors of calls that can't run in 8 bit, and the remedy for each reason."""

from __future__ import annotations


# What a user can do about a reason for 16-bit attention. A reason that is not here has no remedy.
REMEDIES = {
    "training": 'the module is in training mode: call model.eval(), or train with training="int8"',
    "requires_grad": 'a gradient is asked for: torch.no_grad(), or training="int8"',
    "no_backward": "PyTorch has no fused backward for such a call: 16 bit is the faster one to train there",
    "replaced": "another processor was put there: call handle.refresh()",
    "patched": "a function of the model's attention was replaced after the swap, which report() names: put it back",
    "unfollowed": "nobody knows which step it is: let the pipeline have the scheduler, pipe.scheduler = scheduler",
    "captured": "capture a graph for each precision, which handle.steps.precision tells",
    "backend": "set_attention_backend came after the swap: call handle.refresh()",
    "mixed_mask": 'recipe "mixed" knows no masks: give such layers another recipe, layers={"<name>": {"recipe": ...}}',
    "short": "16-bit attention is the faster one there: min_tokens=0 runs it in INT8 all the same",
}
# Replaces the remedy of "replaced" where the pipeline itself replaces processors within each step.
PAG_REMEDY = (
    "perturbed-attention guidance puts its own there in every step, and refresh() can't reach them: "
    "pipe.set_pag_applied_layers(layers, (sage_processors.SagePAGCFGIdentitySelfAttnProcessor2_0(), "
    "sage_processors.SagePAGIdentitySelfAttnProcessor2_0())) runs them in INT8"
)
# For runs in several threads whose steps take turns. The guard keeps their results valid, but runs affect each other.
OVERLAP_REMEDY = (
    'their planned scales mix, so that a seed is not the same picture as alone: scaling="dynamic" plans nothing; or '
    "give each thread a model of its own"
)


class _UnsupportedError(NotImplementedError):
    """A call can't run in 8 bit, and the options have on_unsupported="raise".

    Attributes: layer, its name. reason, as handle.report() counts it.
    """

    def __init__(self, where: str, layer: str, reason: str, runner: str, remedy: str, instead: str) -> None:
        self.layer, self.reason = layer, reason
        super().__init__(
            f"{where} {layer!r}: got a call that {runner} can't do (reason {reason!r}), expected a supported one "
            f'because of on_unsupported="raise"; {remedy + ", or: " if remedy else ""}{instead} runs such calls in '
            "16 bit"
        )


class UnsupportedAttentionError(_UnsupportedError):
    """An attention call can't run in INT8, and the options have on_unsupported="raise"."""

    def __init__(
        self, layer: str, reason: str, remedy: str = "", instead: str = 'SageAttnProcessor(on_unsupported="fallback")'
    ) -> None:
        remedy = remedy or REMEDIES.get(reason, "")
        super().__init__("attention of layer", layer, reason, "INT8 attention", remedy, instead)


class UnsupportedLinearError(_UnsupportedError):
    """A swapped linear layer can't run in 8 bit, and the options have on_unsupported="raise"."""

    def __init__(self, layer: str, reason: str, remedy: str = "") -> None:
        instead = 'on_unsupported="fallback"'
        super().__init__("linear layer", layer, reason, "an 8-bit linear layer", remedy, instead)
