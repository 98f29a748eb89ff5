"""The type of a seeded fault."""

from __future__ import annotations

# (function, expression, wrong expression, test that must fail)
#
# "head_forward" is a function, method, class or variable of this name, "TensorChecks.sign" a method of a class, and
# "torch/tiles:slabs" a function in a file whose path ends so. "torch/tiles:" is the whole module. Exactly one place in
# functions of this name has the expression; formatting does not matter. A fault may also replace statements, by `pass`
# to delete them.
#
# "parity::test_x" is the function test_x in test_parity.py. "trainers/trl::test_x" names the folder too: by this name,
# faults/test_faults.py skips tests of trainers that are not installed.
Fault = tuple[str, str, str, str]
