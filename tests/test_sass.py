"""The reader of machine code: it finds a uniform register that one path to its use does not write, and no other."""

from __future__ import annotations

from tests.sass import main_loops, undefined_uniforms


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


def test_loops_with_matrix_instructions_are_counted():
    assert main_loops(SKIPPED) == [{"IGMMA": 1, "BRA": 1}]
