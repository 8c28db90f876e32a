"""Small programs by hand for tests of the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import Program, parse
from page4.experiments.sm70.emulator import run

Array = NDArray[Any]
WARP = 32


def program(body: str) -> Program:
    """Statements, one a line; labels end with a colon."""
    lines = [line.strip() for line in body.strip().splitlines() if line.strip()]
    return parse("start:\n" + "\n".join(line if line.endswith(":") else f"{line} ;" for line in lines))


def outputs(body: str, *inputs: Array, count: int = 1, warps: int = 1) -> list[Array]:
    """What a thread does with a word from each input, as ``[32 * warps]`` uint32 per output.

    The body finds input i in register 20 + i, its thread in R0, and leaves output j in register 40 + j.
    """
    threads = WARP * warps
    words = [np.ascontiguousarray(x).reshape(threads, -1).view(np.uint32) for x in inputs]
    loads, stores = [], []
    results = [np.zeros(threads, np.uint32) for _ in range(count)]
    for index in range(len(words)):
        place = f"c[0x0][{0x160 + 8 * index:#x}]"
        loads += [f"IMAD.WIDE R2, R0, R4, {place}", f"LDG.E.SYS R{20 + index}, [R2]"]
    for index in range(count):
        place = f"c[0x0][{0x160 + 8 * (len(words) + index):#x}]"
        stores += [f"IMAD.WIDE R2, R0, R4, {place}", f"STG.E.SYS [R2], R{40 + index}"]
    text = "\n".join(["S2R R0, SR_TID.X", "MOV R4, 0x4", *loads, body, *stores, "EXIT"])
    run(program(text), grid=(1, 1, 1), warps=warps, arguments=[*words, *results], shared_bytes=1024)
    return results


def floats(values: Any) -> Array:
    """float32, repeated to a warp."""
    return np.resize(np.asarray(values, np.float32), WARP)


def words(values: Any) -> Array:
    """uint32, repeated to a warp."""
    return np.resize(np.asarray(values, np.int64) & 0xFFFFFFFF, WARP).astype(np.uint32)
