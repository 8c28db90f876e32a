"""Geometries by name, or of a model's folder."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from page4.experiments.strict_yaml import parse_yaml
from page4.kernels.errors import InputError
from page4.kvcache.cache import CacheGeometry
from page4.model.cache_geometry import cache_geometry
from page4.model.config import Qwen4ExpConfig

PUBLIC = "qwen3.8-flash-next"
"""The public checkpoint."""


def named_geometries() -> tuple[str, ...]:
    """Names of the geometries that come with the package."""
    folder = resources.files("page4.experiments.capacity").joinpath("geometries")
    return tuple(sorted(file.name.removesuffix(".yaml") for file in folder.iterdir()))


def load_geometry(name: str) -> CacheGeometry:
    """The geometry with this name, or of the model in this folder; no weights are needed.

    Raises:
        InputError: neither, or the folder's config.json describes no such model.
    """
    return cache_geometry(load_config(name))


def load_config(name: str) -> Qwen4ExpConfig:
    """The config with this name, or of the model in this folder.

    Raises:
        InputError: as :func:`load_geometry`.
    """
    if name in named_geometries():
        file = resources.files("page4.experiments.capacity").joinpath("geometries", f"{name}.yaml")
        return Qwen4ExpConfig.from_dict(parse_yaml(file.read_text(encoding="utf-8")))
    if (Path(name) / "config.json").is_file():
        return Qwen4ExpConfig.from_file(Path(name) / "config.json")
    raise InputError(
        f"geometry {name!r} is neither a folder with a config.json nor one of {', '.join(named_geometries())}"
    )
