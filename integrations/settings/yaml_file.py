"""Read settings from a YAML file. Only this module imports PyYAML, so reading a mapping does not need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gspo_kernels.validation import Checks, Unquoted


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raise a ValueError for a duplicate key: PyYAML would silently keep its last value."""
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, _UniqueKeyLoader)


class _UniqueKeyLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                Checks(self.name).fail(name, "given once", Unquoted("it twice"))
        return node
