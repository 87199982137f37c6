"""Every documented name goes through transformers' own loader, runs, and is what the report says ran."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import sage_kernels
import sage_processors as sp
from sage_processors.language import names
from sage_processors.language import report as language_report
from sage_processors.reporting.event_counter import shared_numbers
from tests.support.language_calls import ANY_LENGTH, forward, tiny
from tests.support.repository import ROOT
from tests.support.tiny_language_models import MODELS


def documented() -> list[str]:
    """The names in the table of docs/language.md, each with its strict twin, as the last line of it says."""
    page = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    table = page[page.index("| name |") :].partition("\n\n")[0]
    found = [name for line in table.splitlines() for name in re.findall(r"`(sage_\w+)`", line.split("|")[1])]
    return [*found, *(f"{name}_strict" for name in found)]


NAMES = documented()
MY_FP8 = sp.register_transformers("my_fp8", recipe="qk_int8_pv_fp8", min_tokens=0)[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(model, inputs, folder of it)."""
    model, inputs = MODELS["llama"]()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, inputs, folder


# names


def test_the_page_lists_what_is_registered():
    assert set(NAMES) == set(sp.register_transformers()) and len(NAMES) == len(set(NAMES))
    assert {names.IMPLEMENTATIONS[name].recipe for name in NAMES} == set(sage_kernels.RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_every_documented_name_is_loaded_runs_and_is_reported(name, llama):
    """transformers looks for its own kernels behind some names: a name that only our registry knows would not do."""
    model, inputs, folder = llama
    model = copy.deepcopy(model)
    model.set_attn_implementation(name)
    loaded = type(model).from_pretrained(folder, attn_implementation=name).eval()
    outputs = [forward(each, inputs) for each in (model, loaded)]
    assert torch.equal(*outputs) and outputs[0].isfinite().all()
    for each in (model, loaded):
        report = sp.attention_report(each)
        assert report.calls == 2 and not report.fallbacks, str(report)
        expected = ("active", name, names.IMPLEMENTATIONS[name].recipe, "per_token")
        for row in report.rows:
            assert (row["status"], row["implementation"], row["recipe"], row["scaling"]) == expected


# reports belong to what ran


def test_a_call_is_listed_by_what_it_ran_as(llama):
    model, inputs = tiny()
    forward(model, inputs)
    model.set_attn_implementation(MY_FP8)
    for run in range(2):
        report = sp.attention_report(model)
        now, before = ([row for row in report.rows if row["status"] == status] for status in ("active", "earlier"))
        assert [(x["implementation"], x["recipe"], x["calls"]) for x in now] == [(MY_FP8, "qk_int8_pv_fp8", run)] * 2
        ran = [(x["implementation"], x["recipe"], x["calls"]) for x in before]
        assert ran == [(ANY_LENGTH, "qk_int8_pv_bf16", 1)] * 2 and report.calls == 2 + 2 * run
        assert f"2 layers earlier: {ANY_LENGTH}, qk_int8_pv_bf16" in str(report)
        assert f"before, by {ANY_LENGTH}: 100 % of attention calls in INT8 (2 of 2)" in report.verdict
        began = "100 % of attention calls in INT8 (2 of 2)" if run else "Nothing ran"
        assert report.verdict.startswith(began), report.verdict
        forward(model, inputs)


@pytest.mark.parametrize("runs", [False, True])
def test_after_a_switch_to_sdpa_the_report_says_so_first(runs):
    model, inputs = tiny()
    forward(model, inputs)
    model.set_attn_implementation("sdpa")
    if runs:
        forward(model, inputs)
    report = sp.attention_report(model)
    said = "Set now: sdpa, whose calls are not counted; before, by sage_any_length: 100 % of attention calls in INT8"
    assert report.verdict == f"{said} (2 of 2)"
    assert [row["status"] for row in report.rows] == ["not selected", "earlier"] * 2
    model.set_attn_implementation(ANY_LENGTH)
    back = sp.attention_report(model)
    assert back.verdict == "100 % of attention calls in INT8 (2 of 2)" and len(back.rows) == 2


def test_exact_calls_and_other_options_of_a_name_are_kept_apart():
    mine = sp.register_transformers("my_changing", min_tokens=0)[0]
    model, inputs = tiny("llama", mine)
    forward(model, inputs)
    sp.register_transformers(mine, recipe="qk_int8_pv_int8", min_tokens=10**6)
    forward(model, inputs)
    rows = [(x["status"], x["recipe"], x["calls"], x["fallbacks"]) for x in sp.attention_report(model).rows[:2]]
    assert rows == [("active", "qk_int8_pv_int8", 0, {"short": 1}), ("earlier", "qk_int8_pv_bf16", 1, {})]


@pytest.mark.slow("compiles a model")
def test_compiled_calls_after_a_switch_are_counted_under_the_new_name():
    model, inputs = tiny()
    sp.attention_report(model)
    unnamed = sum(map(sum, shared_numbers(language_report.SHARED_COUNTER).values()))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    forward(compiled, inputs)
    model.set_attn_implementation(MY_FP8)
    forward(compiled, inputs)
    rows = [(row["implementation"], row["calls"]) for row in sp.attention_report(model).rows]
    assert rows == [(MY_FP8, 1), (ANY_LENGTH, 1)] * 2
    assert sum(map(sum, shared_numbers(language_report.SHARED_COUNTER).values())) == unnamed
