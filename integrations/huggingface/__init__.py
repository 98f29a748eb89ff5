"""Heads of Hugging Face causal language models: log-probs in place of logits. Start with `fuse_head`."""

from .fused_head import FusedHead, HeadOutput, base_model, fuse_head, logit_options
from .head_options import HeadError

__all__ = ["FusedHead", "HeadError", "HeadOutput", "base_model", "fuse_head", "logit_options"]
