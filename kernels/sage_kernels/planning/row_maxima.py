"""Max score per query row, kept from one denoising step to the next: the softmax reference of 8-bit P.

Consecutive steps see nearly the same rows, so a row's max score of the step before lies close to the new one,
and an attention kernel that takes it as its reference needs no running max. The kernel checks each row and does again
what does not fit, so what is kept here can cost time, but never a digit. The first steps of a run are further apart.
"""

from __future__ import annotations

import torch


# 4 bytes a row: a video model of 40 layers, 40 heads and 76 000 tokens needs 490 MB. What does not fit runs with a
# running max.
LIMIT_BYTES = 512 * 2**20
# Calls of one site and shape in a step that are told apart: guidance makes up to four. More come from a model that is
# called outside of steps, where each would seem one more of the same step.
MOST_CALLS = 16
# Steps at the beginning of a run that tell the next one little. Tiles of 64 rows that the next step had to do again,
# in trained small pipelines with 4, 10 and 25 steps: up to 44, 22 and 12 % after the first step, 42, 29 and 0.5 %
# after the second, 33, 15 and 1 % after the third. A running max takes as long as doing 6 % again.
FIRST_STEPS = 3


class RowMaxima:
    """Row maxima of the call sites of one ScaleState, by shape and by place among the calls of a step.

    The n-th call of a site in a step meets what the n-th call of the step before left: guidance that calls a model
    twice a step keeps both apart, up to MOST_CALLS of them. Compiled calls ask through `keeping_op`; where what
    follows the steps is compiled too, nobody could tell them apart, and nothing is kept. A CUDA graph writes where the
    call that it was captured from did, for as long as it lives: what it was given stays, whatever is forgotten here.

    Args: limit: bytes that may be kept in all, but for those of graphs.
    """

    def __init__(self, limit: int = LIMIT_BYTES):
        self.limit = limit
        self.nbytes = 0
        self._steps = 0
        self._kept: dict[tuple, torch.Tensor] = {}
        self._calls: dict[tuple, int] = {}
        self._of_graphs: list[torch.Tensor] = []
        self._is_blind = False  # steps pass unseen

    def of(self, site: int, shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, bool] | None:
        """Arguments of `HeadState.keeping` for the running call of a site, shape [B, H, S_q].

        Rows, fp32, and whether the step before left its own there. None: nothing is to be kept.
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
        """A step is done: the calls are counted anew, and what it did not use (another resolution) goes."""
        if torch.compiler.is_compiling():
            self._is_blind = True  # this is what compiled code does at every step, and all that it does
            return
        if self._calls:  # a model's own hook tells of the first step, too, before any call
            self._steps += 1
        used = {key: rows for key, rows in self._kept.items() if self._calls.get(key[0], -1) >= key[1]}
        self._kept, self._calls = used, {}
        self.nbytes = sum(rows.nbytes for rows in used.values())

    def stop(self) -> None:
        """Keep nothing until `clear`: nobody says where a run begins."""
        self._is_blind = True
        if not torch.compiler.is_compiling():
            self._kept, self._calls, self.nbytes = {}, {}, 0

    def clear(self) -> None:
        """Forget everything: another run begins. Graphs find nothing in what they were given, either."""
        self._kept, self._calls, self.nbytes, self._steps, self._is_blind = {}, {}, 0, 0, False
        for rows in self._of_graphs:
            rows.fill_(-torch.inf)
