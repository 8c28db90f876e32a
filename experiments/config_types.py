"""Checked conversion of plain YAML values to the types of dataclass fields."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from page4.experiments.strict_yaml import parse_yaml
from page4.kernels.errors import InputError


def type_options(hint: Any) -> tuple[Any, ...]:
    """The members of a union type; a type that is no union is its own only member."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def keywords(hint: Any) -> set[Any]:
    """The values of the `Literal` members of a type. Only these very words are meant: "./word" is a path."""
    literals = (option for option in type_options(hint) if typing.get_origin(option) is Literal)
    return {word for literal in literals for word in typing.get_args(literal)}


def convert_text(text: Any, hint: Any, where: str) -> Any:
    """The text of a `--set` override as the type `hint`: YAML, a bare list, or the text itself for str."""
    if not isinstance(text, str):
        raise InputError(f"{where} has no parts, so a dotted key cannot set one")
    options = type_options(hint)
    takes_list = any(typing.get_origin(option) in (list, tuple) for option in options)
    try:
        value = parse_yaml(text)
        if value is None and type(None) in options:
            return None
        if takes_list and not isinstance(value, list):
            value = [parse_yaml(part) for part in text.split(",")] if text else []
        elif str in options and not isinstance(value, str):
            value = text
    except yaml.YAMLError as error:
        raise InputError(f"{where} is not valid YAML: {text!r}") from error
    return convert_value(value, hint, where)


def convert_value(value: Any, hint: Any, where: str) -> Any:
    """`value`, as YAML or a caller gave it, as the type `hint`.

    Raises:
        InputError: The value is of another type, or not finite; the message begins with `where`.
    """
    if hint is Any:
        return value
    options = [option for option in type_options(hint) if not (option is type(None) and value is not None)]
    if len(options) == 1:
        hint = options[0]
    else:
        for option in options:
            try:
                return convert_value(value, option, where)
            except InputError:
                continue
        raise _wrong_type(value, hint, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in arguments and any(type(value) is type(option) for option in arguments):
            return value
        raise InputError(f"{where} must be one of {', '.join(map(str, arguments))}, got {value!r}")
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        return _convert_sequence(value, origin, arguments, where)
    if origin is dict and isinstance(value, Mapping):
        key_type, item_type = arguments
        return {
            convert_value(k, key_type, where): convert_value(v, item_type, f"{where}.{k}")
            for k, v in value.items()
        }
    return _convert_scalar(value, hint, where)


def _convert_sequence(value: Sequence[Any], origin: type, arguments: tuple[Any, ...], where: str) -> Any:
    if origin is list or arguments[-1] is Ellipsis:
        item_types = [arguments[0]] * len(value)
    else:
        item_types = list(arguments)
        if len(value) != len(item_types):
            raise InputError(f"{where} needs {len(item_types)} values, got {len(value)}")
    return origin(
        convert_value(v, t, f"{where}[{i}]") for i, (v, t) in enumerate(zip(value, item_types, strict=True))
    )


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is type(None) and value is None:
        return None
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:  # YAML 1.1 reads 1e-3, without a point, as text
            number = float(value)
        except ValueError:
            raise _wrong_type(value, hint, where) from None
        if not math.isfinite(number):
            raise InputError(f"{where} must be finite, got {value}")
        return number
    if hint is Path and isinstance(value, (str, Path)) and "\0" not in str(value):
        return Path(value)
    if hint is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"{where} is {value}, which does not fit 64 bits")
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise _wrong_type(value, hint, where)


def _wrong_type(value: Any, hint: Any, where: str) -> InputError:
    return InputError(f"{where} must be {_name(hint)}, got {describe_value(value)}")


def _name(hint: Any) -> str:
    """A type in words for a message."""
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
    if hint in words:
        return words[hint]
    if hint is type(None):
        return "null"
    options = type_options(hint)
    if len(options) > 1:
        return " or ".join(_name(option) for option in options)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, tuple):
        return f"a list (each item {_name(arguments[0])})"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    return str(getattr(hint, "__name__", hint))


def describe_value(value: Any) -> str:
    """A value in words for a message."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return repr(value)
