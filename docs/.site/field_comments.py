"""Show the comments after the fields of a class in the API reference."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

COMMENT = re.compile(r"  # (?!noqa|fmt|pyright)(.*)$")


class FieldComments(griffe.Extension):
    """List the fields that have a comment at the end of their line under "Attributes"."""

    def on_class_members(self, *, node: ast.AST, cls: griffe.Class, agent: Any, **kwargs: Any) -> None:
        lines = agent.code.splitlines()
        comments = {name: COMMENT.search(lines[field.endlineno - 1]) for name, field in cls.attributes.items()}
        fields = [f"    {name}: {found[1].replace('<', '&lt;')}" for name, found in comments.items() if found]
        if fields and cls.docstring and not re.search("^(Args|Attributes):", cls.docstring.value, re.MULTILINE):
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(fields)
