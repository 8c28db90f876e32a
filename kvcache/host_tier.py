"""The host tier: groups of pages and the states after them, in pinned host memory."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError

from .cache import HybridCache
from .copy_queue import Ticket, copy_queue
from .group_layout import GroupLayout
from .prefix_chain import Key

_STAGING = 2  # groups on their way out at the same time


@dataclass
class Transfers:
    """Copies between device and host, one direction of them.

    Attributes:
        groups, bytes: moved.
        seconds: that the copies took, summed; they wait for each other and for the computation before that.
    """

    groups: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, None before the first copy."""
        return self.bytes / self.seconds if self.seconds else None


@dataclass
class _Entry:
    slot: int
    pages: int
    holders: int = 0


class HostTier:
    """Groups by key, within a budget; the one used longest ago makes room.

    A group leaves the device in two steps: its parts are gathered in the order of the computation, so its
    pages may be given away at once; one long copy to the host follows beside the computation. It comes back
    by one long copy and is scattered into its pages, both beside the computation: other requests go on
    meanwhile, and :class:`Ticket` says when the pages may be read.

    Args:
        cache: whose pages and states are moved.
        budget: bytes of host memory.
        pages: of the largest group.
    Raises:
        InputError: the budget does not hold one group.
    """

    def __init__(self, cache: HybridCache, budget: int, pages: int) -> None:
        self._cache = cache
        self._layouts: dict[int, GroupLayout] = {}
        largest = self._layout(pages).nbytes
        device = cache.tables.device
        slots = budget // largest
        if slots < 1:
            raise InputError(
                f"the host tier has {budget / 2**30:.3g} GiB, one group of {pages} pages and a state takes "
                f"{largest / 2**30:.3g}: raise host_gib or lower the snapshot interval"
            )
        self._arena = host_arena((slots, largest), device)
        self._staging_out = torch.empty(_STAGING, largest, dtype=torch.uint8, device=device)
        self._staging_in = torch.empty(largest, dtype=torch.uint8, device=device)
        self._queue = copy_queue(device)
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._free = list(range(slots))
        self._last_use: dict[int, Ticket] = {}  # of a slot
        self._leaving: list[Ticket | None] = [None] * _STAGING  # copies that read the staging buffers
        self._unsettled: list[tuple[Ticket, int, Transfers]] = []
        self.out, self.back = Transfers(), Transfers()
        self.slots = slots

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def group_bytes(self) -> int:
        """Bytes of the largest group: what a slot takes."""
        return self._arena.shape[1]

    def nbytes(self, pages: int) -> int:
        """Bytes of a group of so many pages."""
        return self._layout(pages).nbytes

    def offload(self, key: Key, pages: Sequence[int], request: int) -> Ticket | None:
        """Begins to copy pages and the state of a request to the host; None if there is no room."""
        entry = self._make(key, len(pages))
        if entry is None:
            return None
        turn = self.out.groups % _STAGING
        leaving = self._leaving[turn]
        if leaving is not None:
            leaving.before_computation()
        layout = self._layout(len(pages))
        staging = self._staging_out[turn][: layout.nbytes]
        index = self._indices(pages)
        for stored, part in zip(self._cache.paged_tensors(), layout.pages(staging), strict=True):
            torch.index_select(stored, 0, index, out=part)
        for state, part in zip(self._cache.prefilled_state(request), layout.state(staging), strict=True):
            part.copy_(state)
        target = self._arena[entry.slot][: layout.nbytes]
        ticket = self._queue.submit(lambda: target.copy_(staging, non_blocking=True))
        self._leaving[turn] = ticket
        self._note(entry.slot, ticket, layout.nbytes, self.out)
        return ticket

    def load(self, key: Key, first: int, pages: Sequence[int], request: int | None) -> Ticket:
        """Begins to copy a group back.

        Args:
            first: the group's page that fills the first of ``pages``; pages before it are left out.
            pages: to be filled with the group's pages from there on; may be empty.
            request: whose state to set; None: no one's.
        """
        self._entries.move_to_end(key)
        entry = self._entries[key]
        layout = self._layout(entry.pages)
        start = 0 if pages else layout.state_offset
        stop = layout.state_offset if request is None else layout.nbytes
        source, staging = self._arena[entry.slot], self._staging_in[: layout.nbytes]
        index = self._indices(pages)

        def copy() -> None:
            staging[start:stop].copy_(source[start:stop], non_blocking=True)
            if pages:
                for stored, part in zip(self._cache.paged_tensors(), layout.pages(staging), strict=True):
                    stored.index_copy_(0, index, part[first : first + len(pages)])
            if request is not None:
                states = self._cache.prefilled_state(request)
                for state, part in zip(states, layout.state(staging), strict=True):
                    state.copy_(part)

        ticket = self._queue.submit(copy)
        self._note(entry.slot, ticket, stop - start, self.back)
        return ticket

    def put(self, key: Key, pages: int, data: Tensor) -> bool:
        """Takes a group that comes from elsewhere, uint8 ``[nbytes]``; whether there was room.

        Raises:
            ValueError: it has not :meth:`nbytes` bytes.
        """
        layout = self._layout(pages)
        if data.numel() != layout.nbytes:
            raise ValueError(f"a group of {pages} pages has {layout.nbytes} bytes, got {data.numel()}")
        entry = self._make(key, pages)
        if entry is None:
            return False
        if entry.slot in self._last_use:
            self._last_use[entry.slot].wait()
        self._arena[entry.slot][: layout.nbytes].copy_(data)
        return True

    def hold(self, key: Key) -> None:
        """Keeps a group from making room, until it is released as often."""
        self._entries[key].holders += 1

    def release(self, key: Key) -> None:
        """Ends one :meth:`hold`."""
        self._entries[key].holders -= 1

    def content(self, key: Key) -> tuple[int, Tensor]:
        """A group's number of pages and its bytes, uint8 ``[nbytes]``, once it has arrived; a view."""
        entry = self._entries[key]
        return entry.pages, self._arena[entry.slot][: self._layout(entry.pages).nbytes]

    def poll(self) -> None:
        """Counts the copies that are done."""
        waiting = []
        for ticket, nbytes, transfers in self._unsettled:
            if ticket.done():
                transfers.bytes += nbytes
                transfers.seconds += ticket.seconds()
            else:
                waiting.append((ticket, nbytes, transfers))
        self._unsettled = waiting

    def drain(self) -> None:
        """Waits for all copies."""
        for ticket, _, _ in self._unsettled:
            ticket.wait()
        self.poll()

    def _make(self, key: Key, pages: int) -> _Entry | None:
        """Room for a new group: a free slot, or that of the group used longest ago."""
        if not self._free:
            oldest = next((k for k, entry in self._entries.items() if not entry.holders), None)
            if oldest is None:
                return None
            self._free.append(self._entries.pop(oldest).slot)
        entry = self._entries[key] = _Entry(self._free.pop(), pages)
        return entry

    def _note(self, slot: int, ticket: Ticket, nbytes: int, transfers: Transfers) -> None:
        self._last_use[slot] = ticket
        transfers.groups += 1
        self._unsettled.append((ticket, nbytes, transfers))

    def _indices(self, pages: Sequence[int]) -> Tensor:
        device = self._staging_in.device
        host = torch.tensor(pages, dtype=torch.int64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    def _layout(self, pages: int) -> GroupLayout:
        if pages not in self._layouts:
            self._layouts[pages] = GroupLayout(self._cache, pages)
        return self._layouts[pages]


def host_arena(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Host memory, uint8, that a GPU copies to and from beside its computation.

    It is pinned where it lies: PyTorch's own pinned allocations are rounded up to powers of two.

    Raises:
        InputError: so much is not there, or cannot be pinned.
    """
    try:
        arena = torch.empty(shape, dtype=torch.uint8)
    except (RuntimeError, OverflowError, TypeError) as error:  # the last two: sizes beyond 64 bits
        size = f"{math.prod(shape) / 2**30:.3g} GiB"
        raise InputError(f"the host tier cannot have {size} of memory: lower host_gib") from error
    if device.type == "cuda":
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(arena.data_ptr(), arena.nbytes, 0))
        if status:
            raise InputError(
                f"{arena.nbytes / 2**30:.3g} GiB of host memory cannot be pinned (CUDA error {status}): "
                "lower host_gib"
            )
        weakref.finalize(arena, runtime.cudaHostUnregister, arena.data_ptr()).atexit = False
    return arena
