"""Tuned configurations: what a file may hold, which entry a call gets, and what is remembered of it."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from page4.kernels.errors import InputError
from page4.kernels.page4_attention_gluon import GluonConfig
from page4.kernels.page4_attention_triton import AttentionConfig
from page4.kernels.tunable import TUNABLE, AttentionKey, field_types, get_tunable
from page4.kernels.tuning import (
    SHIPPED_FOLDER,
    Configurations,
    active,
    configuration_digests,
    device_name,
    nearest,
    triton_version,
    use_configurations,
)
from page4.kernels.tuning_file import (
    Entry,
    TuningFile,
    gpu_family,
    gpu_slug,
    read_tuning_file,
    tuning_path,
)

GLUON, PLAIN = TUNABLE["page4_attention_gluon"], TUNABLE["page4_attention_triton"]
KEY = AttentionKey(
    groups=64, rows_per_group=4, heads_per_kv=6, kv_heads=1, head_dim=256, capacity=4096, kv_format="e4m3"
)
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def entry(key: AttentionKey = KEY, splits: int = 4) -> Entry:
    return Entry(
        key, GluonConfig(splits, 64, 4), 30.5, 33.25, "2026-11-29", {"context": 32768, "overlap": 0.9}
    )


def predicted(key: AttentionKey = KEY, splits: int = 4) -> Entry:
    return dataclasses.replace(entry(key, splits), predicted=True)


def gluon_file(*entries: Entry) -> TuningFile:
    return TuningFile(GLUON, "NVIDIA H200", "3.6", {item.key: item for item in entries})


def write(folder: Path, file: TuningFile) -> Path:
    path = folder / tuning_path(file.kernel.name, file.gpu, file.triton)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.text(), encoding="utf-8")
    return path


def folder_for_this_machine(folder: Path, *entries: Entry) -> Path:
    return write(
        folder, TuningFile(GLUON, device_name(HERE), triton_version(), {item.key: item for item in entries})
    )


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "nvidia-h200"), ("Tesla V100-SXM2-32GB", "tesla-v100-sxm2-32gb"), ("cpu", "cpu")],
)
def test_a_gpu_has_a_folder_of_plain_characters(name: str, slug: str) -> None:
    assert gpu_slug(name) == slug


@pytest.mark.parametrize(
    "name",
    ["Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB", "Tesla V100S-PCIE-32GB", "V100"],
)
def test_all_v100s_have_one_folder(name: str) -> None:
    assert gpu_family(name) == "V100"


@pytest.mark.parametrize(
    "name", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Quadro GV100", "Tesla P100", "cpu"]
)
def test_other_gpus_keep_their_name(name: str) -> None:
    assert gpu_family(name) == name


@pytest.mark.parametrize(
    "entries",
    [
        (),
        (entry(),),
        (entry(), entry(dataclasses.replace(KEY, groups=1), 16)),
        (predicted(), entry(dataclasses.replace(KEY, groups=1), 16)),
    ],
)
def test_a_file_reads_back_as_it_was_written(entries: tuple[Entry, ...], tmp_path: Path) -> None:
    written = gluon_file(*entries)
    read = read_tuning_file(write(tmp_path, written), GLUON)
    assert dataclasses.replace(read, sha256="") == written
    assert len(read.sha256) == 64


def test_the_text_does_not_depend_on_the_order_of_measurement() -> None:
    other = entry(dataclasses.replace(KEY, groups=1))
    assert gluon_file(entry(), other).text() == gluon_file(other, entry()).text()


def test_merging_replaces_equal_keys_and_keeps_the_others() -> None:
    other = entry(dataclasses.replace(KEY, groups=1))
    merged = gluon_file(entry(splits=4), other).merged({KEY: entry(splits=8)})
    assert merged.entries == {KEY: entry(splits=8), other.key: other}


def test_what_was_predicted_replaces_nothing_that_was_measured() -> None:
    old, new = entry(splits=4), entry(splits=8)
    assert gluon_file(old).merged({KEY: predicted(splits=8)}).entries == {KEY: old}
    assert gluon_file(predicted(splits=4)).merged({KEY: new}).entries == {KEY: new}
    later = predicted(splits=2)
    assert gluon_file(predicted(splits=4)).merged({KEY: later}).entries == {KEY: later}


def test_an_entry_says_whether_it_was_measured() -> None:
    by_key = json.loads(gluon_file(predicted()).text())["entries"]
    assert [(item.get("measured"), item.get("predicted")) for item in by_key] == [(None, "2026-11-29")]


def change(*path: Any, value: Any = None, drop: bool = False) -> Any:
    """A function that changes one place of a file's JSON."""

    def apply(content: Any) -> Any:
        content = copy.deepcopy(content)
        target = content
        for name in path[:-1]:
            target = target[name]
        if drop:
            del target[path[-1]]
        else:
            target[path[-1]] = value
        return content

    return apply


