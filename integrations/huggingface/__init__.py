"""Compute losses and log-probs at the head of a Hugging Face causal language model. Start with `fuse_head`."""

from .fused_head import FusedHead, HeadOutput, base_model, fuse_head, is_fused, logit_options
from .head_options import HeadError

__all__ = ["FusedHead", "HeadError", "HeadOutput", "base_model", "fuse_head", "is_fused", "logit_options"]
