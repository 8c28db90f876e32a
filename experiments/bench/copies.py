"""How many copies of a case rotate through the caches."""

from __future__ import annotations

from page4.experiments.bench.machine import Machine
from page4.kernels.errors import InputError


class NoRoomError(InputError):
    """The inputs of a cell do not fit into the memory of the machine."""


def choose_copies(machine: Machine, bytes_per_launch: int, memory: int, limit: int) -> tuple[int, bool]:
    """Copies of a case, and whether they keep its bytes out of the caches.

    Args:
        machine: says how many would, and how much memory there is.
        bytes_per_launch: that one launch moves.
        memory: that one copy takes, bytes.
        limit: most copies.

    Raises:
        NoRoomError: not even one copy fits into the memory.
    """
    fitting = machine.memory_bytes // max(1, memory)
    if fitting < 1:
        raise NoRoomError(
            f"one copy of the inputs takes {memory / 2**30:.1f} GiB, "
            f"more than the {machine.memory_bytes / 2**30:.1f} GiB that may be used"
        )
    wanted = machine.cold_copies(bytes_per_launch)
    copies = min(wanted, fitting, limit)
    return copies, copies >= wanted
