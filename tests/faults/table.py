"""The type of a seeded fault.

Seeded are faults that would otherwise stay unseen: nothing fails or warns, but a loss, gradient, log-prob, divisor or
metric of a loss is wrong. One fault for each such guarantee is enough, and none for those that the rows of
math/test_array.py and of the trainers' arrays detect.
"""

from __future__ import annotations

# (function, edit of an expression in it, test that must fail)
#
# "head_forward" is a function, method or class of this name, "TensorChecks.sign" a method of a class, and
# "torch/tiles:slabs" a function in a file whose path ends so.
#
# The edit is written as `git diff --word-diff` prints it: "x + [-y-]{+z+}" makes x + z of x + y. Exactly one place in
# functions of this name has the expression x + y; formatting does not matter. The edit may also be of a statement:
# "[-statement-]{+pass+}" deletes it.
#
# "array::test_x" is the function test_x in test_array.py. "trainers/trl::test_x" names the folder too: by this name,
# faults/test_faults.py skips tests of trainers that are not installed.
Fault = tuple[str, str, str]

ROW = "array::test_a_pinned_row_equals_float64"
