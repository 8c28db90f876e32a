"""The V100 in numbers, as the model of its multiprocessors and memory uses it."""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """A GPU of compute capability 7.0. Latencies are cycles from issue to result, of an idle machine.

    Sizes, clocks and throughputs are those of NVIDIA's documents; latencies and the bandwidth of L2 are from
    published microbenchmarks (Jia et al., arXiv:1804.06826), rounded. ``dram_bytes_per_second`` is what
    reads and writes in mixture reach, not the 900 GB/s of the data sheet.

    Attributes:
        multiprocessors: each with four schedulers that issue one warp instruction a cycle.
        clock_hz: boost clock of the SXM2 board.
        dram_bytes_per_second: of HBM2, as streams reach it.
        l2_bytes_per_second: of all slices together.
        l2_bytes: of L2, in lines of 128 bytes with sectors of 32.
        unified_bytes: L1 and shared memory of a multiprocessor together.
        shared_latency, l1_latency, l2_latency, dram_latency: of a load that finds its data there; the last is
            counted from L2's queue on.
        fixed_latency, tensor_latency: of arithmetic and of HMMA where nothing waits for their barrier.
        special_latency, system_latency, variable_latency: of MUFU and conversions, of S2R, and of any other
            instruction whose result is announced by a barrier.
        queue_cycles: work that the load/store unit accepts ahead of itself.
        store_backlog_cycles: work that the DRAM queue may hold before stores stall.
        barrier_cycles: from the arrival of the last warp to the next instruction.
        branch_cycles: extra cycles of a taken branch.
        block_start_cycles: from the end of a block to the first instruction of the next in its place.
    """

    multiprocessors: int = 80
    clock_hz: float = 1.53e9
    dram_bytes_per_second: float = 852e9
    l2_bytes_per_second: float = 2155e9
    l2_bytes: int = 6 * 2**20
    unified_bytes: int = 128 * 2**10
    fixed_latency: int = 4
    tensor_latency: int = 10
    shared_latency: int = 23
    l1_latency: int = 28
    l2_latency: int = 193
    dram_latency: int = 375
    special_latency: int = 18
    system_latency: int = 20
    variable_latency: int = 14
    queue_cycles: int = 200
    store_backlog_cycles: int = 4000
    barrier_cycles: int = 12
    branch_cycles: int = 8
    block_start_cycles: int = 60

    def part(self, multiprocessors: int) -> Machine:
        """A machine of fewer multiprocessors with their share of L2 and of all bandwidths."""
        share = multiprocessors / self.multiprocessors
        return self._replace(
            multiprocessors=multiprocessors,
            dram_bytes_per_second=self.dram_bytes_per_second * share,
            l2_bytes_per_second=self.l2_bytes_per_second * share,
            l2_bytes=int(self.l2_bytes * share),
        )


V100 = Machine()

REGISTERS = 65536  # 32-bit registers of a multiprocessor
SHARED_BYTES = 96 * 2**10  # shared memory that its blocks may use
MAX_THREADS = 2048
MAX_BLOCKS = 32
WARP = 32
STREAM_BYTES_PER_SECOND = 830e9  # what Triton kernels were seen to reach: the floor of memory-bound work
FP32_FLOPS = 15.7e12
TENSOR_FLOPS = 125e12
