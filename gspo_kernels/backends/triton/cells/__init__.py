"""The backward of a part of the cells of d_logits: lists of cells, and block-sparse products."""
