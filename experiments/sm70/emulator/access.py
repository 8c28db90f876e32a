"""Loads, stores and atomic operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from page4.experiments.sm70.assembly import ZERO_REGISTER, Address, Instruction, Operand, Predicate, Register

from .memory import Access, Memory
from .operands import Array, Operands
from .operation import Mask, Operation, Unsupported, allow
from .races import RaceList
from .undefined import ALL_BITS

AccessBuilder = Callable[[Instruction, Operands, Memory, RaceList], Operation]

_WIDTHS = ("8", "16", "U8", "S8", "U16", "S16", "64", "128")
_SCOPES = ("E", "SYS", "GPU", "SM", "CTA", "STRONG", "WEAK", "CONSTANT", "EF", "EL", "LU", "NA", "U")
_AT: dict[str, Any] = {
    "ADD": np.add, "MIN": np.minimum, "MAX": np.maximum, "AND": np.bitwise_and, "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
}  # fmt: skip


class _Side:
    """What loads and stores have in common: the address, and who is to blame."""

    def __init__(self, instruction: Instruction, operands: Operands, address: Operand) -> None:
        assert isinstance(address, Address)
        self.instruction, self.threads = instruction, operands.threads
        self.size = instruction.access_bytes
        self.everyone = np.arange(self.threads.count)
        self._offset = np.int64(address.offset)
        self._low = self.threads.registers[address.register]
        pair = instruction.memory_space == "global"
        if pair and "E" not in instruction.modifiers:
            raise Unsupported("addresses of 32 bits")
        above = min(address.register + 1, ZERO_REGISTER)
        self._high = self.threads.registers[above] if pair else None
        self._registers = [
            n for n in range(address.register, address.register + 1 + pair) if n < ZERO_REGISTER
        ]
        self._signed = self._low.view(np.int32)

    def who(self, mask: Mask) -> Array:
        """Threads of a mask."""
        return self.everyone if mask is None else np.flatnonzero(mask)

    def addresses(self, mask: Mask, who: Array) -> Array:
        """``[n]`` int64."""
        undefined = self.threads.undefined
        for register in self._registers:
            if undefined.anywhere[register] and undefined.bits[register][who].any():
                wrong = np.zeros(self.threads.count, bool)
                wrong[who] = undefined.bits[register][who] != 0
                raise self.threads.fail(
                    self.instruction, wrong, f"the address depends on an undefined value in R{register}"
                )
        low = self._low if mask is None else self._low[who]
        if self._high is None:
            signed = self._signed if mask is None else self._signed[who]
            return signed.astype(np.int64) + self._offset
        high = self._high if mask is None else self._high[who]
        return (low.astype(np.int64) | high.astype(np.int64) << np.int64(32)) + self._offset

    def fail(self, who: Array) -> Callable[[Array, str], Exception]:
        """Makes the error for accesses of these threads."""

        def error(wrong: Array, message: str) -> Exception:
            threads = np.zeros(self.threads.count, bool)
            threads[who[wrong]] = True
            return self.threads.fail(self.instruction, threads, message)

        return error


def load(instruction: Instruction, operands: Operands, memory: Memory, races: RaceList) -> Operation:
    """``LDG``, ``LDS`` and ``LDL``."""
    allow(instruction, *_SCOPES, *_WIDTHS)
    target, address = instruction.operands
    assert isinstance(target, Register)
    side = _Side(instruction, operands, address)
    threads, size, space = side.threads, side.size, instruction.memory_space
    words = max(size // 4, 1)
    signed = {"S8": 24, "S16": 16}.get(
        next((m for m in instruction.modifiers if m[0] == "S" and m[1:].isdigit()), "")
    )
    kept = target.number != ZERO_REGISTER
    rows = [threads.registers[target.number + word] for word in range(words)] if kept else []

    def put(values: list[Array], undefined: list[Array] | None, mask: Mask, who: Array) -> None:
        for word, row in enumerate(rows):
            value = values[word]
            if signed:
                value = (value << np.uint32(signed)).view(np.int32) >> np.int32(signed)
            if mask is None:
                row[...] = value
            else:
                row[who] = value
            place = target.number + word
            if undefined is None:
                if threads.undefined.anywhere[place]:
                    threads.undefined.set(place, None, mask)
                continue
            marks = np.zeros(threads.count, np.uint32)
            marks[who] = ALL_BITS * (undefined[word] != 0) if signed else undefined[word]
            threads.undefined.set(place, marks, mask)

    def run_global(mask: Mask) -> None:
        who = side.who(mask)
        addresses = side.addresses(mask, who)
        memory.last = Access(space, None if mask is None else who, addresses, size)
        for piece in memory.globals.pieces(addresses, size, side.fail(who)):
            if piece.which is None:
                put(piece.load(size), piece.load_undefined(size), mask, who)
                continue
            here = who[piece.which]
            part = np.zeros(threads.count, bool)
            part[here] = True
            put(piece.load(size), piece.load_undefined(size), part, here)

    def run_shared(mask: Mask) -> None:
        who = side.who(mask)
        addresses = side.addresses(mask, who)
        memory.last = Access(space, None if mask is None else who, addresses, size)
        offsets = memory.shared.places(addresses, threads.block[who], size, side.fail(who))
        report = races.reporter(instruction, who, addresses)
        put(*memory.shared.load(offsets, size, threads.warp[who], report), mask, who)

    def run_local(mask: Mask) -> None:
        who = side.who(mask)
        addresses = side.addresses(mask, who)
        memory.last = Access(space, None if mask is None else who, addresses, size)
        put(*memory.local.load(memory.local.places(addresses, who, size, side.fail(who)), size), mask, who)

    return Operation({"global": run_global, "shared": run_shared, "local": run_local}[space])


def store(instruction: Instruction, operands: Operands, memory: Memory, races: RaceList) -> Operation:
    """``STG``, ``STS`` and ``STL``."""
    allow(instruction, *_SCOPES, *_WIDTHS)
    address, source = instruction.operands
    assert isinstance(source, Register)
    side = _Side(instruction, operands, address)
    threads, size, space = side.threads, side.size, instruction.memory_space
    words = max(size // 4, 1)
    zeros = source.number == ZERO_REGISTER
    numbers = [ZERO_REGISTER if zeros else source.number + word for word in range(words)]
    rows = [threads.registers[number] for number in numbers]
    stored = np.uint32((1 << 8 * min(size, 4)) - 1)

    def take(mask: Mask, who: Array) -> tuple[list[Array], list[Array] | None]:
        values = rows if mask is None else [row[who] for row in rows]
        undefined = threads.undefined
        if not any(undefined.anywhere[number] for number in numbers):
            return values, None
        marks = [undefined.bits[number][who] & stored for number in numbers]
        return values, marks if any(mark.any() for mark in marks) else None

    def run_global(mask: Mask) -> None:
        who = side.who(mask)
        addresses = side.addresses(mask, who)
        memory.last = Access(space, None if mask is None else who, addresses, size)
        values, undefined = take(mask, who)
        fail = side.fail(who)
        if undefined is not None:
            wrong = np.logical_or.reduce([mark != 0 for mark in undefined])
            raise fail(wrong, f"stores an undefined value from R{source.number} in global memory")
        for piece in memory.globals.pieces(addresses, size, fail):
            part = values if piece.which is None else [value[piece.which] for value in values]
            piece.store(size, part)
            piece.store_defined(size)

    def run_shared(mask: Mask) -> None:
        who = side.who(mask)
        addresses = side.addresses(mask, who)
        memory.last = Access(space, None if mask is None else who, addresses, size)
        offsets = memory.shared.places(addresses, threads.block[who], size, side.fail(who))
        report = races.reporter(instruction, who, addresses)
        memory.shared.store(offsets, size, *take(mask, who), threads.warp[who], report)

    def run_local(mask: Mask) -> None:
        who = side.who(mask)
        addresses = side.addresses(mask, who)
        memory.last = Access(space, None if mask is None else who, addresses, size)
        memory.local.store(memory.local.places(addresses, who, size, side.fail(who)), size, *take(mask, who))

    return Operation({"global": run_global, "shared": run_shared, "local": run_local}[space])


def atomic(instruction: Instruction, operands: Operands, memory: Memory, races: RaceList) -> Operation:
    """``RED`` and ``ATOMG`` of 32 bits: threads take turns, in the order of their numbers."""
    allow(instruction, *_SCOPES, *_AT, "EXCH", "CAS", "S32", "F32", "FTZ", "RN")
    given = list(instruction.operands)
    if isinstance(given[0], Predicate):
        given.pop(0)
    target = given.pop(0) if instruction.opcode == "ATOMG" else None
    side = _Side(instruction, operands, given.pop(0))
    threads = side.threads
    values = [operands.bits(operand) for operand in given]
    name = next((name for name in (*_AT, "EXCH", "CAS") if name in instruction.modifiers), "")
    kind = {"S32": np.int32, "F32": np.float32}.get(
        next((m for m in instruction.modifiers if m in ("S32", "F32")), ""), np.uint32
    )
    wanted = target if isinstance(target, Register) and target.number != ZERO_REGISTER else None
    if not wanted and name not in _AT:
        raise Unsupported("an exchange without a result")
    sources = [operand.number for operand in given if isinstance(operand, Register)]

    def run(mask: Mask) -> None:
        who = side.who(mask)
        addresses = side.addresses(mask, who)
        memory.last = Access("global", None if mask is None else who, addresses, 4)
        fail = side.fail(who)
        for number in sources:
            if threads.undefined.anywhere[number] and threads.undefined.bits[number][who].any():
                wrong = threads.undefined.bits[number][who] != 0
                raise fail(wrong, f"an atomic operation with an undefined value in R{number}")
        read = [np.broadcast_to(value(), threads.count)[who] for value in values]
        for piece in memory.globals.pieces(addresses, 4, fail):
            part = [value if piece.which is None else value[piece.which] for value in read]
            here = who if piece.which is None else who[piece.which]
            words, place = piece.words.view(kind), piece.offsets >> 2
            marks = piece.load_undefined(4)
            if marks is not None:
                raise fail(np.ones(len(who), bool), "an atomic operation on memory that nobody wrote")
            if wanted is None:
                _AT[name].at(words, place, part[0].view(kind))
                continue
            before = np.empty(len(here), kind)
            for turn, word in enumerate(place):
                before[turn] = words[word]
                words[word] = _next(name, words[word], [value[turn].view(kind) for value in part])
            threads.registers[wanted.number][here] = before.view(np.uint32)
            if threads.undefined.anywhere[wanted.number]:
                written = np.zeros(threads.count, bool)
                written[here] = True
                threads.undefined.set(wanted.number, None, written)

    return Operation(run)


def _next(name: str, old: Any, values: list[Any]) -> Any:
    if name == "EXCH":
        return values[0]
    if name == "CAS":
        return values[1] if old == values[0] else old
    return _AT[name](old, values[0])


ACCESS: dict[str, AccessBuilder] = {
    "LDG": load, "LDS": load, "LDL": load, "STG": store, "STS": store, "STL": store,
    "RED": atomic, "ATOMG": atomic,
}  # fmt: skip
