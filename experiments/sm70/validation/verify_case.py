"""The verification of drafts as a case of the bench: exact, so that every request is checked bit for bit."""

from __future__ import annotations

import functools

from page4.experiments.bench.case import Case, Contender
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check
from page4.experiments.kernel_cases import StepShape
from page4.experiments.verify_cases import VerifyInputs, verify_bytes, verify_copies
from page4.kernels.mtp_verify import verify_reference
from page4.kernels.mtp_verify_triton import verify_triton


def verify_case(shape: StepShape, seed: int, machine: Machine) -> Case:
    """Verification at temperature 1 with greedy drafts; floor: the logits once."""
    floor = verify_bytes(shape)
    count, cold = choose_copies(machine, floor, 2 * floor, 1)
    copies = verify_copies(shape, machine.device, seed, count)
    launches = [functools.partial(verify_triton, **vars(inputs)) for inputs in copies]
    contender = Contender("triton", launches, functools.partial(check_verify, copies[-1]))
    return Case(floor, [contender], count, cold)


def check_verify(inputs: VerifyInputs) -> Check:
    """Run the inputs' launches and compare with the reference: equal or wrong."""
    inputs.accepted.fill_(-7)
    inputs.emitted.fill_(-7)
    verify_triton(**vars(inputs))
    accepted, emitted = verify_reference(inputs.logits, inputs.drafts, inputs.positions, inputs.params)
    same = inputs.accepted.equal(accepted) and inputs.emitted.equal(emitted)
    requests = len(accepted)
    return Check(0.0 if same else float("inf"), requests, requests)
