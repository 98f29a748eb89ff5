"""Experiments on what the loss does to a policy, and the claims of the GSPO paper."""
