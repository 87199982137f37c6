"""Find the fastest options that meet a quality budget, by comparing pictures with stock attention's.

First every recipe and scaling is tried on its own. From the best of them start candidate sequences, lists of options
of rising quality and cost. In the first sequence (layer_choices.py) every layer takes the cheapest way whose measured
error stays below a limit, and the limit falls from candidate to candidate. The others (candidates.py) have more and
more in 16 bit: layers in the order of their error, first steps, last steps. In each sequence, bisection finds the
first candidate that meets the budget.

If linear layers are searched, two sequences are theirs (linear_choices.py), layer by layer and role by role, and one
pairs the first of these with the sequence of attention layers. They replace the others. If limits of skipped tiles
are searched, one more sequence (skip_choices.py) starts from the cheapest options that meet the budget without.

What meets the budget on the search's seeds is drawn again with fresh seeds, the cheapest first and among equally dear
ones the best first. Only these numbers count.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_kernels.facts.recipe import MIXED_RECIPE

from ..files.whole_file import check_output
from ..option_groups import LINEARS, LayerRule
from ..options import SageAttnProcessor
from ..reporting.progress import progress_bar
from . import layer_choices, policy_files, skip_choices
from .candidates import candidate_sequences
from .layer_choices import Choice, Way
from .trials import Trials, numbers_of
from .verdict import verdict_of


if TYPE_CHECKING:
    from rich.console import Console


logger = logging.getLogger("sage_processors")
MAX_LOOKS = 4


@dataclass(frozen=True)
class Calibration:
    """Options found by `calibrate`, with their quality on fresh seeds and everything that was tried.

    Attributes:
        config: the options, for `pipe.set_attn_processor`.
        met: True if the pictures of fresh seeds met the budget.
        budget: {"target_psnr": dB} or {"max_attention_error": relative L2 of the worst layer}.
        result: numbers on fresh seeds.
            psnr_db, psnr_db_low, psnr_db_worst: mean, lower end of the mean's 95 % interval, worst picture.
            attention_error: relative L2 of the worst layer; 0 if it was not measured.
            int8_share: INT8 calls over all attention calls, as in a report.
            cost: time of attention that INT8 can do over that of 16 bit, counted or measured.
            looks: sets of fresh seeds used.
            linear_share, if linear layers were searched: their operations in 8 bit over all of them.
            skipped_fraction, if skipping was searched: tile pairs left out, layers weighted by their time.
            lost_max, if skipping was searched: the largest measured share of a row's probability that was left out.
        curve: everything tried on the search's seeds, by cost: label, cost, the three psnr_db numbers, int8_share.
        models: the denoisers that the policy is for.
    """

    config: SageAttnProcessor
    met: bool
    budget: dict[str, Any]
    result: dict[str, Any]
    curve: list[dict[str, Any]]
    models: list[dict[str, Any]]

    def save(self, path: str | Path) -> None:
        """Write the policy file, .json, that `SageAttnProcessor.from_policy` reads."""
        result = self.result | {"met": self.met}
        policy_files.write_policy(path, self.config, self.models, budget=self.budget, result=result, curve=self.curve)

    def print(self, console: Console | None = None) -> None:
        """Print the curve and the verdict with rich."""
        from rich.console import Console
        from rich.table import Table

        table, console = Table(title="tried on the search's seeds", title_justify="left"), console or Console()
        for name in ("options", "attention time", "PSNR mean, dB", "95 % above", "PSNR worst, dB", "INT8 calls"):
            table.add_column(name, justify="left" if name == "options" else "right")
        for row in self.curve:
            psnr = [f"{row[x]:.2f}" if row["int8_share"] else "–" for x in ("psnr_db", "psnr_db_low", "psnr_db_worst")]
            table.add_row(row["label"], f"{row['cost']:.3f}", *psnr, f"{row['int8_share']:.0%}")
        console.print(table)
        console.print(self.verdict, highlight=False, soft_wrap=True)

    @property
    def verdict(self) -> str:
        """Return the budget and what was reached on fresh seeds as a sentence."""
        return verdict_of(self.budget, self.met, self.result)


def calibrate(
    pipe: Any,
    inputs: Sequence[str],
    *,
    target_psnr: float | None = None,
    max_attention_error: float | None = None,
    recipes: Sequence[str] | None = None,
    scalings: Sequence[str] = ("timestep", "per_block", "per_token"),
    linears: Sequence[str] = (),
    skip_limits: Sequence[float] = (),
    config: SageAttnProcessor | None = None,
    steps: int = 25,
    seeds: Sequence[int] | None = None,
    held_out: Sequence[str] = (),
    arguments: dict[str, Any] | None = None,
    batch: int = 4,
    cost: str = "auto",
    path: str | Path | None = None,
    state_path: str | Path | None = None,
    progress: bool = True,
) -> Calibration:
    """Find the fastest options that meet a quality budget. This draws many pictures.

    Args:
        pipe: a text-to-image or text-to-video DiffusionPipeline. A handle that is applied to it is removed.
        inputs: prompts, one picture or clip each.
        seeds: one for each prompt, by default 0, 1, …; fresh seeds are made from them.
        held_out: prompts for the fresh seeds, taken in turns; by default inputs again.
        arguments: more for the pipeline's call, such as the size of a clip.
        target_psnr: mean PSNR, dB, against stock attention on the same seeds. Give this or max_attention_error.
        max_attention_error: relative L2 error of every layer's attention output, on sampled heads, rows and steps.
        recipes, scalings: what to try; recipes default to config's. "static" and "sigma_power" start from a table
            frozen after a first run (`handle.freeze_scales`). With max_attention_error, every layer tries the first
            recipe with the first scaling and with those of the others that are computed per call. If a layer fails
            with all of these, they are tried with P·V in 16 bit, and then with the Hadamard rotation too.
        linears: formats to try for linear layers, "int8" and "fp8". Each layer gets one of them or 16 bit. Needs
            target_psnr. config's linears.min_features and the linears of its layers say which layers are searched.
        skip_limits: limits to try for `Skip.limit`, for all layers alike and by layer and noise level, on top of
            the cheapest options that meet target_psnr without. Needs target_psnr and a planned scaling.
        config: options that are not searched.
        steps: denoising steps. batch: pictures per pipeline call.
        cost: "counted" (operations and bytes: the same calibration writes the same file on every machine), "measured"
            (times of this machine) or "auto" (measured on a GPU, else counted).
        path: where to write the policy, .json.
        state_path: where to keep measurements, .json. A later calibration of the same inputs and model continues
            from there.
        progress: show a progress bar (rich).
    Returns: Calibration. Its `met` is False if nothing met the budget; it then holds the best that was found.
    Raises: TypeError, ValueError (arguments, paths that can't be written, or the state of another calibration);
        OSError if the policy can't be written at the end. The log then says what was found.
    """
    config = SageAttnProcessor() if config is None else config
    seeds = list(range(len(inputs))) if seeds is None else list(seeds)
    kind = ("measured" if pipe.device.type == "cuda" else "counted") if cost == "auto" else cost
    _check(inputs, seeds, target_psnr, max_attention_error, kind, path, state_path)
    if config.linears.drop_weights:
        raise ValueError(
            "config: got drop_weights=True, expected False: the search compares with the 16-bit weights; set it in "
            "the options that are found"
        )
    linears = _checked_formats(linears, target_psnr)
    skip_limits = skip_choices.checked_limits(skip_limits, scalings, target_psnr)
    if isinstance(held_out, str) or not all(isinstance(x, str) for x in held_out):
        raise TypeError("held_out: got something else than a list of prompts, expected a list of str")
    recipes = (config.recipe,) if recipes is None else tuple(recipes)
    if MIXED_RECIPE in (*recipes, *(recipe for _, recipe in config.rules("recipe"))):
        raise NotImplementedError(
            f"recipes: got {MIXED_RECIPE!r}, expected recipes of sage_kernels.RECIPES: the cost of mixed precision is "
            "not known; compare it by hand, with handle.probe()"
        )
    start = skip_choices.without_lists(config) if skip_limits else config
    bases = [dataclasses.replace(start.with_scaling(s), recipe=r) for r in recipes for s in scalings]
    if not bases:
        raise ValueError("scalings: got no recipe or no scaling, expected at least one of each")
    with progress_bar(progress, "stock attention") as show:
        trials = Trials(
            pipe, list(inputs), seeds, config=config, steps=steps, batch=batch, kind=kind, path=state_path, show=show,
            linears=linears, held_out=held_out, arguments=arguments, skips=bool(skip_limits),
        )  # fmt: skip
        if trials.linears is not None:
            bases = [base.with_linears(trials.linears.base) for base in bases]
        if target_psnr is not None:
            found = _for_psnr(trials, bases, float(target_psnr), skip_limits)
        elif max_attention_error is not None:  # exactly one of the two is given
            found = _for_error(trials, bases, float(max_attention_error))
    if path is not None:
        try:
            found.save(path)
        except OSError:  # the disk may have filled up since: don't lose what took so long to find
            logger.error("path: %s can't be written; what was found: %s", path, found)
            raise
    return found


def _check(
    inputs: Any, seeds: list[int], target_psnr: float | None, max_attention_error: float | None, kind: str,
    path: str | Path | None, state_path: str | Path | None,
) -> None:  # fmt: skip
    if isinstance(inputs, str) or not all(isinstance(x, str) for x in inputs):
        raise TypeError("inputs: got something else than a list of prompts, expected a list of str")
    if not inputs or len(seeds) != len(inputs):
        raise ValueError(f"seeds: got {len(seeds)} for {len(inputs)} inputs, expected one each and at least one")
    if (target_psnr is None) == (max_attention_error is None):
        raise ValueError("target_psnr: got both or neither budget, expected target_psnr= or max_attention_error=")
    if not (target_psnr or max_attention_error or 0) > 0:
        raise ValueError(f"target_psnr: got {target_psnr or max_attention_error}, expected a budget > 0")
    if kind not in ("counted", "measured"):
        raise ValueError(f'cost: got {kind!r}, expected "auto", "counted" or "measured"')
    for name, value in (("path", path), ("state_path", state_path)):
        if value is None:
            continue
        if Path(value).suffix != ".json":
            raise ValueError(f"{name}: got {Path(value).name!r}, expected a name that ends in .json")
        check_output(value, name)


def _checked_formats(linears: Sequence[str], target_psnr: float | None) -> tuple[str, ...]:
    formats = tuple(name for name in LINEARS if name != "none")
    if isinstance(linears, str) or not all(isinstance(x, str) for x in linears):
        raise TypeError(f"linears: got {linears!r}, expected a tuple of {list(formats)}")
    unknown = sorted(set(linears) - set(formats))
    if unknown:
        raise ValueError(f"linears: got {unknown}, expected some of {list(formats)}")
    if linears and target_psnr is None:
        raise ValueError(
            "linears: got formats to try without target_psnr, expected it: only pictures show linear layers' error"
        )
    return tuple(dict.fromkeys(linears))


def _conclude(
    trials: Trials, config: SageAttnProcessor, met: bool, budget: dict[str, Any], outcome: dict[str, Any], looks: int
) -> Calibration:
    result = numbers_of(outcome)
    result |= {"attention_error": max(outcome["errors"].values(), default=0.0), "looks": looks}
    curve = sorted(trials.curve.values(), key=lambda row: (row["cost"], -row["psnr_db"], row["label"]))
    return Calibration(config, met, budget, result, curve, trials.models)


# --- pictures ---


def _for_psnr(
    trials: Trials, bases: list[SageAttnProcessor], target: float, skip_limits: Sequence[float] = ()
) -> Calibration:
    budget = {"target_psnr": target}
    looked: list[tuple[SageAttnProcessor, dict[str, Any]]] = []

    def good_enough(configs: list[SageAttnProcessor]) -> Calibration | None:
        """Draw with fresh seeds, in the order of preference, until a result meets the budget. Else None."""
        for config in sorted(configs, key=trials.preference):
            if len(looked) == MAX_LOOKS:
                return None
            outcome = trials.measure(config, look=len(looked) + 1)
            looked.append((config, outcome))
            if outcome["psnr_db"] >= target:
                return _conclude(trials, config, True, budget, outcome, len(looked))
        return None

    tried = {base: trials.measure(base)["psnr_db"] for base in bases}
    passing = [base for base, psnr in tried.items() if psnr >= target]
    found = None
    planned = sorted(filter(skip_choices.can_skip, passing), key=trials.preference)
    if skip_limits and planned:
        skips = trials.skip_choices(planned[0], skip_limits).candidates()
        alike = [skip_choices.skipping(planned[0], trials.config, limit) for limit in skip_limits]
        alike = [config for config in alike if trials.measure(config)["psnr_db"] >= target]
        found = good_enough(sorted([*alike, *_first_that_meets(trials, skips, target)], key=trials.preference)[:2])
        if found is None and looked:  # keep the last look for options without skipping
            found = _search_stricter(trials, skips, target, looked, good_enough, MAX_LOOKS - 1)
    if found is None:
        found = good_enough(passing)
    if found is None and len(looked) < MAX_LOOKS:
        best = max(bases, key=lambda base: (tried[base], -trials.cost(base)))
        errors = trials.measure(best, probe=True)["errors"]
        measured = layer_choices.options_to_probe(best)
        by_layer = trials.layer_choices(best, measured).candidates()
        good = [c for c in measured if c not in tried and trials.measure(c, probe=True)["psnr_db"] >= target]
        passing = sorted(good, key=trials.preference)[:1]
        worst_first = sorted(errors, key=lambda layer: (-errors[layer], layer))
        sequences = [by_layer, *candidate_sequences(best, worst_first, trials.steps)]
        if trials.linears is not None:  # linear layers take most of the time: them first, then both together
            linear = trials.linears.candidates(best)
            sequences = [linear, trials.linears.roles(best), _pair_up(by_layer, linear)]
        for candidates in sequences:
            passing += _first_that_meets(trials, candidates, target)
        found = good_enough(passing)
        if trials.linears is not None and passing:
            found = found or _search_stricter(trials, linear, target, looked, good_enough)
    if found is not None:
        return found
    if not looked:  # nothing met the target: report the best that was found
        reachable = max(trials.curve, key=lambda key: (trials.curve[key]["psnr_db"], key))
        config = SageAttnProcessor(**json.loads(reachable))
        looked.append((config, trials.measure(config, look=1)))
    config, outcome = max(looked, key=lambda pair: pair[1]["psnr_db"])
    return _conclude(trials, config, outcome["psnr_db"] >= target, budget, outcome, len(looked))


def _search_stricter(
    trials: Trials, candidates: Sequence[Any], target: float, looked: list[Any], good_enough: Any,
    looks: int = MAX_LOOKS,
) -> Any:  # fmt: skip
    """Try stricter candidates on fresh seeds until one meets the target or `looks` are used up. Else None.

    The next candidate must exceed the target on the search's seeds by as much as fresh seeds missed it.
    """
    goal = target
    while len(looked) < looks:
        goal += target - max(outcome["psnr_db"] for _, outcome in looked)
        stricter = _first_that_meets(trials, candidates, goal)
        if not stricter or any(config == stricter[0] for config, _ in looked):
            return None
        found = good_enough(stricter)
        if found is not None:
            return found
    return None


def _pair_up(attention: Sequence[SageAttnProcessor], linear: Sequence[SageAttnProcessor]) -> list[SageAttnProcessor]:
    """Combine two candidate sequences, each at the same fraction of its length."""
    if not attention or not linear:
        return []
    count = max(len(attention), len(linear), 2)
    places = [[i * (len(sequence) - 1) // (count - 1) for sequence in (attention, linear)] for i in range(count)]
    return [
        attention[a].with_rules(
            *(LayerRule(pattern, linears=format) for pattern, format in linear[b].rules("linears"))
        )
        for a, b in places
    ]


def _first_that_meets(trials: Trials, candidates: Sequence[SageAttnProcessor], target: float) -> list[Any]:
    """Return [the first candidate that meets the target], by bisection; [] if the last one does not."""
    if not candidates or trials.measure(candidates[-1])["psnr_db"] < target:
        return []
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if trials.measure(candidates[middle])["psnr_db"] >= target:
            high = middle
        else:
            low = middle + 1
    return [candidates[high]]


# --- attention error ---


def _for_error(trials: Trials, bases: list[SageAttnProcessor], limit: float) -> Calibration:
    base = bases[0]
    same = [b for b in bases if b.recipe == base.recipe and (b is base or not b.scaling.is_planned)]
    mild = [dataclasses.replace(b, recipe=layer_choices.milder_recipe(base.recipe)) for b in same]
    # P·V in 16 bit and the rotation cost more than another scaling: measured only if a layer fails without them
    stages = [same, [b for b in mild if b not in same]]
    stages += [[dataclasses.replace(b, rotation="hadamard") for b in mild]] if base.rotation == "none" else []
    tried = []
    for stage in stages:
        tried += stage
        layers = trials.layer_choices(base, tried)
        if all(min(layers.error(layer, Choice.of(b)) for b in tried) <= limit for layer in layers.layers):
            break

    limits = dict.fromkeys(layers.layers, limit)
    banned: set[tuple[str, Way]] = set()
    for look in range(1, MAX_LOOKS + 1):
        chosen = layers.choose(limits, banned)
        config = layers.options(chosen)
        outcome = trials.measure(config, look=look, probe=True)
        over = {layer: error for layer, error in outcome["errors"].items() if error > limit}
        if not over:
            break
        for layer, error in over.items():
            banned.add((layer, chosen.get(layer, Way(None))))
            if layer in limits:  # similar ways will be worse on fresh seeds by as much
                limits[layer] *= limit / error
    return _conclude(trials, config, not over, {"max_attention_error": limit}, outcome, look)
