"""Estimates from samples made by hand: acceptance, differences, positions, speeds, degenerate text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.acceptance.figures import figures
from page4.experiments.acceptance.measure import rerun_rows
from page4.experiments.acceptance.metrics import ALL_LENGTHS, METRIC_COLUMNS, Metrics
from page4.experiments.acceptance.summary import checks_summary, is_degenerate, summarise
from page4.experiments.acceptance.table import markdown_table, table_rows
from page4.experiments.samples import Row, to_csv
from page4.experiments.statistics import bootstrap, difference, ratio
from tests.experiments.acceptance.tiny_study import tiny_config

ARMS = ("fp16", "e4m3", "fp16_again")
PROMPTS = ("one@1", "one@2", "one@3", "two@1", "two@2", "two@3")


@pytest.fixture
def config() -> AcceptanceConfig:
    return tiny_config(Path("model"), Path("texts"))


def rounds(accepted: Callable[[str, int, str, int], int], seconds: Callable[[str], float]) -> list[Row]:
    """Four rounds of every prompt; three prompts to a batch."""
    return [
        {
            "arm": arm,
            "length": length,
            "text": prompt.partition("@")[0],
            "prompt": prompt,
            "batch": PROMPTS.index(prompt) // 3,
            "round": turn,
            "prefix": length + 5 * turn,
            "accepted": accepted(arm, length, prompt, turn),
            "prefill_tokens": 3 * length,
            "prefill_seconds": seconds(arm),
            "round_seconds": 0.01,
        }
        for arm in ARMS
        for length in (48, 96)
        for prompt in PROMPTS
        for turn in range(4)
    ]


def generation(arm: str, prompt: str, **changes: Any) -> Row:
    row: Row = {
        "arm": arm,
        "length": 48,
        "text": "one",
        "prompt": prompt,
        "new_tokens": 9,
        "steps": 4,
        "accepted": 6,
        "repeated_4grams": 0.0,
        "prefill_tokens_per_s": 100.0,
        "decode_tokens_per_s": 50.0,
        "step_p50_ms": 10.0,
        "step_p90_ms": 12.0,
    }
    return row | changes


def _one_less(arm: str, length: int, prompt: str, turn: int) -> int:
    """The baseline accepts 3, 2, 1, 0 in turn; E4M3 one less of the third round's 1 at length 96."""
    return 0 if (arm, length, turn) == ("e4m3", 96, 2) else 3 - turn


def _equal_seconds(arm: str) -> float:
    return 1.0


def test_acceptance_is_accepted_over_drafted(config: AcceptanceConfig) -> None:
    metrics = summarise(config, rounds(_one_less, _equal_seconds), [])
    assert metrics.get("acceptance", "fp16", 96).value == pytest.approx(6 / 12)
    assert metrics.get("acceptance", "e4m3", 96).value == pytest.approx(5 / 12)
    assert metrics.get("acceptance", "e4m3", 48).value == pytest.approx(6 / 12)
    assert metrics.get("acceptance", "e4m3", ALL_LENGTHS).value == pytest.approx(11 / 24)
    assert metrics.get("tokens_per_step", "fp16", 96).value == pytest.approx(1 + 3 * 6 / 12)


def test_differences_are_points_and_changes_percent(config: AcceptanceConfig) -> None:
    metrics = summarise(config, rounds(_one_less, _equal_seconds), [])
    assert metrics.get("acceptance_difference", "e4m3", 96).value == pytest.approx(-100 / 12)
    assert metrics.get("acceptance_change", "e4m3", 96).value == pytest.approx(100 * (5 / 6 - 1))
    assert metrics.get("tokens_per_step_change", "e4m3", 96).value == pytest.approx(100 * (2.25 / 2.5 - 1))
    noise = metrics.get("acceptance_difference", "fp16_again", 96)
    assert (noise.value, noise.low, noise.high, noise.clusters) == (0, 0, 0, 6)


