"""Rewrite the tables in pages of the documentation, between markers, from results.csv."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from sage_processors.files.whole_file import write_whole

from .headline import figures_markdown
from .kernel_tables import cold_start, linear_rivals, linears, many_gpus, mixed, models, recipe_errors
from .peer_tables import peer_models, peers, whole_pictures
from .scaling_tables import scaling_front
from .tables import results_markdown


ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "kernels" / "benchmarks" / "results.csv"
PAGES = (
    "README.md", "docs/index.md", "docs/guide.md", "docs/linears.md", "docs/recipes.md", "docs/results.md",
    "docs/comparison.md", "docs/many_gpus.md",
)  # fmt: skip
BEGIN = "<!-- {}:begin -->"  # markers around a section, with its name
END = "<!-- {}:end -->"


def sections(rows: list[dict[str, str]]) -> dict[str, str]:
    """Return {name of a section: its Markdown} for all sections that a page may have."""
    return {
        "figures": figures_markdown(rows),
        "results": results_markdown(rows),
        "peers": peers(rows),
        "peer_models": peer_models(rows),
        "pictures": whole_pictures(rows),
        "linears": linears(rows),
        "linear_rivals": linear_rivals(rows),
        "cold_start": cold_start(rows),
        "mixed": mixed(rows),
        "models": models(rows),
        "many_gpus": many_gpus(rows),
        "recipe_errors": recipe_errors(rows),
        "scaling_front": scaling_front(rows),
    }


def replace_sections(text: str, found: dict[str, str]) -> str:
    """Return `text` with the sections between markers replaced.

    Raises: ValueError if there are no markers, or if a section's markers are not there once each and in order.
    """
    marked = [name for name in found if BEGIN.format(name) in text or END.format(name) in text]
    if not marked:
        raise ValueError(f"text: got no markers, expected {BEGIN} and {END} once each, for one of {list(found)}")
    for name in marked:
        begin, end = BEGIN.format(name), END.format(name)
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"text: expected {begin} and {end} once each, in this order")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{found[name]}\n{end}{after}"
    return text


def update(pages: Iterable[str | Path], results: str | Path) -> bool:
    """Rewrite the sections of these pages. Returns True if any changed.

    Raises: ValueError for a page without markers; nothing is written then.
    """
    from sage_kernels.results import read_rows

    found, texts = sections(read_rows(results)), {}
    for page in map(Path, pages):
        try:
            texts[page] = replace_sections(page.read_text(encoding="utf-8"), found)
        except ValueError as error:
            raise ValueError(f"{page}: {error}") from error
    changed = [path for path in texts if path.read_text(encoding="utf-8") != texts[path]]
    for path in changed:
        write_whole(path, texts[path])
    return bool(changed)


def main(arguments: list[str] | None = None) -> None:
    """Rewrite the pages' tables, as a command. Exits with 2 and a message if a file is missing."""
    parser = argparse.ArgumentParser(description="Rewrite the tables in the pages.")
    parser.add_argument("--page", type=Path, action="append", help="page with markers; may be repeated")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    pages = given.page or [ROOT / name for name in PAGES]
    for path in (given.results, *pages):
        if not path.is_file():
            parser.error(f"{path} does not exist")
    try:
        changed = update(pages, given.results)
    except ValueError as error:
        parser.error(str(error))
    print(f"{', '.join(map(str, pages))}: {'updated' if changed else 'already up to date'}")


if __name__ == "__main__":
    main()
