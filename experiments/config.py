"""Configurations of studies: a dataclass, filled from defaults, a YAML file, `--set key=value` and flags."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import yaml

from page4.experiments.config_types import convert_text, convert_value, describe_value, keywords, type_options
from page4.experiments.strict_yaml import parse_yaml
from page4.kernels.errors import InputError


class DataclassInstance(Protocol):
    """Any dataclass object (the standard library has no public name for this)."""

    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[Any]]]


ConfigT = TypeVar("ConfigT", bound=DataclassInstance)


def load_config(
    cls: type[ConfigT],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    quick: bool = False,
    **flags: object,
) -> ConfigT:
    """Build a `cls` from its defaults, its `QUICK` values, a YAML file, overrides and flags; the last wins.

    Args:
        cls: A dataclass. Fields may be bool, int, float, str, Path, Literal, unions of these (with None),
            nested dataclasses, and list, tuple or dict of these. A class attribute
            `QUICK: ClassVar[dict[str, Any]]` holds the values that `--quick` puts in place of the defaults.
        file: YAML mapping of field names to values; nested dataclasses are nested mappings.
        overrides: `key=value` texts. The key may be dotted (`train.steps`), the value is YAML; a list may
            also be written without brackets (`lengths=1024,2048`).
        quick: Use `cls.QUICK`.
        flags: Values of command-line options by field name; None means "not given".

    Raises:
        InputError: An unknown key (the message lists the right ones), a value of the wrong type, a non-finite
            number, a missing value, an unreadable file, or whatever the class's own `__post_init__` refuses.
    """
    values: dict[str, Any] = {}
    if quick:
        _merge(values, cls, getattr(cls, "QUICK", {}), f"{cls.__name__}.QUICK")
    if file is not None:
        _merge(values, cls, _read_yaml(file), str(file))
    for override in overrides:
        _merge(values, cls, _parse_override(override), f"--set {override}", from_text=True)
    hints = typing.get_type_hints(cls)
    for name, value in flags.items():
        if value is not None:
            values[name] = convert_value(value, hints[name], f"--{name.replace('_', '-')}")
    return cast(ConfigT, _build(cls, values))


def config_to_dict(config: DataclassInstance) -> dict[str, Any]:
    """The fields of a configuration as plain YAML and JSON types (tuples become lists, paths text).

    `load_config` reads the same configuration from them: a path that is named as a keyword of its field, as
    a folder "shipped" where the word "shipped" is allowed too, is written with "./" before it.
    """
    hints = typing.get_type_hints(type(config))
    return {
        field.name: _plain(getattr(config, field.name), hints[field.name])
        for field in dataclasses.fields(config)
    }


def config_hash(config: DataclassInstance) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the configuration's canonical JSON."""
    text = json.dumps(config_to_dict(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any, hint: Any = None) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return config_to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        text = value.as_posix()
        return f"./{text}" if text in keywords(hint) else text
    return value


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"cannot read the configuration {file}: {reason}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{file} must hold a mapping of keys to values, not {describe_value(content)}")
    return content


def _parse_override(override: str) -> dict[str, Any]:
    """`a.b=1` -> `{"a": {"b": "1"}}`; the text becomes a value when the type of the field is known."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise InputError(f"--set needs key=value, got {override!r}")
    nested: Any = text.strip()
    for part in reversed(key.strip().split(".")):
        nested = {part: nested}
    return cast(dict[str, Any], nested)


def _merge(
    values: dict[str, Any],
    cls: type,
    update: Mapping[str, Any],
    source: str,
    from_text: bool = False,
    prefix: str = "",
) -> None:
    """Put checked values of `update` into `values`; nested dataclasses are merged key by key."""
    convert = convert_text if from_text else convert_value
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    for key, value in update.items():
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise InputError(
                f"{source}: unknown key {prefix + str(key)!r}{hint}; the keys are {', '.join(names)}"
            )
        nested = _dataclass_in(hints[key])
        if nested is not None and isinstance(value, Mapping):
            if not isinstance(values.get(key), dict):
                values[key] = {}
            _merge(values[key], nested, value, source, from_text, prefix=f"{prefix}{key}.")
        else:
            values[key] = convert(value, hints[key], f"{source}: {prefix}{key}")


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that a field holds, also behind `| None`."""
    for option in type_options(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def _build(cls: type, values: Mapping[str, Any], default: Any = None, prefix: str = "") -> Any:
    """Construct `cls`, or change `default`, with the values; nested dataclasses are constructed first."""
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in values:
            value, nested = values[field.name], _dataclass_in(hints[field.name])
            if nested is not None and isinstance(value, Mapping):
                base = getattr(default, field.name, None) if default is not None else _default_of(field)
                value = _build(nested, value, base, f"{prefix}{field.name}.")
            arguments[field.name] = value
        elif field.init and missing and default is None:
            raise InputError(f"the configuration needs a value for {prefix + field.name!r}")
    try:
        return cls(**arguments) if default is None else dataclasses.replace(default, **arguments)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


def _default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, or None when it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