def test_position_counts_rounds_that_got_at_least_so_far(config: AcceptanceConfig) -> None:
    metrics = summarise(config, rounds(_one_less, _equal_seconds), [])
    assert [metrics.get("acceptance_at", "fp16", 96, position=j).value for j in (1, 2, 3)] == [
        0.75,
        0.5,
        0.25,
    ]
    assert [metrics.get("acceptance_at", "e4m3", 96, position=j).value for j in (1, 2, 3)] == [0.5, 0.5, 0.25]
    assert metrics.get("acceptance_at_difference", "e4m3", 96, position=1).value == pytest.approx(-25)


def test_rounds_of_three_drafts_hold_those_of_fewer(config: AcceptanceConfig) -> None:
    """Two of four rounds accept 3 and two accept 1: with two drafts they would have accepted 2 and 1."""
    metrics = summarise(config, rounds(lambda *key: 3 if key[3] < 2 else 1, lambda arm: 1.0), [])
    shares = [metrics.get("acceptance_of", "e4m3", 48, drafts).value for drafts in (1, 2, 3)]
    assert shares == pytest.approx([1, 6 / 8, 8 / 12])
    emitted = [metrics.get("tokens_per_step_of", "e4m3", ALL_LENGTHS, drafts).value for drafts in (1, 2, 3)]
    assert emitted == pytest.approx([2, 2.5, 3])
    assert shares[-1] == metrics.get("acceptance", "e4m3", 48).value
    assert metrics.get("acceptance_of_difference", "e4m3", 48, 2).value == 0


def test_pairing_is_by_prompt_whatever_the_order_of_the_rows(config: AcceptanceConfig) -> None:
    def by_prompt(arm: str, length: int, prompt: str, turn: int) -> int:
        return PROMPTS.index(prompt) // 2 + (arm == "fp16" and prompt == "one@2")

    rows = rounds(by_prompt, _equal_seconds)
    expected = summarise(config, rows, []).get("acceptance_difference", "e4m3", 48)
    assert expected.value == pytest.approx(-100 / 18) and expected.high <= 0
    assert summarise(config, rows[::-1], []).get("acceptance_difference", "e4m3", 48) == expected


def test_texts_are_reported_one_by_one(config: AcceptanceConfig) -> None:
    def by_text(arm: str, length: int, prompt: str, turn: int) -> int:
        return 3 if prompt.startswith("one") else 0 if length == 48 else 1

    metrics = summarise(config, rounds(by_text, _equal_seconds), [])
    assert metrics.texts == ["one", "two"]
    assert metrics.get("acceptance", "fp16", ALL_LENGTHS, text="one").value == 1
    assert metrics.get("acceptance", "fp16", 48, text="two").value == 0
    assert metrics.get("acceptance", "fp16", 96, text="two").value == pytest.approx(1 / 3)
    assert metrics.get("acceptance", "fp16", ALL_LENGTHS, text="two").value == pytest.approx(1 / 6)
    assert metrics.get("acceptance", "fp16", ALL_LENGTHS, text="two").clusters == 3


def test_prefill_rate_is_per_batch_and_its_change_paired(config: AcceptanceConfig) -> None:
    metrics = summarise(config, rounds(_one_less, lambda arm: 2.0 if arm == "e4m3" else 1.0), [])
    rate = metrics.get("prefill_rate", "fp16", 96)
    assert (rate.value, rate.clusters) == (288, 1), "one of two batches, the other one came first"
    assert metrics.get("prefill_rate_change", "e4m3", 96).value == pytest.approx(-50)
    assert metrics.get("prefill_rate_change", "fp16_again", 96).value == 0


def test_the_first_batch_of_a_length_is_too_slow_to_say_anything(config: AcceptanceConfig) -> None:
    rows = rounds(_one_less, _equal_seconds)
    slow = [
        row | {"prefill_seconds": 20.0, "round_seconds": 9.0} if row["batch"] == 0 else row for row in rows
    ]
    found, expected = (summarise(config, of, []) for of in (slow, rows))
    for name in ("prefill_rate", "decode_rate", "step_p50", "step_p90"):
        assert found.get(name, "e4m3", 48) == expected.get(name, "e4m3", 48)
    alone = [row for row in slow if row["batch"] == 0]
    assert summarise(config, alone, []).get("step_p50", "e4m3", 48).value == 9000, "where there is no other"


