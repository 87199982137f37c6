"""The reader of machine code: it finds a uniform register that one path to its use does not write, and no other."""

from __future__ import annotations

import pytest

from tests.kernels.codegen.sanitize import unordered_races
from tests.kernels.codegen.sass import is_ordered_by_the_block, is_ordered_by_the_ring, main_loops, undefined_uniforms


SKIPPED = """
        /*0000*/                   UMOV UR6, 0x1 ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   UIADD3 UR4, UR6, 0x2, URZ ;
.L_x_1:
        /*0030*/                   IGMMA.64x64x32.S8.S8 R24, R88, gdesc[UR4], R24 ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""


def test_a_register_that_one_path_skips_is_found():
    # the last two of a descriptor's four registers count where the left operand is in ordinary registers
    assert undefined_uniforms(SKIPPED) == ["0030 IGMMA.64x64x32.S8.S8 UR7"]
    assert undefined_uniforms(SKIPPED.replace("gdesc[UR4]", "gdesc[UR2]")) == [
        "0030 IGMMA.64x64x32.S8.S8 UR4", "0030 IGMMA.64x64x32.S8.S8 UR5",
    ]  # fmt: skip


def test_a_register_that_every_path_writes_is_not():
    whole = SKIPPED.replace("UMOV UR6, 0x1", "UIADD3.64 UR6, URZ, URZ, URZ")
    assert undefined_uniforms(whole) == []
    assert undefined_uniforms(whole.replace("gdesc[UR4]", "gdesc[UR2]")) == [
        "0030 IGMMA.64x64x32.S8.S8 UR4", "0030 IGMMA.64x64x32.S8.S8 UR5",
    ]  # fmt: skip


def test_code_of_all_specialised_warps_is_read():
    table = """
        /*0000*/                   BRX R2 -0x4c0 (*"BRANCH_TARGETS .L_x_2,.L_x_3"*);
.L_x_2:
        /*0010*/                   EXIT ;
.L_x_3:
        /*0020*/                   UMOV UR18, UR22 ;
        /*0030*/                   EXIT ;
"""
    assert undefined_uniforms(table) == ["0020 UMOV UR22"]


def test_loops_with_matrix_instructions_are_counted():
    assert main_loops(SKIPPED) == [{"IGMMA": 1, "BRA": 1}]


HANDED_OVER = """
        /*0000*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0010*/                   LDS.U8 R0, [R0+UR59+0x1b88c] ;
        /*0020*/               @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0030*/                   LDS R2, [R8+0x1b600] ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
        /*0050*/                   STS.64 [UR8+0x1b890], R2 ;
        /*0060*/                   STS [UR8+0x1b898], R0 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0080*/                   STS [R11+0x1b880], R10 ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x3, 0x80 ;
"""


@pytest.mark.parametrize("read, write, ordered", [
    (0x10, 0x50, True), (0x10, 0x60, True),
    (0x30, 0x50, False), (0x10, 0x80, False),  # a barrier of some warps only
    (0x10, 0x70, False), (0x50, 0x60, False), (0x10, 0x98, False),
])  # fmt: skip
def test_barriers_of_the_whole_block_order_a_load_and_a_store(read, write, ordered):
    assert is_ordered_by_the_block(HANDED_OVER, read, write) == ordered


RING = """
        /*0000*/                   STS [UR5+0x660], R4 ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7+0x630], R6 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   STS [UR8+0x660], R3 ;
        /*0040*/              @!P1 SYNCS.ARRIVE.TRANS64 RZ, [UR7+0x600], R5 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   LDS R2, [UR9+0x660] ;
        /*0080*/               @P2 BRA `(.L_x_3) ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
.L_x_3:
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x2, 0x80 ;
        /*00b0*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR9+0x630], RZ ;
        /*00c0*/               @P0 BRA `(.L_x_2) ;
        /*00d0*/                   EXIT ;
"""


def test_a_place_that_was_freed_and_waited_for_orders_a_load_and_a_store():
    assert is_ordered_by_the_ring(RING, 0x70, 0x30)
    assert not is_ordered_by_the_ring(RING, 0x70, 0x00)  # nothing is waited for
    assert not is_ordered_by_the_ring(RING, 0x30, 0x70)
    some = "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"
    before, last, after = RING.rpartition(some)
    assert not is_ordered_by_the_ring(before + "NOP" + after, 0x70, 0x30)  # one path meets no barrier
    assert not is_ordered_by_the_ring(RING.replace(some, "@P3 " + some), 0x70, 0x30)
    assert not is_ordered_by_the_ring(RING.replace("SYNCS.PHASECHK.TRANS64.TRYWAIT", "NOP"), 0x70, 0x30)
    arrived = RING.replace("LDS R2, [UR9+0x660] ;", "LDS R2, [UR9+0x660] ;\n /*0078*/ SYNCS.ARRIVE RZ, [UR9+0x630] ;")
    assert not is_ordered_by_the_ring(arrived, 0x70, 0x30)


def test_reports_of_racecheck_are_looked_up_in_the_code_of_their_launch():
    report = """
========= Error: Race reported between Read access at a_kernel+0x10 in a.py:1
=========     and Write access at a_kernel+0x50 in a.py:1 [18 hazards]
=========     and Write access at a_kernel+0x60 in a.py:2 [9 hazards]
=========
64 per_token full
code first
========= Error: Race reported between Write access at a_kernel+0x50 in a.py:1
=========     and Read access at a_kernel+0x10 in a.py:1 [4 hazards]
code other first
========= Error: Race reported between Write access at a_kernel+0x50 in a.py:1
=========     and Write access at a_kernel+0x60 in a.py:1 [4 hazards]
code first
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""
    codes = {"first": HANDED_OVER, "other": SKIPPED}
    unordered, number = unordered_races(report, codes.get)
    assert number == 3 and len(unordered) == 1 and "0x60" in unordered[0]
    # the code of the launch is not known, or another
    assert len(unordered_races(report.replace("code ", ""), codes.get)[0]) == 4
    assert len(unordered_races(report.replace("first", "other"), codes.get)[0]) == 4
