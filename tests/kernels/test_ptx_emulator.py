"""What the emulator makes of Hopper's instructions, against numpy, and the mistakes that it finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.ptx_emulator import Pointer, run_grid
from tests.kernels.ptx_wgmma import Descriptor

Array = NDArray[Any]

FENCES = "fence.proxy.async.shared::cta;\nbar.sync 0;\nwgmma.fence.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def numbers(start: int, count: int) -> str:
    """Registers in braces."""
    return "{" + ",".join(f"%r{i}" for i in range(start, start + count)) + "}"


def multiply(
    columns: int, descriptors: list[Descriptor], transposed: bool, accumulate: str = "0", between: str = ""
) -> str:
    """PTX: shared memory is filled from the second argument, then ``A B`` is written to the third.

    Registers: %r100 on are the sums, %r10 on are A's, four for each descriptor; %r9 is free. ``between`` is
    run once the products have started.
    """
    sums = numbers(100, columns // 2)
    lines = [f"mov.b32 %r{i}, 0f3F800000;" for i in range(100, 100 + columns // 2)]  # 1.0
    for step in range(len(descriptors)):
        lines.append(f"ld.global.v4.b32 {numbers(10 + 4 * step, 4)}, [%rd5+{16 * 128 * step}];")
    lines.append(FENCES)
    for step, descriptor in enumerate(descriptors):
        lines.append(f"mov.u64 %rd9, {descriptor.encode()};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {sums}, "
            f"{numbers(10 + 4 * step, 4)}, %rd9, {'1' if step else accumulate}, 1, 1, {int(transposed)};"
        )
    lines += ["wgmma.commit_group.sync.aligned;", between, WAIT]
    for i in range(columns // 2):
        lines.append(f"st.global.b32 [%rd6+{4 * i}], %r{100 + i};")
    return "\n".join(lines)


def run(body: str, a: Array, shared: Array, result: Array) -> None:
    """Run a body with 128 threads; a thread has 16 bytes of ``a`` (%rd5) and a row of ``result`` (%rd6).

    Each copies 16 bytes (%r5) of every 2 KiB of ``shared``.
    """
    copies = "\n".join(
        f"ld.global.v4.b32 {numbers(1, 4)}, [%rd4+{at}];\nst.shared.v4.b32 [%r5+{at}], {numbers(1, 4)};"
        for at in range(0, len(shared), 2048)
    )
    ptx = f"""
