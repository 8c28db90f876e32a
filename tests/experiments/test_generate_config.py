"""What `page4 generate` chooses where it is not told: by checkpoint, formats and scales."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from page4.experiments.generate_config import GenerateConfig
from page4.experiments.info import CHECKPOINT, OVERLAYS
from page4.kernels.errors import InputError
from page4.kvcache import RECOMMENDED

OTHER = Path("another-checkpoint")


def chosen(**options: Any) -> tuple[str | None, object]:
    config = GenerateConfig(**options).resolve()
    return config.kv_format, config.scales


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (RECOMMENDED, "shipped")),
        ({"model": CHECKPOINT}, (RECOMMENDED, "shipped")),
        ({"kv_format": RECOMMENDED}, (RECOMMENDED, "shipped")),
        ({"kv_format": "e4m3"}, ("e4m3", "shipped")),
        ({"draft_kv_format": "e4m3"}, (RECOMMENDED, "shipped")),
        ({"kv_format": "e4m3,3:fp16", "draft_kv_format": RECOMMENDED}, ("e4m3,3:fp16", "shipped")),
        ({"kv_format": "e3m4"}, ("e3m4", "prompt")),
        ({"kv_format": "e4m3,3:e3m4"}, ("e4m3,3:e3m4", "prompt")),
        ({"kv_format": "e4m3", "draft_kv_format": "int8"}, ("e4m3", "prompt")),
        ({"kv_format": "fp16"}, ("fp16", "prompt")),
        ({"scales": "prompt"}, (RECOMMENDED, "prompt")),
        ({"scales": "shipped"}, (RECOMMENDED, "shipped")),
        ({"scales": OVERLAYS / "e4m3"}, ("e4m3", OVERLAYS / "e4m3")),
    ],
    ids=str,
)
def test_the_shipped_checkpoint_takes_the_recommended_format_and_shipped_scales(
    options: dict[str, Any], expected: tuple[str, object]
) -> None:
    """Where overlays ship for all formats that are used, and the format is not another overlay's."""
    assert chosen(**options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("fp16", "prompt")),
        ({"draft_kv_format": "e4m3"}, ("fp16", "prompt")),
        ({"kv_format": "e4m3"}, ("e4m3", "prompt")),
        ({"scales": "prompt"}, (RECOMMENDED, "prompt")),
        ({"scales": OVERLAYS / "e4m3"}, ("e4m3", OVERLAYS / "e4m3")),
        ({"scales": OVERLAYS}, (RECOMMENDED, OVERLAYS)),
    ],
    ids=str,
)
def test_another_checkpoint_takes_fp16_or_what_its_scales_are_made_for(
    options: dict[str, Any], expected: tuple[str, object]
) -> None:
    assert chosen(model=OTHER, **options) == expected


def test_what_is_chosen_stays_chosen() -> None:
    config = GenerateConfig(model=OTHER).resolve()
    assert config.resolve() == config


def test_prefixes_are_kept_with_the_defaults(tmp_path: Path) -> None:
    assert chosen(prefix_cache=tmp_path) == (RECOMMENDED, "shipped")
    assert chosen(prefix_cache=tmp_path, model=OTHER) == ("fp16", "prompt")


@pytest.mark.parametrize(
    ("options", "static"), [({"kv_format": "e3m4"}, "e3m4"), ({"scales": "prompt"}, RECOMMENDED)], ids=str
)
def test_prefixes_are_not_kept_with_scales_of_the_prompt(
    options: dict[str, Any], static: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"a prefix cache in {static} needs scales that are the same"):
        chosen(prefix_cache=tmp_path, **options)


INT8 = {"kv_format": "int8", "draft_kv_format": RECOMMENDED}


@pytest.mark.parametrize(
    ("options", "advice", "followed"),
    [
        ({"scales": "prompt"}, "use --scales shipped", {"scales": "shipped"}),
        ({"kv_format": "e3m4"}, "use --scales DIR, .* made for e3m4", {"scales": Path("overlay")}),
        ({"model": OTHER, "kv_format": RECOMMENDED}, "use --scales DIR", {"scales": Path("overlay")}),
        (INT8, f"take int8 or fp16 in place of {RECOMMENDED}", {"draft_kv_format": "fp16"}),
        (INT8, f"take int8 or fp16 in place of {RECOMMENDED}", {"draft_kv_format": "int8"}),
    ],
    ids=str,
)
def test_who_keeps_prefixes_is_advised_what_works(
    options: dict[str, Any], advice: str, followed: dict[str, Any], tmp_path: Path
) -> None:
    """`--scales shipped` only where they have all formats: beside int8 no overlay is accepted."""
    with pytest.raises(InputError, match=advice):
        chosen(prefix_cache=tmp_path, **options)
    chosen(prefix_cache=tmp_path, **options | followed)


def test_a_folder_without_overlays_names_no_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        chosen(scales=tmp_path)
    shutil.copytree(OVERLAYS / "e4m3", tmp_path / "e4m3")
    with pytest.raises(InputError, match="does not exist"):
        chosen(scales=tmp_path / "e2m5")
