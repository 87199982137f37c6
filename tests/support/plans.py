"""What a test says of calls that had no plan, where small random models have some whose plan does not fit."""

from __future__ import annotations


def calls_without_a_plan(row: dict, sequences: int = 1) -> float:
    """Of a row of a report or a state's summary: a call whose plan did not fit is dynamic too, and counted apart.

    Exact for one sequence: the misfits are those of all `sequences` of a batch, dynamic calls those of the first. Of
    several it is the least that it may be: all misfits the first one's.
    """
    misfit = row["misfit_fraction"] if "misfit_fraction" in row else row["misfit"]
    return round(row["dynamic_calls"] - misfit * sequences * row["calls"], 6)
