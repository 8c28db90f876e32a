"""The tunable kernels by name."""

from __future__ import annotations

from page4.experiments.autotune.attention import AttentionProblem
from page4.experiments.autotune.prepare import PrepareProblem
from page4.experiments.autotune.problem import Problem
from page4.experiments.autotune.scores import ScoresProblem
from page4.kernels.page4_attention_gluon import GLUON_FORMATS, INSTRUCTIONS, can_run, formats_of

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        AttentionProblem("gluon", GLUON_FORMATS),
        AttentionProblem("triton", (*GLUON_FORMATS, "int8")),
        ScoresProblem(),
        PrepareProblem(),
    )
}
"""With the KV formats that Gluon attention reads on most GPUs."""


def problems_on(capability: tuple[int, int] | None) -> dict[str, Problem]:
    """The tunable kernels, with the KV formats that Gluon attention reads on a GPU.

    ``capability`` is the GPU's (major, minor); None without a GPU, for :data:`PROBLEMS`.
    """
    if capability is None:
        return PROBLEMS
    instructions = [instruction for instruction in INSTRUCTIONS if can_run(instruction, capability)]
    formats = dict.fromkeys(name for instruction in instructions for name in formats_of(instruction))
    gluon = AttentionProblem("gluon", tuple(formats))
    return PROBLEMS | {gluon.name: gluon}
