"""The outcome of a calibration in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..reporting.layer_report import NOTHING_RAN


def verdict_of(budget: Mapping[str, float], met: bool, found: Mapping[str, Any]) -> str:
    """Return the budget and what was reached on fresh seeds as a sentence."""
    name, limit = next(iter(budget.items()))
    asked = f"PSNR of {limit:g} dB or more" if name == "target_psnr" else f"attention error of {limit:g} or less"
    if not found["int8_share"]:
        return f"Budget, {asked}: {'met' if met else 'NOT met'}, but {NOTHING_RAN}."
    timed = "attention that can be in INT8 " + ("and linear layers take" if "linear_share" in found else "takes")
    numbers = [
        f"{found['int8_share']:.0%} of attention calls in INT8",
        f"{timed} {found['cost']:.2f} of the 16-bit time",
    ]
    if "psnr_db" in found:
        numbers.append(f"PSNR {found['psnr_db']:.2f} dB (mean; worst picture {found['psnr_db_worst']:.2f})")
    if found.get("attention_error"):
        numbers.append(f"attention error {found['attention_error']:.2g} (worst layer)")
    names = {
        "linear_share": "{:.0%} of the linear layers' work in 8 bit",
        "skipped_fraction": "{:.0%} of tiles skipped",
    }
    numbers += [text.format(found[name]) for name, text in names.items() if name in found]
    return f"Budget, {asked}: {'met' if met else 'NOT met; the nearest'} on fresh seeds: {', '.join(numbers)}."