def test_step_times_and_decode_rate_come_from_the_rounds_of_a_batch(config: AcceptanceConfig) -> None:
    rows = rounds(_one_less, _equal_seconds)
    for row in rows:  # 10, 20, 30, 40 ms, all twice as long for E4M3
        row["round_seconds"] = 0.01 * (1 + row["round"]) * (2 if row["arm"] == "e4m3" else 1)
    metrics = summarise(config, rows, [])
    assert metrics.get("step_p50", "fp16", 96).value == pytest.approx(25)
    assert metrics.get("step_p90", "fp16", 96).value == pytest.approx(37)
    assert metrics.get("step_p50_change", "e4m3", 96).value == pytest.approx(100)
    emitted = {
        "fp16": 3 * (4 + 3 + 2 + 1),
        "e4m3": 3 * (4 + 3 + 1 + 1),
    }  # three prompts share the time of a batch
    assert metrics.get("decode_rate", "fp16", 96).value == pytest.approx(emitted["fp16"] / 0.1)
    assert metrics.get("decode_rate", "e4m3", 96).value == pytest.approx(emitted["e4m3"] / 0.2)


def test_speeds_of_generation_are_medians_over_prompts(config: AcceptanceConfig) -> None:
    speeds = {"fp16": (10.0, 20.0, 90.0), "e4m3": (11.0, 18.0, 99.0), "fp16_again": (10.0, 20.0, 90.0)}
    rows = [
        generation(arm, f"one@{i}", decode_tokens_per_s=speed)
        for arm, of_arm in speeds.items()
        for i, speed in enumerate(of_arm)
    ]
    metrics = summarise(config, rounds(_one_less, _equal_seconds), rows)
    assert metrics.get("generation_decode_rate", "fp16", 48).value == 20
    assert metrics.get("generation_decode_rate_change", "e4m3", 48).value == pytest.approx(
        10
    )  # of +10, -10 and +10 %
    assert metrics.get("generation_step_p90", "e4m3", 48).value == 12
    assert math.isnan(metrics.get("generation_decode_rate", "fp16", 96).value)


def test_degenerate_continuations_do_not_enter_the_acceptance(config: AcceptanceConfig) -> None:
    looping = generation("fp16", "one@2", accepted=12, repeated_4grams=0.9)
    rows = [generation(arm, f"one@{i}") for arm in ARMS for i in (1, 2)]
    rows = [looping if (row["arm"], row["prompt"]) == ("fp16", "one@2") else row for row in rows]
    assert [row for row in rows if is_degenerate(config, row)] == [looping]
    metrics = summarise(config, rounds(_one_less, _equal_seconds), rows)
    estimate = metrics.get("generation_acceptance", "fp16", 48)
    assert (estimate.value, estimate.clusters) == (0.5, 1)


def test_table_says_what_was_not_measured_with_a_dash(config: AcceptanceConfig) -> None:
    alone = [row | {"batch": PROMPTS.index(row["prompt"])} for row in rounds(_one_less, _equal_seconds)]
    metrics = summarise(config, alone, [])
    rows = table_rows(config, metrics)
    assert [(row["arm"], row["length"]) for row in rows] == [("e4m3", 48), ("e4m3", 96), ("e4m3", "all")]
    assert rows[2]["decode_rate_change"]["value"] is None
    cells = _cells(_table(config, metrics))
    assert cells["96"][1:4] == ["6", "50.0 % [50.0, 50.0]", "-8.3 [-8.3, -8.3]"]
    assert cells["96"][6:10] == ["+0.0 %", "-10.0 %", "+0.0 %", "+0.0 %"]
    assert cells["all"][6:10] == ["-", "-", "-", "-"]


