"""What a checkpoint's ``config.json`` says of its quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from page4.kernels.errors import InputError

_DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Quantisation:
    """The quantised forms that a checkpoint may use.

    Attributes:
        int4: whose layout 4-bit integers are in; None where there may be none.
        group_sizes: inputs that share a scale of 4-bit integers, each value that the config names.
        symmetric: whether 4-bit integers of compressed-tensors come without zero points; None where both may
            occur.
        block: rows and columns that share a scale of FP8 weights; 128 x 128 beside 4-bit integers, as in an
            MTP head that was quantised apart.
    """

    int4: Literal["awq", "compressed-tensors"] | None = None
    group_sizes: frozenset[int] = frozenset()
    symmetric: bool | None = None
    block: tuple[int, int] = _DEFAULT_BLOCK


def quantisation(config: dict[str, Any]) -> Quantisation:
    """Read ``quantization_config`` of a ``config.json``; without one, only FP8 with block scales is known.

    Raises:
        InputError: a method or a variant of it that is not supported; the message names it.
    """
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    values = config.get("quantization_config", nested)
    if values is None:
        return Quantisation()
    if not isinstance(values, dict):
        raise InputError(f"config: quantization_config is {values!r}, expected a JSON object")
    method = values.get("quant_method")
    if method == "fp8":
        return Quantisation(block=_block(values))
    if method == "awq":
        return _awq(values)
    if method == "compressed-tensors":
        return _compressed_tensors(values)
    raise InputError(
        f"config: quant_method {method!r} is not supported, expected 'fp8', 'awq' or 'compressed-tensors'"
    )


def _block(values: dict[str, Any]) -> tuple[int, int]:
    block = values.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    raise InputError(f"config: weight_block_size is {block!r}, expected two integers such as [128, 128]")


def _awq(values: dict[str, Any]) -> Quantisation:
    _expect("bits", values.get("bits", 4), 4)
    # AutoAWQ calls the layout "version", transformers "format".
    layout = values.get("version") or values.get("format") or "gemm"
    _expect("version of AWQ", str(layout).lower(), "gemm")
    return Quantisation("awq", _group_sizes(values.get("group_size", 128)))


def _compressed_tensors(values: dict[str, Any]) -> Quantisation:
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise InputError(f"config: config_groups is {groups!r}, expected a JSON object of objects")
    sizes: set[int] = set()
    symmetric: set[bool] = set()
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise InputError(f"config: weights of a config group is {weights!r}, expected a JSON object")
        _expect("format of compressed-tensors", group.get("format") or values.get("format"), "pack-quantized")
        _expect("num_bits", weights.get("num_bits"), 4)
        _expect("type of weights", weights.get("type", "int"), "int")
        if weights.get("actorder"):
            raise InputError(f"config: actorder {weights['actorder']!r} of weights is not supported")
        sizes |= _group_sizes(weights.get("group_size"))
        symmetric.add(bool(weights.get("symmetric", True)))
    return Quantisation(
        "compressed-tensors", frozenset(sizes), symmetric.pop() if len(symmetric) == 1 else None
    )


def _group_sizes(value: object) -> frozenset[int]:
    """-1 means a scale per output, whatever the number of inputs, and so does None."""
    if value is None or value == -1:
        return frozenset({-1})
    if type(value) is not int or value < 1:
        raise InputError(f"config: group_size is {value!r}, expected a positive integer or -1")
    return frozenset({value})


def _expect(name: str, value: object, expected: object) -> None:
    if value != expected:
        raise InputError(f"config: {name} is {value!r}, only {expected!r} is supported")
