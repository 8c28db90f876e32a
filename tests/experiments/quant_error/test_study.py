"""The study end to end on a tiny model: what it measures, what it leaves, how it resumes, what it refuses."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from page4.experiments.quant_error import QuantErrorConfig, measure, run
from page4.experiments.quant_error.prompts import Prompts
from page4.experiments.tokenizer import load_tokenizer
from page4.kernels.codecs import decode_kv, encode_kv
from page4.kernels.errors import InputError
from page4.kvcache import CacheConfig, KVScales, ScalePair
from page4.kvcache.decoded import decoded_rows
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment
from tests.experiments.reporters import Interrupter

Tiny = Callable[..., QuantErrorConfig]
FILES = {
    "config.yaml", "inputs.json", "samples.csv", "logits.csv", "observed.safetensors", "scales.json",
    "summary.json", "summary.csv", "table.md", "kv_error.png", "output_error.png", "overlap.png",
    "by_length.png", "by_position.png", "provenance.json",
}  # fmt: skip
ARMS = ("fp16", "e4m3-max", "e4m3-percentile", "int8")
SIX_DIGITS = 5e-6  # what rounding to six digits changes at most, relative
Finished = tuple[Path, dict[str, Any]]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def where(rows: list[dict[str, str]], **wanted: Any) -> list[dict[str, str]]:
    return [row for row in rows if all(row[name] == str(value) for name, value in wanted.items())]


@pytest.fixture(scope="module")
def finished(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("study") / "out"
    return out, run(tiny(), out)


def test_folder_holds_every_promised_file_and_no_other(finished: Finished) -> None:
    out, summary = finished
    assert {file.name for file in out.iterdir()} - {".lock"} == FILES
    assert json.loads((out / "summary.json").read_text()) == summary
    for figure in out.glob("*.png"):
        assert matplotlib.image.imread(figure).std() > 0.01


def test_every_arm_has_every_window_of_every_prompt_and_layer(finished: Finished) -> None:
    windows = {
        ("48", "28", "48"),
        ("96", "76", "96"),
        ("96", "0", "32"),
        ("96", "32", "64"),
        ("96", "64", "96"),
    }
    for file, layers in (("samples.csv", {"1", "2", "draft"}), ("logits.csv", {"target", "draft"})):
        rows = rows_of(finished[0] / file)
        seen = Counter((row["arm"], row["layer"]) for row in rows)
        assert seen == {(arm, layer): 2 * len(windows) for arm in ARMS for layer in layers}
        assert {(row["length"], row["first"], row["stop"]) for row in rows} == windows


class ByHand:
    """The first prompt at its longest, whole and by itself.

    Attributes:
        target, draft: Logits, float64 `[96, V]`.
        tokens: The prompt's, int64 `[96]`.
        following: What the text says they predict, by the same names, int64 `[96]`.
        k, v: Of the first sparse layer.
    """

    def __init__(self, config: QuantErrorConfig, kv_format: str, scales: KVScales | None) -> None:
        assert config.model is not None
        tokenizer = load_tokenizer(config.model)
        ids = Prompts(config.resolve(), lambda text: tokenizer.encode(text).ids).tokens(0, 96)
        model = Qwen4ExpForCausalLM.from_pretrained(config.model)
        cache = model.new_cache(CacheConfig(kv_format=kv_format, scales=scales, max_tokens=96))
        cache.reserve(cache.open(), 96)

        def batch(tokens: list[int]) -> RowBatch:
            segment = Segment(0, 0, torch.tensor(tokens), model.preceding(tokens, 0), decode=False)
            return RowBatch.pack([segment], model.device)

        streams = model.forward_rows(batch(ids[:96]), cache)
        self.target = model.logits(streams).double().numpy()
        self.draft = model.draft_logits(model.draft_rows(batch(ids[1:97]), streams, cache)).double().numpy()
        self.tokens = torch.tensor(ids[:96])
        self.following = {"target": torch.tensor(ids[1:97]), "draft": torch.tensor(ids[2:98])}
        self.k, self.v = decoded_rows(cache.qsa[0], 0, 0, 96)

    def losses(self, name: str) -> torch.Tensor:
        """Float64 `[96]`, in nats."""
        return F.cross_entropy(torch.from_numpy(getattr(self, name)), self.following[name], reduction="none")


def divergence(p_logits: NDArray[np.float64], q_logits: NDArray[np.float64]) -> float:
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (p_logits, q_logits))
    return float((p * np.log(p / q)).sum(1).mean())


@pytest.mark.parametrize("arm", ["e4m3-max", "e4m3-percentile"])
def test_samples_are_what_float64_finds_by_hand(tiny: Tiny, finished: Finished, arm: str) -> None:
    out, _ = finished
    recorded = json.loads((out / "scales.json").read_text())[arm]
    pairs = [ScalePair(**pair) for pair in recorded["target"]]
    scales = KVScales(tuple(pairs), ScalePair(**recorded["draft"]))
    exact, stored = ByHand(tiny(), "fp32", None), ByHand(tiny(), "e4m3", scales)
    prompt = rows_of(out / "samples.csv")[0]["prompt"]
    (row,) = where(rows_of(out / "samples.csv"), arm=arm, length=96, first=32, layer=1, prompt=prompt)
    for part, x, kept, scale in (
        ("k", exact.k, stored.k, pairs[0].k),
        ("v", exact.v, stored.v, pairs[0].v),
    ):
        through = decode_kv(encode_kv(x[32:64], "e4m3", scale), "e4m3").double() * scale
        assert torch.equal(through.float(), kept[32:64])
        error = ((through.numpy() - x[32:64].double().numpy()) ** 2).sum()
        relative = np.sqrt(error / (x[32:64].double().numpy() ** 2).sum())
        # The study decodes in FP32: a product with the scale is off by 2^-24 of a value, its error by so much
        # against the 3 % that it is of the value.
        assert float(row[f"{part}_error"]) == pytest.approx(relative, rel=SIX_DIGITS + 2.0**-24 / 0.03)
        clipped = (x[32:64].abs() > 448 * scale).double().mean().item()
        assert float(row[f"{part}_clipped"]) == pytest.approx(clipped, rel=SIX_DIGITS)
        assert (clipped > 0.01) == (arm == "e4m3-percentile")
    for name in ("target", "draft"):
        (row,) = where(rows_of(out / "logits.csv"), arm=arm, length=96, first=32, layer=name, prompt=prompt)
        p, q = (getattr(hand, name)[32:64] for hand in (exact, stored))
        assert float(row["kl"]) == pytest.approx(divergence(p, q), rel=SIX_DIGITS)
        assert float(row["flips"]) == (p.argmax(1) != q.argmax(1)).mean()
        before, after = exact.losses(name), stored.losses(name)
        for first, stop in ((32, 64), (76, 96)):  # the second reaches the last row
            place = {"arm": arm, "length": 96, "first": first, "layer": name, "prompt": prompt}
            (row,) = where(rows_of(out / "logits.csv"), **place)
            assert float(row["loss"]) == pytest.approx(after[first:stop].mean().item(), rel=SIX_DIGITS)
            change = (after - before)[first:stop].mean().item()
            assert float(row["loss_change"]) == pytest.approx(change, rel=SIX_DIGITS) and abs(change) > 1e-6


def test_the_first_sparse_layer_sees_the_unquantised_inputs(finished: Finished) -> None:
    """So its accumulated error is its local one and it chooses the same blocks; later layers' are not."""
    rows = rows_of(finished[0] / "samples.csv")
    for row in where(rows, layer=1):
        assert row["output_local"] == row["output_accumulated"] and row["jaccard"] == "1.0"
    for layer in ("2", "draft"):
        later = where(rows, layer=layer)
        assert all(row["output_local"] != row["output_accumulated"] for row in later)
        assert all(0 < float(row["jaccard"]) <= 1 for row in later)


