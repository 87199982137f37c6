"""The options of the swap, documented once, and the errors it raises."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .option_checks import borders, flag, limits, number, one_of, pairs, patterns, short, span, whole


if TYPE_CHECKING:
    from sage_kernels import Mixed


# What a user may write, and the `scaling=` the op then gets; those with a rule in sage_kernels/planning/rules.py also
# get a state.
SCALINGS = {
    "timestep": "per_token",
    "timestep_adaptive": "per_token",
    "delayed": "per_token",
    "static": "per_token",
    "sigma_power": "per_token",
    "dynamic": "per_token",
    "per_token": "per_token",
    "per_block": "per_block",
    "per_head": "per_head",
}
BY_CALL = ("dynamic", "per_token", "per_block", "per_head")  # those whose scales come from the call itself
POLICIES = ("fallback", "strict")
LINEARS = ("none", "int8", "fp8")
TRAININGS = ("exact", "int8")
EXCHANGES = ("16bit", "int8")
SKIPS = ("none", "temporal")
# "auto" is decided while a pipeline runs: see auto_rotation.py.
ROTATIONS = ("none", "hadamard", "auto")
# Options that may differ from layer to layer: beside each is a `layer_<option>` of (layer pattern, value) pairs.
LAYER_OPTIONS = ("recipe", "scaling", "rotation", "keep_noise")
# Different ranges of noise levels in one handle: its layers then meet in up to five combinations of precisions, and a
# compiled model has a version for each; torch.compile gives up at eight.
MAX_RANGES = 2
# rotation="auto": a relative error of 2.5 %, where INT8 without outliers has 1 to 1.6 % (36 to 40 dB) and with ones
# that vary by token some 8 % (22 dB); and what a launch more has to bring.
ROTATE_BELOW_DB = 32.0
ROTATION_GAIN_DB = 1.0
# Ranges of noise levels with limits of their own: at each border all lists are made anew.
MOST_BORDERS = 3
# skip_every: beyond this nothing would be measured twice in a run.
MOST_STEPS = 2**20
# What a user can do about a reason for exact attention, where there is something.
REMEDIES = {
    "training": 'the module is in training mode: call model.eval(), or train with training="int8"',
    "requires_grad": 'a gradient is asked for: torch.no_grad(), or training="int8"',
    "no_backward": "PyTorch has no fused backward for such a call: 16 bit is the faster one to train there",
    "replaced": "another processor was put there: call handle.refresh()",
    "patched": "a function of the model's attention was replaced after the swap, which report() names: put it back",
    "unfollowed": "nobody knows which step it is: let the pipeline have the scheduler, pipe.scheduler = scheduler",
    "captured": "capture a graph for each precision, which handle.steps.precision tells",
    "backend": "set_attention_backend came after the swap: call handle.refresh()",
    "mixed_mask": 'recipe "mixed" knows no masks: layer_recipe gives such layers another one',
    "short": "16-bit attention is the faster one there: min_tokens=0 runs it in INT8 all the same",
}


# Instead of that of "replaced", where the pipeline itself replaces processors within each step.
PAG_REMEDY = (
    "perturbed-attention guidance puts its own there in every step, and refresh() can't reach them: "
    "pipe.set_pag_applied_layers(layers, (sage_processors.SagePAGCFGIdentitySelfAttnProcessor2_0(), "
    "sage_processors.SagePAGIdentitySelfAttnProcessor2_0())) runs them in INT8"
)
# Of runs in several threads whose steps take turns: nothing is wrong beyond the plan's own guard, but no run is alone.
OVERLAP_REMEDY = (
    'their planned scales mix, so that a seed is not the same picture as alone: scaling="dynamic" plans nothing; or '
    "give each thread a model of its own"
)


class UnsupportedAttentionError(NotImplementedError):
    """Raised with policy="strict" where an attention call can't run in INT8. Attributes: layer, reason."""

    def __init__(
        self, layer: str, reason: str, remedy: str = "", instead: str = 'SageAttnProcessor(policy="fallback")'
    ) -> None:
        self.layer = layer
        self.reason = reason
        remedy = remedy or REMEDIES.get(reason, "")
        super().__init__(
            f"attention of layer {layer!r}: got a call that INT8 attention can't do (reason {reason!r}), expected a "
            f'supported one because of policy="strict"; {remedy + ", or: " if remedy else ""}'
            f"{instead} runs such calls exactly"
        )


