"""An overlay loads for the checkpoint that it was made for, and for no other."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import page4.model
from page4.kernels.errors import InputError
from page4.kvcache import KVScales, ScalePair
from page4.kvcache.overlay_write import Sourced, materialise
from page4.model import Qwen4ExpForCausalLM
from page4.model.kv_scales import describe_base, load_overlay
from tests.oracle.tiny import tiny_dict, tiny_model

SHIPPED = Path(page4.model.__file__).parent / "checkpoint"
PAIRS = {2: ScalePair(0.5, 0.25), 3: ScalePair(0.125, 2.0)}


def write_checkpoint(folder: Path, prefix: str = "model.", **config: Any) -> Path:
    """A tiny checkpoint whose layers' names begin with ``prefix``; ``config`` is put into config.json."""
    folder.mkdir()
    tensors = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: tensor.contiguous()
        for name, tensor in tiny_model(seed=1).state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(tiny_dict() | config), encoding="utf-8")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def overlay(tmp_path: Path, checkpoint: Path) -> Path:
    target, draft = Sourced("calibration", PAIRS), Sourced("calibration", {None: ScalePair(1.5, 0.75)})
    materialise(tmp_path / "overlay", describe_base(checkpoint), "e4m3", target, draft, {})
    return tmp_path / "overlay"


def test_loading_gives_every_scale_in_the_files(checkpoint: Path, overlay: Path) -> None:
    scales = load_overlay(overlay, checkpoint)
    assert scales == KVScales(tuple(PAIRS.values()), ScalePair(1.5, 0.75))
    values = [float(v) for file in overlay.glob("*.safetensors") for v in load_file(file).values()]
    loaded = [value for pair in (*scales.target, scales.draft) if pair for value in (pair.k, pair.v)]
    assert sorted(values) == sorted(loaded) and len(values) == 6
    assert load_overlay(overlay, checkpoint, "e4m3", "fp16").draft is None


def test_a_cache_has_the_scales_of_its_layers(checkpoint: Path, overlay: Path) -> None:
    model = Qwen4ExpForCausalLM.from_pretrained(checkpoint)
    config = page4.kvcache.CacheConfig(kv_format="e4m3", scales=load_overlay(overlay, checkpoint))
    cache = model.new_cache(config)
    assert [(layer.k_scale, layer.v_scale) for layer in cache.qsa] == [(p.k, p.v) for p in PAIRS.values()]
    assert cache.draft is not None and cache.draft.mixer.k_scale == 1.5  # type: ignore[union-attr]


def test_the_base_is_described_without_being_changed(checkpoint: Path) -> None:
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in checkpoint.iterdir()}
    base = describe_base(checkpoint)
    assert base.layers == (2, 3) and base.has_draft and base.prefix == "model."
    assert set(base.files) == {"config.json", "model.safetensors"}
    assert {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in checkpoint.iterdir()
    } == before


def test_a_multimodal_checkpoint_keeps_its_prefix(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "model.language_model.")
    base = describe_base(checkpoint)
    assert base.prefix == "model.language_model."
    materialise(tmp_path / "overlay", base, "e4m3", Sourced("calibration", PAIRS), Sourced("none", {}), {})
    names = load_file(tmp_path / "overlay" / "model-kvscales.safetensors")
    assert "model.language_model.layers.2.self_attn.k_scale" in names
    assert load_overlay(tmp_path / "overlay", checkpoint, "e4m3", "fp16").target == tuple(PAIRS.values())


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_retrained_checkpoint_is_another(checkpoint: Path, overlay: Path, file: str) -> None:
    """The same names, shapes and sizes: one bit of one weight differs, or a setting."""
    data = bytearray((checkpoint / file).read_bytes())
    data[-2] ^= 1
    if file == "config.json":
        data = bytearray(
            json.dumps(json.loads((checkpoint / file).read_text()) | {"rms_norm_eps": 2e-6}).encode()
        )
    (checkpoint / file).write_bytes(data)
    with pytest.raises(InputError, match=f"another checkpoint or revision: {file} differs"):
        load_overlay(overlay, checkpoint)


def test_a_copy_of_the_checkpoint_is_the_same(checkpoint: Path, overlay: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert load_overlay(overlay, tmp_path / "copy") == load_overlay(overlay, checkpoint)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"calculate_kv_scales": True}, "calculate_kv_scales: true"),
        (
            {"quantization_config": {"kv_cache_scheme": {"dynamic": True}}},
            "quantization_config.kv_cache_scheme.dynamic",
        ),
        (
            {"quantization_config": {"kv_cache_scheme": {"dynamic": "token"}}},
            "kv_cache_scheme.dynamic: .token.",
        ),
    ],
)
def test_dynamic_scales_of_the_checkpoint_are_refused(
    tmp_path: Path, config: dict[str, Any], named: str, overlay: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "dynamic", **config)
    with pytest.raises(InputError, match=f"computes KV scales as it runs .*{named}"):
        load_overlay(overlay, checkpoint)
    static = write_checkpoint(
        tmp_path / "static", quantization_config={"kv_cache_scheme": {"dynamic": False}}
    )
    assert describe_base(static).dynamic_scales is None


def test_scales_in_the_checkpoint_itself_collide(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.3.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, checkpoint / "model.safetensors")
    base = describe_base(checkpoint)
    with pytest.raises(InputError, match="collides with the checkpoint, which has the k_scale of layer 3"):
        materialise(tmp_path / "o", base, "e4m3", Sourced("calibration", PAIRS), Sourced("none", {}), {})
    assert not (tmp_path / "o").exists()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, overlay: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        load_overlay(overlay, tmp_path)


def test_the_shipped_checkpoint_loads_with_its_overlay_in_two_seconds() -> None:
    started = time.process_time()
    load_overlay(SHIPPED.with_name("checkpoint-kvscales"), SHIPPED)
    Qwen4ExpForCausalLM.from_pretrained(SHIPPED)
    assert time.process_time() - started < 2.0
