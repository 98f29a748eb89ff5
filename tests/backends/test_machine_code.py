"""Counting instructions in machine code: what the compile gate reports of a kernel's end."""

from __future__ import annotations

from gspo_kernels.tools.machine_code import epilogue_instructions, narrow_accesses

# A main loop of 3 instructions, then 2, a branch around 3 more, and 2 up to the exit.
LOOP = """
        /*0000*/                   S2R R0, SR_CTAID.X ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR20], R24 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   FADD R1, R2, R3 ;
        /*0050*/              @!P1 BRA `(.L_x_2) ;
        /*0060*/                   FSEL R1, R2, R3, P0 ;
        /*0070*/                   FSEL R1, R2, R3, P0 ;
        /*0080*/                   FSEL R1, R2, R3, P0 ;
.L_x_2:
        /*0090*/               @P2 STG.E.U16 desc[UR4][R2.64], R1 ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
"""


def test_the_epilogue_is_the_shortest_path_after_the_main_loop() -> None:
    assert epilogue_instructions(LOOP) == 4
    assert (
        epilogue_instructions(LOOP.replace("              @!P1 BRA `(.L_x_2)", "                   FADD R1, R1, R1"))
        == 7
    )
    assert epilogue_instructions(LOOP.replace("HGMMA.64x256x16.F32.BF16", "FFMA")) is None


def test_accesses_of_two_bytes_are_counted() -> None:
    assert narrow_accesses(LOOP) == 1
    assert narrow_accesses(LOOP.replace("STG.E.U16", "STG.E.128").replace("LDG.E.128", "LDG.E.S8.CONSTANT")) == 1
    assert narrow_accesses(LOOP.replace("STG.E.U16", "STG.E.64").replace("LDG.E.128", "LDG.E.EL.U16")) == 1
    assert narrow_accesses(LOOP.replace("STG.E.U16", "STG.E")) == 0
