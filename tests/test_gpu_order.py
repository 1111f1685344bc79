"""The order of instructions in a kernel's disassembly."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                         /* 0x00000a00ff017b82 */
        /*0480*/              @!P0 BRA `(.L_x_2) ;
        /*0490*/                   LDG.E.128.CONSTANT R4, desc[UR6][R4.64] ;
        /*04a0*/                   LDG.E.128.CONSTANT R8, desc[UR6][R8.64] ;
        /*04b0*/                   IMAD.MOV.U32 R2, RZ, RZ, R3 ;
.L_x_2:
        /*0810*/                   HGMMA.64x32x16.F32 R24, gdesc[UR12], R24, UP0 ;
        /*0960*/                   HGMMA.64x32x16.F32 R24, gdesc[UR12], R24 ;
        /*0a90*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0ab0*/              @!P1 STG.E.64 desc[UR4][R2.64], R4 ;
        /*0ac0*/                   EXIT ;
"""


def test_instructions_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "scripts"), *sys.path])
    found = list(importlib.import_module("gpu_order").ordered(SASS))
    products = [("LDG.E.128.CONSTANT", 2), ("HGMMA.64x32x16.F32", 2), ("WARPGROUP.DEPBAR.LE", 1)]
    assert found == [("@!P0 BRA", 1), *products, ("@!P1 STG.E.64", 1), ("EXIT", 1)]
