"""The benchmark of whole models, at sizes for a CPU: its cases are the published models, its gates close."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import sage_kernels
import sage_processors as sp
from sage_kernels.results import read_rows
from tests.support.repository import ROOT, fresh


pytest.importorskip("diffusers")
pytest.importorskip("transformers")

BENCHMARKS = ROOT / "kernels" / "benchmarks"
CPU = torch.device("cpu")
# of the published checkpoints, by the headers of their files
PARAMETERS = {
    "wan21_1_3b_480p81": 1_418_996_800,
    "flux_1024": 11_901_408_320,
    "sdxl_1024": 2_567_463_684,
    "llama8b_prefill_512": 8_030_261_248,
}


# a denoiser and a language model
SEVERAL = [
    name
    if name in ("flux_1024", "llama8b_prefill_512")
    else pytest.param(name, marks=pytest.mark.slow("as the others"))
    for name in PARAMETERS
]


@pytest.fixture(scope="module")
def cases(bench):
    from model_cases import CASES

    return CASES


@pytest.fixture
def small(bench, cases):
    """small(name): Bench of a tiny case."""

    def make(name, min_tokens=None, reps=1, together=1):
        case = cases[name].tiny()
        model = bench.make_model(case, CPU, torch.bfloat16)
        options = {"recipe": sage_kernels.DEFAULT_RECIPE, "min_tokens": min_tokens, "reps": reps}
        options["together"] = together
        return bench.Bench(case, model, CPU, torch.bfloat16, **options)

    return make


TINY = ["--tiny", "--device", "cpu"]


@pytest.fixture
def rows_of(bench, tmp_path):
    """rows_of(*options): the rows that a run of tiny cases writes."""

    def run(*options):
        path = tmp_path / "rows.csv"
        assert bench.main([*TINY, *options, "--csv", str(path)]) == 0
        return read_rows(path)

    return run


@pytest.fixture
def numbered(monkeypatch):
    """numbered(one): the list that grows by the times of each of its measurements, which are other numbers each time;
    the output of measurement `fails_at` is wrong."""

    def make(one, fails_at=None):
        times, measure = [], one.measure

        def watched(*arguments):
            result = measure(*arguments)
            if len(times) == fails_at:
                result = result._replace(output=torch.zeros_like(result.output))
            times.append([100.0 * len(times) + i for i in range(2)])
            return result._replace(times=times[-1])

        monkeypatch.setattr(one, "measure", watched)
        return times

    return make


def medians(rows):
    """Of the times, by provider."""
    return {row["provider"]: float(row["median"]) for row in rows if row["metric"] == "time"}


@pytest.mark.slow("a process that makes them all")
def test_models_are_the_published_ones():
    """In a process of its own: here torch.empty fills what it makes, and these models would fill the machine."""
    code = f"""
        from model_cases import CASES, parameters_on_meta
        with parameters_on_meta():
            for name in {list(PARAMETERS)}:
                model = CASES[name].build()
                assert all(p.is_meta for p in model.parameters())
                print(name, sum(p.numel() for p in model.parameters()))
        """
    printed = fresh(code, path=(ROOT, ROOT / "kernels", BENCHMARKS)).split()
    assert dict(zip(printed[::2], map(int, printed[1::2]), strict=True)) == PARAMETERS


@pytest.mark.parametrize("name", SEVERAL)
def test_rows_of_a_case(name, bench, rows_of, capsys):
    rows = rows_of("--case", name)
    assert {row["suite"] for row in rows} == {"end_to_end"} and {row["case"] for row in rows} == {f"{name}/tiny"}
    stock = ["torch_sdpa_cudnn"] + ["torch_sdpa_flash"] * name.startswith("llama")
    times = [row for row in rows if row["metric"] == "time"]
    assert [row["provider"] for row in times] == [*stock, "attention_removed", "sage_kernels"]
    for row in times:
        assert row["unit"] == "ms" and float(row["p20"]) <= float(row["median"]) <= float(row["p80"])
        ratio = float(times[0]["median"]) / float(row["median"])
        assert float(row["ratio_vs_cudnn"]) == pytest.approx(ratio, abs=2e-3, rel=2e-3)
        assert (row["recipe"] != "") == (row["includes_quantization"] == "True") == (row["provider"] == "sage_kernels")
    [calls] = [row for row in rows if row["metric"] == "int8_calls"]
    assert calls["provider"] == "sage_kernels" and float(calls["median"]) > 0
    [error] = [row for row in rows if row["metric"] == "rel_l1"]
    assert error["provider"] == "sage_kernels" and 0 < float(error["median"]) <= bench.MAX_ERROR
    printed = capsys.readouterr().out
    assert all(provider in printed for provider in stock) and "exact {}" in printed


def test_a_preset_is_timed_as_apply_runs_it(bench, rows_of, monkeypatch):
    """With a rotation, behind a run on random tokens, and with prompts in 16 bit behind gated activations."""
    applied, reports, check = [], [], bench.Bench.check_report
    apply = sp.apply
    monkeypatch.setattr(sp, "apply", lambda model, options: applied.append(options) or apply(model, options))
    monkeypatch.setattr(bench.Bench, "check_report", lambda *a: reports.append(a[1]) or check(*a))
    rows = rows_of("--case", "llama8b_prefill_512", "--fast", "--min-features", "1")
    ours = {row["metric"]: row for row in rows if row["provider"] == "sage_kernels"}
    assert {row["recipe"] for row in ours.values()} == {"preset_fast"} and "time" in ours
    assert [(x.preset, x.linears) for x in applied] == [("fast", sp.Linears("int8", min_features=1))]
    [report] = reports
    assert {row["numbers"] for row in report.rows if row["calls"]} == {"qk_int8_pv_bf16, per_token, hadamard"}
    calls = {row["layer"].rpartition(".")[2]: row["calls"] for row in report.linears.rows if row["format"]}
    assert calls.pop("down_proj") == 0 and set(calls.values()) == {2}
    assert float(ours["int8_calls"]["median"]) == report.calls + report.linears.calls


def test_a_preset_is_for_language_models_and_sets_formats_by_itself(bench, capsys):
    from end_to_end_options import chosen_cases, parse

    assert {case.is_denoiser for case in chosen_cases(parse("", ["--fast"]))} == {False}
    for more in (["--linears", "int8"], ["--recipe", "qk_int8_pv_fp8"]):
        with pytest.raises(SystemExit):
            parse("", ["--fast", *more])
        assert "--fast: sets --linears and --recipe by itself" in capsys.readouterr().err


def test_layers_by_hand_are_in_8_bit_behind_gates_too_and_counted(bench, small):
    one = small("llama8b_prefill_512")
    one.linears, one.min_features = "int8", 1
    with torch.no_grad():
        one.ours_language()
    layers = one.case.config["num_hidden_layers"]
    assert one.int8_calls == 2 * layers * (1 + 7) and one.model.config._attn_implementation == "sdpa"
    assert sp.attention_report(one.model).linears is None


def test_k_and_v_are_made_for_a_removed_attention_too(bench):
    """A compiler leaves out what nobody reads; the forward would be faster by more than attention."""
    products = []

    def count(graph, _):
        products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return graph

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))

        def forward(self, x):
            q, k, v = (make(x).unflatten(-1, (2, 8)).transpose(0, 1) for make in (self.q, self.k, self.v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    model, x = Attention(), torch.randn(6, 16)
    with torch.no_grad(), bench.attention_removed():
        out = torch.compile(model, backend=aot_autograd(fw_compiler=count), fullgraph=True)(x)
        torch.testing.assert_close(out, model(x))
    assert products == [3]


def test_compiled_blocks_are_timed_and_forgotten(bench, rows_of, monkeypatch):
    """Language models are left out; what was compiled for one provider is not the next one's."""
    monkeypatch.setattr(bench, "COMPILER", "aot_eager")  # no C++ compiler needed
    calls, compile_blocks = [], bench.compiled_blocks

    def watched(model, **options):
        assert not any(module._compiled_call_impl for module in model.modules())
        calls.append(model)
        return compile_blocks(model, **options)

    monkeypatch.setattr(bench, "compiled_blocks", watched)
    rows = rows_of("--case", "wan21_1_3b_480p81", "--case", "llama8b_prefill_512", "--called", "compiled")
    assert {row["case"] for row in rows} == {"wan21_1_3b_480p81/compiled/tiny"} and len(calls) == 3
    assert not any(module._compiled_call_impl for module in calls[-1].modules())
    [error] = [row for row in rows if row["metric"] == "rel_l1"]
    assert 0 < float(error["median"]) <= bench.MAX_ERROR
    for called in ("cuda_graph", "captured", "compiled_graphs"):
        with pytest.raises(SystemExit):
            bench.main([*TINY, "--called", called])


