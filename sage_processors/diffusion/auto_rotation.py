"""rotation="auto": a run's first INT8 step is compared with exact attention; layers that need it are rotated after it.

A layer needs it if a sampled head is below ROTATE_BELOW_DB and the rotation does better on the same inputs: outliers
that stay in their channels are what planned scales balance away, and a rotation would only spread them. The choice is
a flag on the host that changes between two steps, as precision windows do it: inside of torch.compile it is a guard.
The compared step is one version of a compiled model, all later steps are the other.
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
    """The layers of a handle whose rotation is "auto": measured and decided once a run, by what that run draws.

    Once scales are frozen what was decided stays, for they are of rotated channels or not. With "timestep_adaptive",
    which goes on from run to run anyway, the first run decides, until `reset`.
    A probe of the user's that runs meanwhile does the measuring too. Each denoiser is decided after the first step in
    which INT8 attention ran in it: the second of two experts may come late.
    """

    def __init__(self, handle):
        self._handle, self._probe = handle, None
        self._resting: Probe | None = None  # ours of the run before: another one would be compiled anew
        self._pending = False  # so that a step with nothing to decide costs nothing
        # label: SQNR of the worst head without and with rotation, step, rotated
        self._decided: dict[str, tuple[float, float, int, bool]] = {}

    @property
    def decided(self) -> bool:
        """Whether anything was decided in this run, or is kept from another."""
        return bool(self._decided)

    def is_open(self, part, layer) -> bool:
        """Whether a layer is to be decided yet."""
        is_auto = layer.sage._sage_config.rotation == "auto"
        return is_auto and not part.frozen and part._label(layer.name) not in self._decided

    def _open(self) -> list:
        """(part, layer, label) of the layers that are not decided yet."""
        return [
            (part, layer, part._label(layer.name))
            for part in self._handle._parts
            for layer in part.layers
            if self.is_open(part, layer)
        ]

    def begin_run(self) -> None:
        """A run starts: what another one decided holds no longer, but where it is kept on purpose."""
        if self._handle.config.scaling.name == ADAPTIVE:
            return
        for part in self._handle._parts:
            for layer in part.layers if not part.frozen else ():
                if layer.sage._sage_config.rotation == "auto":
                    part.rotate(layer, False)
                    self._decided.pop(part._label(layer.name), None)
        if self._open() and self._handle._probe is not None:
            self._handle._probe.reset_trials()  # of a run that was broken off, or in a probe of the user's
        self.watch()

    def watch(self) -> None:
        """Start measuring, if there is something to decide and no other probe does it."""
        names = [label for *_, label in self._open()]
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
        """Measure no more for now."""
        if self._probe is not None:
            self._probe.stop()
            self._probe, self._resting = None, self._probe

    def step_done(self) -> None:
        """Between two steps, with all statistics taken up: decide what was measured."""
        if not self._pending:
            return
        layers, probe = self._open(), self._handle._probe
        if probe is not None:
            ran = [part for part in self._handle._parts if probe.has_tried(part)]  # known without waiting
            # a layer whose own noise levels kept it in 16 bit in this step is decided after one that does not
            layers = [row for row in layers if row[0] in ran and not row[1].sage._sage_window.was_exact]
            if not layers:
                return
            self._decide(layers, *probe.trials())
            if probe is self._probe:
                self._rest()
        self.watch()  # what is still open

    def _decide(self, layers, data: list[dict], trials: list[dict]) -> None:
        for part, layer, label in layers:
            (plain, step), (tried, _) = _worst(data, label), _worst(trials, label)
            # NaN and infinity are no outliers: no rotation helps them
            rotated = math.isfinite(plain) and plain < ROTATE_BELOW_DB and tried > plain + ROTATION_GAIN_DB
            self._decided[label] = (plain, tried, step, rotated)
            if rotated:
                part.rotate(layer, True)
                logger.info("layer %s is rotated from the next step on: %s", label, self.note(label))

    def reset(self) -> None:
        """Decide anew."""
        for part in self._handle._parts:
            for layer in part.layers:
                if layer.sage._sage_config.rotation == "auto":
                    part.rotate(layer, False)
        self._decided = {}
        if self._open() and self._handle._probe is not None:
            # what was measured before is of no run that is to come, also in a probe of the user's
            self._handle._probe.reset()
            self._handle._probe.attach()
        self.watch()

    def note(self, label: str) -> str:
        """What the report says of a layer."""
        if label not in self._decided:
            return ""
        plain, tried, step, rotated = self._decided[label]
        if math.isnan(plain):
            return "rotation auto: no INT8 call was measured"
        found = f"rotation auto: {plain:.1f} dB in step {step}, {tried:.1f} dB with it"
        return found + (", rotated since" if rotated else "")


def _worst(rows: list[dict], label: str) -> tuple[float, int]:
    """SQNR in dB of a layer's worst head, and its step; NaN without any."""
    own = [(row["sqnr_db"], row["step"]) for row in rows if row["layer"].partition("#")[0] == label]
    return min(own, default=(math.nan, -1))