class UnsupportedLinearError(NotImplementedError):
    """Raised with policy="strict" where a swapped linear layer can't run in 8 bit. Attributes: layer, reason."""

    def __init__(self, layer: str, reason: str, remedy: str = ""):
        self.layer = layer
        self.reason = reason
        super().__init__(
            f"linear layer {layer!r}: got a call that an 8-bit linear layer can't do (reason {reason!r}), expected a "
            f'supported one because of policy="strict"; {remedy + ", or: " if remedy else ""}policy="fallback" runs '
            "such calls in 16 bit"
        )


_policy_readers: list[Callable[..., Any]] = []


def read_policies_with(reader: Callable[..., Any]) -> None:
    """Tell `SageAttnProcessor.from_policy` what reads policy files, which lies above this file."""
    _policy_readers.append(reader)


@dataclass(frozen=True)
class SageAttnProcessor:
    """Options of INT8 attention for diffusers models. Give it to `pipe.set_attn_processor` or `sage_processors.apply`.

    Args:
        recipe: number formats of the two matmuls, a key of `sage_kernels.RECIPES`; or "mixed": most query-key blocks
            in a cheap format and a budget of them in 16 bit, or left out. Its scales come from the call itself; calls
            with masks stay exact (reason "mixed_mask").
        scaling: where the INT8 scales of Q and K come from.
            "timestep": per head, planned from the previous denoising step; the first step of a run computes its own.
            What a run draws depends on its inputs and options alone. After `handle.freeze_scales()` or
            `load_scales` every step, the first one too, is planned from the frozen table at its noise level.
            "timestep_adaptive": also from what earlier runs of this handle left at the same noise level, without
            being frozen: the second run of a seed is another picture than the first.
            "per_token", "per_block", "per_head": computed from the inputs of each call. "dynamic" means "per_token".
            "delayed": per head, planned for the widest of the last `history` steps of the same run.
            "static": per head, one plan for all steps, of a frozen table: runs before `handle.freeze_scales()` or
            `load_scales` are those of "timestep".
            "sigma_power": as "static" with the scale times (σ/σ_ref)^gamma, σ the noise level. For study: the inputs
            of attention are normalised at every step, so their range rarely follows σ.
            In all planned ones ("timestep" to "sigma_power") a tile of keys beyond its plan takes its own larger
            scale and is counted. Runs that overlap in several threads on one model share one plan, which is counted,
            logged once and in the report; "dynamic" has no such ties. "static" and "sigma_power" need a pipeline
            whose scheduler tells one run from the next.
        margin: planned scale over the one that the largest value seen needs, > 0. Below 1, most tiles of keys get
            finer steps and those with the largest values their own larger scale: nothing is clipped at any margin.
            Only for planned scales.
        history: steps that "delayed" looks back, >= 1.
        gamma: exponent of "sigma_power". "fit": fitted per head to the frozen table, and 0 (static) where no power law
            fits. A number serves all heads: 1 is s ∝ σ, -1 is s ∝ 1/σ.
        keep_first_steps: so many steps at the start of a run stay in 16 bit (reason "window"). A step is one step of
            the scheduler.
        keep_last_steps: so many steps at the end of a run stay in 16 bit.
        keep_below_noise: steps at noise levels below this stay in 16 bit, 0 to 1 (1 is pure noise).
        keep_noise: (low, high): steps at noise levels of low and above, and below high, stay in 16 bit; a high of 1
            holds 1 itself too. () is none.
            These four need a pipeline, whose scheduler says where a run is. A compiled model gets a second version.
        keep_layers: fnmatch patterns of layer names, as in handle.report(), that stay in 16 bit (reason "kept").
        only_layers: patterns of the layers that may run in INT8; empty: all.
        layer_scaling: (pattern, scaling) pairs, or a dict: other scalings for some layers. The first match counts. A
            pattern that matches no layer is a ValueError.
        layer_recipe: (pattern, recipe) pairs, or a dict, as layer_scaling.
        layer_keep_noise: (pattern, (low, high)) pairs, or a dict, as layer_scaling: in place of keep_noise for these
            layers; the other three hold for them too. At most two different ranges, keep_noise included: a compiled
            model gets a version for every combination of precisions that a run meets, five at most.
        rotation: "hadamard": Q and K are rotated along their channels before they are quantised, which spreads
            outliers that vary from token to token; exact but for rounding, at the cost of one more launch that reads
            and writes Q and K. "auto": the first step of a run that is in INT8 is compared with exact attention on
            sampled heads and rows (as handle.probe does), with and without rotation. Layers with a head below 32 dB
            that the rotation improves by 1 dB or more are rotated from the next step on, to the end of the run. Frozen
            scales keep the last decision, and so does "timestep_adaptive" the first one, until handle.reset().
            Reading the comparison waits for the device once a run. Needs a pipeline, as windows do; a compiled model
            gets a second version.
        layer_rotation: (pattern, rotation) pairs, or a dict, as layer_scaling.
        min_tokens: calls with fewer queries or keys than this run the exact attention (reason "short"): there INT8
            saves nothing. None: as measured for the running GPU, head_dim and recipe (facts/crossover.py), on
            a CPU never. 0: never.
        linears: number format of the linear layers. "int8": weights and activations as INT8, a scale for every row
            of either. "fp8": the same in e4m3, a third as exact and faster on some GPUs. "none": as they are.
            Only those inside of the repeated blocks are swapped; modulation, embeddings and small layers stay in
            16 bit (linears/layers.py).
        keep_linears: fnmatch patterns of linear layers, as in handle.report(), that stay in 16 bit.
        layer_linears: (pattern, "int8" | "fp8" | "none") pairs, or a dict: the first match counts, also for layers
            that would stay in 16 bit. A pattern that matches no layer is a ValueError.
        linears_min_features: linear layers with fewer input or output features than this stay in 16 bit. None: 1024,
            and calls on a GPU with little work (reason "short") run in 16 bit, too. 0: all are swapped.
        drop_weights: free the 16-bit weights of swapped linear layers as soon as the 8-bit ones are made. The handle
            can't give them back: `remove()`, `save_pretrained` and whatever else needs them raise RuntimeError. With
            `linears`, modulation and time embeddings of linears_min_features² weights or more keep INT8 weights, too,
            which multiply 16-bit activations ("int8_weights" in the report); keep_linears keeps them in 16 bit.
        training: "int8": calls that need a gradient, and those of modules in training mode, run in INT8, too, with
            scales of their own; the backward is PyTorch's, in 16 bit (sage_kernels.differentiable_attention). Dropout
            stays exact, and so do calls without a fused backward (reason "no_backward": on CUDA those with masks, in
            fp32, or of more than 192 channels a head). "exact": all of them stay exact, counted as "training" or
            "requires_grad". Linear layers train in 16 bit always.
        mixed: of layers with the recipe "mixed": a `sage_kernels.Mixed` or a dict of its options; None: its defaults.
        keep_blocks: layers with the recipe "mixed" keep which blocks their latest call acted on, for handle.report().
        exchange: what devices send one another under Ulysses context parallelism. "int8": Q, K, V and the output as
            INT8 codes with a scale a token and head, about half the bytes, at some cost in accuracy; calls with masks
            and exact calls are sent as they are. "16bit": all are. Ring attention always sends 16 bit.
        skip: "temporal": key tiles that hold next to none of a row's probability are not visited, as lists of earlier
            steps of the run say, which are measured anew in turn (docs/skipping.md). For models of many tokens, videos
            above all, with a planned scaling; needs a pipeline. Calls with masks, and causal ones, visit everything.
            "none": all calls do.
        skip_limit: largest share of a row's probability that a list may leave out, 0 < skip_limit < 1. What a list
            leaves out is at most half of it when the list is made; one found beyond it is dropped at once.
        layer_skip_limit: (pattern, limit) pairs, or a dict, as layer_scaling: in place of skip_limit for these layers.
            0: they visit everything. A limit is one number, or a tuple of one for each range of noise levels.
        skip_noise: borders between these ranges, ascending, 0 < border < 1, at most three: the first limit is for
            noise levels below the first border, the last for the last border and above. A run that crosses one makes
            all lists anew.
        skip_every: every tile of query rows is measured at least once in so many steps, >= 1.
        skip_first_steps, skip_last_steps: so many steps at the ends of a run visit everything.
        policy: what happens to a call that INT8 attention can't do. "fallback": the model's own exact attention runs,
            is counted per layer with its reason and logged once. "strict": UnsupportedAttentionError.
    Raises: TypeError or ValueError for an option of wrong type or value.
    """

    recipe: str = "qk_int8_pv_bf16"
    scaling: str = "timestep"
    margin: float = 0.9
    history: int = 4
    gamma: float | str = "fit"
    keep_first_steps: int = 0
    keep_last_steps: int = 0
    keep_below_noise: float = 0.0
    keep_noise: tuple[float, ...] = ()
    keep_layers: tuple[str, ...] = ()
    only_layers: tuple[str, ...] = ()
    layer_recipe: tuple[tuple[str, str], ...] = ()
    layer_scaling: tuple[tuple[str, str], ...] = ()
    layer_keep_noise: tuple[tuple[str, tuple[float, ...]], ...] = ()
    rotation: str = "none"
    layer_rotation: tuple[tuple[str, str], ...] = ()
    min_tokens: int | None = None
    linears: str = "none"
    keep_linears: tuple[str, ...] = ()
    layer_linears: tuple[tuple[str, str], ...] = ()
    linears_min_features: int | None = None
    drop_weights: bool = False
    training: str = "exact"
    mixed: Mixed | dict[str, Any] | None = None
    keep_blocks: bool = False
    exchange: str = "16bit"
    skip: str = "none"
    skip_limit: float = 0.01
    layer_skip_limit: tuple[tuple[str, float | tuple[float, ...]], ...] = ()
    skip_noise: tuple[float, ...] = ()
    skip_every: int = 8
    skip_first_steps: int = 2
    skip_last_steps: int = 1
    policy: str = "fallback"

    def __post_init__(self) -> None:
        from sage_kernels import RECIPES, Mixed
        from sage_kernels.facts.recipe import MIXED_RECIPE

        named: dict[str, Collection[str]] = {"recipe": (*RECIPES, MIXED_RECIPE), "scaling": SCALINGS}
        named |= {"rotation": ROTATIONS, "policy": POLICIES, "linears": LINEARS}
        named |= {"training": TRAININGS, "exchange": EXCHANGES, "skip": SKIPS}
        for name, allowed in named.items():
            one_of(name, getattr(self, name), allowed)
        if self.skip != "none" and self.scaling in BY_CALL:
            raise ValueError(
                f"skip: got {self.skip!r} with scaling={self.scaling!r}, expected a planned scaling such as "
                '"timestep": lists are kept with what it plans'
            )
        if number("margin", self.margin, "a number > 0") <= 0:
            raise ValueError(f"margin: got {self.margin}, expected a finite number > 0")
        object.__setattr__(self, "margin", float(self.margin))
        if self.gamma != "fit":
            number("gamma", self.gamma, 'a number or "fit"')
        for name, least in (
            ("history", 1), ("keep_first_steps", 0), ("keep_last_steps", 0),
            ("skip_every", 1), ("skip_first_steps", 0), ("skip_last_steps", 0),
        ):  # fmt: skip
            whole(name, getattr(self, name), least)
        if self.skip_every > MOST_STEPS:
            raise ValueError(f"skip_every: got {short(self.skip_every)}, expected at most {MOST_STEPS} steps")
        if not 0 < number("skip_limit", self.skip_limit, "a share of probability, 0 < skip_limit < 1") < 1:
            raise ValueError(f"skip_limit: got {self.skip_limit}, expected 0 < skip_limit < 1")
        object.__setattr__(self, "skip_noise", borders("skip_noise", self.skip_noise, MOST_BORDERS))
        found = limits("layer_skip_limit", self.layer_skip_limit, len(self.skip_noise) + 1)
        object.__setattr__(self, "layer_skip_limit", found)
        for name in ("min_tokens", "linears_min_features"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 0)
        for name in ("drop_weights", "keep_blocks"):
            flag(name, getattr(self, name))
        object.__setattr__(self, "mixed", Mixed.of(self.mixed))
        for name, only in (("rotation", "none"), ("training", "exact"), ("skip", "none")):
            if self.recipe == MIXED_RECIPE and getattr(self, name) != only:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r} with recipe {MIXED_RECIPE!r}, expected {only!r}; by layer, "
                    "layer_recipe and layer_rotation keep them apart"
                )
        own = RECIPES.get(self.recipe)
        if own is not None and own.plain and (self.scaling not in BY_CALL or self.call_scaling not in own.scalings):
            raise ValueError(
                f"scaling: got {self.scaling!r} with recipe {self.recipe!r}, expected 'per_token': INT-FlashAttention "
                "has a scale a token and no plans; by layer, layer_recipe and layer_scaling go together"
            )
        if own is not None and own.qk != "int8" and self.skip != "none":
            raise ValueError(
                f"skip: got {self.skip!r} with recipe {self.recipe!r}, expected 'none': INT8 codes are measured"
            )
        if not 0 <= number("keep_below_noise", self.keep_below_noise, "a noise level from 0 to 1") <= 1:
            raise ValueError(f"keep_below_noise: got {self.keep_below_noise}, expected a noise level from 0 to 1")
        for name in ("keep_layers", "only_layers", "keep_linears"):
            object.__setattr__(self, name, patterns(name, getattr(self, name)))
        object.__setattr__(self, "keep_noise", span("keep_noise", self.keep_noise))
        for name in (*LAYER_OPTIONS, "linears"):
            object.__setattr__(self, f"layer_{name}", pairs(f"layer_{name}", getattr(self, f"layer_{name}")))
        for name in ("recipe", "rotation", "linears"):
            for _, value in getattr(self, f"layer_{name}"):
                if value not in named[name]:
                    raise ValueError(f"layer_{name}: got {value!r}, expected one of {sorted(named[name])}")
        spans = {self.keep_noise, *(span for _, span in self.layer_keep_noise)} - {()}
        if len(spans) > MAX_RANGES:
            raise ValueError(
                f"layer_keep_noise: got {len(spans)} different ranges, keep_noise included, expected at most "
                f"{MAX_RANGES}: a compiled model gets versions for each"
            )
        for _, scaling in self.layer_scaling:
            if scaling not in (*BY_CALL, self.scaling):
                raise ValueError(
                    f"layer_scaling: got {scaling!r}, expected one of {sorted(BY_CALL)} or the handle's own "
                    f"{self.scaling!r}: one rule plans all layers of a handle"
                )

    @classmethod
    def from_policy(cls, path: str | Path, target: Any = None) -> SageAttnProcessor:
        """The options in a policy file of `sage_processors.calibrate`.

        Args: path: a .json file. target: the pipeline or model it is meant for, compared with the policy's if given.
        Raises: see policy.read_policy.
        """
        config: SageAttnProcessor = _policy_readers[-1](path, target)[0]
        return config

    @property
    def call_scaling(self) -> str:
        """The `scaling=` argument of `sage_kernels.sage_attention`."""
        return SCALINGS[self.scaling]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises: a model put these options on its modules as if they were a processor."""
        raise TypeError(
            "processor: got SageAttnProcessor itself on an attention module, expected one processor per module; "
            "write pipe.set_attn_processor(sage_processors.SageAttnProcessor(...)) for a pipeline, or "
            "sage_processors.apply(model, sage_processors.SageAttnProcessor(...)) for a model. "
            "Load the model again first: its own processors were replaced"
        )
