"""Prepare docstrings for the API reference: comments after fields, and links to pages."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

COMMENT = re.compile(r"  # (?!noqa|fmt|pyright)(.*)$")
SECTION = re.compile("^(Args|Attributes):", re.MULTILINE)
PAGE = re.compile(r"docs/([\w/]+)\.md")


class Docstrings(griffe.Extension):
    """List fields that have a comment at the end of their line under "Attributes". Turn docs/NAME.md into a link."""

    def on_class_members(self, *, node: ast.AST, cls: griffe.Class, agent: Any, **kwargs: Any) -> None:
        if cls.docstring is None or SECTION.search(cls.docstring.value):
            return
        lines = agent.code.splitlines()
        fields = []
        for name, field in cls.attributes.items():
            comment = COMMENT.search(lines[field.endlineno - 1])
            if comment and not name.startswith("_"):
                fields.append(f"    {name}: {comment[1].replace('<', '&lt;')}")
        if fields:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(fields)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = PAGE.sub(r"[docs/\1.md](../\1.md)", obj.docstring.value)
