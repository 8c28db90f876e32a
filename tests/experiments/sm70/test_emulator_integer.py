from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .small_programs import outputs, words

EDGES = [0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]
A, B, C = words(EDGES), words([*EDGES[::-1], 3, 5]), words([7, 0, 0xFFFFFFFF, 0x80000000, 12345])


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def expected(function: Callable[[int, int, int], int]) -> np.ndarray:
    results = [function(int(a), int(b), int(c)) for a, b, c in zip(A, B, C, strict=True)]
    return np.array([result & 0xFFFFFFFF for result in results], np.uint32)


def select(condition: bool, a: int, b: int) -> int:
    return a if condition else b


@pytest.mark.parametrize(
    ("statement", "function"),
    [
        ("IADD3 R40, R20, R21, R22", lambda a, b, c: a + b + c),
        ("IADD3 R40, R20, -R21, RZ", lambda a, b, c: a - b),
        ("IADD3 R40, -R20, 0x7, -R22", lambda a, b, c: 7 - a - c),
        ("IMAD R40, R20, R21, R22", lambda a, b, c: a * b + c),
        ("IMAD R40, R20, -0x3, R22", lambda a, b, c: -3 * a + c),
        ("IMAD.SHL.U32 R40, R20, 0x8, RZ", lambda a, b, c: a * 8),
        ("IMAD.MOV R40, RZ, RZ, -R22", lambda a, b, c: -c),
        ("IMAD.HI.U32 R40, R20, R21, RZ", lambda a, b, c: a * b >> 32),
        ("LEA R40, R20, R21, 0x4", lambda a, b, c: (a << 4) + b),
        ("LEA.HI R40, R20, R21, RZ, 0x4", lambda a, b, c: (a >> 28) + b),
        ("LEA.HI R40, R20, R21, R22, 0x4", lambda a, b, c: ((c << 32 | a) << 4 >> 32) + b),
        ("LEA.HI.SX32 R40, R20, R21, 0x1e", lambda a, b, c: (signed(a) << 30 >> 32) + b),
        ("LOP3.LUT R40, R20, R21, R22, 0xf8, !PT", lambda a, b, c: a | b & c),
        ("LOP3.LUT R40, R20, R21, R22, 0x1b, !PT", lambda a, b, c: lut(0x1B, a, b, c)),
        ("SHF.L.U32 R40, R20, R21, RZ", lambda a, b, c: a << b if b < 32 else 0),
        ("SHF.L.W.U32 R40, R20, R21, RZ", lambda a, b, c: a << (b & 31)),
        ("SHF.L.W.U32.HI R40, R20, R21, R20", lambda a, b, c: (a << 32 | a) << (b & 31) >> 32),
        ("SHF.L.U64.HI R40, R20, 0x5, R22", lambda a, b, c: (c << 32 | a) << 5 >> 32),
        ("SHF.R.U32.HI R40, RZ, R21, R20", lambda a, b, c: a >> b if b < 32 else 0),
        ("SHF.R.U32.HI R40, RZ, 0x3, R20", lambda a, b, c: a >> 3),
        ("SHF.R.S32.HI R40, RZ, R21, R20", lambda a, b, c: signed(a) >> min(b, 32)),
        ("SHF.R.S32.HI R40, RZ, 0x1f, R20", lambda a, b, c: signed(a) >> 31),
        ("SHF.R.S64 R40, R20, 0x5, R22", lambda a, b, c: (signed(c) << 32 | a) >> 5),
        ("SHF.R.U64 R40, R20, R21, R22", lambda a, b, c: (c << 32 | a) >> b if b < 64 else 0),
        ("SGXT R40, R20, 0x8", lambda a, b, c: (a & 255) - 256 * (a >> 7 & 1)),
        ("SGXT.U32 R40, R20, 0x8", lambda a, b, c: a & 255),
        ("IABS R40, R20", lambda a, b, c: abs(signed(a))),
        ("IMNMX R40, R20, R21, PT", lambda a, b, c: min(signed(a), signed(b))),
        ("IMNMX.U32 R40, R20, R21, !PT", lambda a, b, c: max(a, b)),
        ("POPC R40, R20", lambda a, b, c: a.bit_count()),
        ("FLO.U32 R40, R20", lambda a, b, c: a.bit_length() - 1),
        ("FLO.U32.SH R40, R20", lambda a, b, c: 32 - a.bit_length() if a else -1),
        ("FLO R40, R20", lambda a, b, c: (a if a < 2**31 else a ^ 0xFFFFFFFF).bit_length() - 1),
        ("BREV R40, R20", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
        ("PRMT R40, R20, 0x5410, R21", lambda a, b, c: a & 0xFFFF | (b & 0xFFFF) << 16),
        ("PRMT R40, R20, 0x8, RZ", lambda a, b, c: (255 if a & 0x80 else 0) | (a & 255) * 0x01010100),
        ("PRMT R40, R20, R22, R21", lambda a, b, c: permuted(a, b, c)),
        ("ISETP.LT.AND P0, PT, R20, R21, PT\nSEL R40, R20, R22, P0",
         lambda a, b, c: select(signed(a) < signed(b), a, c)),
        ("ISETP.GE.U32.OR P0, P1, R20, R21, !PT\nSEL R40, R20, R22, P1",
         lambda a, b, c: select(not a >= b, a, c)),
        ("ISETP.LT.U32.AND P0, PT, R20, R21, PT\nISETP.LT.AND.EX P1, PT, R21, R22, PT, P0\n"
         "SEL R40, RZ, 0x1, P1",
         lambda a, b, c: select((signed(b), a) < (signed(c), b), 0, 1)),
        ("ISETP.EQ.U32.AND P0, PT, R20, R21, PT\nISETP.NE.AND.EX P1, PT, R21, R22, PT, !P0\n"
         "SEL R40, RZ, 0x1, P1",
         lambda a, b, c: select(a != b or b != c, 0, 1)),
        ("LOP3.LUT P0, RZ, R20, 0x80, RZ, 0xc0, !PT\nSEL R40, RZ, 0x1, P0",
         lambda a, b, c: select(a & 0x80 != 0, 0, 1)),
        ("ISETP.NE.AND P0, PT, R20, RZ, PT\nISETP.NE.AND P1, PT, R21, RZ, PT\n"
         "PLOP3.LUT P2, PT, P0, P1, PT, 0x80, 0x0\nP2R R40, PR, RZ, 0x7",
         lambda a, b, c: (a != 0) | (b != 0) << 1 | (a != 0 and b != 0) << 2),
        ("MOV R41, R20\nR2P PR, R41, 0x3\nP2R R40, PR, R21, 0x3", lambda a, b, c: b & ~3 | a & 3),
    ],
)  # fmt: skip
def test_32_bits(statement: str, function: Callable[[int, int, int], int]) -> None:
    (got,) = outputs(statement, A, B, C)
    np.testing.assert_array_equal(got, expected(function))


def lut(table: int, a: int, b: int, c: int) -> int:
    bits = [table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1 for i in range(32)]
    return sum(bit << i for i, bit in enumerate(bits))


def permuted(a: int, b: int, choice: int) -> int:
    result = 0
    for place in range(4):
        chosen = choice >> 4 * place & 15
        byte = (b << 32 | a) >> 8 * (chosen & 7) & 255
        result |= (byte if chosen < 8 else 255 * (byte >> 7)) << 8 * place
    return result


@given(st.tuples(*[st.integers(0, 2**64 - 1)] * 3))
@settings(max_examples=20)
def test_64_bits_from_pairs(numbers: tuple[int, int, int]) -> None:
    a, b, c = numbers
    halves = [words([n >> shift & 0xFFFFFFFF]) for n in (a, b, c) for shift in (0, 32)]
    body = """
        IADD3 R40, P0, P1, R20, R22, R24
        IADD3.X R41, R21, R23, R25, P0, P1
        IADD3 R42, P0, R20, -R22, RZ
        IADD3.X R43, R21, ~R23, RZ, P0, !PT
        IMAD.WIDE.U32 R44, R20, R22, R24
        IMAD.WIDE R46, R20, R22, R24
        LEA R48, P0, R20, R22, 0x3
        LEA.HI.X R49, R20, R23, R21, 0x3, P0
        LEA R50, P2, R20, R22, 0x2
        LEA.HI.X.SX32 R51, R20, R23, 0x2, P2
        IADD3 R52, P3, R20, R22, RZ
        IMAD.X R53, RZ, RZ, R21, P3
    """
    got = [int(x[0]) for x in outputs(body, *halves, count=14)]
    pairs = [low | high << 32 for low, high in zip(got[::2], got[1::2], strict=True)]
    low, other, whole = a & 0xFFFFFFFF, b & 0xFFFFFFFF, 2**64
    assert pairs == [
        (a + b + c) % whole,
        (a - b) % whole,
        (low * other + c) % whole,
        (signed(low) * signed(other) + c) % whole,
        ((a << 3) + b) % whole,
        ((signed(low) << 2) + b) % whole,
        (a + other) % whole,
    ]
