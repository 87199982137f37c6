"""Write the page of a rating: verdict, tables, and pictures side by side, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...files.whole_file import write_whole
from .. import quality


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
.verdict { font-size: 1.2rem; border-left: .3rem solid #0072b2; padding-left: .8rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; }
th:first-child, td:first-child, tr :last-child:nth-child(2) { text-align: left; }
.pictures { display: grid; grid-template-columns: repeat(3, 1fr); gap: .6rem; }
figure { margin: 0; }
img { width: 100%; height: auto; display: block; }
h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; overflow-wrap: anywhere; }
figcaption, .small { font-size: .85rem; overflow-wrap: anywhere; }
"""
TITLES = {
    "psnr_db": "PSNR, dB", "ssim": "SSIM", "lpips": "LPIPS (less is nearer)", "flicker": "flicker (less is nearer)",
    "clip": "CLIP score", "legibility": "writing that OCR reads",
    "loss": "nats per token", "kl": "KL to the reference, nats per token", "identical": "greedy texts as stock's",
    "distance": "1 - cosine to the reference",
}  # fmt: skip


def write_page(state: dict[str, Any], path: Path) -> None:
    """Write the page of `rating.rate` or `rating_language.rate_texts` beside its pictures."""
    settings, summary = state["settings"], state["summary"]
    named = {"int8": "INT8"} | ({"reference": "stock"} if settings.get("reference") == "stock" else {})
    names = [key for key in TITLES if any(key in found for found in summary["means"].values())]
    shown = [row for row in state["rows"] if "pictures" in row]
    title = escape(f"{Path(settings['model']).name or settings['model']}: INT8 beside stock")
    head = ["drawn with" if shown else "run with", *(TITLES[key] for key in names)]
    lines = [
        [named.get(way, way), *(_cell(found.get(key), key) for key in names)]
        for way, found in summary["means"].items()
    ]
    apart = ["INT8 minus the noise floor", *(_cell(summary["ours_minus_floor"].get(key)) for key in names)]
    cap = f" Identical pictures count as {quality.PSNR_CEILING:.0f} dB." if "psnr_db" in names else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in state["notes"])
    listed = ((key, value) for key, value in settings.items() if key not in ("prompts", "seeds"))
    about = [[key, str(value)] for key, value in listed]
    body = [
        f"<h1>{title}</h1>",
        f'<p class="verdict">{escape(state["verdict"])}</p>',
        _table(head, [*lines, apart]),
        f'<p class="small">Means with 95 % intervals, by bootstrap. The noise floor is another exact kernel.{cap}</p>',
        f"<ul>{notes}</ul>" if notes else "",
        *(_row(row, named) for row in sorted(shown, key=lambda row: row["metrics"]["int8"].get("psnr_db", 0))),
        "<h2>How it was made</h2>",
        _table(["setting", "value"], about),
    ]
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )
    write_whole(path, html.encode())


def _cell(value: Sequence[float] | None, key: str = "") -> str:
    """Return a mean with its interval. key: of the metric."""
    if value is None:
        return "–"
    mean, low, high = (f"{number:.4g}" for number in value)
    return said if (said := _number(value[0], key)) != mean else f"{mean} [{low}, {high}]"


def _number(value: float, key: str) -> str:
    """Return a metric's value in words. key: of the metric."""
    return quality.decibels(value) if key == "psnr_db" and value >= quality.PSNR_CEILING else f"{value:.4g}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    def cells(kind: str, line: list[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(text)}</{kind}>" for text in line) + "</tr>"

    rows = "".join(cells("td", line) for line in lines)
    return (
        f'<div class="wide" tabindex="0"><table><thead>{cells("th", head)}</thead><tbody>{rows}</tbody></table></div>'
    )


def _row(row: dict[str, Any], named: dict[str, str]) -> str:
    """Return one prompt with its pictures and numbers. named: {way: its name on the page}."""
    numbers = "; ".join(f"{TITLES[key]}: {_number(value, key)}" for key, value in row["metrics"]["int8"].items())
    category = f"{row['category']}: " if row["category"] else ""
    alt = "{}: " + row["prompt"].replace("{", "(").replace("}", ")")
    figures = "".join(
        f'<figure><img src="{escape(file)}" alt="{escape(alt.format(way))}" loading="lazy">'
        f"<figcaption>{escape(way)}</figcaption></figure>"
        for way, file in ((named.get(way, way), file) for way, file in row["pictures"].items())
    )
    return (
        f"<h2>{escape(category + row['prompt'])}</h2>"
        f'<p class="small">seed {row["seed"]}; {escape(numbers)}</p><div class="pictures">{figures}</div>'
    )
