"""The sparse backward: lists of the cells of d_logits to compute, and block-sparse products."""
