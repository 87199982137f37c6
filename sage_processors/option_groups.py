"""The options that come in groups: Keep, Scaling, Linears, Skip, and the rules for single layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, get_args

from .option_checks import borders, flag, known_options, limits, number, one_of, short, span, whole, with_known_options


RecipeName = Literal[
    "qk_int8_pv_bf16", "qk_int8_pv_fp8", "qk_int8_pv_int8", "qk_fp8_pv_fp8", "int_flash_half", "int_flash_full",
    "int_flash_full_fp32_sum", "mixed", "16bit",
]  # fmt: skip
ScalingName = Literal[
    "timestep", "timestep_adaptive", "delayed", "static", "sigma_power", "dynamic", "per_token", "per_block",
    "per_head",
]  # fmt: skip
RotationName = Literal["none", "hadamard", "auto"]
LinearFormat = Literal["none", "int8", "fp8"]

IN_16_BIT = "16bit"  # the recipe of layers that stay in 16 bit
# Scaling names, and for each the `scaling=` argument of sage_kernels.sage_attention. The planned ones also have a rule
# in sage_kernels/planning/rules.py.
SCALINGS = {name: name if name in ("per_block", "per_head") else "per_token" for name in get_args(ScalingName)}
BY_CALL = ("dynamic", "per_token", "per_block", "per_head")  # scales are computed from the inputs of each call
LINEARS: tuple[str, ...] = get_args(LinearFormat)
ROTATIONS: tuple[str, ...] = get_args(RotationName)  # "auto" is decided during a run: diffusion/auto_rotation.py
MOST_BORDERS = 3  # of Skip.noise: at each border all lists are measured anew
MOST_STEPS = 2**20  # of Skip.every: beyond this nothing would be measured twice in a run
Group = TypeVar("Group")


class LayerOptions(TypedDict, total=False):
    """Options of some layers, in place of those of the processor. See `SageAttnProcessor.layers`."""

    recipe: RecipeName
    scaling: ScalingName
    rotation: RotationName
    linears: LinearFormat
    keep_noise: tuple[float, float] | tuple[()]
    skip_limit: float | tuple[float, ...]


@with_known_options
@dataclass(frozen=True)
class Keep:
    """Denoising steps in which attention runs in 16 bit.

    Needs a pipeline's scheduler. The report counts their calls with the reason "window".

    Args:
        first_steps: this many steps at the start of a run, >= 0. A step is one step of the scheduler.
        last_steps: this many steps at the end of a run, >= 0.
        noise: (low, high): steps at noise levels from low to below high, 0 to 1, where 1 is pure noise. A high of 1
            includes 1. () is none.
    Raises: TypeError or ValueError for a wrong type or value.
    """

    first_steps: int = 0
    last_steps: int = 0
    noise: tuple[float, float] | tuple[()] = ()

    def __post_init__(self) -> None:
        whole("keep.first_steps", self.first_steps, 0)
        whole("keep.last_steps", self.last_steps, 0)
        object.__setattr__(self, "noise", span("keep.noise", self.noise))


@with_known_options
@dataclass(frozen=True)
class Scaling:
    """How the INT8 scales of Q and K are chosen, with the numbers of a planned scaling.

    Args:
        name: see `SageAttnProcessor.scaling`.
        margin: planned scale divided by the scale that the largest value seen needs, > 0. Below 1, most key tiles get
            finer steps, and those with the largest values get a larger scale of their own: nothing is clipped at any
            margin. Only for planned scalings.
        history: number of steps that "delayed" looks back, >= 1.
        gamma: exponent of "sigma_power". "fit": fitted per head to the frozen table, and 0 (static) where no power law
            fits. A number holds for all heads: 1 is scale ∝ σ, -1 is scale ∝ 1/σ.
    Raises: TypeError or ValueError for a wrong type or value.
    """

    name: ScalingName = "timestep"
    margin: float = 0.9
    history: int = 4
    gamma: float | Literal["fit"] = "fit"

    def __post_init__(self) -> None:
        one_of("scaling", self.name, SCALINGS)
        if number("scaling.margin", self.margin, "a number > 0") <= 0:
            raise ValueError(f"scaling.margin: got {self.margin}, expected a finite number > 0")
        object.__setattr__(self, "margin", float(self.margin))
        whole("scaling.history", self.history, 1)
        if self.gamma != "fit":
            number("scaling.gamma", self.gamma, 'a number or "fit"')

    @property
    def is_planned(self) -> bool:
        """True where the scales of a step are planned from earlier steps or from a frozen table."""
        return self.name not in BY_CALL

    @property
    def of_call(self) -> str:
        """The `scaling=` argument of `sage_kernels.sage_attention`."""
        return SCALINGS[self.name]


@with_known_options
@dataclass(frozen=True)
class Linears:
    """8-bit linear layers of the repeated blocks.

    Args:
        format: "int8": weights and activations in INT8, one scale for each row of either. "fp8": the same in e4m3, a
            third as exact, and faster on some GPUs. "none": 16 bit.
        min_features: layers with fewer input or output features stay in 16 bit. None: 1024, and on a GPU calls with
            little work run in 16 bit, too (reason "short"). 0: all are swapped.
        drop_weights: free the 16-bit weights as soon as the 8-bit ones are made. The handle can't give them back:
            these layers stay in 8 bit after `remove()`; `save_pretrained` and all else that needs the weights raise
            RuntimeError. Modulation and time embeddings with min_features² weights or more then have INT8 weights,
            too, which multiply 16-bit activations ("int8_weights" in the report), unless a rule in `layers` says
            "none".
    Raises: TypeError or ValueError for a wrong type or value.
    """

    format: LinearFormat = "int8"
    min_features: int | None = None
    drop_weights: bool = False

    def __post_init__(self) -> None:
        one_of("linears", self.format, LINEARS)
        if self.min_features is not None:
            whole("linears.min_features", self.min_features, 0)
        flag("linears.drop_weights", self.drop_weights)


@with_known_options
@dataclass(frozen=True)
class Skip:
    """Key tiles with next to no probability are not visited, as lists measured in earlier steps say.

    For models with many tokens, above all video, with a planned scaling and a pipeline (docs/skipping.md). Masked and
    causal calls visit every tile.

    Args:
        limit: largest share of a row's probability that a list may leave out, 0 < limit < 1. A new list leaves out at
            most half of it; a list found beyond the limit is dropped at once.
        every: each tile of query rows is measured at least once in this many steps, >= 1.
        noise: ascending borders between ranges of noise levels, 0 < border < 1, at most three. `skip_limit` of a rule
            in `layers` may then give one limit for each range, the first for noise levels below the first border. A
            run that crosses a border measures all lists anew.
        first_steps, last_steps: this many steps at the ends of a run visit every tile, >= 0.
        compensate: a tile that is left out stands in the softmax as its mean key and mean value. False: it is dropped.
    Raises: TypeError or ValueError for a wrong type or value.
    """

    limit: float = 0.01
    every: int = 8
    noise: tuple[float, ...] = ()
    first_steps: int = 2
    last_steps: int = 1
    compensate: bool = False

    def __post_init__(self) -> None:
        if not 0 < number("skip.limit", self.limit, "a share of probability, 0 < limit < 1") < 1:
            raise ValueError(f"skip.limit: got {self.limit}, expected 0 < limit < 1")
        for name, least in (("every", 1), ("first_steps", 0), ("last_steps", 0)):
            whole(f"skip.{name}", getattr(self, name), least)
        if self.every > MOST_STEPS:
            raise ValueError(f"skip.every: got {short(self.every)}, expected at most {MOST_STEPS} steps")
        flag("skip.compensate", self.compensate)
        object.__setattr__(self, "noise", borders("skip.noise", self.noise, MOST_BORDERS))


@with_known_options
@dataclass(frozen=True)
class LayerRule:
    """Options of the layers that a name pattern matches. None: this rule does not set the option."""

    pattern: str
    recipe: str | None = None
    scaling: str | None = None
    rotation: str | None = None
    linears: str | None = None
    keep_noise: tuple[float, ...] | None = None
    skip_limit: float | tuple[float, ...] | None = None


OF_ATTENTION = ("recipe", "scaling", "rotation", "keep_noise", "skip_limit")  # the other option is of linear layers


def group_of(name: str, value: Any, kind: type[Group], first: str = "") -> Group:
    """Return an option group for a group, a dict of its options, or a string for one of them.

    first: name of the option that a string sets. Raises: TypeError or ValueError that names the option.
    """
    if isinstance(value, kind):
        return value
    if first and isinstance(value, str):
        return kind(**{first: value})
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        said = "a name, " if first else ""
        raise TypeError(f"{name}: got {type(value).__name__}, expected {said}a {kind.__name__} or a dict of {known}")
    known_options(name, value, known)
    return kind(**value)


def rules_of(value: Any, recipes: Sequence[str], ranges: int) -> tuple[LayerRule, ...]:
    """Return the rules of `layers=`.

    That is a dict {pattern: options}, or a sequence of (pattern, options) or LayerRules.

    recipes: names of recipes. ranges: number of noise ranges that a skip_limit may have limits for.
    Raises: TypeError or ValueError that names the pattern.
    """
    expected = "a dict of {layer pattern: options}"
    entries = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise TypeError(f"layers: got {type(value).__name__}, expected {expected}")
    found = []
    for entry in entries:
        if isinstance(entry, LayerRule):
            entry = {field.name: getattr(entry, field.name) for field in fields(entry)}
        if isinstance(entry, Mapping):  # as dataclasses.asdict and policy files have it
            entry = entry.get("pattern"), {k: v for k, v in entry.items() if k != "pattern" and v is not None}
        if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError(f"layers: got {str(entry)[:200]}, expected {expected}")
        pattern, options = entry
        found.append(_rule(pattern, options, recipes, ranges))
    return tuple(found)


def _rule(pattern: str, options: Any, recipes: Sequence[str], ranges: int) -> LayerRule:
    known = [field.name for field in fields(LayerRule)][1:]
    where = f"layers[{pattern[:200]!r}]"
    if not isinstance(options, Mapping) or not options:
        raise TypeError(f"{where}: got {str(options)[:200]!r}, expected a dict with some of {known}")
    known_options(where, options, known)
    checked = dict(options)
    names = {"recipe": recipes, "scaling": tuple(SCALINGS), "rotation": ROTATIONS, "linears": LINEARS}
    for key in set(names) & set(options):
        one_of(f"{where}: {key}", options[key], names[key])
    if "keep_noise" in options:
        checked["keep_noise"] = span(f"{where}: keep_noise", options["keep_noise"])
    if "skip_limit" in options:
        checked["skip_limit"] = limits(f"{where}: skip_limit", options["skip_limit"], ranges)
    return LayerRule(pattern, **checked)