CONFIG, KEY_FIELDS = ("entries", 0, "config"), ("entries", 0, "key")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("colour", value=1), "the file has an unknown field 'colour'"),
        (change("gpu", drop=True), "the file has no field 'gpu'"),
        (change("format", value=2), "format 2 is not 1"),
        (change("format", value="1"), "format must be of type int, got '1'"),
        (
            change("kernel", value="page4_attention_triton"),
            "it holds configurations of 'page4_attention_triton'",
        ),
        (change("gpu", value="NVIDIA H100"), "its GPU 'NVIDIA H100' and Triton '3.6' belong to nvidia-h100"),
        (change("triton", value="3.7"), "belong to nvidia-h200/triton-3.7"),
        (change("entries", value={}), "entries must be of type list"),
        (change("entries", 0, value=7), "entries[0]: the entry must be a mapping, got 7"),
        (change("entries", 0, "speed", value=1), "entries[0]: the entry has an unknown field 'speed'"),
        (change("entries", 0, "median_us", value=-1.0), "median_us must be a positive number, got -1.0"),
        (change("entries", 0, "median_us", value="5"), "median_us must be of type float, got '5'"),
        (change("entries", 0, "measured", value="yesterday"), "measured must be a day"),
        (change("entries", 0, "measured", drop=True), "one of the fields measured and predicted"),
        (change("entries", 0, "predicted", value="2026-11-30"), "one of the fields measured and predicted"),
        (change("entries", 0, "conditions", value={"x": []}), "the condition 'x' must be a number or text"),
        (change(*CONFIG, "num_ctas", value=2), "the configuration has an unknown field 'num_ctas'"),
        (change(*CONFIG, "splits", drop=True), "the configuration has no field 'splits'"),
        (change(*CONFIG, "splits", value=True), "splits must be of type int, got True"),
        (change(*CONFIG, "splits", value=4.0), "splits must be of type int, got 4.0"),
        (change(*CONFIG, "splits", value=0), "splits must lie in 1..64, got 0"),
        (change(*CONFIG, "tile_tokens", value=48), "tile_tokens must be a power of two"),
        (change(*CONFIG, "num_warps", value=16), "num_warps must be a power of two and at most D / 32 = 8"),
        (change(*CONFIG, "num_warps", value=3), "num_warps must be a power of two"),
        (change(*KEY_FIELDS, "kv_format", value="fp4"), "fp4"),
        (change(*KEY_FIELDS, "kv_format", value="int8"), "reads fp16"),
        (change(*KEY_FIELDS, "capacity", value=2052), "capacity must be a power of two, got 2052"),
        (change(*KEY_FIELDS, "rows_per_group", value=9), "rows_per_group must lie in 1..8, got 9"),
        (change(*KEY_FIELDS, "head_dim", value=96), "head_dim must be one of"),
        (change(*KEY_FIELDS, "groups", value=0), "groups must be at least 1, got 0"),
        (change(*KEY_FIELDS, "heads_per_kv", value=17), "heads_per_kv must lie in 1..16, got 17"),
        (lambda content: [content], "the file must be a mapping"),
        (lambda content: content | {"entries": content["entries"] * 2}, "entries[1]: the key occurs twice"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(
    damage: Any, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, gluon_file(entry()))
    path.write_text(json.dumps(damage(json.loads(path.read_text()))), encoding="utf-8")
    with pytest.raises(InputError) as refusal:
        read_tuning_file(path, GLUON)
    text = str(refusal.value)
    assert text.startswith(f"{path}: ") and message in text and "\n" not in text


def test_text_that_is_no_json_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, gluon_file(entry()))
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"page4_attention_gluon\.json is not JSON"):
        read_tuning_file(path, GLUON)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*page4_attention_gluon\.json: No such file"):
        read_tuning_file(path, GLUON)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_warps": 6}, "num_warps"), ({"num_warps": 64}, "num_warps"), ({"num_stages": 0}, "num_stages")],
)
def test_plain_triton_has_impossible_configurations_too(changes: dict[str, int], message: str) -> None:
    config = dataclasses.replace(AttentionConfig(1, 16, 4, 1), **changes)
    with pytest.raises(InputError, match=message):
        PLAIN.check(KEY, config)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(InputError, match="'softmax' cannot be tuned; choose one of page4_attention_gluon, "):
        get_tunable("softmax")


