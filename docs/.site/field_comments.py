"""Show the comment after a field of a class as the field's text in the API reference."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

COMMENT = re.compile(r"  # (?!noqa|fmt|pyright)(.*)$")


class FieldComments(griffe.Extension):
    """Give each field without a docstring the comment at the end of its line."""

    def on_class_members(self, *, node: ast.AST, cls: griffe.Class, agent: Any, **kwargs: Any) -> None:
        lines = agent.code.splitlines()
        for field in cls.attributes.values():
            comment = COMMENT.search(lines[field.endlineno - 1])
            if comment and field.docstring is None:
                field.docstring = griffe.Docstring(comment[1], parent=field)
