"""The tunable kernels by name."""

from __future__ import annotations

from page4.experiments.autotune.attention import AttentionProblem
from page4.experiments.autotune.prepare import PrepareProblem
from page4.experiments.autotune.problem import Problem
from page4.experiments.autotune.scores import ScoresProblem
from page4.kernels.page4_attention_gluon import GLUON_FORMATS, formats_of

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        AttentionProblem("gluon", GLUON_FORMATS),
        AttentionProblem("triton", (*GLUON_FORMATS, "int8")),
        ScoresProblem(),
        PrepareProblem(),
    )
}

_VOLTA_ATTENTION = AttentionProblem("gluon", formats_of("mma884"))
V100_PROBLEMS: dict[str, Problem] = PROBLEMS | {_VOLTA_ATTENTION.name: _VOLTA_ATTENTION}
"""The same on a V100, whose kernel reads more formats."""
