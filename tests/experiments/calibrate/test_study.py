"""A calibration: what it sees, that it resumes, that shards merge, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from page4.experiments.calibrate import CalibrateConfig, run, study
from page4.experiments.calibrate.state import STATE_FILE, load
from page4.experiments.calibrate.windows import cut_windows, own_windows
from page4.experiments.cli import run as command
from page4.experiments.prompt_windows import Text
from page4.experiments.tokenizer import load_tokenizer
from page4.kernels.errors import InputError
from page4.kvcache import scale_for_maximum
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import KVObservation, KVObserver, calibrate_scales

Tiny = Callable[..., CalibrateConfig]


def test_scales_are_those_of_the_windows(tiny: Tiny, checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    report = run(tiny(), tmp_path / "out")
    encode = load_tokenizer(checkpoint).encode
    texts = [encode((corpus / f"{name}.txt").read_text()).ids for name in ("first", "second")]
    windows = [text[start : start + 128] for text in texts for start in range(0, len(text), 128)]
    expected = calibrate_scales(Qwen4ExpForCausalLM.from_pretrained(checkpoint), windows)
    (pair,), draft = expected.target, expected.draft
    assert draft is not None
    for layer, scales in (("1", pair), ("draft", draft)):
        for part, scale in (("k", scales.k), ("v", scales.v)):
            found = report["layers"][layer][part]
            assert found["scale"] == scale == scale_for_maximum(found["maximum"], 448.0)
            assert found["p99.9"] <= found["p99.99"] <= found["maximum"]
            assert found["saturated"] == 0 and found["values"] == 2 * 32 * (470 - 5 * (layer == "draft"))
            assert max(head["scale"] for head in found["heads"]) == scale
            assert sum(count for _, count in found["log2_histogram"]) <= found["values"]
    assert (report["windows"], report["tokens"]) == (5, 470)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    for file in ("table.md", "magnitudes.png", "config.yaml", "provenance.json"):
        assert (tmp_path / "out" / file).stat().st_size > 0


def test_windows_take_turns_and_shards_share_them(tiny: Tiny) -> None:
    texts = [Text("a", "", list(range(300))), Text("b", "", list(range(130)))]
    windows = cut_windows(tiny(), texts)
    assert [(w.text, w.start, len(w.tokens)) for w in windows] == [
        ("a", 0, 128), ("b", 0, 128), ("a", 128, 128), ("b", 128, 2), ("a", 256, 44),
    ]  # fmt: skip
    assert cut_windows(tiny(max_windows=2), texts) == windows[:2]
    shards = [own_windows(tiny(shard=shard, shards=3), windows) for shard in range(3)]
    assert sorted(id(window) for shard in shards for window in shard) == sorted(map(id, windows))


@pytest.mark.parametrize("after", [1, 4])
def test_an_interrupted_run_resumes(
    tiny: Tiny, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tiny(), tmp_path / "whole")
    observe = KVObserver.observe
    left = after

    def stop(self: KVObserver, text: list[int]) -> KVObservation:
        nonlocal left
        if left == 0:
            raise ConnectionError("the machine went away")
        left -= 1
        return observe(self, text)

    monkeypatch.setattr(KVObserver, "observe", stop)
    with pytest.raises(ConnectionError):
        run(tiny(), tmp_path / "out")
    state = load(tmp_path / "out")
    assert state is not None and (state.windows, state.total) == (after, 5)
    assert not (tmp_path / "out" / "report.json").exists()
    left = 5 - after  # exactly what is missing
    assert run(tiny(), tmp_path / "out") == whole
    assert left == 0
    monkeypatch.setattr(study.Qwen4ExpForCausalLM, "from_pretrained", None)  # nothing is run again
    assert run(tiny(), tmp_path / "out") == whole


def test_shards_merge_to_what_one_run_sees(tiny: Tiny, tmp_path: Path) -> None:
    whole = run(tiny(rule="mse"), tmp_path / "whole")
    parts = [tmp_path / f"part{shard}" for shard in range(2)]
    maxima = [run(tiny(shard=shard, shards=2), part) for shard, part in enumerate(parts)]
    merged = run(tiny(rule="mse", merge=tuple(parts)), tmp_path / "merged")
    assert merged["layers"] == whole["layers"]
    assert (merged["windows"], merged["tokens"]) == (5, 470)
    for layer, pair in merged["layers"].items():
        for part, found in pair.items():
            assert found["maximum"] == max(shard["layers"][layer][part]["maximum"] for shard in maxima)
    other = run(tiny(corpus=tiny().prompts, prompts=tiny().corpus), tmp_path / "other")
    both = run(tiny(merge=(*parts, tmp_path / "other")), tmp_path / "both")
    assert both["tokens"] == 470 + other["tokens"]


def test_what_cannot_be_merged_is_refused(
    tiny: Tiny, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [tmp_path / f"part{shard}" for shard in range(2)]
    for shard, part in enumerate(parts):
        run(tiny(shard=shard, shards=2), part)

    def refused(folders: tuple[Path, ...], message: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=message):
            run(tiny(merge=folders, **changes), tmp_path / "merged")
        assert not (tmp_path / "merged").exists()

    refused((parts[0],), "shard 1 of 2 is missing")
    refused((parts[0], parts[0]), "are the same shard of the same calibration")
    refused((tmp_path / "nowhere",), "is not the folder of a calibration: No such file")
    run(tiny(merge=tuple(parts)), tmp_path / "done")
    refused((tmp_path / "done",), "it has no corpus of its own")
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "config.json").write_text((checkpoint / "config.json").read_text() + "\n")
    refused(tuple(parts), "with another checkpoint or revision", model=copy)
    (parts[1] / STATE_FILE).unlink()
    refused(tuple(parts), "part1 is not finished: 0 windows are done")


@pytest.mark.parametrize("damage", ["bytes", "shape", "windows"])
def test_a_damaged_state_is_refused(tiny: Tiny, tmp_path: Path, damage: str) -> None:
    run(tiny(), tmp_path / "out")
    file = tmp_path / "out" / STATE_FILE
    tensors, metadata = load_file(file), {"windows": "5", "tokens": "470", "total": "5", "layers": "1 draft"}
    if damage == "bytes":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "shape":
        save_file({name: array[:, :9].copy() for name, array in tensors.items()}, file, metadata)
    else:
        save_file(
            {name: array.astype(np.int64) for name, array in tensors.items()},
            file,
            metadata | {"windows": "6"},
        )
    with pytest.raises(InputError, match=r"is not the state of a calibration|has 6 of 5 windows"):
        run(tiny(), tmp_path / "out")


def test_a_corpus_from_the_evaluation_texts_is_refused(tiny: Tiny, tmp_path: Path, prompts: Path) -> None:
    with pytest.raises(InputError, match="'held' shares 13 words in a row with the evaluation text 'held'"):
        run(tiny(corpus=prompts), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("kv_format=fp16", "fp16 has no static scales"),
        ("kv_format=int8", "int8 has no static scales"),
        ("window=1", "window must be at least 2"),
        ("shard=2", "shard is 2, expected 0 to 0 of 1 shards"),
        ("rule=best", "rule must be one of max, percentile, mse"),
        ("percent=0", "percent must be above 0"),
        ("corpus=nowhere", "nowhere does not exist"),
        ("merge=nowhere", "nowhere is not the folder of a calibration"),
    ],
)
def test_unusable_settings_are_refused(
    setting: str,
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["calibrate", "--model", str(checkpoint), "--device", "cpu", "--set", setting]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_more_shards_than_windows_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shard 7 of 8 has none of 5 windows"):
        run(tiny(shard=7, shards=8), tmp_path / "out")
