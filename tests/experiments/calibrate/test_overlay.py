"""`page4 scales`: overlays from calibrations, and their use in `page4 generate` and `page4 acceptance`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from page4.experiments.acceptance import run as study
from page4.experiments.acceptance.scales import scales_from_json
from page4.experiments.calibrate import CalibrateConfig, run
from page4.experiments.calibrate.overlay import check_calibration, write_overlay
from page4.experiments.cli import run as command
from page4.experiments.generate import continue_text
from page4.experiments.generate_config import GenerateConfig
from page4.kernels.errors import InputError
from page4.kvcache import ScalePair
from page4.kvcache.overlay_scales import PrototypeScales
from page4.model import Qwen4ExpForCausalLM
from page4.model.kv_scales import describe_base, load_overlay
from page4.spec_decode import DecoderConfig, SpeculativeDecoder
from tests.experiments.acceptance.tiny_study import tiny_config, write_texts

Tiny = Callable[..., CalibrateConfig]
PROMPT = "Anne thought of the sea and of nothing else. "


@pytest.fixture(scope="module")
def calibrated(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated") / "calibration"
    run(tiny(max_windows=2), folder)
    return folder


@pytest.fixture
def calibration(calibrated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(calibrated, tmp_path / "calibration"))


def listing(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))
    }


def scales_command(*arguments: object) -> int:
    return command(["scales", *map(str, arguments)])


def test_the_command_writes_shows_and_verifies(
    checkpoint: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(checkpoint)
    overlay, report = tmp_path / "overlay", json.loads((calibration / "report.json").read_text())
    given = (overlay, "--model", checkpoint, "--calibration", calibration)
    assert scales_command("materialise", *given) == 0
    assert scales_command("inspect", overlay, "--model", checkpoint, "--json") == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    for layer, pair in report["layers"].items():
        assert shown["scales"][layer] == {part: pair[part]["scale"] for part in "kv"}
    assert shown["count"] == {"target": 2, "draft": 2} and not shown["prototype"]
    assert scales_command("verify", *given) == 0
    assert "4 scales, 1 of 1 target layers, would load" in capsys.readouterr().out
    assert listing(checkpoint) == before
    provenance = json.loads((overlay / "provenance.json").read_text())
    assert provenance["calibration"]["tokens"] == report["tokens"]
    assert str(tmp_path) not in (overlay / "provenance.json").read_text()


@pytest.mark.parametrize("kv_format", ["e2m5", "e3m4"])
def test_a_calibration_by_the_maximum_gives_scales_of_every_format(
    kv_format: str, tiny: Tiny, checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    """Those of a calibration for that format, to the bit: what is seen does not depend on it."""
    given = ("--model", checkpoint, "--calibration", calibration)
    assert scales_command("materialise", tmp_path / "o", *given, "--format", kv_format) == 0
    assert scales_command("verify", tmp_path / "o", *given) == 0
    run(tiny(max_windows=2, kv_format=kv_format), tmp_path / "own")
    overlay = write_overlay(tmp_path / "p", checkpoint, tmp_path / "own")
    assert overlay.manifest.kv_format == kv_format
    assert load_overlay(tmp_path / "o", checkpoint) == load_overlay(tmp_path / "p", checkpoint)
    check_calibration(overlay, describe_base(checkpoint), calibration)


@pytest.mark.parametrize("kv_format", ["fp16", "fp32", "int8"])
def test_a_format_without_static_scales_gets_none_from_a_calibration(
    kv_format: str, checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"{kv_format} has no static scales"):
        write_overlay(tmp_path / "overlay", checkpoint, calibration, kv_format=kv_format)


def test_another_rule_needs_all_that_was_seen_for_another_format(
    tiny: Tiny, checkpoint: Path, tmp_path: Path
) -> None:
    run(tiny(max_windows=2, rule="mse"), tmp_path / "mse")
    with pytest.raises(InputError, match=r"by the rule mse; .* --format e2m5 --rule mse --merge"):
        write_overlay(tmp_path / "overlay", checkpoint, tmp_path / "mse", kv_format="e2m5")
    run(tiny(merge=(tmp_path / "mse",), rule="mse", kv_format="e2m5"), tmp_path / "merged")
    overlay = write_overlay(tmp_path / "overlay", checkpoint, tmp_path / "merged")
    assert overlay.manifest.kv_format == "e2m5"


@pytest.fixture
def several(checkpoint: Path, calibration: Path, tmp_path: Path) -> Path:
    for name in ("e4m3", "e2m5"):
        write_overlay(tmp_path / "several" / name, checkpoint, calibration, kv_format=name)
    return tmp_path / "several"


def test_several_overlays_are_shown_and_verified_together(
    checkpoint: Path, calibration: Path, several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (several, "--model", checkpoint)
    assert scales_command("inspect", *given, "--json") == 0
    out = capsys.readouterr().out
    assert "Scales for e4m3" in out and "Scales for e2m5" in out
    shown = json.loads(out.splitlines()[-1])
    assert {name: record["kv_format"] for name, record in shown.items()} == {"e4m3": "e4m3", "e2m5": "e2m5"}
    assert scales_command("verify", *given, "--calibration", calibration) == 0
    assert scales_command("verify", *given, "--draft-format", "e4m3") == 0
    assert scales_command("verify", *given, "--format", "e4m3,1:e2m5") == 0
    ending = "4 scales, 1 of 1 target layers, would load"
    assert capsys.readouterr().out.splitlines() == [
        f"{several} in {formats}: {ending}" for formats in ("e4m3", "e2m5", "e2m5, draft e4m3", "e4m3,1:e2m5")
    ]
    assert scales_command("verify", *given, "--format", "e3m4") == 2
    assert "made for e4m3 and e2m5, the target's KV format is e3m4" in capsys.readouterr().err


def test_prototypes_borrow_or_take_1(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    overlay = write_overlay(tmp_path / "a", checkpoint, calibration, "layer:draft", "layer:1")
    report = json.loads((calibration / "report.json").read_text())["layers"]
    assert overlay.target[1].k == report["draft"]["k"]["scale"]
    assert overlay.draft is not None and overlay.draft.v == report["1"]["v"]["scale"]
    assert (overlay.manifest.target, overlay.manifest.draft) == ("layer draft", "layer 1")
    assert overlay.manifest.prototype
    unit = write_overlay(tmp_path / "b", checkpoint, None, "unit", "unit")
    assert unit.target[1].k == 1.0 and unit.manifest.prototype
    with pytest.warns(PrototypeScales, match=r"prototype scales of the target .unit."):
        load_overlay(tmp_path / "b", checkpoint, "e4m3", "fp16")


def test_scales_of_another_tool_come_from_its_file(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "hf_quant.safetensors"
    exported = {
        "model.layers.1.self_attn.k_proj.k_scale": torch.tensor([0.25], dtype=torch.bfloat16),
        "model.layers.1.self_attn.v_proj.v_scale": torch.tensor(0.1),
        "model.layers.1.self_attn.k_proj.weight": torch.zeros(2, 2),
        "mtp.layers.0.self_attn.k_proj.output_scale": torch.tensor(0.5),
        "mtp.layers.0.self_attn.v_proj.output_scale": torch.tensor(2.0),
    }
    save_file(exported, file)
    overlay = write_overlay(tmp_path / "overlay", checkpoint, None, f"file:{file}", f"file:{file}")
    assert (overlay.manifest.target, overlay.manifest.prototype) == ("file hf_quant.safetensors", False)
    assert overlay.target[1] == ScalePair(0.25, float(np.float32(0.1))) and overlay.draft == ScalePair(
        0.5, 2.0
    )
    v_scale = "model.layers.1.self_attn.v_proj.v_scale"
    for change, message in (
        (
            {v_scale: torch.tensor([0.1, 0.2])},
            r"of shape \[2\], expected one",
        ),
        ({v_scale: torch.tensor(1)}, "expected one number"),
        ({v_scale: torch.tensor(0.0)}, "must be a positive finite"),
        ({"model.layers.1.self_attn.k_scale": torch.tensor(0.1)}, "is a second k_scale of layer 1"),
        ({"mtp.layers.0.self_attn.v_proj.output_scale": None}, "has a scale for K and none for V"),
        (dict.fromkeys([name for name in exported if "mtp" in name]), "has no scales of the draft layer"),
        (dict.fromkeys([name for name in exported if "scale" in name]), "holds no KV scales"),
    ):
        save_file({name: t for name, t in (exported | change).items() if t is not None}, file)
        with pytest.raises(InputError, match=message):
            write_overlay(tmp_path / "other", checkpoint, None, f"file:{file}", f"file:{file}")
    file.write_bytes(b"?")
    with pytest.raises(InputError, match="not a readable safetensors file"):
        write_overlay(tmp_path / "other", checkpoint, None, f"file:{file}", "none")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "layer:9"], "layer 9 was not calibrated; there are 1, draft"),
        (["--draft", "best"], "'best' is no source of scales"),
        (["--draft", "unit:1"], "'unit:1' is no source of scales"),
        (["--target", "none", "--draft", "none"], "both target and draft have none"),
        (["--calibration", "nowhere"], "nowhere holds no report.json"),
    ],
)
def test_unusable_sources_are_refused(
    options: list[str],
    message: str,
    checkpoint: Path,
    calibration: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = listing(tmp_path)
    given = ["--model", checkpoint, *([] if "--calibration" in options else ["--calibration", calibration])]
    assert scales_command("materialise", tmp_path / "overlay", *given, *options) == 2
    assert message in capsys.readouterr().err
    assert listing(tmp_path) == before


def test_calibrated_scales_need_a_calibration(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="scales from 'calibration' need --calibration"):
        write_overlay(tmp_path / "overlay", checkpoint, None)
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_is_not_touched(checkpoint: Path, calibration: Path) -> None:
    before = listing(checkpoint)
    with pytest.raises(InputError, match="lies inside the checkpoint"):
        write_overlay(checkpoint / "scales", checkpoint, calibration)
    assert listing(checkpoint) == before


def test_a_calibration_of_another_revision_is_refused(
    checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "other")
    with (tmp_path / "other" / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(InputError, match=r"another checkpoint or revision: config\.json differ"):
        write_overlay(tmp_path / "overlay", tmp_path / "other", calibration)
    assert not (tmp_path / "overlay").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"base": {}, "kv_format": 3}', "[" * 10_000])
def test_a_report_that_is_none_is_refused(
    text: str, checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    (calibration / "report.json").write_text(text)
    with pytest.raises(InputError, match=r"is not the report of a calibration|is not valid JSON"):
        write_overlay(tmp_path / "overlay", checkpoint, calibration)
    assert not (tmp_path / "overlay").exists()


@pytest.mark.parametrize("value", [0, -1, None, "x", 1e-50])
def test_a_report_with_an_unusable_scale_is_refused(
    value: object, checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    report = json.loads((calibration / "report.json").read_text())
    report["layers"]["draft"]["v"]["scale"] = value
    (calibration / "report.json").write_text(json.dumps(report))
    with pytest.raises(InputError):
        write_overlay(tmp_path / "overlay", checkpoint, calibration)
    assert not (tmp_path / "overlay").exists()


def test_verify_compares_with_a_calibration_bit_for_bit(
    checkpoint: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_overlay(tmp_path / "overlay", checkpoint, calibration)
    report = json.loads((calibration / "report.json").read_text())
    report["layers"]["1"]["k"]["scale"] *= 1 + 2**-22
    (calibration / "report.json").write_text(json.dumps(report))
    given = (tmp_path / "overlay", "--model", checkpoint, "--calibration", calibration)
    assert scales_command("verify", *given) == 2
    assert "layer 1 has ScalePair" in capsys.readouterr().err


def generated(checkpoint: Path, **options: Any) -> dict[str, Any]:
    config = GenerateConfig(model=checkpoint, device="cpu", max_new_tokens=8, ignore_eos=True, **options)
    return continue_text(config, PROMPT, lambda _: None)


def test_generate_decodes_with_an_overlay(
    checkpoint: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay, used = tmp_path / "overlay", []

    class Spied(SpeculativeDecoder):
        def __init__(self, model: Qwen4ExpForCausalLM, config: DecoderConfig) -> None:
            super().__init__(model, config)
            used.append(config.scales)

    write_overlay(overlay, checkpoint, calibration)
    monkeypatch.setattr("page4.experiments.generate.observe_texts", None)  # nothing is calibrated
    monkeypatch.setattr("page4.experiments.generate.SpeculativeDecoder", Spied)
    for draft_format in (None, "fp16"):
        report = generated(checkpoint, kv_format="e4m3", draft_kv_format=draft_format, scales=overlay)
        assert len(report["tokens"]) == 8
        assert used.pop() == load_overlay(overlay, checkpoint, "e4m3", draft_format)


def test_generate_without_a_format_takes_that_of_the_overlay(
    checkpoint: Path, calibration: Path, several: Path, tmp_path: Path
) -> None:
    write_overlay(tmp_path / "overlay", checkpoint, calibration, kv_format="e3m4")
    for folder, draft, expected in (
        (tmp_path / "overlay", None, ("e3m4", "e3m4")),
        (several, None, ("e2m5", "e2m5")),
        (several, "e4m3", ("e2m5", "e4m3")),
    ):
        report = generated(checkpoint, scales=folder, draft_kv_format=draft)
        assert (report["kv_format"], report["draft_kv_format"]) == expected
        assert report["scales"] == str(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_format": "fp16"}, "fp16 has no static scales"),
        ({"kv_format": "int8"}, "int8 of the target computes its scales"),
        ({"kv_format": "e3m4"}, "made for e4m3"),
        ({"kv_format": "e4m3", "scales": Path("nowhere")}, "the overlay nowhere does not exist"),
        ({"kv_format": "e4m3", "scales": "shipped"}, "another checkpoint or revision"),
    ],
)
def test_generate_refuses_before_it_loads_the_model(
    options: dict[str, Any],
    message: str,
    checkpoint: Path,
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_overlay(tmp_path / "overlay", checkpoint, calibration)
    monkeypatch.setattr("page4.experiments.generate.Qwen4ExpForCausalLM.from_pretrained", None)
    with pytest.raises(InputError, match=message):
        generated(checkpoint, **({"scales": tmp_path / "overlay"} | options))


def test_a_missing_draft_is_refused_and_a_flag_names_missing_targets(
    checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    write_overlay(tmp_path / "no-draft", checkpoint, calibration, draft="none")
    with pytest.raises(InputError, match="0 of 2 draft scales"):
        generated(checkpoint, kv_format="e4m3", scales=tmp_path / "no-draft")
    exact_draft = generated(
        checkpoint, kv_format="e4m3", draft_kv_format="fp16", scales=tmp_path / "no-draft"
    )
    assert exact_draft["tokens"]
    write_overlay(tmp_path / "no-target", checkpoint, calibration, target="none")
    with pytest.raises(InputError, match="0 of 2 target scales"):
        generated(checkpoint, kv_format="e4m3", scales=tmp_path / "no-target")
    with pytest.warns(PrototypeScales, match="no target scales"):
        generated(checkpoint, kv_format="e4m3", scales=tmp_path / "no-target", allow_unit_target_scales=True)


ARMS = (("fp16", "fp16", "fp16", 0), ("e4m3", "e4m3", "e4m3", 0), ("mixed", "e4m3", "fp16", 0))


def test_the_acceptance_study_takes_an_overlay(
    checkpoint: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = write_overlay(tmp_path / "overlay", checkpoint, calibration)
    texts = write_texts(tmp_path / "texts", first=300, second=400)
    monkeypatch.setattr("page4.experiments.acceptance.scales.observe_texts", None)
    config = tiny_config(checkpoint, texts, arms=ARMS, lengths=(48,), scales=tmp_path / "overlay")
    study(config, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "scales.json").read_text())
    assert written["e4m3"]["target"] == [{"k": overlay.target[1].k, "v": overlay.target[1].v}]
    assert study(config, tmp_path / "out")["study"] == "acceptance"
    shutil.rmtree(tmp_path / "overlay")
    write_overlay(tmp_path / "overlay", checkpoint, calibration, draft="layer:1")
    with pytest.warns(PrototypeScales), pytest.raises(InputError, match="it differs in scales"):
        study(config, tmp_path / "out")


def test_the_acceptance_study_takes_the_overlay_of_each_format(
    checkpoint: Path, several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts", first=300, second=400)
    monkeypatch.setattr("page4.experiments.acceptance.scales.observe_texts", None)
    arms = (*ARMS, ("e2m5", "e2m5", "e2m5", 0), ("both", "e2m5", "e4m3", 0), ("int8", "int8", "int8", 0))
    study(tiny_config(checkpoint, texts, arms=arms, lengths=(48,), scales=several), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "scales.json").read_text())
    for name in ("e4m3", "e2m5"):
        scales = load_overlay(several, checkpoint, name)
        assert scales_from_json(written[name]) == scales
    samples = (tmp_path / "out" / "samples.csv").read_text()
    assert {line.split(",")[0] for line in samples.splitlines()[1:]} >= {"e2m5", "both", "int8"}


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (ARMS[:1], "no arm has a format with static scales"),
        ((ARMS[0], ("e3m4", "e3m4", "e3m4", 0)), "made for e4m3"),
        ((ARMS[0], ("mixed", "e4m3", "int8", 0)), "int8 of the draft computes its scales"),
    ],
)
def test_the_acceptance_study_refuses_before_it_claims_a_folder(
    arms: tuple[Any, ...], message: str, checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    write_overlay(tmp_path / "overlay", checkpoint, calibration)
    texts = write_texts(tmp_path / "texts", first=300, second=400)
    with pytest.raises(InputError, match=message):
        study(tiny_config(checkpoint, texts, arms=arms, scales=tmp_path / "overlay"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
