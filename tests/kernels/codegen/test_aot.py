"""Every kernel of the tile table compiles for GPUs that are not here, to the instructions it was written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.codegen.compiled_from import compiled_from
from tests.support.repository import ROOT


triton = pytest.importorskip("triton", reason="triton is not installed")

TABLE = ROOT / "tests" / "codegen.json"


def target(name: str):
    return pytest.param(name, marks=pytest.mark.slow("compiles many kernels"))


TARGETS = [target(name) for name in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")]
# Compiled in every run; all other rows are those of the table where it was made of these sources by this Triton
SAMPLE = ("sm_80/attention/128/planned", "sm_80/decode/128/8", "sm_80/linear/int8/16", "sm_80/prepare/128/planned")
# Registers that one turn of a plain key loop of some 500 instructions may put away and take back, by kernel.
SPILLS = {"hopper": 6, "tma": 0, "pointers": 0}


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request):
    if is_believed():
        return {key: facts for key, facts in rows_of_table().items() if key.startswith(f"{request.param}/")}
    return compiled(request.param)


def rows_of_table() -> dict:
    return json.loads(TABLE.read_text())["kernels"]


def compiled(name: str, *keys: str) -> dict:
    """Facts of a target's kernels, or of these alone, by key."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    command = [sys.executable, ROOT / "tests" / "kernels" / "codegen" / "codegen.py", name, *keys]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def is_believed() -> bool:
    """Whether the committed table says what compiling would."""
    table = json.loads(TABLE.read_text())
    return table["meta"] == compiled_from(table["kernels"])


def skip_unless_pinned():
    """Which registers spill is the compiler's affair: asserted for the Triton that the table was made with."""
    pinned = json.loads(TABLE.read_text())["meta"]["triton"]
    if pinned != triton.__version__:
        pytest.skip(f"the table is of Triton {pinned}, this is {triton.__version__}")


def target_of(kernels):
    return next(iter(kernels)).split("/")[0]


def attention(kernels):
    return {key: facts for key, facts in kernels.items() if "/attention/" in key}


def test_scores_run_on_int8_matrix_units(kernels):
    found = attention(kernels)
    assert len(found) >= 6  # three head widths, planned and per token
    assert all(facts["int8_matrix"] for facts in found.values())


def test_no_uniform_register_is_read_that_was_not_written(kernels):
    """ptxas has lost descriptors of matrix operands: wrong sums, or an illegal address, in a loop that rarely runs."""
    for key, facts in kernels.items():
        assert facts.get("undefined", 0) == 0, key


def test_plain_key_loop_does_not_spill(kernels):
    skip_unless_pinned()
    for key, facts in attention(kernels).items():
        # the first loop of a kernel is the one over wholly visible tiles. With a mask of keys it reads a list, and
        # spills on sm_80; another tile would not, but a padded sample would lose the bits it has alone.
        if facts.get("loops") and key != "sm_80/attention/128/planned/keys":
            assert facts["loops"][0]["spills"] <= SPILLS[facts["kernel"]], (key, facts)


def test_packed_sequences_run_on_the_same_matrix_units_and_spill_little(kernels):
    skip_unless_pinned()
    found = {key: facts for key, facts in kernels.items() if "/packed/" in key or "/packed_fp8/" in key}
    assert len(found) >= 2 and all(facts["int8_matrix"] for facts in found.values())
    for key, facts in found.items():
        assert facts.get("fp8_matrix", False) == ("/packed_fp8/" in key), key
        # a turn has 300 to 760 instructions; where the sequence lies takes a few registers, and sm_80 to sm_89 have no
        # more of them
        most = 24 if target_of(kernels) in ("sm_80", "sm_86", "sm_89") else 4
        assert all(loop["spills"] <= most for loop in facts.get("loops", [])[:1]), (key, facts)
    assert all(facts.get("stack", 0) == 0 for key, facts in kernels.items() if "/packed_prepare" in key)


def test_calls_that_skip_tiles_run_on_the_same_matrix_units_and_spill_little(kernels):
    found = {key: facts for key, facts in kernels.items() if "/skipping" in key}
    measuring = {key: facts for key, facts in kernels.items() if "/measure_tiles/" in key or "/choose_tiles/" in key}
    assert found and measuring and all(facts["int8_matrix"] for facts in found.values())
    for key, facts in measuring.items():
        assert facts["int8_matrix"] == ("/measure_tiles/" in key), key
    skip_unless_pinned()
    for key, facts in found.items():
        # a list is read in each turn, of some 500 instructions, and sm_80 has no registers left for it
        most = 12 if key.startswith("sm_80/") else SPILLS[facts["kernel"]]
        assert all(loop["spills"] <= most for loop in facts.get("loops", [])[:1]), (key, facts)
    assert all(facts.get("stack", 0) == 0 for facts in measuring.values())


