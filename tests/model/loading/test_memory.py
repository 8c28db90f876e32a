"""How much memory loading takes: less than the model and the largest shard together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from tests.oracle.tiny import tiny_dict

from .test_quantised import AWQ_CONFIG, FP8_CONFIG

SIZES: dict[str, Any] = {"hidden_size": 256, "num_experts": 48, "moe_intermediate_size": 256}
SHARDS = 4
SHIPPED = Path(__file__).parents[3] / "model" / "checkpoint"


def per_expert(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Fused experts as one matrix per expert."""
    stem, kind = name.rsplit(".", 1)
    found: dict[str, Tensor] = {}
    for e, matrix in enumerate(weight):
        if kind == "down_proj":
            found[f"{stem}.{e}.down_proj.weight"] = matrix
        else:
            gate, up = matrix.chunk(2)
            found |= {f"{stem}.{e}.gate_proj.weight": gate, f"{stem}.{e}.up_proj.weight": up}
    return found


def quantised(form: str, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Some codes and scales of the form; what they mean does not matter here."""
    outputs, inputs = weight.shape
    stem = name.removesuffix(".weight")
    if form == "fp8":
        scale = torch.full((-(-outputs // 128), -(-inputs // 128)), 0.01)
        return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    assert form == "awq"
    words = torch.randint(0, 2**31 - 1, (inputs, outputs // 8), dtype=torch.int32)
    groups = inputs // 32
    return {
        f"{stem}.qweight": words,
        f"{stem}.qzeros": torch.zeros(groups, outputs // 8, dtype=torch.int32),
        f"{stem}.scales": torch.full((groups, outputs), 0.01, dtype=torch.float16),
    }


def write(folder: Path, form: str, **sizes: Any) -> int:
    """A checkpoint with experts in this form, in several shards; bytes of the largest."""
    folder.mkdir()
    values = tiny_dict(**sizes)
    settings = {"fp8": FP8_CONFIG, "awq": AWQ_CONFIG}.get(form)
    config = values if settings is None else values | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))

    stored: dict[str, Tensor] = {}
    for name, tensor in Qwen4ExpForCausalLM(Qwen4ExpConfig.from_dict(values)).state_dict().items():
        if ".experts." not in name or form == "fp32":
            stored[name] = tensor
        elif form == "fp16":
            stored |= {part: matrix.half() for part, matrix in per_expert(name, tensor).items()}
        else:
            for part, matrix in per_expert(name, tensor).items():
                stored |= quantised(form, part, matrix)
    room = dict.fromkeys((f"model-{i}.safetensors" for i in range(SHARDS)), 0)
    files: dict[str, str] = {}
    for name in sorted(stored, key=lambda name: -stored[name].nbytes):
        files[name] = min(room, key=lambda file: room[file])  # shards of about one size
        room[files[name]] += stored[name].nbytes
    for file in room:
        save_file({n: stored[n].contiguous() for n in stored if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("fp32", "float32"), ("fp16", "float16"), ("fp8", "float16"), ("awq", "float16")],
)
def test_the_peak_is_below_the_model_and_the_largest_shard(form: str, dtype: str, tmp_path: Path) -> None:
    largest = write(tmp_path / "large", form, **SIZES)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 3}
    write(tmp_path / "small", form, **sizes)
    command = [sys.executable, str(Path(__file__).parent / "peak_memory.py"), str(tmp_path / "small")]
    output = subprocess.run(
        [*command, str(tmp_path / "large"), dtype],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ).stdout
    peak, model = (int(word) for word in output.split())
    print(f"{form} to {dtype}: peak {peak / 1e6:.1f} MB, model {model / 1e6:.1f}, shard {largest / 1e6:.1f}")
    assert largest < model / 3  # otherwise the bound says little
    assert peak < model + largest


def test_the_shipped_checkpoint_loads_in_under_two_seconds() -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        Qwen4ExpForCausalLM.from_pretrained(SHIPPED)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2