def test_the_exact_key_wins_then_the_nearest_then_nothing(tmp_path: Path) -> None:
    def at(groups: int, capacity: int = 4096, **changes: Any) -> AttentionKey:
        return dataclasses.replace(KEY, groups=groups, capacity=capacity, **changes)

    folder_for_this_machine(
        tmp_path,
        entry(at(16), 1),
        entry(at(64), 2),
        entry(at(16, 8192), 3),
        entry(at(64, rows_per_group=1), 5),
    )
    configurations = Configurations(tmp_path)

    def found(key: AttentionKey) -> tuple[int, str] | None:
        match = configurations.lookup(GLUON.name, key, HERE)
        return match and (match.config.splits, match.origin)

    assert found(at(64)) == (2, "exact")
    assert found(at(33)) == (2, "bucket")  # 64 / 33 is less than 33 / 16, which is out of reach
    assert found(at(32)) == (1, "bucket")  # equally near: the smaller key
    assert found(at(20)) == (1, "bucket")
    assert found(at(16, 8192)) == (3, "exact")
    assert found(at(16, 2048)) == (1, "bucket")
    assert found(at(64, 8192)) is None  # 64 was only tried with shorter lists, 16 is too far
    assert found(at(129)) is None
    assert found(at(7)) is None
    assert found(at(64, kv_format="fp16")) is None
    assert found(at(64, head_dim=128)) is None


def test_a_byte_float_without_entries_takes_those_of_e4m3(tmp_path: Path) -> None:
    """Its own come first, however far within reach; other formats move other bytes."""

    def at(groups: int, kv_format: str) -> AttentionKey:
        return dataclasses.replace(KEY, groups=groups, kv_format=kv_format)

    folder_for_this_machine(tmp_path, entry(at(16, "e4m3"), 1), entry(at(32, "e3m4"), 2))
    configurations = Configurations(tmp_path)

    def found(key: AttentionKey) -> tuple[int, str] | None:
        match = configurations.lookup(GLUON.name, key, HERE)
        return match and (match.config.splits, match.origin)

    assert found(at(16, "e2m5")) == found(at(16, "e5m2")) == (1, "bucket")
    assert found(at(16, "e3m4")) == (2, "bucket")
    assert found(at(8, "e3m4")) == (1, "bucket")
    assert found(at(64, "e2m5")) is None
    assert found(at(16, "fp16")) is None and found(at(16, "int8")) is None


