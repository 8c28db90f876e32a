"""The training state and the exported checkpoint are there whole or as they were before."""

from __future__ import annotations

import contextlib
import errno
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from page4.experiments.training.checkpoint import export, load_state, save_state
from page4.experiments.training.config import TrainConfig
from page4.experiments.training.loop import build_model
from page4.kernels.errors import InputError

CPU = torch.device("cpu")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """As a limit on the size of files makes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "run" / "state.pt"
    save_state({"model": {"w": torch.arange(5)}, "step": 3}, file)
    found = load_state(file, CPU)
    assert found["step"] == 3 and found["model"]["w"].tolist() == [0, 1, 2, 3, 4]
    assert names(file.parent) == {"state.pt"}


def test_on_a_full_disk_the_earlier_state_stays(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    save_state({"model": {}, "step": 1}, file)
    with full_disk(), pytest.raises(OSError) as raised:
        save_state({"model": {"w": torch.zeros(10_000)}, "step": 2}, file)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(file))
    assert load_state(file, CPU)["step"] == 1
    assert names(tmp_path) == {"state.pt"}


def test_what_cannot_be_saved_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    class Unsavable:
        def __reduce__(self) -> str:
            raise RuntimeError("no state of this")

    with pytest.raises(RuntimeError, match="no state of this"):
        save_state({"model": Unsavable()}, tmp_path / "state.pt")
    assert names(tmp_path) == set()


@pytest.mark.parametrize("content", [b"", b"half of a sta"])
def test_a_damaged_state_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(InputError, match="not a readable training state"):
        load_state(tmp_path / "state.pt", CPU)


def test_an_export_is_whole_and_nothing_else(tmp_path: Path) -> None:
    """In several shards, over an earlier one of more shards and what a killed process was writing."""
    config = TrainConfig(model_size="tiny").model
    model = build_model(config)
    (tmp_path / "tokens.json").write_text("{}")
    folder = tmp_path / "checkpoint"
    export(model, config, None, folder, shard_bytes=100_000)
    (folder / ".model-00001-of-00002.partial-0123abcd.safetensors").write_bytes(b"half")
    export(model, config, tmp_path / "tokens.json", folder, shard_bytes=400_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    assert names(folder) == {*shards, "config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert set(index["weight_map"]) == set(model.state_dict())
    assert json.loads((folder / "config.json").read_text()) == config


def test_an_export_onto_a_full_disk_names_the_file(tmp_path: Path) -> None:
    config = TrainConfig(model_size="tiny").model
    with full_disk(), pytest.raises(OSError) as raised:
        export(build_model(config), config, None, tmp_path)
    assert raised.value.filename == str(tmp_path / "model-00001-of-00001.safetensors")
    assert names(tmp_path) == set()
