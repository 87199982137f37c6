"""The option rotation="auto": choose the layers to rotate by the first INT8 step of a run.

In that step a probe compares sampled heads and rows with fp32 attention, with and without the Hadamard rotation. A
layer is rotated from the next step on if a sampled head is below ROTATE_BELOW_DB and the rotation gains more than
ROTATION_GAIN_DB on the same inputs. The second condition is needed because a planned balance already removes outliers
that stay in their channels, and a rotation would only spread those.

The choice is a flag on the host that changes between two steps, as the flag of a step window does. In a compiled model
it is a guard: the compared step runs one compiled version, and all later steps run another.
"""

from __future__ import annotations

import logging
import math

from sage_kernels.planning.rules import ADAPTIVE

from ..options import ROTATE_BELOW_DB, ROTATION_GAIN_DB
from .reports.probe import Probe


logger = logging.getLogger("sage_processors")

SAMPLED_HEADS, SAMPLED_ROWS = 8, 32


class AutoRotation:
    """The decisions for all layers of a handle with rotation="auto", made once in each run.

    Frozen scales keep the decision, because they were measured with it. With "timestep_adaptive" scaling the decision
    of the first run stays until `reset`, because the scales go on from run to run.
    If the user's own probe is running, its measurements are used. Each denoiser is decided after the first step in
    which it ran INT8 attention: the second of two expert models may start late in a run.
    """

    def __init__(self, handle):
        self._handle, self._probe = handle, None
        self._resting: Probe | None = None  # our stopped probe: a compiled model would recompile for a new one
        self._pending = False  # False: a step has nothing to decide and costs nothing
        # label -> (SQNR of the worst head in dB, the same with rotation, step, whether the layer is rotated)
        self._decided: dict[str, tuple[float, float, int, bool]] = {}

    @property
    def decided(self) -> bool:
        """True if any layer is decided, in this run or in an earlier one."""
        return bool(self._decided)

    def is_open(self, denoiser, layer) -> bool:
        """True for a layer with rotation="auto" that is not decided yet."""
        is_auto = layer.own.config.rotation == "auto"
        return is_auto and not denoiser.frozen and denoiser._label(layer.name) not in self._decided

    def _undecided_layers(self) -> list:
        """Return (denoiser, layer, label) of each layer that is not decided yet."""
        return [
            (denoiser, layer, denoiser._label(layer.name))
            for denoiser in self._handle._denoisers
            for layer in denoiser.layers
            if self.is_open(denoiser, layer)
        ]

    def begin_run(self) -> None:
        """Forget the earlier run's decisions, except those that frozen or adaptive scales keep."""
        if self._handle.config.scaling.name == ADAPTIVE:
            return
        for denoiser in self._handle._denoisers:
            for layer in denoiser.layers if not denoiser.frozen else ():
                if layer.own.config.rotation == "auto":
                    denoiser.rotate(layer, False)
                    self._decided.pop(denoiser._label(layer.name), None)
        if self._undecided_layers() and self._handle._probe is not None:
            self._handle._probe.reset_trials()  # left by an interrupted run, or by a run in the user's probe
        self.watch()

    def watch(self) -> None:
        """Start measuring if a layer is undecided and no other probe measures already."""
        names = [label for *_, label in self._undecided_layers()]
        self._pending = bool(names)
        if not names:
            self._rest()
        elif self._handle._probe is None:
            if self._resting is None:
                self._probe = Probe(self._handle, every=1, heads=SAMPLED_HEADS, rows=SAMPLED_ROWS, only=names)
            else:
                self._probe, self._resting = self._resting, None
                self._probe.reset()
                self._probe.go_on(only=names)
            self._handle._probe = self._probe
        elif self._handle._probe is self._probe:
            self._probe.attach(only=names)

    def _rest(self) -> None:
        """Stop our own probe and keep it for the next run."""
        if self._probe is not None:
            self._probe.stop()
            self._probe, self._resting = None, self._probe

    def step_done(self) -> None:
        """Decide the layers that were measured in the step before. Called between two steps."""
        if not self._pending:
            return
        layers, probe = self._undecided_layers(), self._handle._probe
        if probe is not None:
            ran = [x for x in self._handle._denoisers if probe.has_tried(x)]  # does not sync
            # a layer that its own `keep_noise` kept in 16 bit in this step is decided after a later step
            layers = [row for row in layers if row[0] in ran and not row[1].sage._sage.window.was_16bit]
            if not layers:
                return
            self._decide(layers, *probe.trials())
            if probe is self._probe:
                self._rest()
        self.watch()  # for the layers that are still undecided

    def _decide(self, layers, data: list[dict], trials: list[dict]) -> None:
        for denoiser, layer, label in layers:
            (plain, step), (tried, _) = _worst(data, label), _worst(trials, label)
            # no rotation helps a layer with NaN or infinite values
            rotated = math.isfinite(plain) and plain < ROTATE_BELOW_DB and tried > plain + ROTATION_GAIN_DB
            self._decided[label] = (plain, tried, step, rotated)
            if rotated:
                denoiser.rotate(layer, True)
                logger.info("layer %s is rotated from the next step on: %s", label, self.note(label))

    def reset(self) -> None:
        """Drop all decisions, and decide again in the next run."""
        for denoiser in self._handle._denoisers:
            for layer in denoiser.layers:
                if layer.own.config.rotation == "auto":
                    denoiser.rotate(layer, False)
        self._decided = {}
        if self._undecided_layers() and self._handle._probe is not None:
            # earlier measurements say nothing about the next run, in the user's own probe either
            self._handle._probe.reset()
            self._handle._probe.attach()
        self.watch()

    def note(self, label: str) -> str:
        """Return the report's remark on a layer; "" for a layer that is not decided."""
        if label not in self._decided:
            return ""
        plain, tried, step, rotated = self._decided[label]
        if math.isnan(plain):
            return "rotation auto: no INT8 call was measured"
        found = f"rotation auto: {plain:.1f} dB in step {step}, {tried:.1f} dB with it"
        return found + (", rotated since" if rotated else "")


def _worst(rows: list[dict], label: str) -> tuple[float, int]:
    """Return (SQNR in dB, step) of a layer's worst head; (NaN, -1) if none was measured."""
    own = [(row["sqnr_db"], row["step"]) for row in rows if row["layer"].partition("#")[0] == label]
    return min(own, default=(math.nan, -1))
