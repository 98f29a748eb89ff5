"""Causal models of Hugging Face transformers: their head computes log-probs in place of logits."""

from .fused_head import FusedHead, HeadOutput, base_model, fuse_head, logit_options
from .head_options import HeadError

__all__ = ["FusedHead", "HeadError", "HeadOutput", "base_model", "fuse_head", "logit_options"]
