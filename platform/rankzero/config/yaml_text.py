"""YAML for settings: plain values to text and back. Pure.

Reading executes no code and takes time in proportion to the length of the text.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import yaml


def load(text: str) -> Any:
    """Return the plain values of the text. Raises ValueError for anything that is wrong with it."""
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {str(error)[:1000]}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML's constructors raise these for some texts.
        raise ValueError(f"not valid YAML: {type(error).__name__}: {str(error)[:1000]}") from error


def dump(values: Any) -> str:
    """Return the values as text. `load` reads it back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Refuses aliases, duplicate keys, and numbers that no float holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        # A dozen lines of aliases can make a value larger than any memory, or one without an end.
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            what = "an alias (*name): write the value itself"
            raise yaml.composer.ComposerError(None, None, what, mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, count in keys.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key[:80]!r} occurs twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    number = float(loader.construct_yaml_float(node))
    if math.isinf(number) and "inf" not in node.value.lower():
        raise yaml.constructor.ConstructorError(
            None, None, f"{node.value[:80]} is too large", node.start_mark
        )
    return number


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    number = int(loader.construct_yaml_int(node))
    str(number)  # Raises ValueError for more digits than Python writes.
    return number


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, and writes any Unicode text so that it is read back."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    )


_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Dumper.add_representer(str, _represent_text)
