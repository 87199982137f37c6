"""What a report says to people: a verdict first, layers together, at 80 columns; and to machines: every layer."""

from __future__ import annotations

import io
import itertools
import json
import random

import pytest
import torch


pytest.importorskip("rich")
from rich.console import Console

import sage_processors as sp
from sage_processors.diffusion.reports.report import Report
from sage_processors.linears.report import LinearReport
from sage_processors.reporting.layer_names import patterns
from sage_processors.reporting.layer_report import LayerReport
from tests.support.tiny_pipelines import flux_pipe


FLUX = [f"transformer.transformer_blocks.{i}.attn" for i in range(19)]
FLUX += [f"transformer.single_transformer_blocks.{i}.attn" for i in range(38)]
SDXL = [
    f"unet.{block}.attentions.{i}.transformer_blocks.{j}.attn{k}"
    for block, ns, ms in (
        ("down_blocks.1", 2, 2),
        ("down_blocks.2", 2, 10),
        ("up_blocks.0", 3, 10),
        ("mid_block", 1, 10),
    )
    for i, j, k in itertools.product(range(ns), range(ms), (1, 2))
]


def row(name: str, calls: int = 28, fallbacks=None, **more) -> dict:
    values = {"recipe": "qk_int8_pv_bf16", "scaling": "timestep", "rotation": "none", "rotated_calls": 0}
    values |= {"dynamic_calls": 1.0, "bytes_saved": 10**8, "note": ""}
    values |= dict.fromkeys(("clipped_fraction", "below_fraction", "misfit_fraction"), 0.0)
    values |= dict.fromkeys(("v_clipped_fraction", "redone_fraction", "skipped_fraction", "lost_max"), 0.0)
    values |= {"dense": {}}
    return {"layer": name, "status": "active", "calls": calls, "fallbacks": fallbacks or {}} | values | more


def linear(name: str, calls: int = 2, fallbacks=None, **more) -> dict:
    values = {
        "status": "active",
        "format": "int8",
        "compiled_calls": 0,
        "few_row_calls": 0,
        "rel_l2": None,
        "bytes_saved": 0,
        "note": "",
    }
    return {"layer": name, "calls": calls, "fallbacks": fallbacks or {}} | values | more


