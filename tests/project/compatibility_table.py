"""docs/compatibility.md, made from the cases of tests/cases.json that have a `state`, and the committed outcomes.

A state is said of a combination only where a test found it: one that bears the case's name and asks the fixture
`shows` (tests/support/combinations.py), or those of the cases in `shown_by`. `make cases` writes it.
"""

from __future__ import annotations

from pathlib import Path

from tests.project.case_table import COLUMNS, OTHER, TESTS, WORST_FIRST


PAGE = TESTS.parent / "docs" / "compatibility.md"
STATES = {"int8": "INT8", "exact": "exact, reported", "error": "error"}
# the first case of each section
SECTIONS = {
    "X01": "Running, placing and copying a model",
    "X21": "Adapters and changed projections",
    "X33": "Guidance",
    "X40": "Caches",
    "X45": "Pipelines of several models",
    "X48": "Quantised linear layers",
    "X55": "Training",
    "X63": "What stays exact",
    "X71": "By diffusers’ name for a back end",
    "X73": "Several GPUs",
    "X80": "Errors",
    "X90": "Transformers and the Hub",
}


def outcome(row: dict, tried: dict[str, str]) -> str:
    """The worst outcome of the cases that show a row, in one column: "passed", "passed, of other sources", "–" …"""
    found = [tried[case] for case in row.get("shown_by", []) + [row["id"]] if case in tried]
    return min(found, key=lambda text: WORST_FIRST.index(text.partition(",")[0]), default="–")


def state(row: dict, outcomes: dict[str, dict]) -> str:
    """What the first column says of a row: its state, or that no test has shown it."""
    tried = [outcome(row, found["cases"]) for found in outcomes.values()]
    if any(text.startswith("failed") for text in tried):
        return "not shown: a test failed"
    return STATES[row["state"]] if any(text.startswith("passed") for text in tried) else "not shown yet"


def page(rows: list[dict], outcomes: dict[str, dict]) -> str:
    """The Markdown page."""
    combined = [row for row in rows if "state" in row]
    number = {name: sum(state(row, outcomes) == text for row in combined) for name, text in STATES.items()}
    lines = [
        "# Compatibility",
        "",
        f"{len(combined)} combinations with other features: {number['int8']} run in INT8, {number['exact']} stay",
        f"exact and are reported, {number['error']} are errors that say what to do. Made by `make cases` from",
        "[tests/cases.json](../tests/cases.json) and [tests/outcomes](../tests/outcomes): a state stands here because",
        "a test found it. `pytest -k X25` runs the test of a row; other names are of cases of the",
        "[whole list](../kernels/CASES.md).",
        "",
        "- **INT8**: INT8 attention ran, as near to stock attention under the same feature as without it.",
        "- **exact, reported**: the model's own attention ran, bit for bit, and `handle.report()` says so, with a",
        "  [reason](reports.md).",
        "- **error**: before anything is computed; it names what was given and the way out.",
        "",
        "Small models with random weights were run. An outcome is the worst of a row's tests that ran; one",
        f"{OTHER} was found with kernels that are not these. Where none ran on a GPU, the column says why.",
        "",
    ]
    for column in COLUMNS:
        lines += [f"- {column}: {where}" for where in outcomes[column]["where"] or ["not tried yet"]]
    for row in combined:
        if row["id"] in SECTIONS:
            lines += ["", f"## {SECTIONS[row['id']]}", "", "| with | attention | | shown by | CPU | GPU |"]
            lines.append("| --- | --- | --- | --- | --- | --- |")
        shown_by = " ".join(row.get("shown_by") or [row["id"]])
        cells = [row["case"], state(row, outcomes), row["expected"], shown_by]
        cells += [outcome(row, outcomes[column]["cases"]) for column in COLUMNS]
        cells[-1] = row.get("gpu", cells[-1]) if cells[-1] == "–" else cells[-1]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write(rows: list[dict], outcomes: dict[str, dict]) -> Path:
    """Write the page."""
    from sage_processors.files.whole_file import write_whole

    write_whole(PAGE, page(rows, outcomes))
    return PAGE
