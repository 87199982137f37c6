"""The language examples run as they stand, on the embedded model and on a folder, small and offline."""

from __future__ import annotations

import builtins
import re
import runpy
import shutil
import sys

import pytest
import torch


pytest.importorskip("transformers")

import sage_processors as sp
from sage_processors.evaluation import language
from sage_processors.language.report import SHARED_COUNTER
from sage_processors.reporting.event_counter import zero_shared
from tests.support.repository import ROOT


EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def run(example: str, *arguments) -> str:
        monkeypatch.setattr(sys, "argv", [example, *map(str, arguments)])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        zero_shared(SHARED_COUNTER)  # as in a process of its own
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def loaded(monkeypatch):
    """Models that an example loaded."""
    models, load = [], language.load

    def remember(*args, **kwargs):
        models.append(load(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(language, "load", remember)
    return models


@pytest.fixture(scope="module")
def int8_share():
    config = language.load()[0].config
    return f"{(config.head_dim + 2) / (2 * config.head_dim):.3f}"  # codes and a 2-byte scale against 2-byte numbers


def test_chat_answers_and_weighs_the_cache(run, int8_share, loaded):
    output = run("chat.py", "Which day comes after Monday?", "--new-tokens", 20)
    assert "<|" not in output and output.count("comes after") == 1  # streamed without the prompt or special tokens
    speed = re.search(r"\[(\d+) tokens, ([\d.]+) tokens/s .*; KV cache \d+ bytes a token, ([\d.]+) of bf16\]", output)
    assert 1 <= int(speed[1]) <= 20 and float(speed[2]) > 0 and speed[3] == int8_share
    ((model, _),) = loaded
    report = sp.attention_report(model)
    assert report.calls > 0 and report.fallbacks == {}, str(report)


def test_chat_goes_on_until_an_empty_line_and_keeps_the_conversation(run, monkeypatch):
    questions = iter(["Hello!", "Thank you.", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(questions))
    output = run("chat.py", "--new-tokens", 8, "--model", language.EMBEDDED)
    first, second = (int(n) for n in re.findall(r"prompt's (\d+) read", output))
    assert second > first + 4 and next(questions, None) is None


def test_long_prefill_times_both_and_reports_what_ran(run, int8_share):
    output = run("long_prefill.py", "--tokens", 130, "--min-tokens", 2)
    stock, ours = re.findall(r"130 tokens: [\d.]+ ms; KV cache (\d+) bytes a token, ([\d.]+) of bf16", output)
    assert stock[1] == "2.000" and ours[1] == int8_share and int(ours[0]) < int(stock[0])
    assert "active" in output and "short" not in output
    assert "100 % of attention calls in INT8" in output


def test_long_prefill_takes_a_config_alone(run, tmp_path):
    shutil.copy(language.EMBEDDED / "config.json", tmp_path)
    output = run("long_prefill.py", "--model", tmp_path, "--random", "--tokens", 600)
    assert "sage_long_prefill, 600 tokens" in output and "short" not in output
