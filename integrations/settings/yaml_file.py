"""Read settings from a YAML file. Apart from the readers, so that a mapping is read without PyYAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gspo_kernels.validation import Field, Said


def read_yaml(path: Path) -> Any:
    """Read one YAML file; a key that is given twice is an error, where YAML would take the last."""
    return yaml.load(path.read_text(), _UniqueKeyLoader)


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                Field("from_roll").fail(str(name), "given once", Said("it twice"))
        return super().construct_mapping(node, deep)
