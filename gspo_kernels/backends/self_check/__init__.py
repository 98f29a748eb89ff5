"""The self-check of the Triton kernels, before their first use on a machine.

verdict       may this machine use the kernels? Reads a stored result, or runs the check, once per machine
kernel_check  compares the kernels with float64
samples       the batches of the check
"""