def test_forwards_that_are_timed_together(bench, small, rows_of, monkeypatch):
    """The GPU is waited for once, the steps go on, and the time is that of one forward."""
    one, events = small("flux_1024", reps=2, together=3), []
    step_of, forward = one.inputs, one._forward
    monkeypatch.setattr(one, "inputs", lambda step: step_of(step) | {"step": step})
    monkeypatch.setattr(one, "_forward", lambda given: events.append(given.pop("step")) or forward(given))
    monkeypatch.setattr(one, "wait", lambda: events.append("wait"))
    monkeypatch.setattr(one.host, "timed", lambda run: (30.0, True, run()))
    measured = one.measure(1)
    assert events == [4, "wait", "wait", 5, 6, 7, "wait", "wait", 8, 9, 10, "wait"] and measured.times == [10.0, 10.0]
    rows = rows_of("--case", "flux_1024", "--together", "2")
    assert {row["case"] for row in rows} == {"flux_1024/together2/tiny"}
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--together", "0"])


@pytest.mark.parametrize("fails_at", [None, 5])
def test_rounds_are_one_row_and_none_where_one_of_them_fails(fails_at, bench, small, tmp_path, numbered):
    one, path = small("flux_1024", reps=2), tmp_path / "rows.csv"
    one.rounds, measured = 2, numbered(one, fails_at)
    with torch.no_grad():
        assert len(bench.run_case(one, path)) == (fails_at is not None)
    wanted = {"torch_sdpa_cudnn": 300.5, "attention_removed": 250.5, "sage_kernels": 350.5}
    if fails_at is not None:  # in its second turn
        del wanted["sage_kernels"]
    assert len(measured) == 7 and medians(read_rows(path)) == wanted


