"""What can be read from a disassembly without understanding it: how often each instruction occurs."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from page4.experiments.sm70 import binary_cache
from page4.experiments.sm70.compiling import Binary
from page4.experiments.sm70.toolchain import Toolchain

LOADS = ("LDG", "LDGSTS")
STORES = ("STG",)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P(?:\d|T)\s+)?([A-Z][\w.]*)")
_TARGET = re.compile(r"EF_CUDA_SM(\d+)")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class MachineCode:
    """The instructions of a binary.

    Attributes:
        target: compute capability that the ELF header names.
        opcodes: how often every opcode with its modifiers occurs, such as ``LDG.E.128.SYS``.
    """

    target: int
    opcodes: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> MachineCode:
        """From what ``nvdisasm`` prints.

        Raises:
            ValueError: the text names no target.
        """
        found = _TARGET.search(text)
        if not found:
            raise ValueError("the disassembly names no target")
        return cls(int(found[1]), Counter(_INSTRUCTION.findall(text)))

    def count(self, *names: str) -> int:
        """Instructions of these names, whatever their modifiers."""
        return sum(number for opcode, number in self.opcodes.items() if opcode.split(".")[0] in names)

    def widths(self, *names: str) -> Mapping[int, int]:
        """Bytes of a thread's access -> how many instructions of these names access so many; ascending."""
        found: Counter[int] = Counter()
        for opcode, number in self.opcodes.items():
            name, *modifiers = opcode.split(".")
            if name in names:
                found[next((_BYTES[m] for m in modifiers if m in _BYTES), 4)] += number
        return dict(sorted(found.items()))

    def with_type(self, *types: str) -> tuple[str, ...]:
        """Opcodes that name one of these types, such as ``BF16``, among their modifiers."""
        return tuple(sorted(opcode for opcode in self.opcodes if any(t in opcode for t in types)))


def machine_code(binary: Binary, toolchain: Toolchain) -> MachineCode:
    """The instructions of a binary, from the cache where it was read before."""
    key = hashlib.sha256(b"opcodes" + binary.cubin).hexdigest()
    known = binary_cache.read(key)
    if known is None:
        code = MachineCode.parse(toolchain.disassemble(binary.cubin))
        known = {"target": code.target, "opcodes": dict(code.opcodes)}
        binary_cache.write(key, known)
    return MachineCode(**known)
