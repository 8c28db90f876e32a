"""The suite runs in two processes with one thread each, and draws the same examples every time."""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch

if not torch.cuda.is_available():
    # Triton kernels run on CPU tensors; Triton reads this when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
hypothesis.settings.register_profile("page4", deadline=None, derandomize=True)
hypothesis.settings.load_profile("page4")
