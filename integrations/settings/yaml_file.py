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
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                Checks("from_roll").fail(str(name), "given once", Unquoted("it twice"))
        return super().construct_mapping(node, deep)
