"""Names of static KV scales in checkpoints: this project's, and those that other tools write."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

TARGET_FILE = "model-kvscales.safetensors"
DRAFT_FILE = "model-bf16-kvscales-mtp.safetensors"

# Read: k_scale of serving engines (with and without the module `attn`), k_proj.k_scale of ModelOpt,
# k_proj.output_scale of compressed-tensors. A layer number has at most four digits.
_LAYER = r"model\.(?:language_model\.)?layers\.(?P<layer>0|[1-9]\d{0,3})"
_PART = (
    r"(?:attn\.)?_?(?P<direct>[kv])_scale|(?P<projection>[kv])_proj\.(?:(?P=projection)_scale|output_scale)"
)
_NAME = re.compile(rf"(?:{_LAYER}|mtp\.layers\.0)\.self_attn\.(?:{_PART})", re.ASCII)


class ScaleName(NamedTuple):
    """What a tensor's name says. ``layer`` is None for the MTP layer."""

    layer: int | None
    part: Literal["k", "v"]

    def __str__(self) -> str:
        return f"{self.part}_scale of {describe_layer(self.layer)}"


def describe_layer(layer: int | None) -> str:
    """``layer 3``, or ``the draft layer``."""
    return "the draft layer" if layer is None else f"layer {layer}"


def parse_scale_name(name: str) -> ScaleName | None:
    """The layer and part that a tensor's name means, under any of the known spellings; else None."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part = match["layer"], match["direct"] or match["projection"]
    return ScaleName(None if layer is None else int(layer), "k" if part == "k" else "v")


def scale_tensor_name(name: ScaleName, prefix: str) -> str:
    """How an overlay spells a scale; ``prefix`` is the base's, ``model.`` or ``model.language_model.``."""
    module = "mtp.layers.0" if name.layer is None else f"{prefix}layers.{name.layer}"
    return f"{module}.self_attn.{name.part}_scale"


def scale_file(layer: int | None) -> str:
    """The overlay's file that holds a layer's scales."""
    return DRAFT_FILE if layer is None else TARGET_FILE
