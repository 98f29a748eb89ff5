"""Read settings from a YAML file. Only this module imports PyYAML, so reading a mapping does not need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gspo_kernels.validation import Checks, Unquoted


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raise a ValueError for a duplicate key: PyYAML would silently keep its last value."""
    return yaml.load(path.read_text(), _UniqueKeyLoader)


class _UniqueKeyLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check the keys before merge keys (`<<: *base`) add those of another mapping, which a mapping may override."""
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = [self.construct_object(key) for key in keys if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                Checks("from_roll").fail(str(name), "given once", Unquoted("it twice"))
        return node
