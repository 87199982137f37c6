"""MkDocs hook: pages outside of docs/ are part of the site, and links are those that work in the repository.

A file of the repository has the same place in the site, but that docs/ is the site's root: `kernels/README.md` is
`kernels/README.md`, `docs/guide.md` is `guide.md`. So a link between files of the repository becomes one between pages
of the site; what is no page (a table, a notebook, a source file) is copied beside them. A folder has no page: its link
becomes its text. README.md is `overview.md`, as the site's root has a page of its own.
"""

from __future__ import annotations

import os
import re
from html import escape, unescape
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File


ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "kernels/README.md",
    "kernels/NOTES.md",
    "kernels/CASES.md",
)
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<link>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
TAG = re.compile(r"(<[^>]+>)")
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
    """Where a file of the repository is in the site."""
    return "overview.md" if path == "README.md" else path.removeprefix("docs/")


def target(source: str, link: str) -> str:
    """The file of the repository that a link of another one means."""
    return os.path.normpath(PurePosixPath(source).parent / link).replace(os.sep, "/")


def links(source: str) -> set[str]:
    """Files and folders of the repository that a page links to."""
    text = FENCE.sub("", (ROOT / source).read_text(encoding="utf-8"))
    return {target(source, match["link"]) for match in LINK.finditer(text)}


def on_files(files, config):
    """Add the pages, and what pages link to."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    linked = set().union(*(links(page) for page in (*pages, *PAGES)))
    for path in sorted({*PAGES, *(name for name in linked if not name.startswith("docs/"))}):
        if (ROOT / path).is_file():
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_content(html, page, config, files):
    """Every cell of a table knows its column's heading: on a phone a row is shown as a card."""
    return TABLE.sub(lambda match: _labelled(match[0]), html)


def _labelled(table):
    heads = [unescape(TAG.sub("", head)).strip() for head in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]

    def row(match):
        number = iter(range(len(heads)))
        label = lambda cell: f'<td data-label="{escape(heads[next(number)])}"{cell[1]}>'  # noqa: E731
        return re.sub(r"<td([^>]*)>", label, match[0])

    parts = TAG.split(re.sub(r"<tr>.*?</tr>", row, table, flags=re.DOTALL))
    # odd parts are tags; long names break behind an underscore, so that numbers need not break at all
    return "".join(part if i % 2 else re.sub(r"(?<=\w)_(?=\w)", "_<wbr>", part) for i, part in enumerate(parts))


def on_page_markdown(markdown, page, config, files):
    """Links from where the page is in the site."""
    uri = page.file.src_uri
    source = next((path for path in PAGES if place(path) == uri), f"docs/{uri}")

    def moved(match):
        path = target(source, match["link"])
        if (ROOT / path).is_dir():
            return match["text"]
        link = os.path.relpath(place(path), PurePosixPath(uri).parent).replace(os.sep, "/")
        return f"[{match['text']}]({link}{match['anchor'] or ''})"

    parts = FENCE.split(markdown)  # odd ones are code
    return "".join(part if i % 2 else LINK.sub(moved, part) for i, part in enumerate(parts))
