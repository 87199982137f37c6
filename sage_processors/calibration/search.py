"""Find the fastest options that meet a quality budget, by drawing pictures and comparing them with stock attention.

What is tried: every recipe and scaling on its own; then, from the best of them, ladders. On the first one every layer
has the cheapest way whose measured error stays below a limit that falls from rung to rung (demotion.py): P·V in 16 bit
where the recipe has it in 8, a scale per token, the Hadamard rotation (measured for all layers first, which may do),
16 bit at the noise levels where its error is, 16 bit throughout. The others have more and more 16 bit: layers in the
order of their error, first steps, last steps. On each ladder the mildest rung that meets the budget is found by
bisection. What meets it on the search's seeds is drawn again with fresh seeds, cheapest first and of equally dear ones
the better first, and only those numbers count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from sage_kernels.planning.rules import NEED_RUNS

from ..diffusion.noise_level import can_track, noise_levels
from ..evaluation import metrics, quality
from ..evaluation.progress_bar import progress_bar
from ..options import BY_CALL, SageAttnProcessor
from ..strict_json import strict_json, strict_object
from ..version import __version__
from ..whole_file import check_output
from . import layer_choices as demotion
from . import policy_files as policy
from .candidates import label, ladders
from .cost import CostTable
from .layer_choices import Choice, Demotion, Way


logger = logging.getLogger("sage_processors")
HELD_OUT = 2**24  # added to the seeds for every look at pictures that chose nothing
MAX_LOOKS = 4
MAX_STATE_BYTES = 16 * 2**20
_REMEDY = "delete it, or pass another state_path"


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
        config: the options, to be given to `pipe.set_attn_processor`.
        met: whether the pictures of fresh seeds met the budget.
        budget: {"target_psnr": dB} or {"max_attention_error": relative L2 of the worst layer}.
        result: on those fresh seeds: psnr_db (mean), psnr_db_low (lower end of the mean's 95 % interval: few pictures
            tell little), psnr_db_worst, attention_error (of the worst layer; 0 where it was not asked for), int8_share
            (INT8 calls over those that INT8 can do), cost (attention time over that of 16 bit, counted or measured),
            looks (sets of fresh seeds used).
        curve: everything tried on the search's seeds, by cost: label, cost, the three of psnr_db, int8_share.
        models: what the policy is for.
    """

    config: SageAttnProcessor
    met: bool
    budget: dict
    result: dict
    curve: list[dict]
    models: list[dict]

    def save(self, path) -> None:
        """Write the policy file, .json, that `SageAttnProcessor.from_policy` reads."""
        result = self.result | {"met": self.met}
        policy.write_policy(path, self.config, self.models, budget=self.budget, result=result, curve=self.curve)

    def print(self, console=None) -> None:
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
        verdict = "met: " if self.met else "NOT met, the best reachable is: "
        verdict += str(self.result) if self.result["int8_share"] else quality.NOTHING_RAN
        console.print(f"budget {self.budget} on fresh seeds {verdict}", highlight=False)


