"""rotation="auto": the first INT8 step is compared with exact attention, and layers that need it are rotated after it.

The choice is a flag on the host that changes between two steps, as precision windows do it: inside of torch.compile it
is a guard. The compared step is one version of a compiled model, all later steps are the other.
"""

from __future__ import annotations

import logging
import math

from .config import ROTATE_BELOW_DB
from .probe import Probe


logger = logging.getLogger("sage_processors")

SAMPLED_HEADS, SAMPLED_ROWS = 8, 32


class AutoRotation:
    """The layers of a handle whose rotation is "auto": measured once, decided once, until `reset`.

    A probe of the user's that runs meanwhile does the measuring too. Each denoiser is decided after the first step in
    which INT8 attention ran in it: the second of two experts may come late.
    """

    def __init__(self, handle):
        self._handle, self._probe = handle, None
        self._decided: dict[str, tuple[float, int, bool]] = {}  # label: lowest SQNR of a head, step, rotated

    def _open(self) -> list:
        """(part, layer, label) of the layers that are not decided yet."""
        return [
            (part, layer, part._label(layer.name))
            for part in self._handle._parts
            for layer in part.layers
            if layer.sage._sage_config.rotation == "auto" and part._label(layer.name) not in self._decided
        ]

    def watch(self) -> None:
        """Start measuring, if there is something to decide and no other probe does it."""
        if self._open() and self._handle._probe is None:
            self._probe = self._handle._probe = Probe(
                self._handle, every=1, heads=SAMPLED_HEADS, rows=SAMPLED_ROWS, only=[x for *_, x in self._open()]
            )

    def step_done(self) -> None:
        """Between two steps, with all statistics taken up: decide what was measured."""
        layers, probe = self._open(), self._handle._probe
        if not layers:
            return
        if probe is not None:
            ran = [part for part in self._handle._parts if probe.has_seen(part)]  # known without waiting
            if not any(part in ran for part, *_ in layers):
                return
            self._decide([row for row in layers if row[0] in ran], probe.data())
            if probe is self._probe:
                probe.stop()
                self._probe = None
        self.watch()  # what is still open

    def _decide(self, layers, data: list[dict]) -> None:
        for part, layer, label in layers:
            rows = [row for row in data if row["layer"].partition("#")[0] == label]
            worst = min(rows, key=lambda row: row["sqnr_db"], default={"sqnr_db": math.nan, "step": -1})
            # NaN and infinity are no outliers: no rotation helps them
            rotated = math.isfinite(worst["sqnr_db"]) and worst["sqnr_db"] < ROTATE_BELOW_DB
            self._decided[label] = (worst["sqnr_db"], worst["step"], rotated)
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
        self.watch()

    def note(self, label: str) -> str:
        """What the report says of a layer."""
        if label not in self._decided:
            return ""
        sqnr, step, rotated = self._decided[label]
        if math.isnan(sqnr):
            return "rotation auto: no INT8 call was measured"
        return f"rotation auto: {sqnr:.1f} dB in step {step}" + (", rotated since" if rotated else "")
