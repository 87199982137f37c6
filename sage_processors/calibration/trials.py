"""Draw pictures under candidate options, once each, and keep the outcomes, also in a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path

import torch

from sage_kernels.planning.rules import NEED_RUNS

from ..diffusion.steps.noise_level import can_track, noise_levels
from ..evaluation import metrics, quality
from ..files.strict_json import strict_json, strict_object
from ..options import SageAttnProcessor
from ..version import __version__
from . import layer_choices, policy_files, skip_choices
from .candidates import label
from .cost import CostTable
from .layer_choices import Choice, LayerChoices
from .linear_choices import LinearChoices


logger = logging.getLogger("sage_processors")
HELD_OUT = 2**24  # added to the seeds for every look at pictures that chose nothing
MAX_STATE_BYTES = 16 * 2**20
_REMEDY = "delete it, or pass another state_path"


class Trials:
    """Outcomes of pictures drawn under candidate options, kept in memory and in a state file.

    Args: as for `calibrate`, and
        kind: "counted" or "measured" costs. path: of the state file; None: none. show: of a progress bar.
        skips: True if options that skip tiles will be tried.
    Raises: ValueError if no attention call runs in INT8, or the state file is damaged or of another calibration.
    """

    def __init__(
        self, pipe, prompts, seeds, *, config, steps, batch, kind, path, show, linears=(), held_out=(),
        arguments=None, skips=False,
    ):  # fmt: skip
        from ..entry import apply, handle_of

        self._pipe, self._prompts, self._seeds = pipe, prompts, seeds
        self._held_out, self._arguments, self._skips = list(held_out), arguments or {}, skips
        self.steps, self._batch, self._show, self.config = steps, batch, show, config
        earlier = handle_of(pipe)
        if earlier is not None:
            earlier.remove()
        probing = SageAttnProcessor(scaling="dynamic", min_tokens=config.min_tokens)
        with apply(pipe, probing) as handle:  # finds the layers, their shapes and the noise levels
            on_step = show("shapes and noise levels", steps)
            self._generate(prompts[:batch], seeds[:batch], on_step)
            self.models, self.costs = policy_files.describe_models(handle), CostTable(handle, kind)
            scheduler = getattr(pipe, "scheduler", None)
            # rounded, so that a GPU's last digit does not decide on which side of a border a step lies
            self.levels = [round(u, 6) for u in noise_levels(scheduler).tolist()] if can_track(scheduler) else []
        if not self.costs.shapes:
            raise ValueError("pipe: got no attention call that runs in INT8, expected some; see handle.report()")
        self.linears: LinearChoices | None = None
        if linears:

            def draw(on_step):
                self._generate(prompts[:1], seeds[:1], on_step)

            batch = len(prompts[:batch])
            self.linears = LinearChoices(pipe, config, linears, draw, steps, batch, kind, show)
        self._stock = {}
        self._path = None if path is None else Path(path)
        self._fingerprint = self._identity()
        self._outcomes = self._resume()
        self._skipped: dict[str, dict] = {}  # by options: the shares of tiles left out, of the last set of seeds
        self.curve: dict[str, dict] = {}

    def _generate(self, prompts, seeds, on_step) -> torch.Tensor:
        return quality.generate(self._pipe, prompts, seeds, steps=self.steps, on_step=on_step, **self._arguments)

    def _prompts_of(self, look: int) -> list[str]:
        """Return a prompt for each seed."""
        prompts = self._held_out if look and self._held_out else self._prompts
        return [prompts[i % len(prompts)] for i in range(len(self._seeds))]

    def _identity(self) -> str:
        models = [x for x in self._pipe.components.values() if isinstance(x, torch.nn.Module)]
        # sums tell fine-tuned weights apart without copying the weights to the host
        weights = [float(p.detach().sum(dtype=torch.float64)) for m in models for p in m.parameters()]
        scheduler = self._pipe.scheduler
        facts = [
            __version__, torch.__version__, str(self._pipe.device), str(self._pipe.dtype), self.models, weights,
            type(scheduler).__name__, {k: str(v) for k, v in dict(scheduler.config).items()},
            self._prompts, self._seeds, self.steps, self._batch, self._held_out,
            {name: str(value) for name, value in self._arguments.items()},
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _resume(self) -> dict:
        if self._path is None or not self._path.exists():
            return {}
        content = strict_json(policy_files.read_small(self._path, MAX_STATE_BYTES), "the state", _REMEDY)
        strict_object(content, {"fingerprint": str, "outcomes": dict}, "the state", _REMEDY)
        if content["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"state_path: got {self._path.name!r} of another model, prompts, seeds or versions, expected one of "
                f"this calibration; {_REMEDY}"
            )
        numbers = ("psnr_db", "psnr_db_low", "psnr_db_worst", "int8_share", "lost_max")
        fields: dict[str, type] = {**dict.fromkeys(numbers, float), "noise": dict, "skipped": dict}
        outcomes = {k: strict_object(v, fields, "an outcome", _REMEDY) for k, v in content["outcomes"].items()}
        for outcome in outcomes.values():
            layer_choices.check_sums(outcome["noise"], _REMEDY)
            skip_choices.check_shares(outcome["skipped"], _REMEDY)
        return outcomes

    def measure(self, config, *, look: int = 0, probe: bool = False) -> dict:
        """Return the outcome of drawing under `config`.

        Args:
            look: 0 for the search's seeds, n for the n-th set of fresh seeds. probe: measure attention's errors too.
        Returns: a dict of
            psnr_db, psnr_db_low, psnr_db_worst, int8_share, cost.
            noise: {layer: {step as str: [signal, noise]}}, sums of squares; empty without `probe`.
            errors: {layer: relative L2}, made from noise.
            skipped: `skip_choices.shares_of`. lost_max: the largest share of a row's probability found left out.
            linear_share, if linear layers are searched. skipped_fraction, if skipping is.
        """
        key, probed = (json.dumps([dataclasses.asdict(config), look, x], sort_keys=True) for x in (probe, True))
        key = probed if probed in self._outcomes else key  # the same pictures
        if key not in self._outcomes:
            self._outcomes[key] = self._draw(config, look, probe)
            self._keep()
        self._skipped[options_key(config)] = self._outcomes[key]["skipped"]
        outcome = self._outcomes[key] | {"cost": round(self.cost(config), 6)}
        noise = outcome["noise"]
        if self.linears is not None:
            outcome["linear_share"] = round(self.linears.share(config), 6)
        if self._skips:
            outcome["skipped_fraction"] = round(self.costs.skipped_fraction(config, outcome["skipped"]), 6)
        else:
            del outcome["lost_max"]
        outcome["errors"] = {layer: layer_choices.relative_l2(sums.values()) for layer, sums in noise.items()}
        if look == 0:
            row = {"label": label(config)} | numbers_of(outcome)
            self.curve[options_key(config)] = row
        return outcome

    def _keep(self) -> None:
        if self._path is None:
            return
        try:
            policy_files.write_json(self._path, {"fingerprint": self._fingerprint, "outcomes": self._outcomes})
        except OSError as error:  # the search goes on: only a later one would have gone faster
            logger.warning("state_path: %s can't be written (%s); the search goes on without", self._path, error)

    def _draw(self, config, look: int, probe: bool) -> dict:
        seeds = [seed + look * HELD_OUT for seed in self._seeds]
        size = {"steps": self.steps, "batch": self._batch}
        prompts, batches = self._prompts_of(look), -(-len(seeds) // self._batch)
        if look not in self._stock:
            on_step = self._show("stock attention", self.steps * batches)
            parts = [slice(i, i + self._batch) for i in range(0, len(seeds), self._batch)]
            self._stock[look] = torch.cat([self._generate(prompts[p], seeds[p], on_step) for p in parts])
        warm = config.scaling.name in NEED_RUNS
        probes, rows = [], []

        def on_handle(handle):
            if probe:
                probes.append(handle.probe(every=max(1, self.steps // 8)))

        on_step = self._show(label(config), self.steps * (batches + warm))
        variant = quality.Variant("tried", config, warm)
        drawn = quality.evaluate(
            self._pipe, prompts, seeds, [variant], stock=self._stock[look], on_step=on_step, on_handle=on_handle,
            on_report=lambda report: rows.extend(report.rows), arguments=self._arguments, **size,
        )["tried"]  # fmt: skip
        mean = metrics.mean_interval(drawn.psnr_db)
        return {
            "psnr_db": round(mean.value, 4),
            "psnr_db_low": round(mean.low, 4),
            "psnr_db_worst": round(min(drawn.psnr_db), 4),
            "int8_share": round(drawn.int8_calls / max(drawn.int8_calls + drawn.fallback_calls, 1), 6),
            "noise": layer_choices.sums_by_step(probes),
            "skipped": skip_choices.shares_of(rows),
            "lost_max": round(float(max((row["lost_max"] for row in rows), default=0.0)), 8),
        }

    def cost(self, config) -> float:
        """Return attention time over that of 16 bit; if linear layers are searched, of both together."""
        run, skipped = len(self.levels) or self.steps, self._skipped.get(options_key(config), {})
        linear = (0.0, 0.0) if self.linears is None else self.linears.seconds(config)
        return self.costs.relative(config, run, self.levels, skipped, linear)

    def preference(self, config) -> tuple:
        """Return a sort key for measured options: the cheapest first, among equally dear ones the best."""
        key = options_key(config)
        return round(self.cost(config), 3), -self.curve[key]["psnr_db"], key

    def layer_choices(self, base, configs) -> LayerChoices:
        """Return LayerChoices from probes under `configs`, each of which is one choice for all layers."""
        noise = {Choice.of(config): self.measure(config, probe=True)["noise"] for config in configs}
        return LayerChoices(base, noise, layer_choices.seconds_of(self.costs), self.levels)

    def skip_choices(self, base, limits) -> skip_choices.SkipChoices:
        """Return SkipChoices from probes under `base`, which skips nothing, and with each of the limits."""
        configs = {0.0: base} | {limit: skip_choices.skipping(base, self.config, limit) for limit in limits}
        noise = {limit: self.measure(config, probe=True)["noise"] for limit, config in configs.items()}
        return skip_choices.SkipChoices(base, self.config, noise, self.levels)


def options_key(config: SageAttnProcessor) -> str:
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def numbers_of(outcome: dict) -> dict:
    return {k: v for k, v in outcome.items() if k not in ("errors", "noise", "skipped")}