def calibrate(
    pipe,
    inputs,
    *,
    target_psnr: float | None = None,
    max_attention_error: float | None = None,
    recipes=None,
    scalings=("timestep", "per_block", "per_token"),
    config: SageAttnProcessor | None = None,
    steps: int = 25,
    seeds=None,
    batch: int = 4,
    cost: str = "auto",
    path=None,
    state_path=None,
    progress: bool = True,
) -> Calibration:
    """Find the fastest attention that meets a quality budget. Takes as long as drawing all those pictures.

    Args:
        pipe: a text-to-image DiffusionPipeline. What was applied to it before is removed.
        inputs: prompts, one picture each. seeds: one for each, 0, 1, … by default; fresh ones are made from them.
        target_psnr: mean PSNR, dB, against stock attention on the same seeds. max_attention_error: relative L2 error
            of every layer's attention output, on sampled heads, rows and steps. Exactly one of the two.
        recipes, scalings: what to try; recipes default to config's. "static" and "sigma_power" start from a table
            frozen after a first run (`handle.freeze_scales`). With max_attention_error the first of both is tried for
            every layer, and the per-call ones among the other scalings; where these fail a layer, all of them with
            P·V in 16 bit, if the recipe has it in 8; where these fail too, with the Hadamard rotation.
        config: options that are not searched.
        steps: denoising steps. batch: pictures per pipeline call.
        cost: "counted" (operations and bytes; the same everywhere, so the same calibration writes the same file),
            "measured" (times of this machine) or "auto": measured on a GPU.
        path: where to write the policy, .json. state_path: where to keep what was measured, .json; a calibration with
            the same inputs and model goes on from there.
        progress: show a progress bar (rich).
    Returns: Calibration; `met` says whether the budget was met.
    Raises: TypeError, ValueError (arguments, files that can't be written, or a state of another calibration); OSError
        where the disk is full at the end: what was found is in the log then.
    """
    config = SageAttnProcessor() if config is None else config
    seeds = list(range(len(inputs))) if seeds is None else list(seeds)
    kind = ("measured" if pipe.device.type == "cuda" else "counted") if cost == "auto" else cost
    _check(inputs, seeds, target_psnr, max_attention_error, kind, path, state_path)
    recipes = (config.recipe,) if recipes is None else tuple(recipes)
    bases = [dataclasses.replace(config, recipe=r, scaling=s) for r in recipes for s in scalings]
    if not bases:
        raise ValueError("scalings: got no recipe or no scaling, expected at least one of each")
    with progress_bar(progress) as show:
        search = _Search(
            pipe, list(inputs), seeds, min_tokens=config.min_tokens, steps=steps, batch=batch, kind=kind,
            path=state_path, show=show,
        )  # fmt: skip
        if target_psnr is not None:
            found = _for_psnr(search, bases, float(target_psnr))
        else:
            found = _for_error(search, bases, float(max_attention_error))
    if path is not None:
        try:
            found.save(path)
        except OSError:  # a disk that has filled up since: what took so long to find is not lost with it
            logger.error("path: %s can't be written; what was found: %s", path, found)
            raise
    return found


def _check(inputs, seeds, target_psnr, max_attention_error, kind, path, state_path) -> None:
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


