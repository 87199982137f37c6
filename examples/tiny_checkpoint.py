"""Checkpoints of a training run in small files: one file of tensors per part, state.json last, a log of losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sage_processors.files.whole_file import whole_file, write_whole


STATE, LOG = "state.json", "log.jsonl"


class Checkpoint:
    """The newest checkpoint and the log in a work folder.

    state.json names the files that belong to it and is written after them, so that an interrupted save leaves the
    checkpoint before. Its keys "stage" (one of `stages`, in their order) and "step" say where training stands.
    """

    def __init__(self, folder: Path, stages: tuple[str, ...]):
        self.folder, self.stages = folder, stages

    @property
    def exists(self) -> bool:
        return (self.folder / STATE).exists()

    def save(self, state: dict[str, Any], groups: dict[str, list[torch.Tensor]]) -> None:
        """Write lists of tensors by their names, and the state, which must fit into JSON; then delete older files."""
        files = {part: f"{state['stage']}-{state['step']:06d}-{part}.pt" for part in groups}
        for part, tensors in groups.items():
            with whole_file(self.folder / files[part]) as file:
                torch.save([x.detach().cpu() for x in tensors], file)
        write_whole(self.folder / STATE, json.dumps({**state, "files": files}, indent=2) + "\n")
        for old in set(self.folder.glob("*-[0-9]*-*.pt")) - {self.folder / name for name in files.values()}:
            old.unlink()

    def load(self) -> tuple[dict[str, Any], dict[str, list[torch.Tensor]]]:
        """(state, groups) as they were saved, on the CPU. Rows of the log after them, which will come again, go."""
        state = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        files = state.pop("files")
        groups = {part: torch.load(self.folder / name, weights_only=True) for part, name in files.items()}
        if (self.folder / LOG).exists():
            rows = [json.loads(line) for line in (self.folder / LOG).read_text(encoding="utf-8").splitlines()]
            kept = [row for row in rows if self._place(row) <= self._place(state)]
            write_whole(self.folder / LOG, "".join(json.dumps(row) + "\n" for row in kept))
        return state, groups

    def log(self, state: dict[str, Any], **row: Any) -> None:
        """Append a line of JSON."""
        with open(self.folder / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": state["stage"], "step": state["step"], **row}) + "\n")

    def _place(self, row: dict[str, Any]) -> tuple[int, int]:
        return self.stages.index(row["stage"]), row["step"]


def copy_into(parameters: list, values: list) -> None:
    """Give parameters these values, in place."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def moments(optimizer: torch.optim.Optimizer, params: list) -> tuple[list, list]:
    """First and second moments of AdamW, zeros before its first step."""

    def of(key: str) -> list:
        states = (optimizer.state.get(p, {}) for p in params)
        return [s[key] if key in s else torch.zeros_like(p) for s, p in zip(states, params, strict=True)]

    return of("exp_avg"), of("exp_avg_sq")


def put_moments(optimizer: torch.optim.Optimizer, params: list, first: list, second: list, step: int) -> None:
    """The inverse of `moments`, after `step` steps."""
    if step == 0:
        return
    device = params[0].device if optimizer.defaults["fused"] else "cpu"  # where AdamW itself keeps its count
    state = {
        place: {"step": torch.tensor(float(step), device=device), "exp_avg": m, "exp_avg_sq": v}
        for place, (m, v) in enumerate(zip(first, second, strict=True))
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def compile_blocks(blocks: torch.nn.ModuleList) -> None:
    """Compile each block's forward (one graph serves all of them); where that fails, go on without, saying so."""
    for block in blocks:
        block.forward = _compiled(block)


def plain_blocks(blocks: torch.nn.ModuleList) -> None:
    """Undo `compile_blocks`."""
    for block in blocks:
        vars(block).pop("forward", None)


def _compiled(block: torch.nn.Module):
    plain, proved = block.forward, False
    fast = torch.compile(plain)  # of the second shape on, one for all

    def forward(*inputs):
        nonlocal fast, proved
        if fast is plain:
            return plain(*inputs)
        try:
            output = fast(*inputs)
            proved = True
            return output
        except Exception as error:
            if proved:
                raise
            print(f"torch.compile failed, training without it: {type(error).__name__}: {str(error)[:300]}", flush=True)
            fast = plain
            return plain(*inputs)

    return forward
