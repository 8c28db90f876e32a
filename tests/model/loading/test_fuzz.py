"""Damaged checkpoints: each of 10,000 mutations ends in one clear line, or in what the files truly say.

A checkpoint has no checksum: bytes that stay finite numbers are other weights, and nobody can tell. Whatever
loads has to be what an independent reading finds in the files; all else is refused before the model changes.
"""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from page4.kernels.errors import InputError
from page4.model import Qwen4ExpForCausalLM
from page4.model.loader import load_weights
from page4.model.loading.quantisation import Quantisation
from page4.model.weights import Weight
from tests.oracle.tiny import tiny_dict, tiny_model

from .encoders import awq, block_fp8, compressed_with_zero_points
from .mutations import mutate_json, mutate_shard

MUTATIONS = 10_000
INDEX = "model.safetensors.index.json"
BLOCK = 4
GROUPS = frozenset({32})
DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32, "I64": np.int64}
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


class Small(nn.Module):
    """A weight of each form, and fused experts that come in pieces."""

    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.half, self.fp8, self.int4 = Weight(3, 5), Weight(7), Weight(9, 6), Weight(16, 64)
        self.experts = nn.Module()
        self.experts.down_proj = nn.Parameter(torch.zeros(2, 3, 4))
        self.register_buffer("sizes", torch.zeros(3, dtype=torch.int64))


def build() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({"mlp": Small()})


def checkpoint(method: str) -> dict[str, Tensor]:
    """Stored tensors of all forms."""
    g = torch.Generator().manual_seed(0)
    stored = {
        "mlp.plain.weight": torch.randn(3, 5, generator=g),
        "mlp.half.weight": torch.randn(7, generator=g).bfloat16(),
        "mlp.sizes": torch.arange(3),
        "mlp.experts.0.down_proj.weight": torch.randn(3, 4, generator=g).half(),
        "mlp.experts.1.down_proj.weight": torch.randn(3, 4, generator=g).half(),
    }
    stored |= block_fp8("mlp.fp8.weight", torch.randn(9, 6, generator=g), BLOCK)[0]
    int4 = awq if method == "awq" else compressed_with_zero_points
    return stored | int4("mlp.int4.weight", torch.randn(16, 64, generator=g))[0]


def read(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file by the format's description."""
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    found = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        data = content[start:stop]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F8_E4M3":
            values = E4M3[np.frombuffer(data, np.uint8)]
        else:
            values = np.frombuffer(data, DTYPES[entry["dtype"]])
        found[name] = values.reshape(entry["shape"])
    return found


def meant(stored: dict[str, np.ndarray], method: str) -> dict[str, np.ndarray]:
    """The weights that the stored tensors stand for, a value at a time."""
    weights = {
        "mlp.plain.weight": stored["mlp.plain.weight"].astype(np.float32),
        "mlp.half.weight": stored["mlp.half.weight"].astype(np.float32),
        "mlp.sizes": stored["mlp.sizes"],
        "mlp.experts.down_proj": np.stack(
            [stored[f"mlp.experts.{e}.down_proj.weight"].astype(np.float32) for e in range(2)]
        ),
    }
    codes, scale = stored["mlp.fp8.weight"], stored["mlp.fp8.weight_scale_inv"].astype(np.float32)
    weights["mlp.fp8.weight"] = np.array(
        [[codes[r, c] * scale[r // BLOCK, c // BLOCK] for c in range(6)] for r in range(9)]
    )
    int4 = np.empty((16, 64), dtype=np.float32)
    if method == "awq":
        words, scales, zeros = (stored[f"mlp.int4.{part}"] for part in ("qweight", "scales", "qzeros"))
        nibble = [0, 4, 1, 5, 2, 6, 3, 7]
    else:
        words, scales, zeros = (
            stored[f"mlp.int4.weight_{part}"] for part in ("packed", "scale", "zero_point")
        )
    words, zeros = words.astype(np.int64), zeros.astype(np.int64)
    for n, i in np.ndindex(int4.shape):
        if method == "awq":
            shift = 4 * nibble[n % 8]
            q, z = words[i, n // 8] >> shift & 15, zeros[i // 32, n // 8] >> shift & 15
            int4[n, i] = np.float32(q - z) * np.float32(scales[i // 32, n])
        else:
            q, z = words[n, i // 8] >> 4 * (i % 8) & 15, zeros[n // 8, i // 32] >> 4 * (n % 8) & 15
            int4[n, i] = np.float32(q - z) * np.float32(scales[n, i // 32])
    weights["mlp.int4.weight"] = int4
    return weights


def write(folder: Path, stored: dict[str, Tensor], sharded: bool) -> dict[Path, bytes]:
    """The files of a checkpoint and their content."""
    folder.mkdir()
    if not sharded:
        contents = {folder / "model.safetensors": save(stored)}
    else:
        names = sorted(stored)
        files = {f"model-{i}.safetensors": names[i::2] for i in range(2)}
        contents = {folder / file: save({n: stored[n] for n in own}) for file, own in files.items()}
        weight_map = {name: file for file, own in files.items() for name in own}
        contents[folder / INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    for file, content in contents.items():
        file.write_bytes(content)
    return contents


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "two shards"])
@pytest.mark.parametrize("method", ["awq", "compressed-tensors"])
def test_mutations_are_refused_or_read_as_they_are(method: str, sharded: bool, tmp_path: Path) -> None:
    rng = random.Random(f"{method} {sharded}")
    quantised = Quantisation(method, GROUPS, block=(BLOCK, BLOCK))  # type: ignore[arg-type]
    folder = tmp_path / "model"
    contents = write(folder, checkpoint(method), sharded)
    model, loads, slowest = build(), 0, 0.0
    with np.errstate(all="ignore"):
        for _ in range(MUTATIONS // 4):
            file = rng.choice(list(contents))
            mutate = mutate_json if file.name == INDEX else mutate_shard
            file.write_bytes(mutate(contents[file], rng))
            start = time.perf_counter()
            try:
                load_weights(model, folder, torch.float32, torch.device("cpu"), 1, quantised)
            except InputError as error:
                message = str(error)
                assert message.startswith(str(folder)) and message.isprintable()
                assert len(message) < 3000
                assert all(tensor.is_meta for tensor in model.state_dict().values())
            else:
                loads += 1
                shards = [file for file in contents if file.name != INDEX]
                found = meant({name: a for shard in shards for name, a in read(shard).items()}, method)
                own = model.state_dict()
                assert own.keys() == found.keys()
                for name, tensor in own.items():
                    assert np.array_equal(tensor.numpy(), found[name]), name
                model = build()
            slowest = max(slowest, time.perf_counter() - start)
            file.write_bytes(contents[file])
    assert slowest < 5  # no hang
    assert 0 < loads < MUTATIONS // 4 / 2  # both ends happen


def test_mutations_of_a_whole_model(tmp_path: Path) -> None:
    """The same through `from_pretrained`, the config included: InputError is the only exception."""
    rng = random.Random(0)
    weights = {name: tensor.clone() for name, tensor in tiny_model(seed=4).state_dict().items()}
    folder = tmp_path / "model"
    contents = write(folder, weights, sharded=True)
    contents[folder / "config.json"] = json.dumps(tiny_dict()).encode()
    for file, content in contents.items():
        file.write_bytes(content)
    refused = 0
    for _ in range(100):
        file = rng.choice(list(contents))
        mutate = mutate_shard if file.suffix == ".safetensors" else mutate_json
        file.write_bytes(mutate(contents[file], rng))
        try:
            Qwen4ExpForCausalLM.from_pretrained(folder)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
        file.write_bytes(contents[file])
    assert refused > 50