FP8_TARGETS = [target(name) for name in ("sm_89", "sm_90", "sm_100", "sm_120")]


@pytest.mark.parametrize("kernels", FP8_TARGETS, indirect=True)
def test_fp8_recipe_runs_both_matmuls_in_8_bit_and_spills_next_to_nothing(kernels):
    found = {key: facts for key, facts in kernels.items() if "/attention_fp8/" in key}
    assert found
    for key, facts in found.items():
        assert facts["int8_matrix"] and facts["fp8_matrix"], key
    # registers put away and taken back in one turn of some 500 instructions: at width 128 the tile is as large as
    # fits. The other versions of Triton differ by one or two.
    for key, facts in found.items():
        assert facts["loops"][0]["spills"] <= 4, (key, facts)


# Instructions that put away or take back a register in a turn of 128 keys, where it is not none.
INT8_SPILLS = {"sm_86/128/per_token": 4, "sm_89/128/per_token": 4}
# Instructions a key and query row over those of P·V in 16 bit, where they are not fewer. At 64 channels what rounds P
# weighs most; on 8.0 a warp of the 16-bit tile has 32 rows there, which share the loads of K and V.
INT8_OVER_16_BIT = {"sm_80/64/planned": 1.16, "sm_86/64/planned": 1.05, "sm_89/64/planned": 1.05,
                    "sm_86/128/per_token": 1.002, "sm_89/128/per_token": 1.002}  # fmt: skip
WIDE_OVER_16_BIT = 1.01


def test_int8_values_run_both_matmuls_in_8_bit(kernels):
    skip_unless_pinned()
    found = {key: facts for key, facts in kernels.items() if "/attention_int8/" in key}
    assert len(found) >= 4 and all(facts["int8_matrix"] for facts in found.values())
    for key, facts in found.items():
        name, _, width, kind = key.split("/", 3)
        if facts.get("loops") and "/" not in kind:
            allowed = INT8_SPILLS.get(f"{name}/{width}/{kind}", 0)
            assert facts["loops"][0]["spills"] <= allowed, (key, facts)


@pytest.mark.parametrize("kernels", [target("sm_80"), target("sm_86"), target("sm_89")], indirect=True)
def test_int8_values_take_no_more_instructions_a_key_than_16_bit_ones(kernels):
    sys.path.insert(0, str(ROOT / "kernels"))
    from sage_kernels._triton.attention.tiles import choose_tile

    skip_unless_pinned()
    name = target_of(kernels)

    def instructions(suite, width, scaling, pv):
        """A key and query row, of a warp."""
        tile = choose_tile(int(name[3:]), width, scaling, pv=pv)
        count = kernels[f"{name}/{suite}/{width}/{scaling}"]["loops"][0]["instructions"]
        return count * tile.num_warps / (tile.block_m * tile.block_n)

    for width, scaling in ((64, "planned"), (128, "planned"), (128, "per_token"), (256, "planned")):
        ratio = instructions("attention_int8", width, scaling, "int8") / instructions(
            "attention", width, scaling, "16bit"
        )
        allowed = INT8_OVER_16_BIT.get(f"{name}/{width}/{scaling}", WIDE_OVER_16_BIT if width == 256 else 1.0)
        assert ratio <= allowed, (width, scaling, ratio)


def test_recipes_to_compare_with_run_both_matmuls_in_8_bit(kernels):
    skip_unless_pinned()
    full = {key: facts for key, facts in kernels.items() if "/int_flash_full/" in key}
    assert len(full) >= 2 and all(facts["int8_matrix"] for facts in full.values())
    fp8 = {key: facts for key, facts in kernels.items() if "/fp8_scores/" in key}
    assert all(facts["fp8_matrix"] and not facts["int8_matrix"] for facts in fp8.values())
    assert len(fp8) == {"sm_89": 3, "sm_90": 4, "sm_100": 3, "sm_120": 3}.get(target_of(kernels), 0)


@pytest.mark.parametrize("kernels", [target("sm_90")], indirect=True)
def test_the_reference_of_the_step_before_shortens_the_plain_loop(kernels):
    tables = f"{target_of(kernels)}/attention_fp8/128/planned"
    lagged, running = (kernels[f"{tables}/{name}"]["loops"][0]["instructions"] for name in ("lagged", "running"))
    assert lagged <= 0.9 * running


@pytest.mark.parametrize("kernels", [target("sm_90")], indirect=True)
def test_fp8_operands_are_not_rearranged_on_hopper(kernels):
    """What the permutation of V is for: P needs no shuffle but those of the row maxima."""
    for key, facts in kernels.items():
        if "/attention_fp8/" in key and not key.endswith("/rows"):
            assert facts["shuffles"] <= 12, (key, facts)
    assert all(facts["stack"] == 0 for key, facts in kernels.items() if "/values/" in key)


