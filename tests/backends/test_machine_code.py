"""Count instructions, and accesses of at most two bytes, in machine code."""

from __future__ import annotations

from gspo_kernels.tools.doctor.machine_code import count_amd, count_sass, narrow_accesses

SASS = """
        /*0000*/                   S2R R0, SR_CTAID.X ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
.L_x_3:
        /*0040*/                   BRA `(.L_x_3);
        /*0050*/                   NOP;
"""
AMD = """
\t.globl\tforward_tile
forward_tile:
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\ts_nop 0
\tglobal_load_ushort v1, v0, s[2:3]
\tglobal_load_dwordx4 v[4:7], v0, s[2:3]
\tbuffer_store_byte v1, v0, s[8:11], 0 offen
\ts_endpgm
    .private_segment_fixed_size: 4
    .vgpr_count:     96
"""


def test_all_instructions_but_nops_are_counted() -> None:
    assert count_sass(SASS) == 5


def test_resources_and_instructions_of_amds_assembly_are_counted() -> None:
    assert count_amd(AMD) == (96, 4, 2, 5)


def test_accesses_of_two_bytes_are_counted() -> None:
    assert narrow_accesses("@%p1 ld.global.L1::evict_last.b16 { %rs1 }, [ %rd1 + 0 ];") == 1
    assert narrow_accesses("ld.global.b16 %rs1, [%rd1]; st.global.u8 [%rd2], %rs1;") == 2
    assert narrow_accesses("st.global.v4.b32 [ %rd1 ], { %r1, %r2, %r3, %r4 }; ld.global.v4.b16 %rs1, [%rd1];") == 0
    assert narrow_accesses("ld.shared.b16 %rs1, [%r1]; st.global.b32 [%rd2], %r1;") == 0
