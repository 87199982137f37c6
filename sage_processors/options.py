"""SageAttnProcessor: the options of the swap, each documented once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from .option_checks import known_options, one_of, whole
from .option_groups import (
    IN_16_BIT,
    ROTATIONS,
    Keep,
    LayerOptions,
    LayerRule,
    LinearFormat,
    Linears,
    RecipeName,
    RotationName,
    Scaling,
    ScalingName,
    Skip,
    group_of,
    rules_of,
)
from .presets import PresetName, with_preset


if TYPE_CHECKING:
    from sage_kernels import Mixed


ON_UNSUPPORTED = ("fallback", "raise")
TRAININGS = ("16bit", "int8")
# Different ranges of noise levels in one handle. Its layers then meet in up to five combinations of precisions, and a
# compiled model has a version for each; torch.compile gives up at eight.
MAX_RANGES = 2
# rotation="auto" rotates a layer with a head below 32 dB (2.5 % relative error; INT8 has 36 to 40 dB without outliers,
# 22 dB with outliers that vary by token), if that gains 1 dB or more, which has to pay for one more launch.
ROTATE_BELOW_DB = 32.0
ROTATION_GAIN_DB = 1.0


# What imports functions of folders that may import this file, by name: `apply` and `read_policy`. The package's
# __init__.py hands it in.
HANDED_IN: dict[str, Callable[[], Callable[..., Any]]] = {}


def _with_preset(init: Any) -> Any:
    """Wrap an `__init__`: a preset gives options, an unknown keyword is a TypeError with the closest."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, preset: Any = None, **options: Any) -> None:
        known_options("SageAttnProcessor", options, known)
        init(self, preset, **with_preset(preset, options))

    return checked