class _Search:
    """Draws pictures under options, once each, and remembers the outcome, also in a file."""

    def __init__(self, pipe, prompts, seeds, *, min_tokens, steps, batch, kind, path, show):
        from ..diffusion.handle import apply, handle_of

        self._pipe, self._prompts, self._seeds = pipe, prompts, seeds
        self.steps, self._batch, self._show = steps, batch, show
        if handle_of(pipe) is not None:
            handle_of(pipe).remove()
        probing = SageAttnProcessor(scaling="dynamic", min_tokens=min_tokens)
        with apply(pipe, probing) as handle:  # who is there, in which shapes, at which noise levels
            on_step = show("shapes and noise levels", steps)
            quality.generate(pipe, prompts[:batch], seeds[:batch], steps=steps, on_step=on_step)
            self.models, self.costs = policy.describe_models(handle), CostTable(handle, kind)
            scheduler = getattr(pipe, "scheduler", None)
            # rounded: a GPU's last digit must not decide on which side of a border a step lies
            self.levels = [round(u, 6) for u in noise_levels(scheduler).tolist()] if can_track(scheduler) else []
        if not self.costs.shapes:
            raise ValueError("pipe: got no attention call that runs in INT8, expected some; see handle.report()")
        self._stock = {}
        self._path = None if path is None else Path(path)
        self._fingerprint = self._identity()
        self._outcomes = self._resume()
        self.curve: dict[str, dict] = {}

    def _identity(self) -> str:
        models = [x for x in self._pipe.components.values() if isinstance(x, torch.nn.Module)]
        # sums tell fine-tuned weights apart without reading them to the host
        weights = [float(p.detach().sum(dtype=torch.float64)) for m in models for p in m.parameters()]
        scheduler = self._pipe.scheduler
        facts = [
            __version__, torch.__version__, str(self._pipe.device), str(self._pipe.dtype), self.models, weights,
            type(scheduler).__name__, {k: str(v) for k, v in dict(scheduler.config).items()},
            self._prompts, self._seeds, self.steps, self._batch,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _resume(self) -> dict:
        if self._path is None or not self._path.exists():
            return {}
        content = strict_json(policy.read_small(self._path, MAX_STATE_BYTES), "the state", _REMEDY)
        strict_object(content, {"fingerprint": str, "outcomes": dict}, "the state", _REMEDY)
        if content["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"state_path: got {self._path.name!r} of another model, prompts, seeds or versions, expected one of "
                f"this calibration; {_REMEDY}"
            )
        fields = {**dict.fromkeys(("psnr_db", "psnr_db_low", "psnr_db_worst", "int8_share"), float), "noise": dict}
        outcomes = {k: strict_object(v, fields, "an outcome", _REMEDY) for k, v in content["outcomes"].items()}
        for outcome in outcomes.values():
            demotion.check_sums(outcome["noise"], _REMEDY)
        return outcomes

    def measure(self, config, *, look: int = 0, probe: bool = False) -> dict:
        """Outcome of drawing under `config`; look 0: the search's seeds, above: fresh ones.

        Keys: psnr_db, psnr_db_low, psnr_db_worst, int8_share, noise ({layer: {step as str: [signal, noise]}}, sums of
        squares, with `probe`), errors ({layer: relative L2}), and cost.
        """
        key = json.dumps([dataclasses.asdict(config), look, probe], sort_keys=True)
        if key not in self._outcomes:
            self._outcomes[key] = self._draw(config, look, probe)
            self._keep()
        outcome = self._outcomes[key] | {"cost": round(self.cost(config), 6)}
        outcome["errors"] = {layer: demotion.relative_l2(sums.values()) for layer, sums in outcome["noise"].items()}
        if look == 0:
            row = {"label": label(config)} | _numbers(outcome)
            self.curve[_key(config)] = row
        return outcome

    def _keep(self) -> None:
        if self._path is None:
            return
        try:
            policy.write_json(self._path, {"fingerprint": self._fingerprint, "outcomes": self._outcomes})
        except OSError as error:  # the search goes on: only a later one would have gone faster
            logger.warning("state_path: %s can't be written (%s); the search goes on without", self._path, error)

    def _draw(self, config, look: int, probe: bool) -> dict:
        seeds = [seed + look * HELD_OUT for seed in self._seeds]
        size = {"steps": self.steps, "batch": self._batch}
        batches = -(-len(seeds) // self._batch)
        if look not in self._stock:
            on_step = self._show("stock attention", self.steps * batches)
            parts = [slice(i, i + self._batch) for i in range(0, len(seeds), self._batch)]
            self._stock[look] = torch.cat(
                [
                    quality.generate(self._pipe, self._prompts[p], seeds[p], steps=self.steps, on_step=on_step)
                    for p in parts
                ]
            )
        warm = config.scaling in NEED_RUNS
        probes = []

        def on_handle(handle):
            if probe:
                probes.append(handle.probe(every=max(1, self.steps // 8)))

        on_step = self._show(label(config), self.steps * (batches + warm))
        variant = quality.Variant("tried", config, warm)
        drawn = quality.evaluate(
            self._pipe, self._prompts, seeds, [variant], stock=self._stock[look], on_step=on_step, on_handle=on_handle,
            **size,
        )["tried"]  # fmt: skip
        mean = metrics.mean_interval(drawn.psnr_db)
        return {
            "psnr_db": round(mean.value, 4),
            "psnr_db_low": round(mean.low, 4),
            "psnr_db_worst": round(min(drawn.psnr_db), 4),
            "int8_share": round(drawn.int8_share, 6),
            "noise": demotion.sums_by_step(probes),
        }

    def cost(self, config) -> float:
        """Attention time over that of 16 bit."""
        return self.costs.relative(config, len(self.levels) or self.steps, self.levels)

    def preference(self, config) -> tuple:
        """Sorts what was measured: cheapest first, of equally dear ones the better first."""
        key = _key(config)
        return round(self.cost(config), 3), -self.curve[key]["psnr_db"], key

    def demotion(self, base, configs) -> Demotion:
        """From the probes under `configs`, which are options for all layers."""
        noise = {Choice.of(config): self.measure(config, probe=True)["noise"] for config in configs}
        return Demotion(base, noise, demotion.seconds_of(self.costs), self.levels)

    def conclude(self, config, met: bool, budget: dict, outcome: dict, looks: int) -> Calibration:
        """The result, from the outcome on fresh seeds."""
        result = _numbers(outcome)
        result |= {"attention_error": max(outcome["errors"].values(), default=0.0), "looks": looks}
        curve = sorted(self.curve.values(), key=lambda row: (row["cost"], -row["psnr_db"], row["label"]))
        return Calibration(config, met, budget, result, curve, self.models)


def _key(config: SageAttnProcessor) -> str:
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def _numbers(outcome: dict) -> dict:
    return {k: v for k, v in outcome.items() if k not in ("errors", "noise")}


# --- pictures ---


def _for_psnr(search: _Search, bases, target: float) -> Calibration:
    budget, looked = {"target_psnr": target}, []

    def good_enough(configs):
        """Draws with fresh seeds, in the order of preference; the first that meets the budget."""
        for config in sorted(configs, key=search.preference):
            if len(looked) == MAX_LOOKS:
                return None
            outcome = search.measure(config, look=len(looked) + 1)
            looked.append((config, outcome))
            if outcome["psnr_db"] >= target:
                return search.conclude(config, True, budget, outcome, len(looked))
        return None

    tried = {base: search.measure(base)["psnr_db"] for base in bases}
    found = good_enough([base for base, psnr in tried.items() if psnr >= target])
    if found is None and len(looked) < MAX_LOOKS:
        best = max(bases, key=lambda base: (tried[base], -search.cost(base)))
        errors = search.measure(best, probe=True)["errors"]
        measured = demotion.demotions(best)
        by_layer = search.demotion(best, measured).ladder()
        good = [c for c in measured if c not in tried and search.measure(c, probe=True)["psnr_db"] >= target]
        passing = sorted(good, key=search.preference)[:1]
        worst_first = sorted(errors, key=lambda layer: (-errors[layer], layer))
        for ladder in (by_layer, *ladders(best, worst_first, search.steps)):
            passing += _mildest(search, ladder, target)
        found = good_enough(passing)
    if found is not None:
        return found
    if not looked:  # nothing came near: the best reachable is what users want to know
        reachable = max(search.curve, key=lambda key: (search.curve[key]["psnr_db"], key))
        config = SageAttnProcessor(**json.loads(reachable))
        looked.append((config, search.measure(config, look=1)))
    config, outcome = max(looked, key=lambda pair: pair[1]["psnr_db"])
    return search.conclude(config, outcome["psnr_db"] >= target, budget, outcome, len(looked))


def _mildest(search: _Search, ladder, target: float) -> list:
    """[the mildest rung that meets the target], by bisection; [] where not even the last one does."""
    if not ladder or search.measure(ladder[-1])["psnr_db"] < target:
        return []
    low, high = 0, len(ladder) - 1
    while low < high:
        middle = (low + high) // 2
        if search.measure(ladder[middle])["psnr_db"] >= target:
            high = middle
        else:
            low = middle + 1
    return [ladder[high]]


# --- attention error ---


def _for_error(search: _Search, bases, limit: float) -> Calibration:
    base = bases[0]
    same = [b for b in bases if b.recipe == base.recipe and (b is base or b.scaling in BY_CALL)]
    mild = [dataclasses.replace(b, recipe=demotion.milder_recipe(base.recipe)) for b in same]
    # dearer than another scaling, cheaper than 16 bit: measured where what comes before is not enough
    stages = [same, [b for b in mild if b not in same]]
    stages += [[dataclasses.replace(b, rotation="hadamard") for b in mild]] if base.rotation == "none" else []
    tried = []
    for stage in stages:
        tried += stage
        layers = search.demotion(base, tried)
        if all(min(layers.error(layer, Choice.of(b)) for b in tried) <= limit for layer in layers.layers):
            break

    limits, banned = dict.fromkeys(layers.layers, limit), set()
    for look in range(1, MAX_LOOKS + 1):
        plan = layers.plan(limits, banned)
        config = layers.options(plan)
        outcome = search.measure(config, look=look, probe=True)
        over = {layer: error for layer, error in outcome["errors"].items() if error > limit}
        if not over:
            break
        for layer, error in over.items():
            banned.add((layer, plan.get(layer, Way(None))))
            if layer in limits:  # its neighbours among the ways will be as much worse on fresh seeds
                limits[layer] *= limit / error
    return search.conclude(config, not over, {"max_attention_error": limit}, outcome, look)
