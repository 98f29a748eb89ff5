"""Compute losses and log-probs at the head of a Hugging Face causal language model. Start with `fuse_head`."""

from .fused_head import FusedHead, HeadOutput, base_model, fuse_head, is_fused, logit_options
from .head_options import HeadError
from .rounding import ClipNoise, LogProbsByPrecision, clip_noise, log_probs_by_precision
from .row_checkpoint import RowCheckpoint, skip_rows_without_gradient

__all__ = [
    "ClipNoise",
    "FusedHead",
    "HeadError",
    "HeadOutput",
    "LogProbsByPrecision",
    "RowCheckpoint",
    "base_model",
    "clip_noise",
    "fuse_head",
    "is_fused",
    "log_probs_by_precision",
    "logit_options",
    "skip_rows_without_gradient",
]
