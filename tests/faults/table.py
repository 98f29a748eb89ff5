"""The type of a seeded fault.

Seeded are faults that would otherwise stay unseen: nothing fails or warns, but a loss, gradient, log-prob, metric or
divisor is wrong, or a resumed run computes other numbers. One fault for each such guarantee is enough.
"""

from __future__ import annotations

# (function, expression, wrong expression, test that must fail)
#
# "head_forward" is a function, method or class of this name, "TensorChecks.sign" a method of a class, and
# "torch/tiles:slabs" a function in a file whose path ends so. Exactly one place in functions of this name has the
# expression; formatting does not matter. A fault may also replace a statement, by `pass` to delete it.
#
# "parity::test_x" is the function test_x in test_parity.py. "trainers/trl::test_x" names the folder too: by this name,
# faults/test_faults.py skips tests of trainers that are not installed.
Fault = tuple[str, str, str, str]
