"""kernels/CASES.md, made from tests/cases.json and the committed outcomes: `python tests/project/case_table.py`.

docs/compatibility.md comes along (compatibility_table.py).

A test names the cases that it shows: test_M03_M04_a_row_that_sees_nothing. conftest's --outcomes writes the worst
outcome of every case's tests to tests/outcomes/*.json. Those of CPUs are not committed: where they are missing, the
CPU column stays as the page has it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any


TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "kernels" / "CASES.md"
TIERS = {"C": "CPU, eager", "I": "CPU, Triton's interpreter", "G": "one GPU", "2G": "two GPUs"}
WORST_FIRST = ("failed", "passed", "skipped")  # a skipped test shows nothing, where another of its case ran
# the column of the table, and the files that fill it, each for the cases that it has
COLUMNS = {
    "CPU": ("cpu", "cpu_newest"),
    "GPU": ("gpu", "gpu_part", "gpu_combinations", "two_gpus", "sanitizer", "gpu_newest"),
}
RENEWED_BY = {
    "cpu": 'make test-all ARGS="--outcomes tests/outcomes/cpu.json"',
    # with the newest PyTorch and Triton of tests/project/versions.py, as far as they could be put there
    "cpu_newest": "pytest -m 'not gpu and not slow and not repeat' --outcomes tests/outcomes/cpu_newest.json",
    "gpu_newest": "pytest -m 'gpu and not two_gpus' --outcomes tests/outcomes/gpu_newest.json",
    "gpu": "make test-gpu",
    # as many as there was a GPU for, beside the last whole run, which may be of earlier sources
    "gpu_part": 'make test-gpu ARGS="--outcomes tests/outcomes/gpu_part.json"',
    "gpu_combinations": "make test-gpu-combinations",
    "two_gpus": 'make test-gpu ARGS="-m two_gpus --outcomes tests/outcomes/two_gpus.json"',
    "sanitizer": "make sanitize",
}
OTHER = "of other sources"  # an outcome of kernels that are not those of this checkout, or of none that is named
GROUPS = {
    "V": "Values",
    "M": "Masks",
    "K": "Causal",
    "S": "Shapes",
    "L": "Layouts and memory",
    "D": "Number formats",
    "N": "8-bit linear layers",
    "E": "Devices and execution",
    "T": "Autograd, compilation, threads",
    "P": "Pipelines and processors",
    "Q": "Scale files and timesteps",
    "C": "KV cache",
    "X": "Combinations with other features",
}


def case_ids(test_name: str) -> list[str]:
    """The cases that a test's name or node id starts with: ["M03", "M04"] of test_x.py::test_M03_M04_zero[cuda]."""
    function = test_name.rpartition("::")[2].partition("[")[0]
    return re.findall(r"[A-Z]\d\d", re.match(r"(test_(?:[A-Z]\d\d(?:_|$))+)?", function)[0])


def worst_by_case(tests: dict[str, str]) -> dict[str, str]:
    """{case: worst outcome} of {node id: outcome}."""
    worst: dict[str, str] = {}
    for name, outcome in tests.items():
        for case in case_ids(name):
            worst[case] = min(outcome, worst.get(case, "skipped"), key=WORST_FIRST.index)
    return dict(sorted(worst.items()))


def cases() -> list[dict]:
    """The rows of cases.json: id, case, expected, tiers, reason (why no test can bear the id; "" if one must).

    Combinations with other features have a state, too: "int8", "exact" or "error"; and, where tests of other cases
    show it, shown_by: the IDs of those.
    """
    return json.loads((TESTS / "cases.json").read_text(encoding="utf-8"))


