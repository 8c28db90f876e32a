"""The tunable kernels by name."""

from __future__ import annotations

from page4.experiments.autotune.attention import AttentionProblem
from page4.experiments.autotune.prepare import PrepareProblem
from page4.experiments.autotune.problem import Problem
from page4.experiments.autotune.scores import ScoresProblem

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        AttentionProblem("gluon"),
        AttentionProblem("triton"),
        ScoresProblem(),
        PrepareProblem(),
    )
}