def printed(report, *, terminal: bool, width: int | None = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    report.print(console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# --- names ---


def test_equal_layers_become_ranges_and_lists():
    assert list(patterns(FLUX)) == [
        "transformer.transformer_blocks.0-18.attn",
        "transformer.single_transformer_blocks.0-37.attn",
    ]
    assert list(patterns([f"b.{i}.{w}" for i in (0, 1, 2, 5, 11) for w in ("to_q", "to_k")])) == [
        "b.0-2,5,11.{to_q,to_k}"
    ]
    assert list(patterns(["b.attn1", "b.attn2"])) == ["b.attn1-2"]
    assert list(patterns(["b.to_q", "b.0.to_q", "b.1.to_q"])) == ["b.to_q", "b.0-1.to_q"]


def test_a_pattern_stands_for_its_names_and_no_others():
    """Of any names: each is in one pattern, and what a pattern says by itself is those names."""
    pieces = random.Random(0)
    for _ in range(300):
        names = {
            ".".join(pieces.choices(("a", "b", "x1", "x2", "x02", "0", "1", "2"), k=pieces.randint(1, 4)))
            for _ in range(9)
        }
        found = patterns(sorted(names))
        assert sorted(itertools.chain(*found.values())) == sorted(names)
        for pattern, covered in found.items():
            assert sorted(spelled(pattern)) == sorted(covered), (pattern, covered)


def spelled(pattern: str) -> list[str]:
    """What a reader makes of a pattern, written independently of it."""
    names = [""]
    for piece in pattern.split("."):
        stem = piece.rstrip("0123456789,-") if not piece.startswith("{") else ""
        body = piece[len(stem) :]
        if piece.startswith("{"):
            words = piece.strip("{}").split(",")
        elif "," in body or "-" in body:
            ends = [part.split("-") for part in body.split(",")]
            words = [f"{stem}{n}" for part in ends for n in range(int(part[0]), int(part[-1]) + 1)]
        else:
            words = [piece]
        names = [f"{name}.{word}".lstrip(".") for name in names for word in words]
    return names


# --- the verdict ---


def test_the_first_line_is_a_verdict():
    report = Report([row("a.0", 20, {"short": 8}), row("a.1", 52)])
    assert report.verdict == "90 % of attention calls in INT8 (72 of 80); 16 bit: short 8"
    assert Report([row("a", 5)]).verdict == "100 % of attention calls in INT8 (5 of 5)"


def test_a_verdict_says_first_that_nothing_ran():
    nothing = Report([row("a", 0, {"short": 3, "window": 1})]).verdict
    assert nothing == "Nothing ran in INT8: 0 of 4 attention calls; 16 bit: short 3, window 1"
    assert Report([row("a", 0)]).verdict == "Nothing ran: no attention calls counted"
    assert LinearReport([linear("a", 0, {"training": 2})]).verdict.startswith(
        "Nothing ran in 8 bit: 0 of 2 linear calls"
    )


def test_a_verdict_does_not_round_to_all_or_none():
    assert Report([row("a", 999, {"short": 1})]).verdict.startswith(
        "over 99 % of attention calls in INT8 (999 of 1000)"
    )
    assert Report([row("a", 1, {"short": 999})]).verdict.startswith("under 1 % of attention calls in INT8 (1 of 1000)")


def test_a_verdict_names_what_is_not_counted_or_not_known():
    idle = row("b", 0, recipe=None, status="not swappable")
    other = row("c", 3, {"replaced": 1}, status="replaced")
    said = Report([row("a", 4), idle, other]).verdict
    assert (
        said == "88 % of attention calls in INT8 (7 of 8); by other processors: 1; not counted: 1 layer not swappable"
    )
    said = LinearReport(
        [linear("a"), linear("b", 0, status="kept", format=None), linear("c", 0, compiled_calls=6)]
    ).verdict
    assert said == "100 % of linear calls in 8 bit (8 of 8); in 16 bit, not counted: 1 layer kept"


# --- the table ---


@pytest.mark.parametrize("names", [FLUX, SDXL], ids=["flux", "sdxl"])
def test_a_report_of_a_large_model_is_short_and_fits_80_columns(names):
    rows = [row(name, 0, {"short": 28, "mask_shape": 1}) if name.endswith("attn2") else row(name) for name in names]
    rows[-1] |= {"status": "replaced", "recipe": None}
    lines = printed(Report(rows), terminal=True)
    assert len(lines) < 40 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(piece in text for name in names for piece in name.split(".")[1:-1] if not piece.isdigit())
    prefix = names[0].partition(".")[0]
    assert f"{prefix}." not in text and text.count(f"layers of {prefix}") == 1


def test_data_for_machines_has_no_number_that_json_can_not_say():
    report = Report([row("a", keep_noise=(0.0, 0.5))], linears=LinearReport([linear("a", rel_l2=float("inf"))]))
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["rows"][0]["keep_noise"] == [0.0, 0.5] and data["linears"]["rows"][0]["rel_l2"] is None


# --- real pipelines ---


def test_a_report_says_the_same_to_a_terminal_and_to_a_pipe_and_keeps_every_layer_for_machines():
    pipe, run = flux_pipe()
    handle = pipe.set_attn_processor(
        sp.SageAttnProcessor(min_tokens=0, linears=sp.Linears("int8", min_features=0), keep=sp.Keep(first_steps=1))
    )
    run(steps=2)
    report = handle.report()
    lines = printed(report, terminal=True)
    assert lines[0].startswith("50 % of attention calls in INT8") and lines[0] == printed(report, terminal=False)[0]
    assert lines[1].startswith("100 % of linear calls in 8 bit") and max(map(len, lines)) <= 80
    assert str(report).splitlines()[0] == report.verdict == lines[0]

    data = json.loads(json.dumps(report.as_dict()))
    assert data["verdict"] == report.verdict and data["calls"] == report.calls
    layers = [name.removesuffix(".processor") for name in pipe.transformer.attn_processors]
    assert [each["layer"] for each in data["rows"]] == [f"transformer.{name}" for name in layers]
    assert len(data["linears"]["rows"]) == sum(isinstance(x, torch.nn.Linear) for x in pipe.transformer.modules())
    assert isinstance(report, LayerReport)