def read_outcomes(folder: Path = TESTS / "outcomes", sources: str | None = None) -> dict[str, dict]:
    """{column: {"where": what ran there, "cases": {id: outcome}, "other": files of other sources}} of a folder.

    sources: hash of the kernels that outcomes must be of; None: of this checkout's.
    """
    sources = _own_sources() if sources is None else sources
    found = {}
    for column, names in COLUMNS.items():
        found[column] = {"where": [], "cases": {}, "other": []}
        if column == "CPU" and not any(_is_finished(folder / f"{name}.json") for name in names):
            found[column] = _of_page(PAGE.read_text(encoding="utf-8"), sources)
            continue
        for path in (folder / f"{name}.json" for name in names):
            if path.is_file():
                content = json.loads(path.read_text(encoding="utf-8"))
                meta = content["meta"]
                about = f"{meta['gpu']}, torch {meta['torch']}, triton {meta['triton'] or 'not installed'}"
                kernels = str(meta.get("kernel_sources", "unknown"))[:8]
                about += f", {meta['date']}, kernels {kernels}, on commit {meta['commit']} ({path.name})"
                if not meta.get("finished", True):
                    about += ", stopped before its end"
                tried = content["cases"]
                if meta.get("kernel_sources") != sources:
                    about += f", {OTHER}"
                    tried = {case: f"{outcome}, {OTHER}" for case, outcome in tried.items()}
                    found[column]["other"].append(path.name)
                found[column]["where"].append(about)
                for case, outcome in tried.items():
                    known = found[column]["cases"].get(case, OTHER)
                    # the first that is of these sources; what was skipped there shows nothing
                    if known.endswith(OTHER) or known == "skipped":
                        found[column]["cases"][case] = outcome
    return found


def _is_finished(path: Path) -> bool:
    """Whether a run has written its outcomes to the end. One that still runs leaves the page as it is."""
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["meta"].get("finished", True)


def _of_page(text: str, sources: str) -> dict[str, Any]:
    """The CPU column as the committed page has it: whoever makes the pages runs those tests, and commits no file."""
    where = [line.removeprefix("- CPU: ").removesuffix(f", {OTHER}") for line in re.findall("^- CPU: .*$", text, re.M)]
    ran = re.findall(r", kernels (\w{1,8}),", where[0] if where else "")
    mark = "" if ran == [sources[:8]] else f", {OTHER}"
    rows = (re.split(r"(?<!\\) \| ", line.removeprefix("| ")) for line in text.splitlines() if line.startswith("| "))
    cells = {row[0]: row[4].removesuffix(f", {OTHER}") for row in rows if re.fullmatch(r"[A-Z]\d\d", row[0])}
    tried = {case: outcome + mark for case, outcome in cells.items() if outcome != "–"}
    return {"where": [line + mark for line in where], "cases": tried, "other": []}


def _own_sources() -> str:
    from sage_kernels.results import kernel_sources

    return kernel_sources(TESTS.parent / "kernels" / "sage_kernels")


def page(rows: list[dict], outcomes: dict[str, dict]) -> str:
    """The Markdown page."""
    lines = [
        "# Named cases",
        "",
        "Bad inputs and faults, what happens then, and whether it did when last tried. Made by `make cases` from",
        "[tests/cases.json](../tests/cases.json) and [tests/outcomes](../tests/outcomes): not written by hand. A test",
        "that shows a case bears its name: `pytest -k V01`.",
        "",
        f"Tiers: {'; '.join(f'{tier}: {meaning}' for tier, meaning in TIERS.items())}. An outcome is the worst of a",
        f"case's tests; – is one that was not tried; one {OTHER} was found with kernels that are not these, or does",
        "not say with which.",
        "",
    ]
    for column, found in outcomes.items():
        lines += [f"- {column}: {where}" for where in found["where"] or ["not tried yet"]]
    for letter, title in GROUPS.items():
        lines += ["", f"## {title}", "", f"| ID | case | expected | tier | {' | '.join(outcomes)} | note |"]
        lines.append("| --- | --- | --- | --- |" + " --- |" * len(outcomes) + " --- |")
        for row in (row for row in rows if row["id"].startswith(letter)):
            tried = [found["cases"].get(row["id"], "–") for found in outcomes.values()]
            cells = [row["id"], row["case"], row["expected"], " ".join(row["tiers"]), *tried, row["reason"]]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, and say which outcomes are of other sources, and what renews them."""
    from sage_processors.files.whole_file import write_whole
    from tests.project import compatibility_table

    outcomes = read_outcomes()
    write_whole(PAGE, page(cases(), outcomes))
    print(PAGE)
    print(compatibility_table.write(cases(), outcomes))
    for name in (name for found in outcomes.values() for name in found["other"]):
        print(f"tests/outcomes/{name}: {OTHER}; renew it with `{RENEWED_BY[Path(name).stem]}`")


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / "kernels")]  # this checkout's, not an installed one
    main()