@pytest.mark.parametrize("name", SEVERAL)
def test_the_case_knows_its_largest_attention(name, small, bench, monkeypatch):
    """Sizes and number of the calls are those that reach the op."""
    warm_up = bench.WARM_UP
    bench, seen = small(name), []
    op = sage_kernels.sage_attention

    def recording(q, k, v, **options):
        seen.append((q.shape, k.shape, bool(options["causal"])))
        return op(q, k, v, **options)

    monkeypatch.setattr(sage_kernels, "sage_attention", recording)
    with torch.no_grad():
        (bench.ours_denoiser if bench.case.is_denoiser else bench.ours_language)()
    sizes = bench.case.attention()
    largest = max(seen, key=lambda call: call[0][1] * call[1][1])
    q = (sizes["batch"], sizes["seq_q"], sizes["heads"], sizes["head_dim"])
    k = (sizes["batch"], sizes["seq_kv"], sizes["kv_heads"], sizes["head_dim"])
    assert largest == (q, k, sizes["causal"])
    forwards = 1 + (warm_up if bench.case.is_denoiser else 1)
    assert seen.count(largest) == forwards * bench.case.int8_calls()


def test_timestep_scaling_runs_on_plans(small):
    """Warmed up, a denoiser's timed forward is not the first step of a run."""
    bench = small("flux_1024")
    with torch.no_grad(), sp.apply(bench.model, sp.SageAttnProcessor()) as handle:
        bench.measure(3)
        report = handle.report()
    assert [row["calls"] for row in report.rows] == [4, 4]
    assert [row["dynamic_calls"] for row in report.rows] == [1, 1]


