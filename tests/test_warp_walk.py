"""bench/nvdisasm.py parses Maxwell listings; bench/warp_walk.py walks a warp through loops, divisions and 64-bit addresses."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.bench_scripts import of_bench

# for (i = 0; i < n; i++) s += in[i]; with a dual issue, a predicate, an unknown branch and a literal
LISTING = """
	.section	.text.loop,"ax",@progbits
loop:
.text.loop:
        /*0008*/                   MOV R1, c[0x0][0x20] ;
        /*0010*/         {         MOV R4, RZ ;
        /*0018*/                   S2R R0, SR_TID.X         }
        /*0028*/                   SHL R2, R0, c[0x2][0x0] ;
        /*0030*/                   IADD R6.CC, R2, c[0x0][0x140] ;
        /*0038*/                   IADD.X R7, RZ, c[0x0][0x144] ;
        /*0048*/                   LDG.E R9, [R6+0x4] ;
        /*0050*/                   ISETP.GE.AND P0, PT, R4, R9, PT ;
        /*0058*/               @P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0068*/                   LDS.U.128 R12, [R4] ;
        /*0070*/         {         IADD32I R4, R4, 0x1 ;
        /*0078*/                   FFMA.FTZ R8, R12, R8, R8         }
        /*0088*/                   ISETP.LT.AND P1, PT, R4, R9, PT ;
        /*0090*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0098*/                   FSETP.GT.AND P2, PT, R8, RZ, PT ;
        /*00a8*/               @P2 BRA `(.L_x_0) ;
        /*00b0*/                   STG.E.64 [R6], R8 ;
        /*00b8*/                   EXIT ;
	.section	.nv.constant2.loop,"a",@progbits
.nv.constant2.loop:
        /*0000*/ 	.byte	0x02, 0x00, 0x00, 0x00
"""


@pytest.fixture(scope="module")
def nvdisasm() -> ModuleType:
    return of_bench("nvdisasm")


@pytest.fixture(scope="module")
def warp_walk() -> ModuleType:
    return of_bench("warp_walk")


@pytest.mark.parametrize("trips", [0, 1, 7])
def test_a_loop_is_counted_by_what_memory_says(nvdisasm: ModuleType, warp_walk: ModuleType, trips: int) -> None:
    address = 0x7_0000_0000
    launch = warp_walk.Launch(
        (3, 0, 0), (0, 0, 0), (32, 1, 1), (1, 1, 1), {0x140: address & 0xFFFFFFFF, 0x144: address >> 32}
    )
    known = {address + 4 * 3 + 4: trips}  # of thread 3, one further on
    walked = warp_walk.walk(nvdisasm.parse(LISTING)["loop"], launch, known.get)
    assert walked.counts["FFMA", 0] == walked.counts["LDS", 128] == trips
    assert walked.counts["LDG", 32] == walked.counts["STG", 64] == walked.counts["EXIT", 0] == 1
    assert walked.counts.total() == 13 + 5 * trips
    assert walked.guesses == ("BRA at 0xa8",)  # of a float: not taken


def test_an_endless_walk_is_an_error(nvdisasm: ModuleType, warp_walk: ModuleType) -> None:
    launch = warp_walk.Launch((0, 0, 0), (0, 0, 0), (32, 1, 1), (1, 1, 1), {})
    with pytest.raises(RuntimeError, match="still running after 1000 instructions"):
        warp_walk.walk(nvdisasm.parse(LISTING)["loop"], launch, lambda _: 1 << 20, limit=1000)


@pytest.mark.parametrize(("a", "b"), [(7, 9), (0x12345678, 0x9ABC), (0xFFFFFFFF, 0xFFFFFFFF), (1 << 16, 3 << 16)])
def test_the_three_steps_of_a_product(warp_walk: ModuleType, a: int, b: int) -> None:
    """ptxas multiplies 32-bit integers by XMAD, XMAD.MRG and XMAD.PSL.CBCC."""
    low, high = a & 0xFFFF, b >> 16
    first = warp_walk._xmad((), a, b, 0, b)
    merged = warp_walk._xmad(("MRG",), low, high, 0, b)
    product = warp_walk._xmad(("PSL", "CBCC"), a >> 16, merged >> 16, first, merged)
    assert product == a * b & 0xFFFFFFFF
