"""Runs the PTX of a kernel on the CPU: so Gluon kernels, which have no interpreter, are tested without a GPU.

All threads of a block advance together over numpy arrays, those with the lowest program counter first. So
branches that diverge meet again. Asynchronous copies arrive as late as they may, when they are waited for: a
wait that is missing is found, and so is a barrier that warps lack between their accesses to shared memory.
Registers and shared memory that belong to a ``wgmma`` under way must be left alone, and what it multiplies
must have been fenced. Accesses outside of the given tensors are errors. It knows the instructions that our
kernels use and refuses any other.

Semantics follow NVIDIA's PTX ISA. Sums of matrix products are rounded once, where a GPU rounds in an order of
its own; ``ex2`` and ``lg2`` are numpy's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from page4.kernels.codecs import decode_e4m3
from tests.kernels.ptx_shared import SharedMemory
from tests.kernels.ptx_volta import quad_pair_product
from tests.kernels.ptx_wgmma import WARPGROUP, Descriptor, InFlight, product

Array = NDArray[Any]

_TYPES: dict[str, type] = {
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
    "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "f16": np.float16, "f32": np.float32,
}  # fmt: skip
_UNSIGNED: dict[int, type] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_PREFIX_BYTES = (("%rd", 8), ("%rs", 2), ("%p", 0), ("%r", 4), ("%f", 4))  # predicates are bool arrays
_COMPARE: dict[str, Callable[..., Array]] = {
    "eq": np.equal, "ne": np.not_equal, "neu": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip
_BITWISE: dict[str, Callable[..., Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_WARP = 32
_Copy = tuple[Array, Array, Array]  # addresses, bytes, warps
_NOTHING_TO_DO = ("griddepcontrol",)


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``@[!]predicate opcode.modifiers operands``."""

    predicate: str | None
    negated: bool
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def type(self) -> str:
        """The last modifier, which names the type of most instructions."""
        return self.modifiers[-1]


class Program:
    """The instructions and parameters of the only entry of a PTX text."""

    def __init__(self, ptx: str) -> None:
        head, body = ptx[ptx.index(".entry") :].split("\n{", 1)
        self.parameters: list[tuple[str, str]] = re.findall(
            r"\.param\s+\.(\w+)[^,\n)]*?(\w+_param_\d+)", head
        )
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.register_bytes: dict[str, int] = {}  # of registers that inline assembly declares
        body = re.sub(r"//[^\n]*", "", body[: body.rindex("ret;") + len("ret;")])
        body = re.sub(r"^\s*\.(loc|pragma)\b[^\n]*$", "", body, flags=re.MULTILINE)
        for statement in body.split(";"):
            self._add(" ".join(statement.split()))

    def _add(self, text: str) -> None:
        while found := re.match(r"(\$\w+): ?|[{}] ?", text):  # labels and the braces of scopes
            if found[1]:
                self.labels[found[1]] = len(self.instructions)
            text = text[found.end() :]
        if declared := re.match(r"\.reg \.(\w+) (.*)", text):
            if declared[1] in _TYPES and "<" not in declared[2]:
                size = np.dtype(_TYPES[declared[1]]).itemsize
                self.register_bytes |= {name.strip(): size for name in declared[2].split(",")}
            return
        if not text or text.startswith("."):
            return
        found = re.fullmatch(r"(?:@(!?)(%p\d+) )?([a-z][\w.:]*) ?(.*)", text)
        assert found, f"cannot read: {text}"
        opcode, *modifiers = found[3].split(".")
        operands = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", found[4])
        self.instructions.append(
            Instruction(
                found[2], found[1] == "!", opcode, tuple(modifiers), tuple(o.strip() for o in operands), text
            )
        )