@dataclass(frozen=True, init=False)
class SageAttnProcessor:
    """Options of INT8 attention for diffusers models.

    Give them to `pipe.set_attn_processor` or `sage_processors.apply`.

    Args:
        preset: options by one name (presets.py); what is given beside it replaces its own. "fast": INT8 linear layers
            and graphs="auto", too. "small": the same, and the 16-bit weights are dropped. None: INT8 attention alone.
        recipe: number formats of the two matmuls, a key of `sage_kernels.RECIPES`. "mixed": most query-key blocks in a
            cheap format, and a budget of them in 16 bit or left out; masked calls then run in 16 bit (reason
            "mixed_mask"). "16bit": all attention stays in 16 bit.
        scaling: how the INT8 scales of Q and K are chosen: a name, or `Scaling(name, ...)` with its numbers.
            "timestep": planned per head from the previous denoising step; the first step of a run computes its own.
            What a run draws depends on its inputs and options alone. After `handle.freeze_scales()` or `load_scales`
            every step is planned from the frozen table at its noise level, the first one too.
            "timestep_adaptive": also planned from earlier runs of this handle at the same noise level, without
            freezing: the second run of a seed is another picture than the first.
            "per_token", "per_block", "per_head": computed from the inputs of each call. "dynamic" means "per_token".
            "delayed": planned per head for the widest of the last `history` steps of the same run.
            "static": planned per head, one plan for all steps, from a frozen table; before `handle.freeze_scales()` or
            `load_scales` as "timestep".
            "sigma_power": as "static", with the scale times (σ/σ_ref)^gamma, σ the noise level. For study.
            With a planned scaling ("timestep" to "sigma_power") a key tile beyond its plan takes a larger scale of its
            own and is counted. Runs that overlap in several threads on one model share one plan, which is counted and
            logged once; "dynamic" shares nothing. "static" and "sigma_power" need a pipeline with a scheduler.
        linears: 8-bit linear layers: "int8", "fp8", or `Linears(format, ...)`. "none": they stay in 16 bit.
        keep: `Keep(first_steps=, last_steps=, noise=)`: denoising steps whose attention stays in 16 bit.
        layers: {name pattern: options}: other options for some layers. Patterns are fnmatch patterns of the names in
            handle.report(); for each option the first matching pattern that sets it counts. Options of attention:
            `recipe` ("16bit" keeps a layer in 16 bit, reason "kept"), `scaling`, `rotation`, `keep_noise` (as
            `Keep.noise`; at most two different ranges, that of `keep` included), `skip_limit` (0: the layer visits
            every tile). Option of linear layers: `linears`, which holds for protected and small layers, too.
        rotation: "hadamard": rotate Q and K along head_dim before they are quantised, which spreads outliers that vary
            from token to token. Exact but for rounding; costs two launches. Language models with the default recipe
            always have it. "auto": the first step of a run in INT8
            is compared with 16-bit attention on sampled heads and rows, with and without rotation. Layers with a head
            below 32 dB that the rotation improves by 1 dB or more are rotated from the next step to the end of the
            run. Frozen scales keep the last decision, "timestep_adaptive" the first one, until handle.reset(). Reading
            the comparison waits for the device once a run. Needs a pipeline; a compiled model gets a second version.
        skip: `Skip(limit=, ...)`: leave out key tiles with next to no probability. None: visit all.
        mixed: `sage_kernels.Mixed(...)`: options of the recipe "mixed". None: its defaults.
        graphs: "auto": forwards come from CUDA graphs where they can be captured, as a whole from the sixth step on or
            else block by block; the rest runs eagerly, counted with its reason. "off": all runs eagerly.
        min_tokens: attention calls with fewer queries or keys run in 16 bit (reason "short"), where INT8 saves
            nothing. None: as measured for the GPU, head_dim and recipe; never on a CPU. 0: never.
        training: "int8": calls that need a gradient, and those of modules in training mode, run in INT8, too; their
            backward is PyTorch's, in 16 bit (sage_kernels.differentiable_attention). Calls with dropout, or without a
            fused backward (reason "no_backward"), run in 16 bit. "16bit": all of them do, counted as "training" or
            "requires_grad". Linear layers always train in 16 bit.
        on_unsupported: what happens to a call that can't run in 8 bit. "fallback": it runs in 16 bit, is counted per
            layer with its reason and logged once. "raise": UnsupportedAttentionError or UnsupportedLinearError.
    Every group may also be given as a dict of its options.
    Raises: TypeError or ValueError for an unknown option, a wrong type or a wrong value.
    """

    preset: str | None
    recipe: str
    scaling: Scaling
    linears: Linears
    keep: Keep
    layers: tuple[LayerRule, ...]
    rotation: str
    skip: Skip | None
    mixed: Mixed | None
    graphs: str
    min_tokens: int | None
    training: str
    on_unsupported: str

    def __init__(
        self,
        preset: PresetName | None = None,
        *,
        recipe: RecipeName = "qk_int8_pv_bf16",
        scaling: ScalingName | Scaling | Mapping[str, Any] = "timestep",
        linears: LinearFormat | Linears | Mapping[str, Any] = "none",
        keep: Keep | Mapping[str, Any] = Keep(),  # noqa: B008 (frozen)
        layers: Mapping[str, LayerOptions] | Sequence[LayerRule | tuple[str, LayerOptions]] = (),
        rotation: RotationName = "none",
        skip: Skip | Mapping[str, Any] | None = None,
        mixed: Mixed | Mapping[str, Any] | None = None,
        graphs: Literal["off", "auto"] = "off",
        min_tokens: int | None = None,
        training: Literal["16bit", "int8"] = "16bit",
        on_unsupported: Literal["fallback", "raise"] = "fallback",
    ) -> None:
        from sage_kernels import RECIPES, Mixed
        from sage_kernels.facts.recipe import MIXED_RECIPE

        def keep_as(**values: Any) -> None:
            for name, value in values.items():
                object.__setattr__(self, name, value)

        recipes = (*RECIPES, MIXED_RECIPE, IN_16_BIT)
        for name, value, allowed in (
            ("recipe", recipe, recipes), ("rotation", rotation, ROTATIONS), ("graphs", graphs, ("off", "auto")),
            ("training", training, TRAININGS), ("on_unsupported", on_unsupported, ON_UNSUPPORTED),
        ):  # fmt: skip
            one_of(name, value, allowed)
            keep_as(**{name: value})
        if min_tokens is not None:
            whole("min_tokens", min_tokens, 0)
        keep_as(
            preset=preset,
            scaling=group_of("scaling", scaling, Scaling, "name"),
            linears=group_of("linears", linears, Linears, "format"),
            keep=group_of("keep", keep, Keep),
            skip=None if skip is None else group_of("skip", skip, Skip),
            mixed=Mixed.of(mixed),
            min_tokens=min_tokens,
        )
        ranges = 1 if self.skip is None else len(self.skip.noise) + 1
        keep_as(layers=rules_of(layers, recipes, ranges))
        self._check_together(RECIPES.get(recipe))

    if not TYPE_CHECKING:
        __init__ = _with_preset(__init__)

    def _check_together(self, recipe: Any) -> None:
        """Raise ValueError for options that exclude each other. recipe: its entry in RECIPES, if it has one."""
        if self.skip is not None and not self.scaling.is_planned:
            raise ValueError(
                f"skip: got a Skip with scaling={self.scaling.name!r}, expected a planned scaling such as "
                '"timestep": lists are kept with what it plans'
            )
        if self.recipe == "mixed":
            for name, value, only in (
                ("rotation", self.rotation, "none"), ("training", self.training, "16bit"), ("skip", self.skip, None),
            ):  # fmt: skip
                if value != only:
                    raise ValueError(
                        f'{name}: got {value!r} with recipe "mixed", expected {only!r}; `layers` can give some layers '
                        "another recipe and rotation"
                    )
        if recipe is not None and recipe.plain and (
            self.scaling.is_planned or self.scaling.of_call not in recipe.scalings
        ):  # fmt: skip
            raise ValueError(
                f"scaling: got {self.scaling.name!r} with recipe {self.recipe!r}, expected 'per_token': "
                "INT-FlashAttention has a scale per token and no plans; in `layers` set recipe and scaling together"
            )
        if recipe is not None and recipe.qk != "int8" and self.skip is not None:
            raise ValueError(f"skip: got a Skip with recipe {self.recipe!r}, expected None: INT8 codes are measured")
        spans = {self.keep.noise, *(value for _, value in self.rules("keep_noise"))} - {()}
        if len(spans) > MAX_RANGES:
            raise ValueError(
                f"layers: got {len(spans)} different ranges of keep_noise, that of keep included, expected at most "
                f"{MAX_RANGES}: a compiled model gets versions for each"
            )
        for pattern, name in self.rules("scaling"):
            if Scaling(name).is_planned and name != self.scaling.name:
                raise ValueError(
                    f"layers[{pattern!r}]: got scaling {name!r}, expected one that computes its scales from each "
                    f"call, or the processor's own {self.scaling.name!r}: one rule plans all layers of a handle"
                )
        if self.skip is None and self.rules("skip_limit"):
            raise ValueError("layers: got a skip_limit without skip, expected skip=Skip(...) beside it")

    @classmethod
    def from_policy(cls, path: str | Path, target: Any = None) -> SageAttnProcessor:
        """Return the options in a policy file of `sage_processors.calibrate`.

        Args: path: a .json file. target: the pipeline or model that the policy should be for; compared if given.
        Raises: see calibration/policy_files.py, read_policy.
        """
        config: SageAttnProcessor = HANDED_IN["read_policy"]()(path, target)[0]
        return config

    def rules(self, option: str) -> tuple[tuple[str, Any], ...]:
        """Return (pattern, value) of each rule in `layers` that sets this option, in order."""
        found = ((rule.pattern, getattr(rule, option)) for rule in self.layers)
        return tuple((pattern, value) for pattern, value in found if value is not None)

    def of_layer(self, option: str, name: str) -> Any:
        """Return an option of one layer: from the first matching rule, else the processor's own."""
        for pattern, value in self.rules(option):
            if fnmatchcase(name, pattern):
                return value
        own = {
            "scaling": self.scaling.name, "linears": self.linears.format, "keep_noise": self.keep.noise,
            "skip_limit": None if self.skip is None else self.skip.limit,
        }  # fmt: skip
        return own[option] if option in own else getattr(self, option)

    def for_layer(self, name: str) -> SageAttnProcessor:
        """Return the options of one attention layer, without rules.

        A layer that stays in 16 bit keeps the recipe of the others, so that its kernels and reports have one.
        """
        from sage_kernels import DEFAULT_RECIPE

        recipe, scaling = self.of_layer("recipe", name), replace(self.scaling, name=self.of_layer("scaling", name))
        if recipe == IN_16_BIT:
            recipe = DEFAULT_RECIPE if self.recipe == IN_16_BIT else self.recipe
        return replace(
            self, recipe=recipe, scaling=scaling, rotation=self.of_layer("rotation", name), layers=(),
            keep=replace(self.keep, noise=self.of_layer("keep_noise", name)),
            # lists are kept with what is planned
            skip=self.skip if scaling.is_planned and recipe != "mixed" else None,
        )  # fmt: skip

    def with_rules(self, *rules: LayerRule) -> SageAttnProcessor:
        """Return these options with more rules in front of those that `layers` has."""
        return replace(self, layers=(*rules, *self.layers))

    def with_scaling(self, name: str) -> SageAttnProcessor:
        """Return these options with another scaling of the same margin, history and gamma."""
        return replace(self, scaling=replace(self.scaling, name=name))  # type: ignore[arg-type]

    def with_linears(self, format: str) -> SageAttnProcessor:
        """Return these options with linear layers in another format."""
        return replace(self, linears=replace(self.linears, format=format))  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises: a model put these options on its modules as if they were a processor."""
        raise TypeError(
            "processor: got SageAttnProcessor itself on an attention module, expected one processor per module; "
            "write pipe.set_attn_processor(sage_processors.SageAttnProcessor(...)) for a pipeline, or "
            "model.set_attn_processor(...) or sage_processors.apply(model, ...) for a model. "
            "Load the model again first: its own processors were replaced"
        )


def options_of(config: Any) -> SageAttnProcessor:
    """Return the given options, or the defaults for None.

    Raises: TypeError for anything but a SageAttnProcessor or None.
    """
    config = SageAttnProcessor() if config is None else config
    if not isinstance(config, SageAttnProcessor):
        raise TypeError(
            f"config: got {type(config).__name__}, expected sage_processors.SageAttnProcessor; "
            "for one of diffusers' own processors use the model's set_attn_processor"
        )
    return config
