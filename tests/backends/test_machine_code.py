"""Count instructions in machine code: those after a kernel's main loop, and accesses of at most two bytes."""

from __future__ import annotations

from gspo_kernels.tools.machine_code import epilogue_instructions, narrow_accesses

# A main loop of 3 instructions. After it come 2 instructions, of which the second is a branch around 3 further
# instructions, and then 2 instructions up to the exit.
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
    assert narrow_accesses("@%p1 ld.global.L1::evict_last.b16 { %rs1 }, [ %rd1 + 0 ];") == 1
    assert narrow_accesses("ld.global.b16 %rs1, [%rd1]; st.global.u8 [%rd2], %rs1;") == 2
    assert narrow_accesses("st.global.v4.b32 [ %rd1 ], { %r1, %r2, %r3, %r4 }; ld.global.v4.b16 %rs1, [%rd1];") == 0
    assert narrow_accesses("ld.shared.b16 %rs1, [%r1]; st.global.b32 [%rd2], %r1;") == 0
