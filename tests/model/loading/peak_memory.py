"""Loads a checkpoint in a process of its own and prints how far its memory rose, and the model's bytes.

Arguments: a small checkpoint that is loaded first, so that nothing is imported later; the one that is
measured; the dtype. The kernel's own figure is used: it counts mapped pages of shards as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from page4.model import Qwen4ExpForCausalLM


def resident(field: str) -> int:
    """Bytes of this process that are in memory now (VmRSS) or were at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def main() -> None:
    """See above."""
    small, folder, dtype = sys.argv[1:]
    Qwen4ExpForCausalLM.from_pretrained(small, dtype=getattr(torch, dtype))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    model = Qwen4ExpForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    print(resident("VmHWM") - before, size)


if __name__ == "__main__":
    main()
