"""Heads and sequences that are sharded over the ranks of a process group.

Tensor parallelism (TP) shards the vocabulary: all ranks have the same rows, and each has a contiguous range of columns.
Each rank computes its tiles. One all-gather of the tile results, a few numbers per row and tile, gives every rank the
table that a single process would have. So all ranks reduce the same numbers in the same order, and make the same
decisions. In the backward, each rank computes the gradients of its rows of weight, bias and LoRA's B, and d_hidden is
summed over the ranks.

Context parallelism (CP) shards the tokens of every sequence. `backends/torch/sequence.py` gathers the sums of each
sequence.
"""
