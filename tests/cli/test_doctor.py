"""The doctor: passes what is right, fails what is wrong, and needs nothing but torch."""

from __future__ import annotations

import json
import math
import os
import stat

import pytest
import torch
from typer.testing import CliRunner

import sage_kernels
from sage_kernels.facts.recipe import BASES
from sage_processors.cli import doctor, self_test
from sage_processors.cli import main as cli
from tests.support.recording_driver import run


CPU = torch.device("cpu")


def invoke(*arguments, code=0) -> str:
    result = CliRunner().invoke(cli.app, ["doctor", "--device", "cpu", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def few(monkeypatch, *names):
    monkeypatch.setattr(self_test, "CASES", tuple(case for case in self_test.CASES if case.name in names))


@pytest.mark.slow("all recipes; a wrong kernel fails in the quick ones")
def test_doctor_tests_every_recipe_scaling_and_case():
    outcomes = self_test.self_test(CPU)
    assert all(outcome.passed for outcome in outcomes), outcomes
    done = {(outcome.recipe, outcome.scaling, outcome.case) for outcome in outcomes}
    scalings = {r.name: r.scalings if r.plain else (*r.scalings, "timestep") for r in sage_kernels.RECIPES.values()}
    assert {len(x) for x in scalings.values()} == {1, 4}
    plain = {(r, s, c.name) for r in scalings for s in scalings[r] for c in self_test.CASES}
    mixed = {("mixed", base, c.name) for base in BASES for c in self_test.CASES if not c.mask and not c.same_values}
    assert done == plain | mixed
    assert any(case.mask == "bool" for case in self_test.CASES) and any(case.causal for case in self_test.CASES)
    assert any(case.mask == "bias" for case in self_test.CASES)


def test_the_threshold_is_the_theory_of_rounding_less_a_factor_of_two():
    """The theory itself is right to a decibel: scales of whole heads and of tokens, whatever the head dim."""
    for head_dim in (32, 64, 128):
        q, k, v = self_test.make_qkv("biased_keys", 1, 512, 512, 2, 2, head_dim, dtype=torch.bfloat16)
        exact = self_test._exact(q, k, v, None)
        for scaling in ("per_head", "per_token"):
            out = sage_kernels.sage_attention(q, k, v, scaling=scaling)
            got = -20 * math.log10(self_test.relative_l2(out, exact).item())
            theory = self_test.least_sqnr_db(q, k, scaling) + 20 * math.log10(2)
            assert theory - 0.5 < got < theory + 2, (head_dim, scaling)


def _ignoring(*names):
    def broken(*args, **kwargs):
        return sage_kernels.sage_attention(*args, **{k: v for k, v in kwargs.items() if k not in names})

    return broken


def _one_head_off(*args, **kwargs):
    out = sage_kernels.sage_attention(*args, **kwargs)
    out[:, :, -1] *= 1.05
    return out


def _coarser(q, *args, **kwargs):
    """A kernel that loses two of the eight bits of Q."""
    step = q.float().abs().amax(-1, keepdim=True) / 31
    return sage_kernels.sage_attention(((q / step).round() * step).to(q), *args, **kwargs)


def _cut_off(q, k, v, **kwargs):
    """FP8 matrix units that keep all keys in one sum: what an H200's did, 5 % short at 4,096 keys."""
    out = sage_kernels.sage_attention(q, k, v, **kwargs)
    return out * (1 - 0.0125 * k.shape[1] / 1024) if kwargs["recipe"] == sage_kernels.facts.recipe.FP8_RECIPE else out


def _nan(*args, **kwargs):
    return sage_kernels.sage_attention(*args, **kwargs) * math.nan


def _crash(*args, **kwargs):
    raise RuntimeError("illegal instruction\nand more")


BROKEN = {
    "mask": (_ignoring("attn_mask"), {"padding mask", "additive bias"}),
    "causal": (_ignoring("causal"), {"causal"}),
    "smoothing": (lambda *a, **k: sage_kernels.sage_attention(*a, **k, smooth_k=False), None),
    "head": (_one_head_off, {case.name for case in self_test.CASES}),
    "bits": (_coarser, {case.name for case in self_test.CASES if not case.same_values}),
    "sums": (_cut_off, {case.name for case in self_test.CASES if case.same_values}),
    "nan": (_nan, {case.name for case in self_test.CASES}),
    "crash": (_crash, {case.name for case in self_test.CASES}),
    "unplanned": (_ignoring("state"), {case.name for case in self_test.CASES}),
}


@pytest.fixture(scope="module")
def once():
    """once(function, key): the same, called once for each key of its arguments."""
    made = {}

    def of(function, key):
        def known(*args, **kwargs):
            place = function, key(*args, **kwargs)
            if place not in made:
                made[place] = function(*args, **kwargs), args  # which live on: they are known by their ids
            return made[place][0]

        return known

    return of


SEVERAL = [x if x in ("head", "crash") else pytest.param(x, marks=pytest.mark.slow("as head")) for x in BROKEN]


@pytest.mark.parametrize("how", SEVERAL)
def test_doctor_fails_a_wrong_kernel(how, monkeypatch, once):
    broken, cases = BROKEN[how]
    # inputs and bars are those of every run
    monkeypatch.setattr(self_test, "make_qkv", once(self_test.make_qkv, lambda *args, **_: args))
    monkeypatch.setattr(
        self_test, "_exact", once(self_test._exact, lambda q, k, v, mask: (id(q), mask is None or mask.dtype))
    )
    bar = once(self_test.least_sqnr_db, lambda q, k, *rest: (id(q), *rest))
    monkeypatch.setattr(self_test, "least_sqnr_db", bar)
    monkeypatch.setattr(self_test, "sage_attention", broken)
    monkeypatch.setattr(self_test, "BASES", ())  # which are another op
    # the recipe that most use has to show each fault by itself
    name = sage_kernels.facts.recipe.FP8_RECIPE if how == "sums" else sage_kernels.DEFAULT_RECIPE
    monkeypatch.setattr(self_test, "RECIPES", {name: sage_kernels.RECIPES[name]})
    outcomes = self_test.self_test(CPU)
    failed = {outcome.case for outcome in outcomes if not outcome.passed}
    assert failed == cases if cases else failed
    json.dumps([doctor.asdict(outcome) for outcome in outcomes], allow_nan=False)
    if how == "unplanned":
        assert {outcome.scaling for outcome in outcomes if not outcome.passed} == {"timestep"}


def test_doctor_fails_wrong_mixed_precision(monkeypatch):
    """A format with a bit less than it should have."""
    few(monkeypatch, "causal")

    def coarser(q, k, v, *, options, **kwargs):
        step = q.float().abs().amax(-1, keepdim=True) / (31 if options.base == "int8" else 2)
        return sage_kernels.mixed_attention(((q / step).round() * step).to(q), k, v, options=options, **kwargs)

    monkeypatch.setattr(self_test, "mixed_attention", coarser)
    assert {x.scaling for x in self_test.self_test(CPU) if not x.passed} == set(BASES)


def test_doctor_prints_what_it_found_and_exits_with_1_if_a_check_fails(monkeypatch):
    few(monkeypatch, "causal")
    output = invoke("--all")
    words = ("reference (CPU)", "timestep", "All checks passed, but there is no GPU", torch.__version__)
    assert all(word in output for word in words)
    assert "Triton's cache" in output
    monkeypatch.setattr(self_test, "sage_attention", _crash)
    output = invoke(code=1)
    assert "Error: RuntimeError: illegal instruction" in output
    number = sum(1 if r.plain else 4 for r in sage_kernels.RECIPES.values())
    assert f"{number} of {number + len(BASES)} checks failed" in output
    assert "and more" not in output and "Traceback" not in output


def test_doctor_speaks_json(monkeypatch):
    few(monkeypatch, "causal")
    found = json.loads(invoke("--json"))
    keys = {"verdict", "environment", "device", "kernels", "self_test", "self_test_seconds", "triton_cache", "passed"}
    assert set(found) == keys and found["passed"] is True
    assert {"torch", "triton", "diffusers", "transformers", "sage_processors"} <= set(found["environment"])
    worst = {"qk_int8_pv_bf16": 25, "qk_int8_pv_fp8": 20, "qk_int8_pv_int8": 20}
    worst |= {"mixed": 9, "qk_fp8_pv_fp8": 15, "int_flash_half": 20}
    worst |= dict.fromkeys(("int_flash_full", "int_flash_full_fp32_sum"), 18)
    assert all(row["sqnr_db"] > row["least_db"] > worst[row["recipe"]] for row in found["self_test"])
    monkeypatch.setattr(self_test, "sage_attention", _nan)
    found = json.loads(invoke("--json", code=1))
    assert found["passed"] is False and "not finite" in found["self_test"][0]["error"]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_doctor_shows_the_tiles_of_a_gpu(capability, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    rows = doctor.kernels(torch.device("cuda"))
    assert [row["head_dim"] for row in rows] == [64] * 4 + [128] * 4 + [256] * 4
    assert [row["problem"] for row in rows if not row["tile"]] == []


def test_E09_doctor_says_why_a_gpu_can_not_run_the_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    rows = doctor.kernels(torch.device("cuda"))
    assert all("compute capability 7.5" in row["problem"] and row["kernel"] is None for row in rows)


# --- Triton's cache ---


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache that nobody else can write to, wherever the tests run."""
    monkeypatch.setattr(doctor, "file_system", lambda place: "ext4")
    folder = tmp_path / "home" / "cache"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        place.chmod(0o755)
    return folder


def test_the_cache_is_where_triton_looks(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert doctor.triton_cache() == tmp_path / ".triton" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "x"))
    assert doctor.triton_cache() == tmp_path / "x"
    knobs = pytest.importorskip("triton.knobs")
    assert str(doctor.triton_cache()) == knobs.cache.dir
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert str(doctor.triton_cache()) == knobs.cache.dir
    monkeypatch.delenv("TRITON_HOME")
    assert str(doctor.triton_cache()) == knobs.cache.dir


def test_a_private_cache_is_fine_and_a_missing_one_is_not_made(cache):
    found = doctor.examine_cache(cache)
    assert found["warnings"] == [] and found["mode"] == "0755" and found["exists"] and found["owner"] == "you"
    found = doctor.examine_cache(cache / "not" / "there")
    assert not found["exists"] and found["mode"] is None and found["warnings"] == []
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "who"), [(0o775, "group"), (0o777, "group and others"), (0o1777, "group and others")]
)
def test_a_cache_that_others_can_write_to_is_warned_of_and_left_alone(mode, who, cache):
    cache.chmod(mode)
    (warning,) = doctor.examine_cache(cache)["warnings"]
    assert f"{cache} is writable by {who}, who can put code there" in warning
    assert stat.S_IMODE(cache.stat().st_mode) == mode


def test_a_cache_whose_folder_others_can_replace_is_warned_of(cache):
    cache.parent.chmod(0o777)
    (warning,) = doctor.examine_cache(cache)["warnings"]
    assert warning.startswith(f"{cache.parent} is writable by group and others")
    cache.parent.chmod(0o1777)  # as /tmp: nobody can rename what is not theirs
    assert doctor.examine_cache(cache)["warnings"] == []


def test_a_cache_of_somebody_else_or_on_a_network_is_warned_of(cache, monkeypatch):
    monkeypatch.setattr(doctor, "file_system", lambda place: "nfs4")
    assert "network file system (nfs4)" in doctor.examine_cache(cache)["warnings"][0]
    monkeypatch.setattr(doctor, "file_system", lambda place: "ext4")
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    if cache.stat().st_uid:  # root's folders are everybody's to trust
        assert any(f"{cache} belongs to" in warning for warning in doctor.examine_cache(cache)["warnings"])
    else:
        os.chown(cache, 54321, -1)
        found = doctor.examine_cache(cache)
        assert found["owner"] == "54321" and f"{cache} belongs to 54321" in found["warnings"][0]


KERNELS = """
import torch
from tests.support.usual_kernels import CPU, as_on_hopper

as_on_hopper()
from sage_kernels.ops import warm_up
from sage_kernels._triton.attention.launch import launch_attention_fwd
from sage_kernels._triton.launch import ahead
from sage_kernels.facts.masking import make_masking
from sage_kernels.facts.recipe import RECIPES
from sage_kernels.facts.state import new_head_state
from sage_kernels.testing import make_qkv
from sage_processors.cli import self_test

self_test.recipe_problem = lambda recipe, device: ""
kinds = self_test.kinds_of_calls(CPU)
ahead_of_all = ahead.collect([call for kind in kinds for call in warm_up._calls(kind, CPU)])
calls = []
for case in self_test.CASES:
    q, k, v = make_qkv("biased_keys", 2, case.seq_q, case.seq_kv, case.heads, case.kv_heads, case.head_dim,
                       dtype=torch.bfloat16)
    masking = make_masking(self_test._mask(case, CPU), case.causal, None, 0.0, None, case.seq_q, case.seq_kv)[0]
    for recipe in RECIPES:
        for scaling in self_test.scalings_of(recipe):
            state = new_head_state(case.kv_heads, case.head_dim, CPU) if scaling == "timestep" else None
            calls.append((case, lambda q=q, k=k, v=v, masking=masking, recipe=recipe, scaling=scaling, state=state:
                launch_attention_fwd(
                    q, k, v, scale=0.1, scaling=scaling, smooth_k=not RECIPES[recipe].plain, state=state,
                    return_lse=False, recipe=recipe, masking=masking)))
wanted = ahead.collect([call for case, call in calls if case.mask != "bias"])
others = {(ahead_of_all | wanted)[kind].name for kind in set(wanted) ^ set(ahead_of_all)}
assert len(wanted) > 60 and others <= {"_key_mask_kernel"}, others  # small, and compiled for the mask's length
"""


@pytest.mark.slow("a process that compiles")
def test_the_kernels_of_the_self_test_are_compiled_side_by_side(tmp_path, monkeypatch):
    done = run(KERNELS, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    # whatever speaks against it, the cases are run
    monkeypatch.setattr(self_test, "compile_ahead", lambda kinds, device: 1 / 0)
    self_test._compile_ahead(CPU)


@pytest.mark.gpu
def test_doctor_passes_on_a_gpu():
    found = json.loads(CliRunner().invoke(cli.app, ["doctor", "--json"]).output)
    assert found["passed"], found["self_test"]
    assert found["device"]["compute_capability"] and all(not row["problem"] for row in found["kernels"])


def test_doctor_skips_a_recipe_that_this_gpu_cannot_run_and_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    reason = self_test.recipe_problem("qk_int8_pv_fp8", torch.device("cuda"))
    assert "8.9" in reason and "8.0" in reason
    assert self_test.recipe_problem("qk_int8_pv_bf16", torch.device("cuda")) == ""
    assert self_test.recipe_problem("qk_int8_pv_fp8", torch.device("cpu")) == ""
    assert self_test.Outcome("qk_int8_pv_fp8", "per_token", "any", skipped=reason).passed


def test_what_is_printed_names_neither_the_home_folder_nor_the_user(monkeypatch, tmp_path):
    home = tmp_path / "ada.lovelace"
    (home / ".triton" / "cache").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setattr(doctor, "self_test", lambda device: [])
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for place in (home, tmp_path / "link"):  # a home that is a link elsewhere: its real place shows in warnings
        monkeypatch.setenv("HOME", str(place))
        monkeypatch.setenv("TRITON_HOME", str(home))
        home.chmod(0o777)
        found = doctor.examine(torch.device("cpu"))
        assert found["triton_cache"]["path"].startswith("~") and found["triton_cache"]["owner"] == "you"
        assert any("~ is writable by" in warning for warning in found["triton_cache"]["warnings"])
        assert "ada.lovelace" not in json.dumps(found)
    other = {"path": f"{home}-of-others/x", "name": str(home)}
    monkeypatch.setenv("HOME", str(home))
    assert doctor._without_home(other) == {"path": f"{home}-of-others/x", "name": "~"}
