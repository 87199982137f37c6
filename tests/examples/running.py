"""Running an example as it stands, in this process, without a GPU and without a network."""

from __future__ import annotations

import re
import runpy
import sys

import torch

from tests.support.repository import ROOT


EXAMPLES = ROOT / "examples"
PATTERNS = sorted(
    path.stem
    for path in EXAMPLES.glob("*.py")
    if not path.stem.startswith(("train_", "tiny_", "small_")) and path.stem != "command_line"
)
IDENTICAL_DB = 150  # fp32 pictures that differ at all are below this: one last bit of one pixel in 50,000 is 190


def run(example: str, monkeypatch, *arguments) -> None:
    """`python examples/EXAMPLE.py ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", [f"{example}.py", *map(str, arguments)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")


def int8_calls(output: str) -> int:
    """Of the report's verdict."""
    found = re.search(r"% of attention calls in INT8 \((\d+) of \d+\)", output)
    assert found, output
    return int(found[1])


def psnr(output: str) -> list[float]:
    """Of every comparison with stock attention, dB."""
    return [float(number) for number in re.findall(r"PSNR ([\d.]+) dB", output)]