class Memory:
    """Tensors at addresses of their own, far apart; everything else is out of bounds."""

    _GAP = 2**32

    def __init__(self) -> None:
        self._tensors: list[Array] = []

    def add(self, tensor: Array) -> int:
        """Map a contiguous array, which loads and stores then read and change; returns its address."""
        assert tensor.flags.c_contiguous
        self._tensors.append(tensor.reshape(-1).view(np.uint8))
        return len(self._tensors) * self._GAP

    def _pieces(self, addresses: Array, size: int) -> list[tuple[Array, Array, Array]]:
        """Per tensor: its bytes, which of the addresses lie in it, and at what offsets."""
        pieces = []
        number = addresses // self._GAP
        for one in np.unique(number):
            assert 1 <= one <= len(self._tensors), f"address {one * self._GAP:#x} belongs to no tensor"
            tensor, inside = self._tensors[one - 1], number == one
            offsets = addresses[inside] - one * self._GAP
            assert (offsets + size <= len(tensor)).all(), f"{offsets.max() + size} > {len(tensor)} bytes"
            pieces.append((tensor, inside, offsets[:, None] + np.arange(size)))
        return pieces

    def load(self, addresses: Array, size: int) -> Array:
        """Bytes ``[n, size]`` at addresses ``[n]``."""
        data = np.empty((len(addresses), size), np.uint8)
        for tensor, inside, places in self._pieces(addresses, size):
            data[inside] = tensor[places]
        return data

    def store(self, addresses: Array, data: Array) -> None:
        """Write bytes ``[n, size]``."""
        for tensor, inside, places in self._pieces(addresses, data.shape[1]):
            tensor[places] = data[inside]