def test_changes_of_speed_need_three_batches(config: AcceptanceConfig) -> None:
    """Of six prompts, the first is the batch that is left out, the others are two or three batches."""
    samples = rounds(_one_less, _equal_seconds)
    for count, shown in ((3, ["+0.0 %", "-10.0 %", "+0.0 %", "+0.0 %"]), (2, ["-"] * 4)):
        batches = [row | {"batch": min(PROMPTS.index(row["prompt"]), count)} for row in samples]
        metrics = summarise(config, batches, [])
        assert metrics.get("step_p50_change", "e4m3", 96).clusters == count
        text = _table(config, metrics)
        assert _cells(text)["96"][6:10] == shown
        assert "left out of fewer than 3 batches" in text
        assert "Few batches are no evidence on speed: `page4 throughput` measures it." in text


def _table(config: AcceptanceConfig, metrics: Metrics) -> str:
    return markdown_table(config, metrics, {"checks": {}, "generation": {"samples": 0}})


def _cells(text: str) -> dict[str, list[str]]:
    """The cells of every line of a table by the first one."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells] for cells in lines}


def test_fewer_prompts_than_an_interval_needs_are_called_too_few(config: AcceptanceConfig) -> None:
    few = rounds(_one_less, _equal_seconds)
    few = [row for row in few if row["prompt"] in PROMPTS[1:]]
    warning = "Fewer than 6 prompts: too few for intervals, and to conclude from."
    footers = {}
    for num_prompts, samples in ((5, few), (6, rounds(_one_less, _equal_seconds))):
        sized = dataclasses.replace(config, num_prompts=num_prompts)
        metrics = summarise(sized, samples, [])
        text = _table(sized, metrics)
        assert (warning in text) == (num_prompts == 5)
        assert ("In brackets" in text) == ("[" in text) == (num_prompts == 6)
        footers[num_prompts] = [figure.get_supxlabel() for figure in figures(sized, metrics).values()]
    assert len(footers[5]) == 3
    assert all("fewer than 6 prompts: too few for intervals" in note for note in footers[5])
    assert not any("bars" in note or "band" in note for note in footers[5])
    assert footers[5][1].endswith("; dashed: the A/A control")
    assert footers[6][1].endswith("; band: the same for the A/A control")
    assert all("bars: 95 % bootstrap intervals over prompts" in note for note in footers[6])


def test_figures_promise_bars_only_where_there_are_prompts_enough(config: AcceptanceConfig) -> None:
    metrics = summarise(config, rounds(_one_less, _equal_seconds), [])
    unequal = dataclasses.replace(config, num_prompts=6, prompt_tokens=300)  # three prompts of 96 tokens
    for figure in figures(unequal, metrics).values():
        assert "intervals over prompts, where there are at least 6" in figure.get_supxlabel()


def test_intervals_over_texts_draw_whole_texts(config: AcceptanceConfig) -> None:
    """Six texts of three prompts that agree within a text: prompts seem more evidence than they are."""

    def of(arm: str, text: int) -> int:
        return (3, 3, 2, 2, 1, 3)[text] - (arm == "e4m3" and text in (0, 4))

    samples = [
        row | {"text": f"t{text}", "prompt": f"t{text}@{i}", "accepted": of(row["arm"], text)}
        for row in rounds(_one_less, _equal_seconds)
        if row["prompt"] == "one@1"
        for text in range(6)
        for i in range(3)
    ]
    metrics = summarise(config, samples, [])
    drafted = [3 * 4 * 2 * 3] * 6  # 3 drafts, 4 rounds, 2 lengths, 3 prompts
    accepted = {arm: [4 * 2 * 3 * of(arm, text) for text in range(6)] for arm in ("fp16", "e4m3")}
    share = {arm: ratio(of_arm, drafted) for arm, of_arm in accepted.items()}
    options = {"resamples": config.resamples, "confidence": config.confidence, "seed": config.seed}
    level = metrics.get("acceptance_over_texts", "fp16", ALL_LENGTHS)
    assert level == bootstrap(share["fp16"], 6, **options)  # type: ignore[arg-type]
    points = metrics.get("acceptance_difference_over_texts", "e4m3", ALL_LENGTHS)
    expected = bootstrap(difference(share["e4m3"], share["fp16"]), 6, **options)  # type: ignore[arg-type]
    assert points == expected.scaled(100)
    assert metrics.get("acceptance_change_over_texts", "e4m3", ALL_LENGTHS).value == pytest.approx(-100 / 7)
    over_prompts = metrics.get("acceptance_difference", "e4m3", ALL_LENGTHS)
    assert over_prompts.value == pytest.approx(points.value) and over_prompts.clusters == 18
    assert points.high - points.low > 1.3 * (over_prompts.high - over_prompts.low)
    section = _table(config, metrics).partition("**Over texts, all lengths together**")[2]
    assert "These are over the 6 texts:" in section
    assert "| e4m3 | 66.7 % [" in section and "| -11.1 [" in section


def test_fewer_texts_than_an_interval_needs_have_no_intervals_over_texts(config: AcceptanceConfig) -> None:
    metrics = summarise(config, rounds(_one_less, _equal_seconds), [])
    assert not [metric.name for metric in metrics.all if metric.name.endswith("over_texts")]
    assert "Over texts" not in _table(config, metrics)


def test_texts_of_one_prompt_each_have_the_intervals_over_prompts_alone(config: AcceptanceConfig) -> None:
    samples = [row | {"text": row["prompt"]} for row in rounds(_one_less, _equal_seconds)]
    metrics = summarise(config, samples, [])
    assert metrics.get("acceptance", "fp16", ALL_LENGTHS).clusters == len(metrics.texts) == 6
    assert "Over texts" not in _table(config, metrics)


def test_metrics_are_read_back_as_they_were_written(config: AcceptanceConfig, tmp_path: Path) -> None:
    free = [generation(arm, "one@1") for arm in ARMS]
    metrics = summarise(config, rounds(_one_less, _equal_seconds), free)
    written = to_csv([metric.to_row() for metric in metrics.all], list(METRIC_COLUMNS))
    (tmp_path / "summary.csv").write_text(written, encoding="utf-8")
    found = Metrics.read(tmp_path / "summary.csv")
    assert to_csv([metric.to_row() for metric in found.all], list(METRIC_COLUMNS)) == written
    assert found.get("acceptance_at", "e4m3", 48, 2) == metrics.get("acceptance_at", "e4m3", 48, 2)
    assert found.get("acceptance", "e4m3", ALL_LENGTHS) == metrics.get("acceptance", "e4m3", ALL_LENGTHS)
    assert list(figures(config, found)) == ["acceptance.png", "difference.png", "positions.png"]
    alone = dataclasses.replace(config, arms=config.arms[:1])
    assert list(figures(alone, found)) == ["acceptance.png", "positions.png"]


def test_checks_are_summed_by_control_and_arm() -> None:
    rows = [
        {"check": "rerun", "arm": "fp16", "prompt": str(i), "compared": 4, "mismatches": i} for i in range(3)
    ]
    assert checks_summary(rows) == {"rerun": {"fp16": {"prompts": 3, "compared": 12, "mismatches": 3}}}


def test_rerun_compares_round_by_round() -> None:
    first = rounds(_one_less, _equal_seconds)[:8]
    later = [
        row | {"accepted": row["accepted"] - (row["prompt"] == "one@2" and row["round"] == 1)}
        for row in first
    ]
    found = rerun_rows(first, later[::-1])
    assert [(row["prompt"], row["compared"], row["mismatches"]) for row in found] == [
        ("one@1", 4, 0),
        ("one@2", 4, 1),
    ]


def test_table_warns_where_lengths_have_different_prompts(config: AcceptanceConfig) -> None:
    metrics = summarise(config, rounds(_one_less, _equal_seconds), [])
    summary: dict[str, Any] = {"checks": {}, "generation": {"samples": 0}}
    unequal = dataclasses.replace(config, prompt_tokens=200)  # four prompts of 48 tokens, two of 96
    assert "compare arms, not lengths" in markdown_table(unequal, metrics, summary)
    assert "compare arms, not lengths" not in markdown_table(config, metrics, summary)
