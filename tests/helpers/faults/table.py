"""The type of a seeded fault."""

from __future__ import annotations

# (module of the library, source text, faulty text, test that must fail)
# "parity::test_x" means the function test_x in test_parity.py. "trainers/trl::test_x" names the folder too: by this
# name, repo/test_mutations.py skips tests of trainers that are not installed.
Fault = tuple[str, str, str, str]
