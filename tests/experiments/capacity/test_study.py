"""The capacity study: the public geometry's figures by hand, files, and accounts of the origin's figure."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from page4.experiments.capacity import CapacityConfig, run
from page4.experiments.capacity.count import count
from page4.experiments.capacity.gains import gains
from page4.experiments.capacity.geometry import PUBLIC, load_geometry, named_geometries
from page4.experiments.capacity.origin import Account, accounts, explained
from page4.experiments.cli import run as command
from page4.kernels.errors import InputError
from page4.kvcache import CacheConfig, HybridCache, KVScales, ScalePair
from page4.kvcache.capacity import cache_bytes, rank_geometry
from tests.oracle.tiny import tiny_dict

FULL = 262_144


def rows(**changes: Any) -> list[dict[str, Any]]:
    values: dict[str, Any] = {"contexts": (FULL,), "concurrency": (1,), "tensor_parallel": (1, 4)} | changes
    return count(CapacityConfig(**values), load_geometry(PUBLIC))


def row(kv_format: str, degree: int, draft: str | None = None, **changes: Any) -> dict[str, Any]:
    wanted = (kv_format, draft or kv_format, degree)
    names = ("kv_format", "draft_kv_format", "tensor_parallel")
    (found,) = (r for r in rows(**changes) if tuple(r[name] for name in names) == wanted)
    return found


def test_the_public_geometry() -> None:
    """Twelve QSA layers and the draft, 36 delta layers; worked out from the published sizes."""
    geometry = load_geometry(PUBLIC)
    assert named_geometries() == (PUBLIC,)
    qsa = [i for i, kind in enumerate(geometry.layer_types) if kind == "qsa_attention"]
    assert qsa == list(range(3, 48, 4))
    keys = 13 * 128 * 2 / 4  # a key of 128 in FP16 for each 4 tokens, in each sparse layer
    assert row("fp16", 1)["bytes_per_token"] == 13 * 2 * 2 * 256 * 2 + keys == 27_456
    assert row("e4m3", 1)["bytes_per_token"] == 13 * 2 * 2 * 256 + keys == 14_144
    assert row("int8", 1)["bytes_per_token"] == 13 * 2 * 2 * (256 + 4) + keys
    assert row("e4m3", 1, "fp16")["bytes_per_token"] == 12 * 2 * 2 * 256 + 2 * 2 * 256 * 2 + keys
    by_layer = ("e4m3,3:fp16", "fp16")
    mixed = row(by_layer[0], 1, by_layer[1], formats=(("fp16", "fp16"), by_layer))
    assert mixed["bytes_per_token"] == 11 * 2 * 2 * 256 + 2 * 2 * 2 * 256 * 2 + keys
    delta = 36 * 4 * 48 * 128 * 128 * 4  # 3 MiB a layer and row, K + 1 rows
    conv = 36 * (3 + 4) * 10_240 * 2
    ple = (9 + 4) * 10_240 * 4
    ring = 13 * 8 * 128 * 2
    assert row("e4m3", 1)["state_bytes"] == delta + conv + ple + ring
    quarter = 36 * 4 * 12 * 128 * 128 * 4 + 36 * (3 + 4) * 2560 * 2 + ple + ring
    assert row("e4m3", 4)["state_bytes"] == quarter  # one KV head a rank: 2 of 4 ranks keep the same
    assert row("fp16", 4)["bytes_per_token"] == 13 * 2 * 256 * 2 + keys


def test_e4m3_holds_at_least_1_85_times_the_tokens_at_full_length() -> None:
    """The origin's x1.788 is a quotient of tokens that fit; so is this. A full request is another matter."""
    for degree, tokens, request in ((1, 1.941, 1.838), (4, 1.889, 1.840)):
        found = gains(row("e4m3", degree, gpu_gib=80.0), rows(gpu_gib=80.0))
        assert found["tokens_that_fit"] == pytest.approx(tokens, abs=1e-3)
        assert found["per_token"] == pytest.approx(tokens, abs=1e-3)
        assert found["per_request"] == pytest.approx(request, abs=1e-3)
        assert found["tokens_that_fit"] is not None and found["tokens_that_fit"] >= 1.85