def test_nothing_is_written_for_layers_that_ran_exact_for_no_good_reason(small, bench, tmp_path):
    path = tmp_path / "rows.csv"
    for name in ("flux_1024", "llama8b_prefill_512"):
        one = small(name)
        one.model.train()
        with torch.no_grad():
            [failure] = bench.run_case(one, path)
        assert "sage_kernels" in failure and "training" in failure
    assert not [row for row in read_rows(path) if row["provider"] == "sage_kernels"]


def test_Q41_short_calls_are_meant_to_be_exact_and_have_no_ratio(small, bench, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    for name in ("flux_1024", "llama8b_prefill_512"):
        with torch.no_grad():
            assert bench.run_case(small(name, min_tokens=10_000), path) == []
    ours = [row for row in read_rows(path) if row["provider"] == "sage_kernels"]
    of = {name: [row for row in ours if row["metric"] == name] for name in ("rel_l1", "int8_calls", "time")}
    assert [float(row["median"]) for row in of["rel_l1"]] == [0, 0] == [float(x["median"]) for x in of["int8_calls"]]
    assert [row["ratio_vs_cudnn"] for row in of["time"]] == ["", ""]
    assert capsys.readouterr().out.count(" ms  no call ran in INT8") == 2


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of which a tiny model has some."""
    from sage_kernels.ops import skip_state

    monkeypatch.setattr(skip_state, "REFERENCE_BLOCK", (8, 8))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "called", ["eager", pytest.param("compiled", marks=pytest.mark.slow("compiled blocks of dense models are quick"))]
)
@pytest.mark.parametrize("recipe", [sage_kernels.DEFAULT_RECIPE, "qk_int8_pv_fp8"])
def test_rows_of_a_model_that_leaves_out_tiles(called, recipe, bench, rows_of, monkeypatch, capsys):
    """Its output is that of exact attention to the same tiles; the name and the metric say so."""
    monkeypatch.setattr(bench, "COMPILER", "aot_eager")
    cases = ("--case", "wan21_1_3b_480p81", "--case", "llama8b_prefill_512")
    rows = rows_of(*cases, "--skip", "50", "--recipe", recipe, "--called", called)
    name = "wan21_1_3b_480p81/compiled/skip50/tiny" if called == "compiled" else "wan21_1_3b_480p81/skip50/tiny"
    assert {row["case"] for row in rows} == {name}
    [error] = [row for row in rows if row["metric"].startswith("rel_l1")]
    assert error["metric"] == "rel_l1_same_tiles" and 0 < float(error["median"]) <= bench.MAX_ERROR
    assert "of exact attention to the same tiles" in capsys.readouterr().out
    [ours] = [row for row in rows if row["provider"] == "sage_kernels" and row["metric"] == "time"]
    assert ours["recipe"] == recipe and ours["ratio_vs_cudnn"]


@pytest.mark.usefixtures("small_tiles")
def test_a_model_that_leaves_out_tiles_is_not_gated_by_what_it_does_not_do(small, bench, tmp_path, monkeypatch):
    """Dense attention fails where half of the tiles should be left out, and so do lists that nobody read."""
    one, dense = small("flux_1024"), small("flux_1024")
    listed = bench.Bench(one.case, one.model, CPU, torch.bfloat16, recipe=one.recipe, min_tokens=None, reps=1, skip=50)
    with torch.no_grad():
        stock = dense.stock("torch_sdpa_cudnn").output
        expected = listed.expected(stock)
        ours = listed.ours_denoiser().output
        bench.check_output(ours, expected)
        with pytest.raises(bench.Gated, match="relative L1"):
            bench.check_output(dense.ours_denoiser().output, expected)
        monkeypatch.setattr(bench, "give_lists", lambda *_: None)
        [failure] = bench.run_case(listed, tmp_path / "rows.csv")
    assert "0 layers left out tiles" in failure
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--skip", "100"])
