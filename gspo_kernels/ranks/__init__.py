"""Heads and sequences that are sharded over the ranks of a process group.

Tensor parallelism (TP) shards the vocabulary: every rank holds the same rows, and a contiguous range of the columns.
Each rank computes its tiles. One all-gather of the tiles' results, a few numbers per row and tile, gives every rank the
table that a single process would have. So each rank reduces the same numbers in the same order, and takes the same
decisions. In the backward, each rank computes the gradients of its rows of weight, bias and LoRA's B, and d_hidden is
summed over the ranks.

Context parallelism (CP) shards the tokens of every sequence. `backends/sums.py` gathers the sums of each sequence.
"""
