"""Max score per query row, kept for the next denoising step as the softmax reference of 8-bit P.

Consecutive steps see nearly the same rows, so a row's max score of the step before lies close to the new one, and an
attention kernel that takes it as its reference needs no running max. The kernel checks each row and repeats those that
do not fit, so kept scores can cost time, but never change a result. The first steps of a run are further apart.
"""

from __future__ import annotations

import torch


# 4 bytes a row: a video model of 40 layers, 40 heads and 76 000 tokens needs 490 MB. Calls beyond the limit use a
# running max.
LIMIT_BYTES = 512 * 2**20
# Calls of one site and shape in a step that are told apart: guidance makes up to four. More come from a model that is
# called outside of steps, where every call looks like one more of the same step.
MOST_CALLS = 16
# Steps at the beginning of a run that tell the next one little. Tiles of 64 rows that the next step had to repeat, in
# trained small pipelines with 4, 10 and 25 steps: up to 44, 22 and 12 % after the first step, 42, 29 and 0.5 % after
# the second, 33, 15 and 1 % after the third. A running max takes as long as repeating 6 %.
FIRST_STEPS = 3


class RowMaxima:
    """Row maxima of the call sites of one ScaleState, by shape and by place among the calls of a step.

    The n-th call of a site in a step reads the scores of the n-th call in the step before. So guidance that calls a
    model twice a step keeps both apart, for up to MOST_CALLS calls. Compiled calls ask through an op. Where the
    code that follows the steps is compiled too, calls could not be told apart, and nothing is kept. A CUDA graph
    writes where the call that it was captured from did, for as long as it lives: its rows stay allocated.

    Args:
        limit: bytes that may be kept in all, apart from those of graphs.
    """

    def __init__(self, limit: int = LIMIT_BYTES):
        self.limit = limit
        self.nbytes = 0
        self._steps = 0
        self._kept: dict[tuple, torch.Tensor] = {}
        self._calls: dict[tuple, int] = {}
        self._of_graphs: list[torch.Tensor] = []
        self._is_blind = False  # steps pass without being seen

    def of(self, site: int, shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, bool] | None:
        """Return arguments for `HeadState.keeping` for the running call of a site; None to keep nothing.

        shape: [B, H, S_q]. Returns: rows, fp32, and True if the step before left its scores there.
        """
        if self._is_blind:
            return None
        place = (site, shape)
        call = self._calls[place] = self._calls.get(place, -1) + 1
        if call >= MOST_CALLS:
            return None
        found = self._kept.get((place, call))
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if found is not None and found.device == device:
            if capturing:
                self._of_graphs.append(found)
            return found, True
        nbytes = 4 * shape[0] * shape[1] * shape[2]
        if self._steps < FIRST_STEPS or capturing or self.nbytes + nbytes > self.limit:
            return None
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of inference_mode
            self._kept[place, call] = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        self.nbytes += nbytes
        return self._kept[place, call], False

    def next_step(self) -> None:
        """End a step: count calls anew, and drop rows that it did not use (another resolution)."""
        if torch.compiler.is_compiling():
            self._is_blind = True  # compiled code runs this line at every step, and none of those below
            return
        if self._calls:  # a model's own hook reports the first step too, before any call
            self._steps += 1
        used = {key: rows for key, rows in self._kept.items() if self._calls.get(key[0], -1) >= key[1]}
        self._kept, self._calls = used, {}
        self.nbytes = sum(rows.nbytes for rows in used.values())

    def stop(self) -> None:
        """Keep nothing until `clear`: nothing says where a run begins."""
        self._is_blind = True
        if not torch.compiler.is_compiling():
            self._kept, self._calls, self.nbytes = {}, {}, 0

    def clear(self) -> None:
        """Forget everything, since another run begins. The rows of graphs are emptied."""
        self._kept, self._calls, self.nbytes, self._steps, self._is_blind = {}, {}, 0, 0, False
        for rows in self._of_graphs:
            rows.fill_(-torch.inf)
