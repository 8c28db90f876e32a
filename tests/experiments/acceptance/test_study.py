"""The study end to end on a tiny model: what it measures, what it leaves, how it resumes, what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file, save_file

from page4.experiments.acceptance import measure, run
from page4.experiments.acceptance.measure import ROUND_COLUMNS
from page4.experiments.acceptance.scales import DYNAMIC
from page4.experiments.acceptance.study import load_encoder
from page4.experiments.samples import read_samples
from page4.kernels.errors import InputError
from page4.kernels.tunable import TUNABLE
from page4.kernels.tuning import active, device_name, triton_version
from page4.kernels.tuning_file import TuningFile, tuning_path
from page4.spec_decode import Generation
from tests.experiments.acceptance.tiny_study import tiny_config, write_checkpoint, write_texts
from tests.experiments.reporters import Interrupter, Recorder

FILES = {
    "config.yaml",
    "inputs.json",
    "samples.csv",
    "generation.csv",
    "checks.csv",
    "scales.json",
    "summary.json",
    "summary.csv",
    "table.md",
    "acceptance.png",
    "difference.png",
    "positions.png",
    "provenance.json",
}


HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BYTES = ("e4m3", "e5m2", "e3m4", "int8")

SPEEDS = ("prefill", "decode", "step", "generation_decode", "generation_step")


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def _metrics(out: Path) -> list[dict[str, str]]:
    return _rows(out / "summary.csv")


def _untimed_metrics(out: Path) -> list[dict[str, str]]:
    return [m for m in _metrics(out) if not m["metric"].startswith(SPEEDS)]


def _without_times(rows: list[dict[str, str]]) -> list[tuple[str, ...]]:
    timed = ("seconds", "_per_s", "_ms")
    return sorted(tuple(v for k, v in row.items() if not k.endswith(timed)) for row in rows)


@pytest.fixture(scope="module")
def finished(
    checkpoint: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("study") / "out"
    recorder = Recorder()
    summary = run(tiny_config(checkpoint, texts), out, recorder)
    assert recorder.done == recorder.total > 0
    return out, summary


def test_folder_holds_every_promised_file_and_no_other(finished: tuple[Path, dict[str, Any]]) -> None:
    out, summary = finished
    assert {file.name for file in out.iterdir()} - {".lock"} == FILES
    assert json.loads((out / "summary.json").read_text()) == summary
    for figure in out.glob("*.png"):
        assert matplotlib.image.imread(figure).std() > 0.01


def test_every_arm_has_every_round_of_every_prompt_at_every_length(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    rows = _rows(finished[0] / "samples.csv")
    seen = Counter((row["arm"], row["length"], row["prompt"]) for row in rows)
    assert len(seen) == 3 * 2 * 4 and set(seen.values()) == {3}
    assert all(int(row["prefix"]) == int(row["length"]) + 5 * int(row["round"]) for row in rows)
    assert {int(row["accepted"]) for row in rows} <= {0, 1, 2, 3}
    assert len({row["accepted"] for row in rows}) > 1  # a study of constants would test nothing


def test_summary_is_what_the_samples_say(finished: tuple[Path, dict[str, Any]]) -> None:
    out, summary = finished
    rows = _rows(out / "samples.csv")

    def accepted(arm: str, length: str) -> float:
        values = [int(row["accepted"]) for row in rows if (row["arm"], row["length"]) == (arm, length)]
        return sum(values) / len(values) / 3

    for record in _metrics(out):
        if record["metric"] == "acceptance" and record["text"] == "all" and record["length"] != "all":
            assert float(record["value"]) == pytest.approx(accepted(record["arm"], record["length"]))
            assert record["clusters"] == "4"
    table = {(row["arm"], row["length"]): row for row in summary["table"]}
    difference = 100 * (accepted("e4m3", "96") - accepted("fp16", "96"))
    assert table["e4m3", 96]["acceptance_difference"]["value"] == pytest.approx(difference)
    noise = 100 * (accepted("fp16_again", "96") - accepted("fp16", "96"))
    assert table["e4m3", 96]["control_acceptance_difference"]["value"] == pytest.approx(noise)


def test_controls_find_nothing_on_a_sound_decoder(finished: tuple[Path, dict[str, Any]]) -> None:
    checks = finished[1]["checks"]
    assert checks["plain_greedy"]["fp16"] == {"prompts": 1, "compared": 6, "mismatches": 0}
    assert checks["plain_greedy"]["e4m3"]["mismatches"] == 0
    assert checks["rerun"]["fp16"] == {"prompts": 2, "compared": 6, "mismatches": 0}
    assert checks["rerun"]["e4m3"]["mismatches"] == 0


def test_scales_cover_every_layer_and_are_recorded(finished: tuple[Path, dict[str, Any]]) -> None:
    scales = json.loads((finished[0] / "scales.json").read_text())["e4m3"]
    assert len(scales["target"]) == 1 and set(scales["draft"]) == {"k", "v"}
    assert all(0 < pair[name] < 1 for pair in (*scales["target"], scales["draft"]) for name in ("k", "v"))


def test_table_has_the_shape_of_a_row_per_length_and_all(finished: tuple[Path, dict[str, Any]]) -> None:
    table = (finished[0] / "table.md").read_text()
    rows = [line for line in table.splitlines() if re.match(r"\| (48|96|all) \|", line)]
    assert len(rows) == 3 and all(line.count("|") == 12 for line in rows)


def test_arms_see_the_same_prompts_and_lengths_the_same_targets(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[list[int]]] = []
    real = measure.measure_rounds

    def spy(decoder: Any, prompts: list[list[int]], *others: Any) -> Any:
        seen.append(prompts)
        return real(decoder, prompts, *others)

    monkeypatch.setattr(measure, "measure_rounds", spy)
    run(
        tiny_config(checkpoint, texts, num_prompts=2, generation_prompts=0, check_prompts=0), tmp_path / "out"
    )
    warm_up, cells = seen[:2], seen[2:]
    assert warm_up[0] == warm_up[1] == cells[0]  # in the order fp16, e4m3, fp16_again; then rotated by one
    fp16, e4m3, again, e4m3_long, again_long, fp16_long = cells
    assert fp16 == e4m3 and fp16_long == e4m3_long
    nonce = len("Request 0123456789ab.\n\n")
    for base, control in zip(fp16 + fp16_long, again + again_long, strict=True):
        assert base[nonce:] == control[nonce:] and base[:nonce] != control[:nonce]
    for short, long in zip(fp16, fp16_long, strict=True):
        assert short[:nonce] == long[:nonce] and short[nonce:] == long[-len(short) + nonce :]


@pytest.mark.parametrize("after", [1, 16, 20], ids=["the first cell", "the 16th", "the last one"])
def test_interrupted_study_resumes_to_the_same_result_without_measuring_twice(
    after: int, checkpoint: Path, texts: Path, tmp_path: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    config, out = tiny_config(checkpoint, texts), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(config, out, Interrupter(after))
    before = _rows(out / "samples.csv")
    assert not (out / "summary.json").exists()
    run(config, out)
    assert (
        _rows(out / "samples.csv")[: len(before)] == before
    )  # times included: these rows are the first ones
    for name in ("samples.csv", "generation.csv", "checks.csv"):
        assert _without_times(_rows(out / name)) == _without_times(_rows(finished[0] / name))
    assert (out / "scales.json").read_bytes() == (finished[0] / "scales.json").read_bytes()
    assert _untimed_metrics(out) == _untimed_metrics(finished[0])


def test_finished_study_is_summarised_again_and_not_measured(
    checkpoint: Path, texts: Path, finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "measure_rounds", refuse)
    monkeypatch.setattr(measure, "generate", refuse)
    recorder = Recorder()
    assert run(tiny_config(checkpoint, texts), finished[0], recorder) == finished[1]
    assert recorder.done == recorder.total > 0


def test_a_sampled_study_says_so_and_resumes_to_the_same_counts(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    config = tiny_config(checkpoint, texts, lengths=(48,), temperature=1.0, num_draft_tokens=2)
    counts = []
    for name in ("one", "two"):
        run(config, tmp_path / name)
        rows = read_samples(tmp_path / name / "samples.csv", ROUND_COLUMNS)
        counts.append([row["accepted"] for row in rows])
    assert counts[0] == counts[1]
    run(dataclasses.replace(config, temperature=0.0), tmp_path / "greedy")
    rows = read_samples(tmp_path / "greedy" / "samples.csv", ROUND_COLUMNS)
    assert [row["accepted"] for row in rows] != counts[0]
    table = (tmp_path / "one" / "table.md").read_text()
    assert "rounds at temperature 1 with sampled drafts, 2 drafts each" in table


def test_corrupt_verifier_is_reported(
    checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measure.generate

    def accept_everything(decoder: Any, prompts: list[list[int]], tokens: int, **_: Any) -> Any:
        (generation,), stats = real(decoder, prompts, tokens)
        if decoder.config.num_draft_tokens:
            generation = Generation([5] * tokens, [3] * (tokens // 3))
        return [generation], stats

    monkeypatch.setattr(measure, "generate", accept_everything)
    config = tiny_config(checkpoint, texts, lengths=(48,), num_prompts=2)
    summary = run(config, tmp_path / "out")
    assert summary["checks"]["plain_greedy"]["fp16"]["mismatches"] > 0
    assert summary["generation"]["degenerate"] == summary["generation"]["samples"] == 3
    assert not [m for m in _metrics(tmp_path / "out") if m["metric"] == "generation_acceptance"]


def test_arms_may_mix_formats(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    """The target's beside the draft's, and layer by layer: layer 1 is the target's only one with K/V."""
    arms = (
        ("fp16", "fp16", "fp16", 0),
        ("target", "e4m3", "fp16", 0),
        ("draft", "fp16", "e4m3", 0),
        ("layer", "fp16,1:e4m3", "fp16", 0),
    )
    config = tiny_config(checkpoint, texts, arms=arms, lengths=(48,), num_prompts=2, generation_prompts=0)
    summary = run(config, tmp_path / "out")
    assert [row["arm"] for row in summary["table"]] == [
        "target",
        "target",
        "draft",
        "draft",
        "layer",
        "layer",
    ]
    assert summary["controls"] == []
    assert all(check["mismatches"] == 0 for check in summary["checks"]["plain_greedy"].values())
    accepted: dict[str, list[str]] = {}
    for row in sorted(_rows(tmp_path / "out" / "samples.csv"), key=lambda row: (row["prompt"], row["round"])):
        accepted.setdefault(row["arm"], []).append(row["accepted"])
    assert accepted["layer"] == accepted["target"]


