"""bench_fusions.py switches off what it says, in its own process alone, and its rows say so."""

from __future__ import annotations

import pytest
import torch

from sage_kernels.results import read_rows


pytest.importorskip("diffusers")

ARGUMENTS = ["--tiny", "--device", "cpu", "--rounds", "1", "--reps", "1"]


def ops_of(bench, called: str, name: str) -> set[str]:
    """Our operators that a forward of this variant alone makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        assert bench.main([*ARGUMENTS, "--called", called, "--variant", name]) == 0
    return {event.key.partition("::")[2] for event in seen.key_averages() if event.key.startswith("sage_kernels::")}


def test_rows_of_all_variants(bench, tmp_path):
    assert bench.main([*ARGUMENTS, "--csv", str(tmp_path / "rows.csv")]) == 0
    rows = [row for row in read_rows(tmp_path / "rows.csv") if row["metric"] == "time"]
    assert [row["case"] for row in rows] == [f"flux_1024/tiny/{name}" for name in bench.EAGER]
    assert {row["recipe"] for row in rows} == {"qk_int8_pv_bf16+linears_int8"}


@pytest.mark.parametrize(
    "called, name, makes_heads",
    [
        ("eager", "all_fusions", True), ("eager", "no_heads", False), ("eager", "no_fusions", False),
        *(
            pytest.param("compiled", name, name == "all_fusions", marks=pytest.mark.slow("compiles two blocks"))
            for name in ("all_fusions", "no_heads")
        ),
    ],
)  # fmt: skip
def test_heads_are_made_in_one_pass_only_where_they_should(bench, called, name, makes_heads):
    ops = ops_of(bench, called, name)
    assert ("qk_norm_rope" in ops) == makes_heads
    assert "attention_planned" in ops


@pytest.mark.parametrize("name", ["all_fusions", "no_norms", "no_results", "no_fusions"])
def test_norms_and_results_wait_only_where_they_should(bench, monkeypatch, name):
    from sage_processors.linears.postponed import linear as postponed_linear
    from sage_processors.linears.postponed import norm as postponed_norm

    made = set()

    def noted(what, function):
        def run(*arguments, **options):
            made.add(what)
            return function(*arguments, **options)

        return run

    monkeypatch.setattr(postponed_norm.PostponedNorm, "rows", noted("norms", postponed_norm.PostponedNorm.rows))
    monkeypatch.setattr(postponed_linear, "product", noted("results", postponed_linear.product))
    assert bench.main([*ARGUMENTS, "--variant", name]) == 0
    off = {"no_norms": {"norms"}, "no_results": {"results"}, "no_fusions": {"norms", "results"}}
    assert made == {"norms", "results"} - off.get(name, set())


@pytest.mark.parametrize("name", ["all_fusions", "no_heads"])
def test_a_language_model_turns_its_heads_in_one_pass_only_where_it_should(bench, name):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        assert bench.main([*ARGUMENTS, "--case", "llama8b_prefill_32768", "--variant", name]) == 0
    assert ("sage_kernels::qk_norm_rope" in {event.key for event in seen.key_averages()}) == (name == "all_fusions")


def test_language_models_are_not_compiled_here(bench):
    with pytest.raises(SystemExit):
        bench.main([*ARGUMENTS, "--case", "llama8b_prefill_32768", "--called", "compiled"])


def test_a_variant_of_eager_code_is_not_asked_for_in_compiled_code(bench):
    with pytest.raises(SystemExit):
        bench.main([*ARGUMENTS, "--called", "compiled", "--variant", "no_norms"])


def test_what_was_switched_off_is_on_again(bench):
    places = [(bench.norms.NormState, "_waiting"), (bench.modules, "PostponedLinear"), (bench.rotary, "_postponed")]
    before = [getattr(*place) for place in places]
    with pytest.raises(RuntimeError, match="inside"), bench.without("norms", "results", "heads", "graph"):
        assert all(getattr(*place) is not was for place, was in zip(places, before, strict=True))
        assert torch._inductor.config.pre_grad_custom_pass is None
        raise RuntimeError("inside")
    assert [getattr(*place) for place in places] == before
