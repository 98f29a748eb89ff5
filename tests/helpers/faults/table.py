"""The form of a seeded fault."""

from __future__ import annotations

# (module of the library, source text, the text with the fault, a test that must fail)
# The test is named by its file and function: "parity::test_x", or "trainers/trl::test_x" with the folder.
Fault = tuple[str, str, str, str]