.visible .entry probe(
	.param .u64 probe_param_0,
	.param .u64 probe_param_1,
	.param .u64 probe_param_2
)
{{
	mov.u32 %r0, %tid.x;
	ld.param.b64 %rd0, [probe_param_0];
	ld.param.b64 %rd1, [probe_param_1];
	ld.param.b64 %rd2, [probe_param_2];
	mul.lo.s32 %r5, %r0, 16;
	mul.wide.u32 %rd3, %r0, 16;
	add.s64 %rd4, %rd1, %rd3;
	add.s64 %rd5, %rd0, %rd3;
	mul.wide.u32 %rd3, %r0, {result.itemsize * result.shape[1]};
	add.s64 %rd6, %rd2, %rd3;
	{copies}
	{body}
	ret;
}}
"""
    run_grid(ptx, [Pointer(a), Pointer(shared), Pointer(result)], (1, 1, 1), 128, len(shared))


def fragments_of_a(a: Array) -> Array:
    """FP16 ``[steps, 128, 8]`` of ``[64, 16 steps]``: what each thread holds, by the PTX ISA's figure."""
    held = np.empty((a.shape[1] // 16, 128, 8), np.float16)
    for step, thread, i in np.ndindex(held.shape):
        row = 16 * (thread // 32) + thread % 32 // 4 + (8 if i in (2, 3, 6, 7) else 0)
        column = thread % 4 * 2 + i % 2 + (8 if i >= 4 else 0)
        held[step, thread, i] = a[row, 16 * step + column]
    return held


def sums_of(held: Array) -> Array:
    """``[64, N]`` of what the threads hold, ``[128, N / 2]``."""
    sums = np.empty((64, 2 * held.shape[1]), np.float32)
    for thread, i in np.ndindex(held.shape):
        row = 16 * (thread // 32) + thread % 32 // 4 + (8 if i % 4 >= 2 else 0)
        sums[row, 8 * (i // 4) + thread % 4 * 2 + i % 2] = held[thread, i]
    return sums


def placed(b: Array, descriptor: Descriptor, transposed: bool, pitch: int) -> Array:
    """B, ``[sum, columns]``, in bytes of shared memory as a descriptor says.

    Pieces of eight rows; ``pitch`` is from one piece to the next along the rows, where there are several.
    """
    rows = b if transposed else b.T  # [row, along]
    memory = np.full(2**14, 0xFF, np.uint8)
    swizzle = descriptor.swizzle
    down = descriptor.leading if transposed and swizzle == 16 else descriptor.stride
    for row, chunk in np.ndindex(rows.shape[0], rows.shape[1] // 8):
        piece, inside = divmod(chunk, swizzle // 16)
        # 128 bytes of a piece, all banks, hold one, two or four rows, which share an order of chunks.
        inside ^= row % 8 // (128 // swizzle)
        at = descriptor.start + piece * pitch + row // 8 * down + row % 8 * swizzle + 16 * inside
        memory[at : at + 16] = np.ascontiguousarray(rows[row, 8 * chunk : 8 * chunk + 8]).view(np.uint8)
    return memory


def operands(columns: int, steps: int = 1) -> tuple[Array, Array]:
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((64, 16 * steps)), generator.standard_normal((16 * steps, columns))
    return a.astype(np.float16), b.astype(np.float16)


def check(a: Array, b: Array, memory: Array, body: str, before: float = 0.0) -> None:
    result = np.full((128, b.shape[1] // 2), np.nan, np.float32)
    run(body, fragments_of_a(a), memory, result)
    expected = a.astype(np.float64) @ b.astype(np.float64) + before
    np.testing.assert_allclose(sums_of(result), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("columns", [8, 24, 64])
@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
def test_wgmma_with_rows_of_b_along_the_sum(swizzle: int, columns: int) -> None:
    """Steps of 16 numbers within the pieces' rows: only the start moves on."""
    steps = max(1, swizzle // 32)
    a, b = operands(columns, steps)
    # Without a swizzle the two pieces of a step lie apart; else how far has no meaning.
    first = Descriptor(
        start=1024, leading=4096, stride=9 * swizzle if swizzle == 16 else 1024, swizzle=swizzle
    )
    memory = placed(b, first, False, pitch=4096)
    descriptors = [replace(first, start=first.start + 32 * step) for step in range(steps)]
    check(a, b, memory, multiply(columns, descriptors, False))


@pytest.mark.parametrize(
    ("swizzle", "columns"),
    [(16, 8), (16, 24), (16, 128), (32, 16), (32, 64), (64, 32), (64, 128), (128, 64), (128, 128)],
)
def test_wgmma_with_rows_of_b_along_the_columns(swizzle: int, columns: int) -> None:
    """Transposed; more columns than a piece's row holds continue in another piece."""
    a, b = operands(columns)
    across, down = 16 * swizzle, 8 * swizzle  # the two pieces of the sum are adjacent
    leading, stride = (down, across) if swizzle == 16 else (across, down)
    descriptor = Descriptor(start=2048, leading=leading, stride=stride, swizzle=swizzle)
    check(a, b, placed(b, descriptor, True, pitch=across), multiply(columns, [descriptor], True))


PLAIN = Descriptor(start=0, leading=128, stride=256, swizzle=16)


def test_wgmma_adds_to_its_accumulators_when_told_to() -> None:
    a, b = operands(16)
    memory = placed(b, PLAIN, False, pitch=128)
    check(a, b, memory, multiply(16, [PLAIN], False, accumulate="1"), before=1.0)
    on = "setp.lt.u32 %p1, %r0, 128;\n"
    check(a, b, memory, on + multiply(16, [PLAIN], False, accumulate="%p1"), before=1.0)


def test_a_base_offset_is_refused() -> None:
    word = PLAIN.encode()
    assert Descriptor.decode(word) == PLAIN
    with pytest.raises(AssertionError, match="base offset"):
        Descriptor.decode(word | 1 << 49)


OPEN = "wgmma.commit_group.sync.aligned;\n"


@pytest.mark.parametrize(
    ("found", "mistake", "message"),
    [
        (WAIT, "", "%r100 belongs to a wgmma under way"),
        (WAIT, "wgmma.wait_group.sync.aligned 1;", "%r100 belongs to a wgmma under way"),
        (OPEN, "", "%r100 belongs to a wgmma under way"),
        (OPEN, OPEN + "mov.b32 %r100, 0;", "%r100 belongs to a wgmma under way"),
        (OPEN, OPEN + "mov.b32 %r10, 0;", "%r10 belongs to a wgmma under way"),
        (OPEN, OPEN + "mov.b32 %r9, %r103;", "%r103 belongs to a wgmma under way"),
        (OPEN, OPEN + "st.shared.b32 [%r5], %r0;", "a wgmma under way reads these bytes"),
        (OPEN, OPEN + "cp.async.cg.shared.global [%r5], [%rd4], 16;", "a wgmma under way reads these bytes"),
        ("bar.sync 0;", "", "no barrier since another warp wrote this"),
        (WAIT, WAIT + "\nst.shared.b32 [%r5], %r0;", "no barrier since another warp read this"),
        (WAIT, WAIT + "\nbar.sync 0;\nst.shared.b32 [%r5], %r0;\nld.shared.b32 %r9, [0];", "no barrier"),
        ("fence.proxy.async.shared::cta;", "", "no fence.proxy.async"),
        ("wgmma.fence.sync.aligned;", "", "no wgmma.fence"),
        (FENCES, FENCES + "\nmov.b32 %r11, 0;", "no wgmma.fence"),
        (FENCES, FENCES + "\nst.shared.b32 [%r5], %r0;", "no fence.proxy.async"),
        (", 1, 1, 0;", ", -1, 1, 0;", "negated"),
    ],
)
def test_mistakes_around_wgmma_are_found(found: str, mistake: str, message: str) -> None:
    a, b = operands(16)
    memory = placed(b, PLAIN, False, pitch=128)
    right = multiply(16, [PLAIN], False)
    check(a, b, memory, right)
    assert right.count(found) == 1
    with pytest.raises(AssertionError, match=message):
        check(a, b, memory, right.replace(found, mistake))


def test_products_of_an_older_group_can_be_waited_for_alone() -> None:
    """Two groups of different accumulators: the older one is done while the other is under way."""
    a, b = operands(16)
    memory = placed(b, PLAIN, False, pitch=128)
    start = "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"
    second = f"{start} {numbers(200, 8)}, {numbers(10, 4)}, %rd9, 0, 1, 1, 0;\n{OPEN}"
    body = multiply(16, [PLAIN], False, between=second).replace(WAIT, "wgmma.wait_group.sync.aligned 1;")
    check(a, b, memory, body)
    with pytest.raises(AssertionError, match="%r200 belongs to a wgmma under way"):
        check(a, b, memory, body + "\nmov.b32 %r9, %r200;")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_stmatrix(matrices: int, transposed: bool) -> None:
    """Lane 4 r + c of a warp holds numbers 2 c and 2 c + 1 of row r; lane 8 m + r says where row r goes."""
    values = np.arange(128 * 8, dtype=np.float16).reshape(128, 8)  # a thread's registers
    held = values.reshape(4, 8, 4, 4, 2)[:, :, :, :matrices]  # [warp, row, pair, matrix, number]
    expected = held.transpose(0, 3, 1, 2, 4).reshape(4, matrices, 8, 8)
    if transposed:
        expected = expected.swapaxes(2, 3)
    trans = ".trans" if transposed else ""
    body = f"""
	ld.global.v4.b32 {numbers(10, 4)}, [%rd5];
	stmatrix.sync.aligned.m8n8.x{matrices}{trans}.shared.b16 [%r5], {numbers(10, matrices)};
	ld.shared.v4.b32 {numbers(20, 4)}, [%r5];
	st.global.v4.b32 [%rd6], {numbers(20, 4)};
"""
    result = np.zeros((128, 8), np.float16)
    run(body, values, np.zeros(2048, np.uint8), result)
    np.testing.assert_array_equal(result.reshape(4, 4, 8, 8)[:, :matrices], expected)
    assert (result.reshape(4, 4, 8, 8)[:, matrices:] == 0).all()
