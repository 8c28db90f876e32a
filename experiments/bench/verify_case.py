"""Cases of verification: which drafts of a step are accepted, over the public model's vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.experiments.bench.case import Case, Contender
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups
from page4.kernels.draft_sampling import DraftDistributions, sample_drafts_reference
from page4.kernels.mtp_verify import verify_reference
from page4.kernels.mtp_verify_triton import VerifyWorkspace, verify_triton
from page4.kernels.sampling_params import SamplingParams

VOCABULARY = 248320
_POSITION, _SPREAD = 1000, 3.0  # standard deviation of the logits


@dataclass(frozen=True)
class VerifyStep:
    """A call's inputs and outputs."""

    logits: Tensor
    drafts: Tensor
    positions: Tensor
    params: SamplingParams
    workspace: VerifyWorkspace
    distributions: DraftDistributions | None
    accepted: Tensor
    emitted: Tensor

    @classmethod
    def random(
        cls,
        requests: int,
        rows: int,
        device: torch.device,
        seed: int,
        filtered: bool,
        workspace: VerifyWorkspace,
    ) -> VerifyStep:
        """Greedy and sampling requests in turn; with ``filtered`` all sample, their drafts too, from a few.

        Half of the drafts are the target's most likely tokens, so that some are accepted.
        """
        generator = torch.Generator(device).manual_seed(seed)
        shape = (requests, rows, VOCABULARY)
        logits = (
            _SPREAD * torch.randn(shape, generator=generator, device=device, dtype=torch.float16)
        ).half()
        positions = torch.full((requests,), _POSITION, device=device)
        params = _params(requests, filtered, device)
        likely = logits[:, :-1].argmax(2)
        random = torch.randint(0, VOCABULARY, likely.shape, generator=generator, device=device)
        coins = torch.rand(likely.shape, generator=generator, device=device) < 0.5
        drafts, distributions = torch.where(coins, likely, random), None
        if filtered and rows > 1:
            # The draft's logits are near the target's.
            distributions = DraftDistributions.empty(logits[:, 0], rows - 1)
            for step in range(rows - 1):
                noise = torch.randn(requests, VOCABULARY, generator=generator, device=device)
                near = (logits[:, step].float() + noise).half()
                drafts[:, step] = sample_drafts_reference(near, positions + step, params, distributions, step)
        return cls(
            logits, drafts, positions, params, workspace, distributions,
            torch.full_like(positions, -1), positions.new_full((requests, rows), -1),
        )  # fmt: skip

    @classmethod
    def hollow(cls, requests: int, rows: int, device: torch.device, filtered: bool) -> VerifyStep:
        """Padded requests alone, which look the same to a compiler."""
        logits = torch.zeros(requests, rows, VOCABULARY, dtype=torch.float16, device=device)
        positions = torch.full((requests,), -1, device=device)
        sampled = filtered and rows > 1
        return cls(
            logits, positions.new_zeros(requests, rows - 1), positions, _params(requests, filtered, device),
            VerifyWorkspace.allocate(requests, rows - 1, VOCABULARY, device),
            DraftDistributions.empty(logits[:, 0], rows - 1) if sampled else None,
            torch.full_like(positions, -1), positions.new_full((requests, rows), -1),
        )  # fmt: skip

    def launch(self) -> None:
        """Accepted counts and emitted tokens to their places."""
        verify_triton(
            self.logits, self.drafts, self.positions, self.params, self.workspace, self.distributions,
            accepted=self.accepted, emitted=self.emitted,
        )  # fmt: skip


def _params(requests: int, filtered: bool, device: torch.device) -> SamplingParams:
    seeds = list(range(requests))
    if filtered:
        every = [0.8] * requests
        return SamplingParams.of(
            every, draft_temperature=every, top_k=[50] * requests, top_p=[0.95] * requests, seed=seeds,
            device=device,
        )  # fmt: skip
    return SamplingParams.of([float(i % 2) for i in range(requests)], seed=seeds, device=device)


def verify_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """Three launches; floor: one read of the logits, and with filters one row of the drafts' a request."""
    requests, rows = cell.shape.requests, cell.shape.rows
    filtered = cell.kernel == "mtp_verify_filtered"
    row_bytes = 2 * VOCABULARY
    floor = requests * row_bytes * (rows + (1 if filtered and rows > 1 else 0))
    memory = requests * row_bytes * (2 * rows - 1 if filtered else rows)
    # Making the inputs takes some FP32 rows more.
    count, cold = choose_copies(machine, floor, 3 * memory, config.max_copies)
    workspace = VerifyWorkspace.allocate(requests, rows - 1, VOCABULARY, machine.device)
    steps = [
        VerifyStep.random(requests, rows, machine.device, config.seed + i, filtered, workspace)
        for i in range(count)
    ]
    launches: list[Callable[[], object]] = [step.launch for step in steps]
    checked = sample_groups(requests, config.check_groups, config.seed)
    check = functools.partial(check_verification, steps[-1], checked)
    return Case(floor, [Contender("triton", launches, check)], count, cold)


def check_verification(step: VerifyStep, requests: list[int]) -> Check:
    """Run the launch and compare with the reference of some requests, which must be equal."""
    step.accepted.fill_(-7)
    step.emitted.fill_(-7)
    step.launch()
    chosen = torch.tensor(requests, device=step.logits.device)
    params = SamplingParams(
        **{
            name: value if isinstance(value, bool) else value[chosen]
            for name, value in vars(step.params).items()
        }
    )
    distributions = step.distributions
    if distributions is not None:
        distributions = DraftDistributions(**{n: x[chosen] for n, x in vars(distributions).items()})
    accepted, emitted = verify_reference(
        step.logits[chosen], step.drafts[chosen], step.positions[chosen], params, distributions
    )
    equal = torch.equal(step.accepted[chosen], accepted) and torch.equal(step.emitted[chosen], emitted)
    return Check(0.0 if equal else float("inf"), len(requests), len(step.accepted))
