"""The type of a seeded fault."""

from __future__ import annotations

# (module of the library, source text, faulty text, test that must fail)
# "parity::test_x" is the function test_x in test_parity.py; "trainers/trl::test_x" also names the folder.
Fault = tuple[str, str, str, str]