@pytest.mark.parametrize("kernels", [target("sm_80"), target("sm_90")], indirect=True)
def test_keeping_the_first_max_shortens_the_plain_loop(kernels):
    for scaling in ("planned", "per_token"):
        tables = f"{target_of(kernels)}/attention/128/{scaling}"
        first = kernels.get(f"{tables}/first_max", kernels[tables])
        running = kernels.get(f"{tables}/running_max", kernels[tables])
        assert first["loops"][0]["instructions"] <= 0.9 * running["loops"][0]["instructions"], scaling


def test_mixed_attention_runs_on_the_matrix_units_of_its_format_without_spilling(kernels):
    skip_unless_pinned()
    name = target_of(kernels)
    found = {key: facts for key, facts in kernels.items() if "/mixed/" in key}
    assert len(found) == 6
    for key, facts in found.items():
        is_fp4 = key.endswith("fp4")
        assert facts["int8_matrix"] == (not is_fp4), key
        assert facts.get("fp4_matrix", False) == (is_fp4 and name in ("sm_100", "sm_120")), key
        # registers put away outside of the loops, where Q becomes codes, are not counted
        assert all(loop["spills"] == 0 for loop in facts.get("loops", [])), (key, facts)
        assert facts["shared"] <= SHARED.get(name, 99) * 1024, (key, facts)
    others = {key: facts for key, facts in kernels.items() if "/mixed_" in key}
    assert all(facts.get("stack", 0) <= 8 for facts in others.values())


def test_every_barrier_is_invalidated(kernels):
    """Memory that holds a barrier may be used for nothing else until then: on an H200 shared by processes, the state
    of one that had no use came back over what was stored there."""
    assert all(facts.get("barriers_left", 0) == 0 for facts in kernels.values())
    if target_of(kernels) == "sm_90":
        assert any(facts.get("barriers", 0) for facts in kernels.values())


def test_attention_over_the_cache_runs_on_int8_matrix_units(kernels):
    found = {key: facts for key, facts in kernels.items() if "/decode/" in key or "/paged/" in key}
    assert len(found) >= 3 and all(facts["int8_matrix"] for facts in found.values())


def test_attention_over_the_cache_does_not_spill(kernels):
    skip_unless_pinned()
    for key, facts in kernels.items():
        if "/decode/" in key or "/paged/" in key:
            assert all(loop["spills"] == 0 for loop in facts.get("loops", [])), (key, facts)


def test_rotation_runs_on_matrix_units_without_spilling(kernels):
    skip_unless_pinned()
    found = {key: facts for key, facts in kernels.items() if "/rotate/" in key}
    assert len(found) == (6 if target_of(kernels) in ("sm_80", "sm_90") else 2)
    for key, facts in found.items():
        # two programs on an SM of a GPU with little shared memory; fp32 in three parts needs more
        assert facts["shared"] <= (99 if key.endswith(("256", "fp32")) else 74) * 1024 or "sm_90" in key, (key, facts)
        # five registers on sm_120, whose compiler keeps the matrix in them; fp32, which is rare, more
        if key.endswith("/rotate/128/fp32"):
            continue
        assert all(loop["spills"] <= (5 if "sm_120" in key else 0) for loop in facts.get("loops", [])), (key, facts)
        if facts.get("loops"):
            assert all(loop["matrix"] for loop in facts["loops"])


SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}  # KiB a program may have; the others: 99


def test_linear_layers_run_on_8_bit_matrix_units_within_shared_memory(kernels):
    name = target_of(kernels)
    found = {key: facts for key, facts in kernels.items() if "/linear/" in key}
    assert len(found) >= 6 and (name not in ("sm_89", "sm_90", "sm_100", "sm_120") or len(found) >= 10)
    for key, facts in found.items():
        # tiles of 16 rows: mma.sync, which Hopper and the newer data centre GPUs have for FP16 alone, in place of FP8
        widened = key in ("sm_90/linear/fp8/16", "sm_100/linear/fp8/16")
        assert facts["int8_matrix"] == ("/int8/" in key), key
        assert facts.get("fp8_matrix", False) == ("/fp8/" in key and not widened), key
        assert facts["shared"] <= SHARED.get(name, 99) * 1024, (key, facts)
    if name == "sm_90":  # what was timed there
        assert {facts["kernel"] for key, facts in found.items() if "/many" in key and "pointers" not in key} == {
            "linear_hopper"
        }