def test_the_public_geometry_as_the_cache_would_allocate_it() -> None:
    """Tensors without memory have the sizes that were counted, on one rank and on four."""
    for degree in (1, 4):
        geometry = rank_geometry(load_geometry(PUBLIC), degree)
        pair = ScalePair(0.1, 0.1)
        config = CacheConfig(
            "e4m3", scales=KVScales(target=(pair,) * 12, draft=pair), max_requests=2, max_tokens=2 * FULL
        )
        cache = HybridCache(geometry, config, torch.float16, torch.device("meta"))
        tensors = [cache.tables.tensor, *(slots.state for slots in cache.recurrent)]
        assert cache.draft is not None
        for layer in (*cache.qsa, cache.draft.mixer):
            tensors += [layer.k_pages, layer.v_pages, layer.compressed_pages, layer.ring]
        assert sum(tensor.nbytes for tensor in tensors) == cache_bytes(geometry, config, torch.float16).total


def test_accounts_of_the_origins_figure() -> None:
    found = {account.name.split(":")[0]: account for account in accounts()}
    assert found["K and V alone"].quotient == 2
    assert found["pages"].quotient == pytest.approx(1.889, abs=1e-3)
    assert found["what gives the reported quotient"].quotient == pytest.approx(775_096 / 433_401, rel=1e-12)
    result = explained()
    assert 1.5 < result["needed_over_exact_state"] < 3
    exact = next(a for a in accounts() if a.name.startswith("and the state of a full request"))
    assert exact.quotient * (1 - result["smaller_pool"]) == pytest.approx(775_096 / 433_401, rel=1e-12)
    # Both reported figures come out of one pool.
    needed = accounts()[-1]
    e4m3 = result["pool_bytes"] / (needed.e4m3 + needed.request / FULL)
    assert e4m3 == pytest.approx(775_096, rel=1e-9)


def test_a_request_beside_the_pages_brings_the_quotient_to_one() -> None:
    quotients = [Account("", 200.0, 100.0, request).quotient for request in (0.0, 1e6, 1e9, 1e15)]
    assert quotients[0] == 2 and quotients == sorted(quotients, reverse=True)
    assert quotients[-1] == pytest.approx(1, abs=1e-6)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    summary = run(CapacityConfig(gpu_gib=0.5, reserved_gib=0.25), tmp_path / "out")
    alone = [entry for entry in summary["capacities"] if entry["tensor_parallel"] == 1]
    assert {entry["max_tokens"] for entry in alone} == {0}
    assert {entry["gains"]["tokens_that_fit"] for entry in alone} == {None}
    assert "| - |" in (tmp_path / "out" / "table.md").read_text()


def test_the_command_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert command(["capacity", "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == json.loads((out / "summary.json").read_text())
    files = {file.name for file in out.iterdir()}
    assert files >= {"capacity.csv", "capacity.png", "table.md", "config.yaml", "provenance.json"}
    table = (out / "table.md").read_text()
    assert "| 4 | e4m3 | 7,488 |" in table and "the serving stack's x1.788" in table
    with (out / "capacity.csv").open() as file:
        written = list(csv.DictReader(file))
    config = CapacityConfig()
    assert len(written) == 3 * len(config.formats) * len(config.contexts) * 3
    for line in written:
        kinds = [int(line[name]) for name in line if name.endswith("_bytes")][3:]
        assert sum(kinds) == int(line["cache_bytes"])


def test_a_models_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_dict()))
    summary = run(
        CapacityConfig(geometry=str(tmp_path), tensor_parallel=(1, 2), contexts=(64,)), tmp_path / "out"
    )
    assert summary["origin"] is None
    assert summary["capacities"][0]["bytes_per_token"] == 3 * 2 * 2 * 32 * 2 + 3 * 16 * 2 / 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"geometry": "nowhere"}, "geometry 'nowhere' is neither a folder"),
        ({"tensor_parallel": (8, 3)}, "tensor_parallel must be positive and ascending"),
        ({"contexts": ()}, "contexts must list at least one value"),
        ({"concurrency": (1, 1)}, "concurrency must list at least one value, and none twice"),
        ({"formats": (("fp16", "fp7"),)}, "KV format 'fp7' is unknown"),
        ({"reserved_gib": 40.0}, "reserved_gib must be at least 0 and below gpu_gib"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be 0 to 64"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run(CapacityConfig(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()
