"""Fenced code blocks of the pages that users read."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.repository import ROOT


PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "kernels/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    *(
        str(path.relative_to(ROOT))
        for home in ("sage_processors", "demo")
        for path in ROOT.glob(f"{home}/**/README.md")
    ),
)
FENCE = re.compile(r"^```([\w+-]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block: where it stands, its language ("" for none), its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks of these languages, of all pages."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            found.append(Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return [block for block in found if block.language in languages]
