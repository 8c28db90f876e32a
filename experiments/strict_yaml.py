"""YAML from users: one kind of error, and no key twice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, of plain types.

    Raises:
        yaml.YAMLError: it is no YAML, a value is not what its tag or form says (the 99th of a month), it
            nests too deeply, or holds a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    except _OF_CONSTRUCTORS as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


_OF_CONSTRUCTORS = (ValueError, TypeError, LookupError, AttributeError)  # which PyYAML lets pass


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice!r} occurs twice", node.start_mark
            )
        return super().construct_mapping(node, deep)