def test_a_match_says_that_it_was_only_predicted(tmp_path: Path) -> None:
    folder_for_this_machine(tmp_path, predicted())
    with use_configurations(tmp_path) as configurations:
        near = dataclasses.replace(KEY, groups=48)
        for key in (KEY, near):
            configurations.resolve(GLUON.name, key, HERE, GluonConfig(1, 32, 4))
        origins = [use["origin"] for use in configurations.record()["used"]]
    assert origins == ["predicted exact", "predicted bucket"]


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 14)), unique=True, max_size=8),
    st.tuples(st.integers(1, 200), st.integers(0, 14)),
    st.randoms(),
)
def test_the_nearest_entry_is_within_reach_and_does_not_depend_on_the_order(
    recorded: list[tuple[int, int]], wanted: tuple[int, int], random: Any
) -> None:
    def key(pair: tuple[int, int]) -> AttentionKey:
        return dataclasses.replace(KEY, groups=pair[0], capacity=2 ** pair[1])

    in_reach = [
        pair
        for pair in recorded
        if wanted[0] <= 2 * pair[0] and pair[0] <= 2 * wanted[0] and pair[1] - wanted[1] in (0, 1)
    ]
    found = nearest(gluon_file(*(entry(key(pair)) for pair in recorded)), key(wanted))
    assert (found is not None) == bool(in_reach)
    if found is not None:
        assert found.key in {key(pair) for pair in in_reach}
    random.shuffle(recorded)
    assert nearest(gluon_file(*(entry(key(pair)) for pair in recorded)), key(wanted)) == found


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = folder_for_this_machine(tmp_path, entry())
    configurations = Configurations(tmp_path)
    assert configurations.lookup(GLUON.name, KEY, HERE)
    path.unlink()
    assert configurations.lookup(GLUON.name, KEY, HERE)


def test_defaults_reads_nothing() -> None:
    with use_configurations("defaults") as configurations:
        assert active() is configurations
        assert configurations.lookup(GLUON.name, KEY, HERE) is None
        assert configurations.record() == {"source": "defaults", "files": {}, "used": []}
    assert active().source == "shipped"


def test_the_sources_end_with_their_block_even_after_an_error(tmp_path: Path) -> None:
    before = active()
    with pytest.raises(RuntimeError), use_configurations("defaults"):
        raise RuntimeError
    assert active() is before


def test_a_folder_that_cannot_serve_this_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"folder of kernel configurations .*nowhere does not exist"):
        Configurations(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no configurations for .*triton-"):
        Configurations(tmp_path).lookup(GLUON.name, KEY, HERE)
    # A folder may say something of one kernel only.
    folder_for_this_machine(tmp_path, entry())
    assert Configurations(tmp_path).lookup(PLAIN.name, KEY, HERE) is None


def test_the_record_names_files_by_digest_and_no_path_of_the_machine(tmp_path: Path) -> None:
    path = folder_for_this_machine(tmp_path / "mine", entry())
    with use_configurations(tmp_path / "mine") as configurations:
        match = configurations.lookup(GLUON.name, KEY, HERE)
        assert match is not None
        configurations.note(GLUON.name, KEY, match.config, match.origin)
    record = configurations.record()
    relative = path.relative_to(tmp_path / "mine").as_posix()
    assert record["source"] == "mine"
    assert record["files"] == configuration_digests(tmp_path / "mine", HERE)
    assert list(record["files"]) == [relative]
    assert [use["origin"] for use in record["used"]] == ["exact"]
    assert str(tmp_path) not in json.dumps(record)


def test_the_record_tells_a_folder_from_the_keyword_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shipped").mkdir()
    assert Configurations(Path("shipped")).record()["source"] == "./shipped"
    assert Configurations("shipped").record()["source"] == "shipped"


def test_digests_change_with_the_files(tmp_path: Path) -> None:
    assert configuration_digests("defaults", HERE) == {}
    folder_for_this_machine(tmp_path, entry(splits=4))
    before = configuration_digests(tmp_path, HERE)
    folder_for_this_machine(tmp_path, entry(splits=8))
    after = configuration_digests(tmp_path, HERE)
    assert before.keys() == after.keys() and before != after
    write(tmp_path, gluon_file(entry()))  # of another GPU
    assert configuration_digests(tmp_path, HERE) == after or device_name(HERE) == "NVIDIA H200"


@pytest.mark.parametrize("kernel", TUNABLE.values(), ids=TUNABLE)
def test_keys_and_configurations_consist_of_values_that_json_has(kernel: Any) -> None:
    types = [*field_types(kernel.key).values(), *field_types(kernel.config).values()]
    assert set(types) <= {int, str, bool}
    assert kernel.key.REACH.keys() <= field_types(kernel.key).keys()


def test_every_shipped_file_can_be_used() -> None:
    for file in SHIPPED_FOLDER.rglob("*.json"):
        read = read_tuning_file(file, get_tunable(file.stem))
        assert read.entries
        assert file.relative_to(SHIPPED_FOLDER) == tuning_path(file.stem, read.gpu, read.triton)
