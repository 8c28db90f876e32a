"""Names: those of both classes, and lists of them in one line."""

from __future__ import annotations

import itertools
import re

import pytest

from page4.model.loading.names import listed, text_name


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.gate.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("visual.merger.mlp.0.weight", None),
        ("model.visualise.weight", "model.visualise.weight"),
    ],
)
def test_text_names(stored: str, name: str | None) -> None:
    assert text_name(stored) == name


def expand(line: str) -> list[str]:
    """The names that a list stands for, by a reading of it that shares nothing with its writing."""
    names = []
    for entry in re.split(r", (?![^{]*\})", line):
        choices = []
        for part in re.split(r"(\{[^}]*\})", entry):
            if not part.startswith("{"):
                choices.append([part])
                continue
            runs = [run.split("-") for run in part[1:-1].split(",")]
            choices.append([str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)])
        names += ["".join(name) for name in itertools.product(*choices)]
    return sorted(names)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["a.b"], "a.b"),
        (["a.0.b", "a.1.b", "a.2.b", "a.5.b"], "a.{0-2,5}.b"),
        ([f"l.{i}.e.{j}.w" for i in range(3) for j in range(12)], "l.{0-2}.e.{0-11}.w"),
        (["l.0.e.1.w", "l.0.e.2.w", "l.1.e.1.w"], "l.0.e.{1-2}.w, l.1.e.1.w"),
        (["l.0.w", "l.0.e.1.w", "b2.w"], "b2.w, l.0.e.1.w, l.0.w"),
        ([], ""),
    ],
)
def test_lists_are_short(names: list[str], line: str) -> None:
    assert listed(names) == line
    assert not names or expand(line) == sorted(names)


def test_every_name_is_in_the_list() -> None:
    every = [f"m.{i}.x.{j}.{k}.w" for i in range(4) for j in range(5) for k in range(3)]
    for seed in range(20):
        some = [name for n, name in enumerate(every) if (n * 7 + seed) % (2 + seed % 5)]
        assert expand(listed(some)) == sorted(some)


def test_the_list_ends_somewhere_and_prints() -> None:
    line = listed(["a\nb", *(f"x{i}y" for i in range(100))])
    assert line.startswith("a b, x0y") and line.endswith(", 61 more")
    assert listed(["a\x00\udc80b"]) == r"a\x00\udc80b"
    assert len(listed(["x" * 10_000])) < 400
