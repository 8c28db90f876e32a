"""Cases of verification: which drafts of a step are accepted, over the public model's vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from page4.experiments.bench.case import Case, Contender
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig, Kernel
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups
from page4.experiments.verify_cases import Choice, VerifyInputs, verify_bytes, verify_copies, verify_memory
from page4.kernels.draft_sampling import DraftDistributions
from page4.kernels.mtp_verify import verify_reference
from page4.kernels.mtp_verify_triton import verify_triton
from page4.kernels.sampling_params import SamplingParams

CHOICES: dict[Kernel, Choice] = {
    "mtp_verify": "greedy",
    "mtp_verify_sampled": "sampled",
    "mtp_verify_filtered": "filtered",
}
_AT_ONCE = 8  # requests: the reference takes many times the memory of their logits


def verify_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """Three launches; floor: one read of the logits, and with filters one row of the drafts' a request."""
    choice = CHOICES[cell.kernel]
    floor = verify_bytes(cell.shape, choice)
    # Making the inputs takes some FP32 rows more.
    memory = 3 * verify_memory(cell.shape, choice)
    count, cold = choose_copies(machine, floor, memory, config.max_copies)
    copies = verify_copies(cell.shape, machine.device, config.seed, count, choice)
    launches: list[Callable[[], object]] = [
        functools.partial(verify_triton, **vars(inputs)) for inputs in copies
    ]
    requests = sample_groups(cell.shape.requests, config.check_groups, config.seed)
    check = functools.partial(check_verification, copies[-1], requests, launches[-1])
    return Case(floor, [Contender("triton", launches, check)], count, cold)


def check_verification(inputs: VerifyInputs, requests: list[int], launch: Callable[[], object]) -> Check:
    """Run the inputs' launch and compare the chosen requests with the reference, which must be equal."""
    inputs.accepted.fill_(-7)
    inputs.emitted.fill_(-7)
    launch()
    equal = True
    for first in range(0, len(requests), _AT_ONCE):
        part = torch.tensor(requests[first : first + _AT_ONCE], device=inputs.logits.device)
        params: dict[str, Any] = {
            name: value if isinstance(value, bool) else value[part]
            for name, value in vars(inputs.params).items()
        }
        distributions = inputs.distributions
        if distributions is not None:
            distributions = DraftDistributions(**{n: x[part] for n, x in vars(distributions).items()})
        accepted, emitted = verify_reference(
            inputs.logits[part], inputs.drafts[part], inputs.positions[part], SamplingParams(**params),
            distributions,
        )  # fmt: skip
        equal &= inputs.accepted[part].equal(accepted) and inputs.emitted[part].equal(emitted)
    return Check(0.0 if equal else float("inf"), len(requests), len(inputs.accepted))
