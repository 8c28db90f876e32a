"""How many blocks of a kernel a multiprocessor holds, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass

from page4.experiments.sm70.predictor.machine import MAX_BLOCKS, MAX_THREADS, REGISTERS, SHARED_BYTES, WARP
from page4.kernels.errors import InputError

_REGISTER_UNIT = 256  # registers that a warp is given at once
_WARP_UNIT = 4  # warps are spread over the schedulers
_SHARED_UNIT = 256


@dataclass(frozen=True)
class Occupancy:
    """Blocks that run on a multiprocessor at the same time.

    Attributes:
        blocks: of the kernel.
        warps: of those blocks, 64 at most.
        limit: what keeps a further block out: ``registers``, ``bytes of shared memory``, ``threads`` or
            ``blocks``.
    """

    blocks: int
    warps: int
    limit: str


def occupancy(registers: int, shared_bytes: int, warps: int) -> Occupancy:
    """The occupancy of a V100 by blocks of so many warps.

    Args:
        registers: per thread.
        shared_bytes: per block.
        warps: per block.

    Raises:
        InputError: not even one block fits.
    """
    per_warp = -(-max(registers, 1) * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    shared = max(-(-shared_bytes // _SHARED_UNIT) * _SHARED_UNIT, 1)
    limits = {
        "registers": REGISTERS // per_warp // _WARP_UNIT * _WARP_UNIT // warps,
        "bytes of shared memory": SHARED_BYTES // shared,
        "threads": MAX_THREADS // (WARP * warps),
        "blocks": MAX_BLOCKS,
    }
    limit = min(limits, key=limits.__getitem__)
    blocks = limits[limit]
    if blocks < 1:
        raise InputError(
            f"a block of {warps} warps with {registers} registers a thread and {shared_bytes} bytes of "
            f"shared memory does not fit on a V100, which has too few {limit}"
        )
    return Occupancy(blocks, blocks * warps, limit)
