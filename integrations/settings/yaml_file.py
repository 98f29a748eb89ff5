"""Read settings from a YAML file. Only this module imports PyYAML, so reading a mapping does not need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gspo_kernels.validation import Checks, Unquoted

MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raise a ValueError for a duplicate key: PyYAML would silently keep its last value."""
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, _UniqueKeyLoader)


class _UniqueKeyLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys before `flatten_mapping` adds keys, which may repeat those that override them."""
        node = super().compose_mapping_node(anchor)
        names = [self.construct_object(key) for key, _ in node.value if _is_plain(key)]
        for name in names:
            if names.count(name) > 1:
                Checks(self.name).fail(str(name), "given once", Unquoted("it twice"))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace merge keys (`<<: *base` or `<<: [*first, *second]`) by what they add. Later pairs override earlier.

        PyYAML 6.0.4 lets `second` override `first`, and lets `base` override a one-letter key that should override it.
        """
        merged = [value for key, value in node.value if key.tag == MERGE]
        node.value = [(key, value) for key, value in node.value if key.tag != MERGE]
        for value in merged:
            for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(mapping, yaml.MappingNode):
                    expected = "expected a mapping or a list of mappings to merge"
                    raise yaml.constructor.ConstructorError(None, None, expected, mapping.start_mark)
                self.flatten_mapping(mapping)
                node.value = mapping.value + node.value
        super().flatten_mapping(node)


def _is_plain(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.tag != MERGE