def test_a_format_for_a_layer_without_kv_is_refused_before_anything_is_written(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    arms = (("fp16", "fp16", "fp16", 0), ("layer", "fp16,0:e4m3", "fp16", 0))
    with pytest.raises(InputError, match="'fp16,0:e4m3' names layer 0; the QSA layers are 1"):
        run(tiny_config(checkpoint, texts, arms=arms), tmp_path / "out")
    assert not (tmp_path / "out").exists()


ARMS_OF_ALL_FORMATS = (
    ("fp16", "fp16", "fp16", 0),
    *((f"{target}:{draft}", target, draft, 0) for target in BYTES for draft in BYTES),
)


def test_every_format_may_be_the_targets_and_the_drafts(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    """In any combination; the target's own output never depends on the draft's format."""
    config = tiny_config(
        checkpoint, texts, arms=ARMS_OF_ALL_FORMATS, lengths=(48,), num_prompts=2, generation_prompts=0
    )
    summary = run(config, tmp_path / "out")
    assert summary["arms"]["int8:e3m4"] == {"target": "int8", "draft": "e3m4"}
    seen = Counter(row["arm"] for row in _rows(tmp_path / "out" / "samples.csv"))
    assert seen == {arm[0]: 2 * 3 for arm in ARMS_OF_ALL_FORMATS}
    assert all(check["mismatches"] == 0 for check in summary["checks"]["plain_greedy"].values())
    assert summary["checks"]["plain_greedy"].keys() == seen.keys()
    scales = json.loads((tmp_path / "out" / "scales.json").read_text())
    assert scales.keys() == set(BYTES)
    assert all(set(scales[name]) == {"target", "draft"} for name in BYTES if name != "int8")


def test_formats_that_compute_their_scales_say_so(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    """And nothing is calibrated; static scales put there by hand are refused."""
    arms = (("fp16", "fp16", "fp16", 0), ("int8", "int8", "int8", 0))
    config = tiny_config(checkpoint, texts, arms=arms, lengths=(48,), num_prompts=2, generation_prompts=0)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(config, out, Interrupter(1))
    scales = json.loads((out / "scales.json").read_text())
    assert scales == {"int8": DYNAMIC} and "per token and KV head" in DYNAMIC["dynamic"]
    static = {"target": [{"k": 0.1, "v": 0.1}], "draft": {"k": 0.1, "v": 0.1}}
    (out / "scales.json").write_text(json.dumps({"int8": static}), encoding="utf-8")
    with pytest.raises(InputError, match="holds static scales of int8, which computes one per token"):
        run(config, out)
    (out / "scales.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="does not hold KV scales for int8"):
        run(config, out)
    (out / "scales.json").write_text(json.dumps(scales), encoding="utf-8")
    assert [row["arm"] for row in run(config, out)["table"]] == ["int8", "int8"]


def test_study_without_byte_formats_needs_no_scales(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    arms = (("fp16", "fp16", "fp16", 0), ("again", "fp16", "fp16", 1))
    config = tiny_config(checkpoint, texts, arms=arms, lengths=(48,), num_prompts=2, generation_prompts=0)
    summary = run(config, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "scales.json").read_text()) == {}
    assert [row["arm"] for row in summary["table"]] == ["again", "again"]


def test_folder_of_another_configuration_is_refused(
    checkpoint: Path, texts: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    with pytest.raises(InputError, match=r"another configuration .*seed"):
        run(tiny_config(checkpoint, texts, seed=1), finished[0])


def test_folder_of_another_checkpoint_is_refused(
    checkpoint: Path, texts: Path, tmp_path: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    copy = write_checkpoint(tmp_path / "model")
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(InputError, match="checkpoint"):
        run(tiny_config(copy, texts), finished[0])


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_tokenizer, r"holds no tokenizer\.json"),
        (_bad_tokenizer, "is not a tokenizer"),
        (_truncated, "not a readable safetensors file"),
        (_no_weights, "no checkpoint there"),
        (_no_config, r"config\.json"),
    ],
)
def test_damaged_checkpoints_are_refused_before_anything_is_written(
    damage: Callable[[Path], None], message: str, texts: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    damage(folder)
    with pytest.raises(InputError, match=message):
        run(tiny_config(folder, texts), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_too_short_is_refused_with_the_longest_length_possible(checkpoint: Path, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", long=400, short=90)
    with pytest.raises(InputError, match="'short' has 90 tokens, too few for a prompt of 96: at most 80"):
        run(tiny_config(checkpoint, folder), tmp_path / "out")


def test_length_beyond_the_models_positions_is_refused(texts: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", max_position_embeddings=100)
    with pytest.raises(
        InputError, match="exceed the model's 100 positions; the longest length possible is 86"
    ):
        run(tiny_config(folder, texts), tmp_path / "out")


@pytest.mark.parametrize("positions", [100, 2**40], ids=["the model", "the texts"])
def test_rounds_beyond_what_there_is_are_refused_before_they_are_listed(
    positions: int, texts: Path, tmp_path: Path
) -> None:
    """A million of them would take 30 MB, a few hundred million all memory."""
    folder = write_checkpoint(tmp_path / "model", max_position_embeddings=positions)
    config = tiny_config(folder, texts, rounds_per_prompt=1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"exceed the model's 100 positions|too few for a prompt of 96"):
            run(config, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_length_shorter_than_a_nonce_is_refused(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no room beside a nonce of 23"):
        run(tiny_config(checkpoint, texts, lengths=(20, 96)), tmp_path / "out")


def test_damaged_scales_are_refused(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    config, out = tiny_config(checkpoint, texts), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(config, out, Interrupter(1))
    scales = json.loads((out / "scales.json").read_text())
    scales["e4m3"]["draft"]["k"] = float("nan")
    (out / "scales.json").write_text(json.dumps(scales), encoding="utf-8")
    with pytest.raises(InputError, match=r"k_scale .* got nan"):
        run(config, out)


def test_encoder_gives_the_tokenizers_ids(checkpoint: Path) -> None:
    assert load_encoder(checkpoint)("\n a") == [1, 2, 67]


def test_a_study_on_kernels_records_their_configurations_and_their_files(
    checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    kernel = TUNABLE["page4_attention_triton"]
    path = tuning_path(kernel.name, device_name(HERE), triton_version())
    file = tmp_path / "configs" / path
    file.parent.mkdir(parents=True)
    file.write_text(TuningFile(kernel, device_name(HERE), triton_version(), {}).text(), encoding="utf-8")
    config = tiny_config(
        checkpoint,
        texts,
        device=HERE.type,
        backend="triton",
        kernel_configs=tmp_path / "configs",
        arms=(("fp16", "fp16", "fp16", 0),),  # another format would be calibrated, which takes longer
        lengths=(24,),
        num_prompts=1,
        generation_tokens=1,
        num_draft_tokens=1,
        rounds_per_prompt=1,
        generation_prompts=0,
        check_prompts=0,
    )
    out = tmp_path / "out"
    run(config, out)
    provenance = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    record = provenance["runs"][-1]["kernel_configs"]
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert record["source"] == "configs"
    assert provenance["inputs"][f"kernel_configs/{path.as_posix()}"] == sha256
    assert {use["kernel"] for use in record["used"]} >= {"qsa_prepare_triton", "index_scores_triton"}
    formats = {use["key"]["kv_format"] for use in record["used"] if use["kernel"].startswith("page4")}
    assert formats == {"fp16"}
    assert {use["origin"] for use in record["used"]} == {"default"}
    assert active().source == "shipped"
    # The folder belongs to these configurations.
    file.write_text(file.read_text() + " ", encoding="utf-8")
    with pytest.raises(InputError, match="it differs in kernel_configs/"):
        run(config, out)


def test_a_study_on_the_reference_has_no_kernel_configurations(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    provenance = json.loads((finished[0] / "provenance.json").read_text(encoding="utf-8"))
    assert "kernel_configs" not in provenance["runs"][-1]
    assert not [name for name in provenance["inputs"] if name.startswith("kernel_configs")]


def test_a_missing_folder_of_configurations_is_refused(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    config = tiny_config(checkpoint, texts, backend="triton", kernel_configs=tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"the folder of kernel configurations .*nowhere does not exist"):
        run(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