def test_finer_formats_change_less(finished: Finished) -> None:
    rows = rows_of(finished[0] / "samples.csv")

    def mean(arm: str, column: str) -> float:
        return float(np.mean([float(row[column]) for row in where(rows, arm=arm)]))

    for column in ("k_error", "v_error", "output_local", "output_accumulated"):
        fp16, e4m3, clipped, int8 = (mean(arm, column) for arm in ARMS)
        assert 0 < fp16 < int8 < e4m3 < clipped
    for column in ("k", "v"):  # a few percent of thousands of values: theory holds to a few percent as well
        for arm in ARMS:
            assert mean(arm, f"{column}_error") == pytest.approx(mean(arm, f"{column}_expected"), rel=0.05)


@pytest.mark.parametrize(("kv_format", "dtype"), [("fp32", None), ("fp16", "float16")])
def test_an_arm_that_stores_what_it_is_given_changes_nothing(
    tiny: Tiny, tmp_path: Path, checkpoint: Path, kv_format: str, dtype: str | None
) -> None:
    """Also of a checkpoint without an MTP head, which has no draft to measure; nothing is calibrated."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (bare / name).write_bytes((checkpoint / name).read_bytes())
    config = json.loads((bare / "config.json").read_text()) | {"mtp_num_hidden_layers": 0}
    (bare / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(checkpoint / "model.safetensors")
    save_file({k: v for k, v in weights.items() if not k.startswith("mtp.")}, bare / "model.safetensors")
    summary = run(tiny(model=bare, formats=(kv_format,), lengths=(48,), dtype=dtype), tmp_path / "out")
    assert summary["unquantised"] == kv_format
    assert "a control" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert summary["layers"] == ["1", "2"] and summary["logits"] == ["target"]
    assert summary["reference"] is None
    assert json.loads((tmp_path / "out" / "scales.json").read_text()) == {}
    for metric in rows_of(tmp_path / "out" / "summary.csv"):
        if metric["metric"] == "loss":
            assert float(metric["value"]) > 0 and metric["arm"] in (kv_format, "unquantised")
        elif "subnormal" not in metric["metric"]:
            assert float(metric["value"]) == (1 if metric["metric"] == "jaccard" else 0)


def test_the_cut_into_chunks_does_not_matter(tiny: Tiny, finished: Finished, tmp_path: Path) -> None:
    """Of the first sparse layer's K: FP32 sums in another order may move single values across a tie.

    A value that moves changes its error by less than its step; one of some 2000 of a window by 5e-4 of all.
    """
    config = tiny(prefill_chunk=20, formats=("e4m3",), rules=("max",), lengths=(48, 96))
    run(config, tmp_path / "out")
    found = where(rows_of(tmp_path / "out" / "samples.csv"), layer=1)
    wanted = where(rows_of(finished[0] / "samples.csv"), layer=1, arm="e4m3-max")
    assert len(found) == len(wanted) == 10
    for rows in (found, wanted):  # windows come in the order in which chunks reach them
        rows.sort(key=lambda row: (row["length"], row["first"], row["stop"], row["prompt"]))
    for a, b in zip(found, wanted, strict=True):
        assert (a["length"], a["first"], a["prompt"]) == (b["length"], b["first"], b["prompt"])
        assert a["jaccard"] == b["jaccard"]
        assert float(a["k_error"]) == pytest.approx(float(b["k_error"]), rel=5e-4)


def test_summary_is_what_the_samples_say(finished: Finished) -> None:
    out, summary = finished
    rows = rows_of(out / "logits.csv")

    def kl(arm: str) -> float:
        return float(np.mean([float(row["kl"]) for row in where(rows, arm=arm, first=76, layer="draft")]))

    scored = where(rows_of(out / "summary.csv"), length=96, first=76, layer="draft")
    found = {(m["metric"], m["arm"]): m for m in scored}
    assert summary["reference"] == "e4m3-max"
    assert float(found["kl", "int8"]["value"]) == pytest.approx(kl("int8"))
    change = 100 * (kl("int8") / kl("e4m3-max") - 1)
    assert float(found["kl_change", "int8"]["value"]) == pytest.approx(change)
    assert ("kl_change", "e4m3-max") not in found
    assert all((m["clusters"], m["low"]) == ("2", "") for m in found.values())  # too few for intervals


def test_an_interrupted_study_resumes_to_the_same_result(
    tiny: Tiny, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three of four prompts, the third of which is in one of the two files only."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), out, Interrupter(3))
    assert not (out / "summary.json").exists()
    lines = (out / "logits.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    rows_of_a_long_prompt = len(ARMS) * 4 * 2  # windows; target and draft
    (out / "logits.csv").write_text("".join(lines[:-rows_of_a_long_prompt]), encoding="utf-8")
    measured: list[tuple[int, int]] = []
    real = measure.Measurer.measure

    def spy(self: measure.Measurer, index: int, length: int) -> Any:
        measured.append((length, index))
        return real(self, index, length)

    monkeypatch.setattr(measure.Measurer, "measure", spy)
    summary = run(tiny(), out)
    assert measured == [(96, 0), (96, 1)]
    for name in ("samples.csv", "logits.csv", "scales.json"):
        assert (out / name).read_bytes() == (finished[0] / name).read_bytes()
    assert summary == finished[1]


def test_a_finished_study_is_summarised_again_and_not_measured(
    tiny: Tiny, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.Measurer, "measure", None)
    assert run(tiny(), finished[0]) == finished[1]


def test_a_folder_of_another_configuration_is_refused(tiny: Tiny, finished: Finished) -> None:
    with pytest.raises(InputError, match=r"another configuration .*rules"):
        run(tiny(rules=("max",)), finished[0])


def test_the_unquantised_loss_is_that_of_the_model_whatever_the_chunks(
    tiny: Tiny, finished: Finished, tmp_path: Path
) -> None:
    """Of the whole prompt, beside chunks of 7 rows, whose ends lie in the middle of windows.

    FP32 sums in another order move logits of up to 10 by some 2^-20 of themselves: 1e-5 nats. Samples are
    rounded to six digits.
    """
    config = tiny(prefill_chunk=7, formats=("fp32", "int8"), num_prompts=1)
    run(config, tmp_path / "out")
    hand = ByHand(config, "fp32", None)
    assert config.model is not None
    whole = Qwen4ExpForCausalLM.from_pretrained(config.model)(hand.tokens[None]).logits[0].double()
    losses = F.cross_entropy(whole, hand.following["target"], reduction="none")
    torch.testing.assert_close(losses, hand.losses("target"), rtol=0, atol=1e-5)
    rows = rows_of(tmp_path / "out" / "logits.csv")
    for first, stop in ((0, 32), (32, 64), (64, 96), (76, 96)):
        for name, expected in (("target", losses), ("draft", hand.losses("draft"))):
            mean = expected[first:stop].mean().item()
            wanted = pytest.approx(mean, abs=1e-5 + SIX_DIGITS * mean)
            place = {"length": 96, "first": first, "stop": stop, "layer": name}
            (kept,), (quantised,) = (where(rows, arm=arm, **place) for arm in ("fp32", "int8"))
            assert float(kept["loss"]) == wanted and float(kept["loss_change"]) == 0
            assert float(quantised["loss"]) - float(quantised["loss_change"]) == wanted
            assert float(quantised["loss_change"]) != 0


def test_a_prompt_goes_on_as_its_text_does(tiny: Tiny) -> None:
    config = tiny().resolve()
    assert config.model is not None
    tokenizer = load_tokenizer(config.model)
    prompts = Prompts(config, lambda text: tokenizer.encode(text).ids)
    for index, anchor in enumerate(prompts.anchors):
        for length in (48, 96):
            tokens, text, end = prompts.tokens(index, length), anchor.text.tokens, anchor.position
            assert len(tokens) == length + 2 and tokens[-2:] == text[end : end + 2]
            assert tokens[23:] == text[end - length + 23 : end + 2]  # behind a nonce of 23 characters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (48, 5000)}, "a length of 5000 tokens exceeds the model's 4096 positions"),
        ({"lengths": (48, 380)}, "the text 'first' has 300 tokens, too few for a prompt of 380"),
        ({"lengths": (20, 48)}, "a length of 20 tokens has no room beside a nonce of 23"),
        ({"prompts": Path("no/such/folder")}, "the prompt folder no/such/folder does not exist"),
        ({"corpus": Path("no/such/folder")}, "the prompt folder no/such/folder does not exist"),
        ({"model": Path("no/such/folder")}, "no/such/folder"),
        ({"kernel_configs": Path("nowhere")}, "the folder of kernel configurations nowhere does not exist"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(tiny(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prompts_may_take_every_position_and_no_more(
    tiny: Tiny, tmp_path: Path, checkpoint: Path, finished: Finished
) -> None:
    """The two tokens behind a prompt have none: one is the last row's answer, one the draft's."""
    folder = tmp_path / "short"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 96}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run(tiny(model=folder, formats=("int8",)), tmp_path / "out")
    for name in ("samples.csv", "logits.csv"):
        wanted = where(rows_of(finished[0] / name), arm="int8")
        assert rows_of(tmp_path / "out" / name) == wanted
    with pytest.raises(InputError, match="a length of 97 tokens exceeds the model's 96 positions"):
        run(tiny(model=folder, formats=("int8",), lengths=(48, 97)), tmp_path / "too_long")


def test_a_corpus_from_the_prompts_texts_is_refused(tiny: Tiny, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="13 words in a row with the evaluation text 'first'"):
        run(tiny(corpus=texts), tmp_path / "out")
    assert not (tmp_path / "out").exists()
