"""Measure the error of INT8 attention per layer, head and step while a model runs.

In every k-th step, some rows of some heads are computed again in fp32, from the same inputs as the INT8 call. The sums
of squares of the fp32 result and of the difference are added up on the device. They are read back in `data` alone.

8-bit linear layers are compared with 16-bit ones in the same steps (linears/probe.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

import sage_kernels
from sage_kernels.compat import mark_static_address

from ...linears.probe import SLOTS, LinearProbes
from ...reporting.layer_report import NOTHING_RAN, ratios


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


SIGNAL, NOISE, ROWS = range(3)


def exact_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, heads: list[int],
    attn_mask: torch.Tensor | None, is_causal: bool, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Compute attention of some rows of some heads in fp32.

    Args:
        query [B, S_q, H, D], key and value [B, S_kv, H_kv, D]. rows: int64 [R] on their device. heads: n Python ints.
        attn_mask: None, bool or additive, broadcastable to [B, H, S_q, S_kv]. is_causal: row i sees keys up to i.
    Returns: [B, R, n, D] fp32; fully masked rows are 0.
    """
    groups = query.shape[2] // key.shape[2]
    kv = [head // groups for head in heads]
    q, k, v = query[:, rows][:, :, heads].float(), key[:, :, kv].float(), value[:, :, kv].float()
    scores = torch.einsum("brnd,bsnd->bnrs", q, k) * scale
    if attn_mask is not None:
        mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        mask = mask.expand(query.shape[0], query.shape[2], query.shape[1], key.shape[1])[:, heads][:, :, rows]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    if is_causal:
        scores = scores.masked_fill(torch.arange(key.shape[1], device=rows.device) > rows[:, None], -torch.inf)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(hidden, 0.0, scores.softmax(-1))
    return torch.einsum("bnrs,bsnd->brnd", weights, v)


class _Shared:
    """State that all layers of a probe share.

    Attributes: on: the running step is probed. rows: compared per sample and head. slots: {device: int64 [1], the
        index of the running step in the layers' sums}.
    """

    def __init__(self, rows: int) -> None:
        self.on, self.rows = False, rows
        self.slots: dict[torch.device, torch.Tensor] = {}

    def slot(self, device: torch.device | str) -> torch.Tensor:
        """Return the tensor of `slots` on a device, made on first use."""
        device = torch.device(device)
        if device not in self.slots:
            with torch.inference_mode(False):
                self.slots[device] = torch.zeros(1, dtype=torch.int64, device=device)
            mark_static_address(self.slots[device], guard=False)
        return self.slots[device]


class LayerProbe:
    """The sums of squares of one layer. Called by processors._attend; all results stay on the device.

    Attributes: trial: also run the same inputs with the Hadamard rotation, and measure its error.
    """

    def __init__(self, shared: _Shared, calls: int, heads: int, device: torch.device | str) -> None:
        self.shared, self.trial = shared, False
        self.seen_heads: dict[int, int] = {}
        self.tried_heads: dict[int, int] = {}
        # index 0: of all calls. 1: of the calls that were also tried with rotation. 2: of these trials.
        with torch.inference_mode(False):
            self.all = torch.zeros(3, calls, SLOTS, heads, 3, dtype=torch.float64, device=device)
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        """Move the sums to another device."""
        self.all = self.all.to(device)
        self.sums, self.plain_sums, self.trial_sums = self.all
        self.slot = self.shared.slot(device)
        for sums in (self.sums, self.plain_sums, self.trial_sums):
            mark_static_address(sums, guard=False)

    def reset_trial(self) -> None:
        """Forget the results of trials."""
        self.all[1:].zero_()
        self.tried_heads.update(dict.fromkeys(self.tried_heads, 0))  # other keys would make Dynamo recompile

    def compare(
        self, index: int, out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attn_mask: torch.Tensor | None, is_causal: bool, scale: float | None, tried: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Add the error of one INT8 call with the result `out` [B, S_q, H, D].

        Args: index: of the call site in the layer. tried: options of `sage_attention` for a trial with rotation.
        """
        heads_in_all, seq = query.shape[2], query.shape[1]
        count = min(self.sums.shape[2], heads_in_all)
        heads = [i * heads_in_all // count for i in range(count)]
        self.seen_heads[index] = heads_in_all  # not read in the forward, so Dynamo needs no guard on it
        rows = torch.arange(min(self.shared.rows, seq), device=query.device) * seq // min(self.shared.rows, seq)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        exact = exact_rows(query, key, value, rows, heads, attn_mask, is_causal, scale)
        self._add(self.sums[index], out, exact, rows, heads)
        if self.trial and tried is not None:
            self.tried_heads[index] = heads_in_all
            self._add(self.plain_sums[index], out, exact, rows, heads)
            mask: dict[str, Any] = {
                "attn_mask": attn_mask,
                "causal": "top_left" if is_causal else False,
                "scale": scale,
            }
            out = sage_kernels.sage_attention(query, key, value, rotation="hadamard", **tried, **mask)
            self._add(self.trial_sums[index], out, exact, rows, heads)

    def _add(
        self, target: torch.Tensor, out: torch.Tensor, exact: torch.Tensor, rows: torch.Tensor, heads: list[int]
    ) -> None:
        error = out[:, rows][:, :, heads].float() - exact
        sums = torch.zeros_like(target[:1])
        sums[0, : len(heads), SIGNAL] = exact.double().square().sum((0, 1, 3))
        sums[0, : len(heads), NOISE] = error.double().square().sum((0, 1, 3))
        sums[0, : len(heads), ROWS] = exact.shape[0] * exact.shape[1]
        target.index_add_(0, self.slot, sums)


class Probe:
    """Compares INT8 attention with fp32 on sampled steps, heads and rows of every layer of a handle.

    8-bit linear layers are compared with 16-bit ones, on `rows` rows of each call, unless their 16-bit weights were
    dropped.

        with handle.probe(every=4) as probe:
            pipe(...)
            probe.print()

    A compiled model is compiled once more, for the probed steps. Without a scheduler to follow (a model without a
    pipeline) every call counts as step 0, and `every` must be 1.

    Args:
        every: probe one step in so many, beginning with the first of a run.
        heads: number compared per layer. rows: number compared per sample and head. Both are evenly spread. Cost:
            heads · rows / (H · S_q) of an attention in fp32, plus a copy of the K and V of these heads.
        only: names of the attention layers to watch, without linear layers; None: all layers.
    Raises: TypeError, ValueError (every, heads, rows).
    """

    def __init__(
        self, handle: Any, *, every: int = 4, heads: int = 4, rows: int = 32, only: Collection[str] | None = None
    ) -> None:
        for name, value in (("every", every), ("heads", heads), ("rows", rows)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: got {type(value).__name__}, expected an int >= 1")
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if every > 1 and handle._scheduler is None:
            raise ValueError(f"every: got {every} without a scheduler to count steps, expected 1; apply to a pipeline")
        self._handle, self._every, self._heads, self._only = handle, every, heads, only
        self._shared = _Shared(rows)
        self._layers: dict[str, LayerProbe] = {}
        self._linears = LinearProbes(self._shared)
        self.attach()
        handle.steps.listeners.append(self)
        self.step_starts(handle.steps.place)

    def attach(self, only: Collection[str] | None = None) -> None:
        """Watch all swapped layers, with those swapped since. only: if given, replaces the names to watch."""
        self._only = self._only if only is None else only
        for denoiser in self._handle._denoisers:
            if denoiser.linears is not None and self._only is None:
                self._linears.attach(denoiser.linears, denoiser.device)
            for layer in denoiser.layers:
                label, calls = denoiser._label(layer.name), len(layer.own.sites)
                if self._only is not None and label not in self._only:
                    continue
                known = self._layers.get(label)
                if known is None or known.sums.shape[0] != calls:
                    self._layers[label] = LayerProbe(self._shared, calls, self._heads, denoiser.device)
                self._layers[label].trial = self._handle._rotation.is_open(denoiser, layer)
                layer.own.probe = self._layers[label]

    def go_on(self, only: Collection[str]) -> None:
        """Watch the layers with these names from now on, after `stop`."""
        self._handle.steps.listeners.append(self)
        self.attach(only)
        self.step_starts(self._handle.steps.place)

    def step_starts(self, place: int) -> None:
        """Prepare for the next step, at this index of the scheduler's timesteps."""
        self._shared.on = place % self._every == 0
        for slot in self._shared.slots.values():
            slot.fill_(min(place, SLOTS - 1))

    def stop(self) -> None:
        """Stop comparing; `data` stays. May be called more than once."""
        self._shared.on = False
        self._handle.steps.listeners[:] = [x for x in self._handle.steps.listeners if x is not self]
        for denoiser in self._handle._denoisers:
            if denoiser.linears is not None:
                self._linears.detach(denoiser.linears)
            for layer in denoiser.layers:
                own = self._layers.get(denoiser._label(layer.name))
                if own is not None and layer.own.probe is own:
                    layer.own.probe = None
        if self._handle._probe is self:
            self._handle._probe = None

    def has_tried(self, denoiser: Any) -> bool:
        """True if a call of this denoiser was tried with rotation since `reset_trials`. Doesn't sync."""
        return any(
            any(self._layers[name].tried_heads.values()) for name in denoiser.layer_names() if name in self._layers
        )

    def reset_trials(self) -> None:
        """Forget the trials with rotation, and look up again which layers need trials."""
        for layer in self._layers.values():
            layer.reset_trial()
        self.attach()

    def reset(self) -> None:
        """Forget all sums."""
        self._linears.reset()
        for layer in self._layers.values():
            layer.all.zero_()
            layer.reset_trial()
            layer.seen_heads.update(dict.fromkeys(layer.seen_heads, 0))  # other keys would make Dynamo recompile

    def data(self) -> list[dict[str, Any]]:
        """Return one dict per compared layer, head and step. Waits for the device.

        Keys: layer ("#1" appended for a second attention call in it), head, step (index in the scheduler's timesteps),
            rows (compared), signal, noise (sums of squares of the fp32 output and of the difference), sqnr_db (+inf
            without any difference), rel_l2 (square root of noise over signal).
        """
        return self._rows(0)

    def linears(self) -> list[dict[str, Any]]:
        """Return one dict per compared 8-bit linear layer and step. Waits for the device.

        Keys: those of `data` without head, that is layer, step, rows, signal, noise, sqnr_db, rel_l2.
        """
        return self._linears.data()

    def trials(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return `data` of the trials, without rotation and with it. Waits for the device.

        Layers with rotation="auto" have trials until their rotation is decided. Counts the calls since
        `reset_trials`.
        """
        return self._rows(1), self._rows(2)

    def _rows(self, kind: int) -> list[dict[str, Any]]:
        found = []
        for name, layer in self._layers.items():
            sums = layer.all[kind].cpu()
            for call, step, i in sums[..., ROWS].nonzero().tolist():
                signal, noise, rows = sums[call, step, i].tolist()
                count = min(sums.shape[2], layer.seen_heads[call])
                head = i * layer.seen_heads[call] // count
                label = name + (f"#{call}" if call else "")
                found.append({"layer": label, "head": head, "step": step, "rows": int(rows)} | ratios(signal, noise))
        return found

    def summary(self, *by: str) -> list[dict[str, Any]]:
        """Return `data` summed over all keys but those in `by` ("layer", "head", "step").

        In the order of `data`. Raises: ValueError for another key.
        """
        unknown = sorted(set(by) - {"layer", "head", "step"})
        if unknown:
            raise ValueError(f"by: got {unknown}, expected some of layer, head, step")
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.data():
            groups.setdefault(tuple(row[name] for name in by), []).append(row)
        return [
            dict(zip(by, key, strict=True))
            | {"rows": sum(row["rows"] for row in rows)}
            | ratios(sum(row["signal"] for row in rows), sum(row["noise"] for row in rows))
            for key, rows in groups.items()
        ]

    def table(self) -> Table:
        """Return a rich.table.Table of the SQNR in dB, with a row per layer and a column per step."""
        cells = {(row["layer"], row["step"]): row["sqnr_db"] for row in self.summary("layer", "step")}
        worst = {row["layer"]: row for row in sorted(self.summary("layer", "head"), key=lambda row: -row["sqnr_db"])}
        heads = {layer: f"{row['sqnr_db']:.1f} ({row['head']})" for layer, row in worst.items()}
        return _table("SQNR of INT8 attention, dB, by step", cells, {"worst head": heads})

    def linears_table(self) -> Table:
        """Return a table like `table` of the 8-bit linear layers."""
        cells = {(row["layer"], row["step"]): row["sqnr_db"] for row in self.linears()}
        return _table("SQNR of 8-bit linear layers, dB, by step", cells, {})

    def print(self, console: Console | None = None) -> None:
        """Print the tables with rich, to `console` or the terminal."""
        from rich.console import Console

        console = console or Console()
        console.print(self.table() if self.data() else f"{NOTHING_RAN}: nothing was compared")
        if self.linears():
            console.print(self.linears_table())

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _table(title: str, cells: dict[tuple[str, int], float], more: dict[str, dict[str, str]]) -> Table:
    """Make a table with a row per layer and a column per step.

    Args: cells: {(layer, step): dB}. more: {further column: {layer: cell}}.
    """
    from rich.table import Table

    steps = sorted({step for _, step in cells})
    table = Table(title=title, title_justify="left")
    table.add_column("layer", overflow="fold")
    for name in (*map(str, steps), *more):
        table.add_column(name, justify="right")
    for layer in dict.fromkeys(layer for layer, _ in cells):
        values = [f"{cells[layer, step]:.1f}" if (layer, step) in cells else "-" for step in steps]
        table.add_row(layer, *values, *(column[layer] for column in more.values()))
    return table
