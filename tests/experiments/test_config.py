"""Configurations: defaults < QUICK < file < --set < flags, every value checked against its field's type."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml

from page4.experiments.config import config_hash, config_to_dict, load_config
from page4.kernels.errors import InputError


@dataclass(frozen=True)
class Optimiser:
    rate: float = 0.1
    steps: int = 3


@dataclass(frozen=True)
class Study:
    QUICK: ClassVar[dict[str, Any]] = {"lengths": (64,), "repeats": 1}

    lengths: tuple[int, ...] = (1024, 2048)
    kv_format: Literal["fp16", "e4m3"] = "fp16"
    repeats: int = 4
    exact: bool = False
    scale: float | None = None
    note: str | None = None
    model: Path | None = None
    scales: Literal["shipped"] | Path | None = None
    weights: dict[str, float] = field(default_factory=dict)
    pair: tuple[str, int] = ("a", 1)
    optimiser: Optimiser = field(default_factory=lambda: Optimiser(rate=0.5))

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")


@dataclass(frozen=True)
class Needy:
    folder: Path


def write(folder: Path, text: str) -> Path:
    file = folder / "study.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_each_source_wins_over_those_before_it(tmp_path: Path) -> None:
    file = write(tmp_path, "repeats: 2\nlengths: [8]\nexact: true")
    assert load_config(Study) == Study()
    assert load_config(Study, quick=True).repeats == 1
    assert load_config(Study, file, quick=True).repeats == 2
    assert load_config(Study, file, ["repeats=3"], quick=True).repeats == 3
    last = load_config(Study, file, ["repeats=3"], quick=True, repeats=5, note=None)
    assert (last.repeats, last.lengths, last.exact) == (5, (8,), True)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("lengths=[16, 32]", "lengths", (16, 32)),
        ("lengths=16,32", "lengths", (16, 32)),
        ("lengths=16", "lengths", (16,)),
        ("scale=1e-3", "scale", 1e-3),
        ("scale=2", "scale", 2.0),
        ("scale=null", "scale", None),
        ("note=2024", "note", "2024"),
        ("note=a=b", "note", "a=b"),
        ("model=some/folder", "model", Path("some/folder")),
        ("exact=true", "exact", True),
        ("weights={prose: 2}", "weights", {"prose": 2.0}),
        ("pair=b,2", "pair", ("b", 2)),
        ("kv_format=e4m3", "kv_format", "e4m3"),
    ],
)
def test_an_override_is_read_as_the_type_of_its_field(override: str, name: str, value: object) -> None:
    result = getattr(load_config(Study, None, [override]), name)
    assert result == value
    assert type(result) is type(value)


def test_a_dotted_override_keeps_the_other_values_of_its_part() -> None:
    assert load_config(Study, None, ["optimiser.steps=7"]).optimiser == Optimiser(rate=0.5, steps=7)


def test_overrides_of_one_part_add_up_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "optimiser: {rate: 0.25}")
    assert load_config(Study, file, ["optimiser.steps=7"]).optimiser == Optimiser(rate=0.25, steps=7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lenghts=1", r"unknown key 'lenghts' \(did you mean 'lengths'\?\); the keys are lengths, kv_format"),
        ("optimiser.lr=1", r"unknown key 'optimiser.lr'; the keys are rate, steps"),
        ("lengths=a,2", r"lengths\[0\] must be an integer, got 'a'"),
        ("repeats=1.5", "repeats must be an integer, got 1.5"),
        ("repeats=9223372036854775808", "repeats is 9223372036854775808, which does not fit 64 bits"),
        ("repeats=true", "repeats must be an integer, got True"),
        ("repeats=0", "repeats must be at least 1, got 0"),
        ("exact=1", "exact must be true or false, got 1"),
        ("kv_format=e9m9", "kv_format must be one of fp16, e4m3, got 'e9m9'"),
        ("scale=.nan", "scale must be finite"),
        ("scale=.inf", "scale must be finite"),
        ("scale=high", "scale must be a number, got 'high'"),
        ("pair=b", r"pair needs 2 values, got 1"),
        ("weights=3", "weights must be a mapping, got 3"),
        ("weights={prose: x}", "weights.prose must be a number, got 'x'"),
        ("optimiser=3", "optimiser must be a mapping, got 3"),
        ("repeats.x=3", "repeats has no parts"),
        ("lengths=[1,", "not valid YAML"),
        ("lengths", "--set needs key=value, got 'lengths'"),
        ("=3", "--set needs key=value"),
        ("repeats=2001-99-99", "not valid YAML"),
        ("repeats=!!int x", "not valid YAML"),
        ("exact=!!bool maybe", "not valid YAML"),
        ("lengths=" + 2000 * "[", "not valid YAML"),
        ("repeats=" + 5000 * "1", "not valid YAML"),
        ('model="a\\0b"', "model must be a path"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_config(Study, None, [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lengths: [1", "is not valid YAML"),
        ("- 1\n- 2", "must hold a mapping of keys to values, not a list"),
        ("length: 3", "study.yaml: unknown key 'length'"),
        ("repeats: two", "study.yaml: repeats must be an integer, got 'two'"),
        ("optimiser: {steps: x}", "study.yaml: optimiser.steps must be an integer"),
        ("repeats: 1\nrepeats: 2", "not valid YAML: the key 'repeats' occurs twice"),
        ("optimiser: {steps: 1, steps: 2}", "not valid YAML: the key 'steps' occurs twice"),
        ("repeats: 2001-99-99", "not valid YAML: a value cannot be read: month must be in 1..12"),
        (2000 * "[", "not valid YAML: nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_config(Study, write(tmp_path, text))


def test_a_missing_file_and_a_missing_value_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the configuration .*nothing.yaml"):
        load_config(Study, tmp_path / "nothing.yaml")
    with pytest.raises(InputError, match="needs a value for 'folder'"):
        load_config(Needy)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_config(Study, write(tmp_path, "# nothing\n")) == Study()


def test_a_flag_of_the_wrong_type_is_named_as_the_user_wrote_it() -> None:
    with pytest.raises(InputError, match=r"^--kv-format must be one of"):
        load_config(Study, kv_format="fp8")


def test_what_is_written_can_be_read_again(tmp_path: Path) -> None:
    study = Study(lengths=(3,), model=Path("m"), weights={"a": 0.5}, optimiser=Optimiser(steps=9))
    assert load_config(Study, write(tmp_path, yaml.safe_dump(config_to_dict(study)))) == study


def test_a_keyword_is_the_bare_word_and_a_folder_of_that_name_has_a_dot_before_it(tmp_path: Path) -> None:
    """Both as it is given, and as `config.yaml` stores it."""
    for text, value in (("shipped", "shipped"), ("./shipped", Path("shipped")), ("mine", Path("mine"))):
        study = load_config(Study, None, [f"scales={text}"])
        assert (study.scales, type(study.scales)) == (value, type(value))
        assert config_to_dict(study)["scales"] == text
        assert load_config(Study, write(tmp_path, yaml.safe_dump(config_to_dict(study)))) == study
    word, folder = (load_config(Study, scales=scales) for scales in ("shipped", "./shipped"))
    assert config_hash(word) != config_hash(folder)
    assert config_to_dict(Study(model=Path("shipped")))["model"] == "shipped", "no keyword of this field"


def test_the_hash_depends_on_every_value_and_on_nothing_else() -> None:
    assert config_hash(Study()) == config_hash(Study())
    assert config_hash(Study()) != config_hash(Study(optimiser=Optimiser(rate=0.25)))