class Block:
    """One block of threads: registers ``name -> [threads]``, shared memory, and the instructions."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        arguments: Sequence[float],
        index: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
    ) -> None:
        self.program, self.memory, self.index, self.threads = program, memory, index, threads
        self.shared = SharedMemory(shared_bytes)
        self.warps = np.arange(threads) // _WARP
        self.registers: dict[str, Array] = {}
        self.copies: list[list[_Copy]] = [[]]  # groups; the last one is open
        self.products = InFlight()
        self.unfenced_registers: set[str] = set()  # written since wgmma.fence
        self.arguments = {
            name: np.full(threads, value, dtype=_TYPES[kind])
            for (kind, name), value in zip(program.parameters, arguments, strict=True)
        }

    def run(self) -> None:
        """Execute until every thread has returned."""
        counter = np.zeros(self.threads, np.int64)
        alive = np.ones(self.threads, bool)
        while alive.any():
            at = int(counter[alive].min())
            here = alive & (counter == at)
            counter[here] += 1
            instruction = self.program.instructions[at]
            if instruction.predicate is not None:
                here = here & (self._predicate(instruction.predicate) != instruction.negated)
            if not here.any():
                continue
            if instruction.opcode == "bra":
                counter[here] = self.program.labels[instruction.operands[0]]
            elif instruction.opcode == "ret":
                alive &= ~here
            elif instruction.opcode not in _NOTHING_TO_DO:
                try:
                    getattr(self, f"_{instruction.opcode}")(instruction, here)
                except Exception as error:
                    raise AssertionError(f"{instruction.text}: {error!r}") from error

    # Operands. Registers are unsigned integers of their size; an instruction's type says how to read them.

    def _size(self, register: str) -> int:
        for prefix, size in _PREFIX_BYTES:
            if register.startswith(prefix):
                return size
        return self.program.register_bytes[register]

    def _bits(self, operand: str, size: int) -> Array:
        if operand.startswith("%tid.x"):
            return np.arange(self.threads, dtype=np.uint32)
        if operand.startswith("%ctaid."):
            return np.full(self.threads, self.index["xyz".index(operand[-1])], np.uint32)
        if operand == "global_smem":
            return np.zeros(self.threads, _UNSIGNED[size])
        if operand.startswith("0f"):
            return np.full(self.threads, int(operand[2:], 16), np.uint32)
        if re.match(r"-?\d", operand):
            return np.full(self.threads, int(operand.rstrip("U"), 0) % 2 ** (8 * size), _UNSIGNED[size])
        assert operand not in self.products.registers, f"{operand} belongs to a wgmma under way"
        if operand not in self.registers:
            own = self._size(operand)
            self.registers[operand] = np.zeros(self.threads, _UNSIGNED[own] if own else bool)
        return self.registers[operand]

    def _read(self, operand: str, kind: str) -> Array:
        dtype = np.dtype(_TYPES[kind])
        return self._bits(operand, dtype.itemsize).astype(_UNSIGNED[dtype.itemsize]).view(dtype)

    def _predicate(self, operand: str) -> Array:
        if re.match(r"-?\d", operand):
            return np.full(self.threads, operand != "0")
        return self._bits(operand, 0)

    def _write(self, register: str, value: Array, here: Array) -> None:
        if register == "_":  # the sink
            return
        old = self._bits(register, 4)
        size = self._size(register)
        if size:
            value = np.ascontiguousarray(value)
            value = value.view(_UNSIGNED[value.dtype.itemsize]).astype(_UNSIGNED[size])
        self.registers[register] = np.where(here, value, old)
        self.unfenced_registers.add(register)

    @staticmethod
    def _list(operand: str) -> list[str]:
        return [name.strip() for name in operand.strip("{} ").split(",")]

    def _address(self, operand: str) -> Array:
        found = re.fullmatch(r"\[ ?([^ +\]]+)(?: ?\+ ?(-?\d+))? ?\]", operand)
        assert found, operand
        return self._bits(found[1], 4).astype(np.int64) + int(found[2] or 0)

    def _inputs(self, instruction: Instruction, kind: str | None = None) -> list[Array]:
        return [self._read(operand, kind or instruction.type) for operand in instruction.operands[1:]]

    # Moves and memory.

    def _mov(self, instruction: Instruction, here: Array) -> None:
        to, source = instruction.operands
        if instruction.type == "pred":
            self._write(to, self._predicate(source), here)
        elif to.startswith("{"):
            names = self._list(to)
            value = self._read(source, instruction.type)
            parts = value.view(_UNSIGNED[value.dtype.itemsize // len(names)]).reshape(self.threads, -1)
            for column, name in enumerate(names):
                self._write(name, parts[:, column], here)
        elif source.startswith("{"):
            names = self._list(source)
            size = np.dtype(_TYPES[instruction.type]).itemsize // len(names)
            parts = np.stack([self._bits(name, size).astype(_UNSIGNED[size]) for name in names], axis=1)
            self._write(to, parts.view(_UNSIGNED[size * len(names)])[:, 0], here)
        else:
            self._write(to, self._read(source, instruction.type), here)

    def _store_shared(self, addresses: Array, data: Array, warps: Array) -> None:
        places = self.shared.places(addresses, data.shape[1])
        assert not self.products.reads_any(places), "a wgmma under way reads these bytes"
        self.shared.store(places, data, warps)

    def _ld(self, instruction: Instruction, here: Array) -> None:
        to, source = instruction.operands
        if instruction.modifiers[0] == "param":
            self._write(to, self.arguments[source.strip("[] ")], here)
            return
        names, size = self._list(to), np.dtype(_TYPES[instruction.type]).itemsize
        addresses = self._address(source)[here]
        if instruction.modifiers[0] == "global":
            data = self.memory.load(addresses, size * len(names))
        else:
            places = self.shared.places(addresses, size * len(names))
            data = self.shared.load(places, self.warps[here])
        for name, values in zip(names, data.view(_UNSIGNED[size]).T, strict=True):
            whole = np.zeros(self.threads, _UNSIGNED[size])
            whole[here] = values
            self._write(name, whole, here)

    def _st(self, instruction: Instruction, here: Array) -> None:
        to, source = instruction.operands
        size = np.dtype(_TYPES[instruction.type]).itemsize
        values = [self._bits(name, size).astype(_UNSIGNED[size])[here] for name in self._list(source)]
        data = np.stack(values, axis=1).view(np.uint8)
        addresses = self._address(to)[here]
        if instruction.modifiers[0] == "global":
            self.memory.store(addresses, data)
        else:
            self._store_shared(addresses, data, self.warps[here])

    def _cp(self, instruction: Instruction, here: Array) -> None:
        """Asynchronous copies from global to shared memory; all threads are taken to have the same groups."""
        assert instruction.modifiers[0] == "async"
        if instruction.modifiers[1] == "commit_group":
            self.copies.append([])
        elif instruction.modifiers[1] == "wait_group":
            finished = len(self.copies) - 1 - int(instruction.operands[0], 0)
            for copy in (copy for group in self.copies[: max(0, finished)] for copy in group):
                self._store_shared(*copy)
            del self.copies[: max(0, finished)]
        else:
            to, source, size, *read = instruction.operands
            bytes_read = self._read(read[0], "u32")[here] if read else np.full(here.sum(), int(size, 0))
            data = np.zeros((here.sum(), int(size, 0)), np.uint8)  # what is not read is 0
            full = bytes_read == data.shape[1]
            assert (full | (bytes_read == 0)).all(), "a copy reads everything or nothing"
            data[full] = self.memory.load(self._address(source)[here][full], data.shape[1])
            addresses, warps = self._address(to)[here], self.warps[here]
            places = self.shared.places(addresses, data.shape[1])
            assert not self.products.reads_any(places), "a wgmma under way reads these bytes"
            self.shared.will_store(places, warps)
            self.copies[-1].append((addresses, data, warps))

    # Arithmetic.

    def _add(self, instruction: Instruction, here: Array) -> None:
        a, b = self._inputs(instruction)
        self._write(instruction.operands[0], a + b, here)

    def _sub(self, instruction: Instruction, here: Array) -> None:
        if instruction.type == "f16x2":
            to, *operands = instruction.operands
            a, b = (self._read(operand, "b32").view(np.float16) for operand in operands)
            self._write(to, (a - b).view(np.uint32), here)
            return
        a, b = self._inputs(instruction)
        self._write(instruction.operands[0], a - b, here)

    def _mul(self, instruction: Instruction, here: Array) -> None:
        a, b = self._inputs(instruction)
        wide = np.int64 if instruction.type.startswith("s") else np.uint64
        if "wide" in instruction.modifiers:
            product = a.astype(wide) * b.astype(wide)
        elif "hi" in instruction.modifiers:
            product = ((a.astype(wide) * b.astype(wide)) >> wide(8 * a.dtype.itemsize)).astype(a.dtype)
        else:
            product = a * b
        self._write(instruction.operands[0], product, here)

    def _mad(self, instruction: Instruction, here: Array) -> None:
        to, x, y, z = instruction.operands
        kind = instruction.type
        a, b = self._read(x, kind), self._read(y, kind)
        if "wide" in instruction.modifiers:
            total = a.astype(np.int64) * b.astype(np.int64) + self._read(z, "s64")
        else:
            total = a * b + self._read(z, kind)
        self._write(to, total, here)

    def _fma(self, instruction: Instruction, here: Array) -> None:
        a, b, c = (x.astype(np.float64) for x in self._inputs(instruction))
        self._write(instruction.operands[0], (a * b + c).astype(np.float32), here)

    def _div(self, instruction: Instruction, here: Array) -> None:
        a, b = self._inputs(instruction)
        self._write(instruction.operands[0], a / b, here)

    def _neg(self, instruction: Instruction, here: Array) -> None:
        self._write(instruction.operands[0], -self._inputs(instruction)[0], here)

    def _max(self, instruction: Instruction, here: Array) -> None:
        self._write(instruction.operands[0], np.fmax(*self._inputs(instruction)), here)

    def _min(self, instruction: Instruction, here: Array) -> None:
        self._write(instruction.operands[0], np.fmin(*self._inputs(instruction)), here)

    def _ex2(self, instruction: Instruction, here: Array) -> None:
        self._write(instruction.operands[0], np.exp2(self._inputs(instruction)[0]), here)

    def _lg2(self, instruction: Instruction, here: Array) -> None:
        self._write(instruction.operands[0], np.log2(self._inputs(instruction)[0]), here)

    def _bitwise(self, instruction: Instruction, here: Array) -> None:
        if instruction.type == "pred":
            a, b = (self._predicate(operand) for operand in instruction.operands[1:])
        else:
            a, b = self._inputs(instruction)
        self._write(instruction.operands[0], _BITWISE[instruction.opcode](a, b), here)

    _and = _or = _xor = _bitwise

    def _not(self, instruction: Instruction, here: Array) -> None:
        to, source = instruction.operands
        value = (
            self._predicate(source) if instruction.type == "pred" else self._read(source, instruction.type)
        )
        self._write(to, ~value, here)

    def _shl(self, instruction: Instruction, here: Array) -> None:
        to, source, distance = instruction.operands
        value, by = self._read(source, instruction.type), self._read(distance, "u32").astype(np.uint64)
        shifted = np.where(by < 8 * value.dtype.itemsize, value.astype(np.uint64) << (by & np.uint64(63)), 0)
        self._write(to, shifted.astype(value.dtype), here)

    def _shr(self, instruction: Instruction, here: Array) -> None:
        to, source, distance = instruction.operands
        value, by = self._read(source, instruction.type), self._read(distance, "u32").astype(np.int64)
        last = 8 * value.dtype.itemsize - 1
        shifted = value >> np.minimum(by, last).astype(value.dtype)
        if value.dtype.kind == "u":
            shifted = np.where(by > last, 0, shifted)
        self._write(to, shifted.astype(value.dtype), here)

    def _bfe(self, instruction: Instruction, here: Array) -> None:
        to, source, first, length = instruction.operands
        position, bits = self._read(first, "u32").astype(np.int64), self._read(length, "u32").astype(np.int64)
        field = (self._read(source, "u32").astype(np.int64) >> position) & ((1 << bits) - 1)
        if instruction.type == "s32":
            field -= ((field >> (bits - 1)) & 1) << bits
        self._write(to, field.astype(_TYPES[instruction.type]), here)

    def _prmt(self, instruction: Instruction, here: Array) -> None:
        a, b, selector = self._inputs(instruction, "u32")
        source = np.stack((a, b), axis=1).view(np.uint8)  # [threads, 8]
        chosen = (selector[:, None] >> (4 * np.arange(4, dtype=np.uint32))) & 0xF
        assert (chosen < 8).all(), "sign replication is not known here"
        picked = np.take_along_axis(source, chosen.astype(np.int64), axis=1)
        self._write(instruction.operands[0], np.ascontiguousarray(picked).view(np.uint32)[:, 0], here)

    def _setp(self, instruction: Instruction, here: Array) -> None:
        a, b = self._inputs(instruction)
        self._write(instruction.operands[0], _COMPARE[instruction.modifiers[0]](a, b), here)

    def _selp(self, instruction: Instruction, here: Array) -> None:
        to, x, y, choice = instruction.operands
        a, b = self._read(x, instruction.type), self._read(y, instruction.type)
        self._write(to, np.where(self._predicate(choice), a, b), here)

    def _cvt(self, instruction: Instruction, here: Array) -> None:
        to, *sources = instruction.operands
        target, source = instruction.modifiers[-2:]
        if (target, source) == ("f16x2", "f32"):
            high, low = (self._read(x, "f32").astype(np.float16) for x in sources)
            self._write(to, np.stack((low, high), axis=1).view(np.uint32)[:, 0], here)
        elif (target, source) == ("f16x2", "e4m3x2"):
            codes = self._bits(sources[0], 2).astype(np.uint16).view(np.uint8)
            halves = decode_e4m3(torch.from_numpy(codes)).numpy().astype(np.float16)
            self._write(to, halves.view(np.uint32), here)
        else:
            self._write(to, self._read(sources[0], source).astype(_TYPES[target]), here)

    # Warps.

    def _shfl(self, instruction: Instruction, here: Array) -> None:
        to, source, distance, _, _ = instruction.operands
        thread = np.arange(self.threads)
        lane, by = thread % _WARP, self._read(distance, "u32").astype(np.int64)
        other = {"bfly": lane ^ by, "idx": by}[instruction.modifiers[1]]
        self._write(to.split("|")[0], self._bits(source, 4)[thread - lane + other % _WARP], here)

    def _rows(self, operand: str, matrix: int) -> tuple[Array, Array]:
        """Addresses of the eight rows of each warp's matrix, and the warps: ``[8 warps]`` each."""
        addresses = self._address(operand).reshape(-1, _WARP)[:, 8 * matrix : 8 * matrix + 8]
        return addresses.reshape(-1), np.arange(len(addresses)).repeat(8)

    def _ldmatrix(self, instruction: Instruction, here: Array) -> None:
        assert here.all(), "not all lanes take part"
        for matrix, name in enumerate(self._list(instruction.operands[0])):
            addresses, warps = self._rows(instruction.operands[1], matrix)
            rows = self.shared.load(self.shared.places(addresses, 16), warps)
            halves = rows.view(np.uint16).reshape(-1, 8, 8)
            if "trans" in instruction.modifiers:
                halves = np.ascontiguousarray(halves.swapaxes(1, 2))
            self._write(name, halves.reshape(-1, 2).view(np.uint32)[:, 0], here)

    def _stmatrix(self, instruction: Instruction, here: Array) -> None:
        assert here.all(), "not all lanes take part"
        for matrix, name in enumerate(self._list(instruction.operands[1])):
            halves = self._read(name, "b32").view(np.uint16).reshape(-1, 8, 8)
            if "trans" in instruction.modifiers:
                halves = np.ascontiguousarray(halves.swapaxes(1, 2))
            addresses, warps = self._rows(instruction.operands[0], matrix)
            self._store_shared(addresses, halves.view(np.uint8).reshape(-1, 16), warps)

    def _mma(self, instruction: Instruction, here: Array) -> None:
        assert here.all(), "not all warps take part"
        shape, left_layout, right_layout, *types = instruction.modifiers[2:]
        assert (left_layout, types) == ("row", ["f32", "f16", "f16", "f32"]), "another layout or type"
        to, *sources = instruction.operands
        a, b, c = (
            np.stack([self._read(name, "b32") for name in self._list(names)], axis=1) for names in sources
        )
        if shape == "m8n8k4":
            after = quad_pair_product(a, b, c, columns=right_layout == "row")
        else:
            assert (shape, right_layout) == ("m16n8k16", "col"), "another shape"
            after = self._wide_product(a, b, c)
        for column, name in enumerate(self._list(to)):
            self._write(name, after[:, column], here)

    def _wide_product(self, a: Array, b: Array, c: Array) -> Array:
        """``mma.m16n8k16``: 32-bit registers ``[threads, n]`` of its operands and of its result."""
        # [warp, lane / 4, lane % 4, half of the sum, half of the rows, value of the pair]
        left = a.view(np.float16).reshape(-1, 8, 4, 2, 2, 2).astype(np.float64)
        left = left.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)
        right = b.view(np.float16).reshape(-1, 8, 4, 2, 2).astype(np.float64)
        right = right.transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
        before = c.view(np.float32).reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)
        after = (left @ right + before).astype(np.float32)
        return after.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(self.threads, 4)

    # Blocks and warpgroups.

    def _bar(self, instruction: Instruction, here: Array) -> None:
        if instruction.modifiers == ("warp", "sync"):
            return
        assert (instruction.modifiers, instruction.operands) == (("sync",), ("0",)), "another barrier"
        assert here.all(), "not all threads take part"
        self.shared.barrier()

    def _fence(self, instruction: Instruction, here: Array) -> None:
        assert instruction.modifiers[:2] == ("proxy", "async")
        assert here.all(), "not all threads take part"
        self.shared.unfenced[:] = False

    def _wgmma(self, instruction: Instruction, here: Array) -> None:
        assert here.all(), "not all warps take part"
        kind = instruction.modifiers[0]
        if kind == "fence":
            self.unfenced_registers.clear()
        elif kind == "commit_group":
            self.products.commit()
        elif kind == "wait_group":
            sums, places = self.products.wait(int(instruction.operands[0]))
            self.registers |= sums
            self._load_as_each_warp(places)
        else:
            self._start_products(instruction)

    def _start_products(self, instruction: Instruction) -> None:
        shape = re.fullmatch(r"m64n(\d+)k16", instruction.modifiers[3])
        assert shape and instruction.modifiers[4:] == ("f32", "f16", "f16"), "another shape or type"
        columns = int(shape[1])
        to, a, descriptor, accumulate, *scales, transposed = instruction.operands
        assert scales == ["1", "1"], "negated operands"
        sums, sources = self._list(to), self._list(a)
        assert (len(sums), len(sources)) == (columns // 2, 4), "another number of registers"
        assert not self.unfenced_registers & {*sums, *sources}, "no wgmma.fence after writing its registers"
        assert not self.products.sums.keys() & {*sources}, "A is a sum that is under way"
        left = np.stack([self._settled(name) for name in sources], axis=1)
        before = np.stack([self._settled(name) for name in sums], axis=1).view(np.float32)
        words, adds = self._bits(descriptor, 8), self._predicate(accumulate)
        after, reads = [], []
        for first in range(0, self.threads, WARPGROUP):
            group = slice(first, first + WARPGROUP)
            assert (words[group] == words[first]).all() and (adds[group] == adds[first]).all(), "not uniform"
            addresses = Descriptor.decode(int(words[first])).addresses(columns, transposed == "1")
            places = self.shared.places(addresses.reshape(-1), 2)
            assert not self.shared.unfenced[places].any(), "no fence.proxy.async after writing B"
            right = self.shared.bytes[places].view(np.float16).reshape(addresses.shape)
            after.append(product(left[group], right, before[group] if adds[first] else None))
            reads.append(places)
            self._load_as_each_warp(places)
        values = np.concatenate(after)
        done = {name: np.ascontiguousarray(x).view(np.uint32) for name, x in zip(sums, values.T, strict=True)}
        self.products.start(done, {*sources}, np.unique(reads))

    def _load_as_each_warp(self, places: Array) -> None:
        for warp in np.unique(self.warps):
            self.shared.load(places, np.full(len(places), warp))

    def _settled(self, name: str) -> Array:
        """A register as the products that were started will leave it."""
        if name in self.products.sums:
            return self.products.sums[name]
        if name in self.products.registers:
            return self.registers[name]
        return self._bits(name, 4)


@dataclass(frozen=True)
class Pointer:
    """An argument that points into a contiguous array."""

    array: Array
    byte_offset: int = 0


def run_grid(
    ptx: str,
    arguments: Sequence[Pointer | float],
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
) -> None:
    """Run a kernel with arguments in the order of its parameters; it changes the arrays they point into.

    Triton's kernels end with two pointers to scratch memory, which are passed as 0 here.
    """
    program, memory = Program(ptx), Memory()
    values = [memory.add(x.array) + x.byte_offset if isinstance(x, Pointer) else x for x in arguments]
    values += [0] * (len(program.parameters) - len(values))
    with np.errstate(all="ignore"):
        for x, y, z in np.ndindex(grid):
            Block(program, memory, values, (x, y, z), threads, shared_bytes).run()