def test_linear_layers_do_not_spill(kernels):
    skip_unless_pinned()
    for key, facts in kernels.items():
        # Hopper's with a gate of each row: few registers put away behind the loop over the channels; a rare case
        is_rare = facts.get("kernel") == "linear_hopper" and key.endswith("/gate_residual")
        if "/linear/" in key:
            inner = [loop for loop in facts.get("loops", []) if not is_rare or loop["instructions"] < 1000]
            assert all(loop["spills"] == 0 and loop["matrix"] for loop in inner), (key, facts)
        if any(f"/{kind}/" in key for kind in ("quantize_rows", "linear", "add_parts")):
            allowed = (48 if "/split/" in key else 32) if is_rare else 0
            assert facts.get("stack", 0) <= allowed, (key, facts)


def test_a_launch_that_may_begin_early_waits_before_it_reads(kernels):
    """A kernel of Hopper's that is launched so has one wait; what lets it begin is of no use elsewhere."""
    is_hopper = any(name.startswith("sm_90/") for name in kernels)
    early = [row for row in kernels.values() if row["kernel"] in ("hopper", "linear_hopper", "add_parts")]
    assert (len(early) > 20) == is_hopper and all(row["waits"] == 1 for row in early)
    for name, row in kernels.items():
        if row["kernel"] == "linear_hopper":
            assert row["lets_begin"] == ("/split/" in name), name  # the launch that adds up its parts
        if row["kernel"] == "quantize_rows":
            assert row.get("lets_begin", 0) == is_hopper and not row.get("waits"), name


def test_weights_in_8_bit_are_multiplied_in_16_bit_without_spilling(kernels):
    name = target_of(kernels)
    found = {key: facts for key, facts in kernels.items() if "/weight_only/" in key}
    assert len(found) == 3 + 2 * (name in ("sm_80", "sm_90")) + (name in ("sm_89", "sm_90", "sm_100", "sm_120"))
    for key, facts in found.items():
        # two programs on an SM
        most = (112 if name == "sm_90" else 48) * 1024
        assert not facts["int8_matrix"] and facts["shared"] <= most, (key, facts)
        assert facts.get("stack", 0) == 0, (key, facts)
        if "/fp32/" not in key:  # which has no matrix units, and no loop to be found by them
            assert all(loop["spills"] == 0 and loop["matrix"] for loop in facts.get("loops", [])), (key, facts)
            # 8 KiB by 64 lanes: more would take longer than an H200 takes to read them
            assert key.endswith("many") or all(x["instructions"] <= 600 for x in facts.get("loops", [])), (key, facts)


def test_table_of_registers_and_loop_counts_is_the_committed_one(kernels):
    """A change here is a change of the machine code: look at it, then `make codegen`."""
    skip_unless_pinned()
    table = rows_of_table()
    assert all(facts == table[key] for key, facts in kernels.items())


@pytest.mark.slow("compiles some kernels")
def test_a_sample_is_compiled_to_the_rows_of_the_table():
    skip_unless_pinned()
    table = rows_of_table()
    assert compiled("sm_80", *SAMPLE) == {key: table[key] for key in SAMPLE}


def test_a_table_of_other_sources_or_with_other_rows_is_not_believed(monkeypatch, tmp_path):
    table, rows = tmp_path / "codegen.json", {"sm_86/attention/64/planned": {"registers": 128}}
    monkeypatch.setattr(sys.modules[__name__], "TABLE", table)
    edited = {"sm_86/attention/64/planned": {"registers": 127}}
    for meta, own in (({}, rows), ({"triton": "0"}, rows), ({"sources": "others"}, rows), ({}, edited)):
        table.write_text(json.dumps({"meta": compiled_from(rows) | meta, "kernels": own}))
        assert is_believed() == (not meta and own is rows)


@pytest.mark.parametrize("kernels", [target("sm_90")], indirect=True)
def test_hopper_runs_the_warp_specialised_kernel_within_shared_memory(kernels):
    found = {key: facts for key, facts in kernels.items() if facts["kernel"] == "hopper" and "/attention/" in key}
    # planned and per token at two widths, planned with few keys; at 128 their other reference of the softmax, a mask
    # of keys, one of rows, and causal
    assert len(found) == 11 and not any("/256/" in key for key in found)
    others = {key: facts for key, facts in kernels.items() if "/attention_hopper/" in key}
    assert len(others) == 4
    for key, facts in others.items():
        assert facts["int8_matrix"] and facts.get("fp8_matrix", False) == key.endswith("fp8_e4m3"), key
        assert facts["loops"][0]["spills"] <= SPILLS["hopper"], (key, facts)
    for key, facts in (*found.items(), *others.items()):
        # the launch's cap with two consumers or three; warpgroups divide it anew
        registers = 168 if "/attention_hopper/128/" in key or key.endswith("/rows") else 128
        assert facts["shared"] <= 227 * 1024 and facts["registers"] == registers, key
