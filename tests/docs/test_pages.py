"""The pages as a whole: short where they promise it, links that lead somewhere, no measured number that was typed."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

import sage_kernels
from sage_kernels.results import read_rows
from sage_processors.diffusion.calls import processors
from sage_processors.language import report as language_report
from sage_processors.option_groups import ROTATIONS, SCALINGS
from tests.docs.blocks import FENCE
from tests.support.repository import ROOT
from tests.support.weight_bytes import IN_16_BIT, computed, flux_on_meta


PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "kernels/README.md",
    "kernels/NOTES.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
)
UNLINKED = ("glossary.md", "api.md", "compatibility.md", "index.md")  # made from code, or lists of links
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
MEASURED = re.compile(r"\d[\d.,]*\s?(?:×(?! \d)|dB|ms\b|µs|TFLOPS|TB/s|[GM]iB|tokens/s|%)")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """A page without its code and without what is made from results.csv."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", GENERATED.sub("", read(page))))


def anchors(page: str) -> set[str]:
    """What may stand behind a # in a link to this page: its headings, as GitHub and MkDocs write them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_has_what_a_newcomer_looks_for():
    text = read("README.md")
    assert len([word for word in text.split() if any(map(str.isalnum, word))]) <= 1000  # a table's bars are no words
    for wanted in ("side_by_side.png", "make demo", "make test", "set_attn_processor", "set_attn_implementation"):
        assert wanted in text, wanted
    assert (ROOT / "docs" / "images" / "side_by_side.png").stat().st_size < 300_000


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCE.sub("", read(page))):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        found = ROOT / PurePosixPath(page).parent / path if path else ROOT / page
        assert found.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(found.resolve().relative_to(ROOT))), f"{page}: {link}"


def peaks() -> tuple[float, float]:
    """Peak memory of FLUX at 2048², GiB: of ours less stock's, and stock's."""
    rows = [row for row in read_rows(ROOT / "kernels" / "benchmarks" / "results.csv") if row["suite"] == "picture"]
    rows = [row for row in rows if (row["case"], row["metric"]) == ("flux_2048/computed", "peak_memory")]
    newest = {row["provider"]: float(row["median"]) for row in rows if row["recipe"] in ("", "qk_int8_pv_bf16")}
    return newest["sage_kernels"] - newest["torch_sdpa_default"], newest["torch_sdpa_default"]


def sections(page: str) -> dict[str, str]:
    """{anchor of a heading of the third level: text below it}."""
    parts = re.split(r"^### (.+)$", read(page), flags=re.MULTILINE)
    return {name.lower().replace(" ", "-"): text for name, text in zip(parts[1::2], parts[2::2], strict=True)}


# how the words of the glossary appear on other pages
OUR_WORDS = {
    "preset": r"presets?",
    "recipe": r"recipes?", "scaling": r"scalings?", "plan": r"plan(?:s|ned)?", "centre": r"centred?",
    "balance": r"balanced?", "guard": r"guard", "call-site": r"call sites?", "denoiser": r"denoisers?",
    "step-window": r"step windows?", "fallback": r"fallbacks?|fall(?:s|ing)? back", "short-call": r"short calls?",
    "postponed-result": r"postponed", "replay": r"replay(?:s|ed)?",
}  # fmt: skip


def test_the_glossary_is_short_and_says_where_a_word_matters():
    found = sections("docs/glossary.md")
    assert set(found) == set(OUR_WORDS) and len(read("docs/glossary.md").splitlines()) <= 60
    assert all(LINK.search(text) or word == "call-site" for word, text in found.items())


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith("docs/") and p.split("/")[1] not in UNLINKED])
def test_the_first_use_of_a_word_of_ours_leads_to_the_glossary(page):
    text = re.sub(r"^#.*$|`[^`\n]+`", "", FENCE.sub("", GENERATED.sub("", read(page))), flags=re.MULTILINE)
    text = re.sub(r"\[[^\]]+\]\((?!glossary)[^)]+\)", "", text)  # other links say where they lead
    for word, forms in OUR_WORDS.items():
        used = re.search(rf"(?<!\w)(?:{forms})(?!\w)", text, re.IGNORECASE)
        if used:
            linked = text.find(f"(glossary.md#{word})")
            paragraph = (text + "\n\n").find("\n\n", used.start())
            assert 0 <= linked < paragraph, f"{page}: {text[used.start() - 40 : used.end() + 40]!r}"


def test_files_that_the_recipes_of_contributing_name_are_there():
    """A file of a list is named in full, or from a folder that the same step names."""
    found = sections("CONTRIBUTING.md")
    assert len(found) == 4
    for text in found.values():
        for step in re.split(r"^\d\. ", text.partition("\n## ")[0], flags=re.MULTILINE):
            named = re.findall(r"`([\w./]+(?:\.py|\.md|\.json|/))`", step)
            folders = [ROOT, *(ROOT / name if name.endswith("/") else (ROOT / name).parent for name in named)]
            missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
            assert not missing, missing


TYPED = {  # the few numbers with a unit in prose: where they come from
    ("README.md", "41.3 GiB"): lambda: f"{sum(peaks()):.1f} GiB",
    ("README.md", "23.2 GiB"): lambda: f"{_newest('picture', 'peak_memory', 'flux_1024', 'preset_small')[0]:.1f} GiB",
    ("docs/language.md", "4.4 ms"): lambda: f"{_generated('time', 'b1_4096', 'preset_fast')[0]:.1f} ms",
    ("docs/language.md", "15.9 GiB"): lambda: f"{_generated('peak_memory', 'b1_4096', COMPILED)[0]:.1f} GiB",
    ("docs/guide.md", "512 MiB"): lambda: f"{_row_maxima_limit()} MiB",
    ("docs/skipping.md", "512 MiB"): lambda: f"{_skip_lists_limit()} MiB",
    ("kernels/README.md", "512 MiB"): lambda: f"{_row_maxima_limit()} MiB",
}
COMPILED = "stock_static_compiled"


def _newest(suite: str, metric: str, case: str, way: str, commit: str = "") -> tuple[float, str]:
    """Return the newest row's number and its commit, of a run or of all. way: a recipe, or another's provider."""
    rows = read_rows(ROOT / "kernels" / "benchmarks" / "results.csv")
    rows = [row for row in rows if (row["suite"], row["metric"], row["case"]) == (suite, metric, case)]
    rows = [row for row in rows if way in (row["recipe"], row["provider"]) and commit in ("", row["commit"])]
    return float(rows[-1]["median"]), rows[-1]["commit"]


def _generated(metric: str, case: str, way: str, commit: str = "") -> tuple[float, str]:
    return _newest("generate", metric, f"llama8b_{case}", way, commit)


def test_times_of_text_are_those_of_rows():
    """Each beside what the text names, in the same run."""
    text = " ".join(read("docs/language.md").split())
    fast, commit = _generated("time", "b1_4096", "preset_fast")
    assert f"takes {fast:.1f} ms a token" in text
    assert f"compiled, takes {_generated('time', 'b1_4096', COMPILED, commit)[0]:.1f}." in text
    theirs, commit = _generated("time", "b1_4096", "torchao_int8_weights")
    fast, stock = (_generated("time", "b1_4096", way, commit)[0] for way in ("preset_fast", COMPILED))
    assert f"took {fast:.1f}, stock {stock:.1f} and torchao's INT8 weights {theirs:.1f};" in text
    cases = [("b1_4096", "attention_and_cache", "cache alone took {:.1f} and stock {:.1f}")]
    cases += [("b1_32768", "preset_fast", "tokens it is {:.1f} for {:.1f}")]
    cases += [("b8_8192", "preset_fast", "8,192 tokens {:.1f} for {:.1f}")]
    cases += [("b32_4096", "preset_fast", "32 of 4,096 tokens {:.1f} for {:.1f}")]
    for case, way, words in cases:
        ours, commit = _generated("time", case, way)
        assert words.format(ours, _generated("time", case, COMPILED, commit)[0]) in text
    ways = ("preset_fast", "preset_small", "small_int8_head")
    fast, small, head = (_generated("peak_memory", "b1_4096", way)[0] for way in ways)
    assert f'{fast:.1f} with "fast", {small:.1f} with "small", and {head:.1f} if `lm_head`' in text
    rows = [r for r in read_rows(ROOT / "kernels" / "benchmarks" / "results.csv") if r["suite"] == "linear_few_rows"]
    newest = {r["case"]: float(r["ratio_vs_cudnn"]) for r in rows if r["recipe"] == "linears_int8_weights"}
    few = [x for case, x in newest.items() if case.startswith("llama3_8b") and int(case.rpartition("_")[2]) <= 8]
    text = " ".join(read("docs/linears.md").split())
    assert f"by 1 to 8 rows {min(few):.2f} to {max(few):.2f} times as fast" in text


def _row_maxima_limit() -> int:
    from sage_kernels.planning import row_maxima

    return row_maxima.LIMIT_BYTES >> 20


def _skip_lists_limit() -> int:
    from sage_kernels.planning import skip_lists

    return skip_lists.LIMIT_BYTES >> 20


@pytest.mark.parametrize("page", [page for page in PAGES if page != "kernels/NOTES.md"])
def test_no_measured_number_is_typed(page):
    for number in MEASURED.findall(prose(page)):
        if page == "kernels/README.md" and number.endswith(("%", "dB")):
            continue  # properties of number formats; its table of dB is measured by tests of the rotation
        assert (page, number) in TYPED, f"{page}: {number}: let a table of results.csv say it"
        assert TYPED[page, number]() == number
    assert f"of {peaks()[1]:.1f} for FLUX" in read("README.md")


def test_memory_of_flux_is_as_computed():
    before, after, elements = computed(*flux_on_meta(drop_weights=True))
    _, without, _ = computed(*flux_on_meta(drop_weights=True, layers={**dict.fromkeys(IN_16_BIT, "none")}))
    text = " ".join(read("docs/linears.md").split())
    eight, few = (elements[name] / 1e9 for name in ("int8", "int8_weights"))
    assert f"11.90 billion parameters, {eight:.2f} billion of them in layers in 8 bit, {few:.2f} billion in" in text
    patterns = ", ".join(f'`"{pattern}"`' for pattern in IN_16_BIT)
    for row, size in {
        "bf16": before,
        "`drop_weights=True`": after,
        f"modulation in 16 bit: `layers` with {patterns}": without,
    }.items():
        assert f"| {row} | {size / 1e9:.2f} GB | {size / before:.2f} |" in text, row


def test_every_option_and_reason_is_explained():
    recipes, reports = read("docs/recipes.md"), read("docs/reports.md")
    for name in (*sage_kernels.RECIPES, *SCALINGS):
        assert f"`{name}`" in recipes, name
    assert all(rotation in recipes for rotation in ROTATIONS if rotation != "none")
    reasons = {*processors.EVENTS, *language_report.EVENTS, *language_report.REMEDIES} - {*processors.CALLS}
    for reason in reasons - {language_report.INT8, language_report.INT8_CACHE}:
        assert f"`{reason}`" in reports, reason


def test_what_is_said_to_have_no_row_has_none():
    """Once one of them is timed by our own commands, these sentences go."""
    providers = {row["provider"] for row in read_rows(ROOT / "kernels" / "benchmarks" / "results.csv")}
    timed = [name for name in providers if ("cudnn" in name and "fp8" in name) or name == "torchao_fp8_weights"]
    assert "One has no row: PyTorch has no call for cuDNN's FP8" in " ".join(read("docs/comparison.md").split())
    assert "its FP8 weights have no time" in " ".join(read("docs/language.md").split()) and not timed, timed
