"""Measure what rounding in the head does to log-probs, by the dtypes of weight and hidden states, with the head alone.

    python -m gspo_kernels.benchmarks operands          a minute on two cores

Logits have a standard deviation of 5. The error is the root mean square, in nats, of the difference from float64 of the
operands that the head gets, before autocast.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

from .. import candidates, measure, peers
from ..candidates import LogProbs, full_log_probs
from ..measure import Record
from ..suites.options import parser_of
from .precision import EMULATED, FP32_LOGITS, KEEP_FP32, OURS_FP32, by_split_operands, unrounded

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SETUPS = {  # dtypes of the weight, of hidden states, and of autocast
    "bf16 x bf16": (BF16, BF16, None),
    "fp32 x bf16": (FP32, BF16, None),
    "fp32 x bf16, bf16 autocast": (FP32, BF16, BF16),
    "fp32 x fp32, bf16 autocast": (FP32, FP32, BF16),
    "fp32 x fp32, fp16 autocast": (FP32, FP32, FP16),
    "fp16 x fp16": (FP16, FP16, None),
    "fp32 x fp32": (FP32, FP32, None),
}
FULL, TINY = (512, 1024, 8192), (32, 64, 512)  # N, H, V


def heads_of(autocast: torch.dtype | None) -> dict[str, LogProbs]:
    """Log-probs of each head. Those in `KEEP_FP32` run outside of autocast, or turn it off themselves."""
    return {
        **{name: candidates.ALL[name].log_probs for name in ("naive GSPO", "TRL fused head")},
        "TRL cast_lm_head_to_fp32": peers.trl_fp32_log_probs,
        FP32_LOGITS: lambda h, w, *rest: full_log_probs(h.float(), w.float(), *rest),
        "ours": candidates.ALL["ours"].log_probs,
        OURS_FP32: partial(unrounded, autocast=autocast, head_precision="fp32"),
        EMULATED: lambda h, w, *rest: by_split_operands(h.float() if w.dtype == FP32 else h, w, *rest),
    }


@torch.no_grad()
def study(tokens: int, width: int, vocab: int) -> Record:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width)
    weight = torch.randn(vocab, width)
    ids = torch.randint(vocab, (tokens,))
    setups = []
    for name, (of_weight, of_hidden, autocast) in SETUPS.items():
        h, w = hidden.to(of_hidden), (5 * width**-0.5 * weight).to(of_weight)
        true = full_log_probs(h.double(), w.double(), ids, None, torch.float64)
        errors: Record = {}
        for head, log_probs in heads_of(autocast).items():
            within = torch.autocast("cpu", autocast) if autocast and head not in KEEP_FP32 else nullcontext()
            try:
                with within:
                    found = log_probs(h, w, ids, None)
                errors[head] = (found.double() - true).square().mean().sqrt().item()
            except (RuntimeError, TypeError, ValueError) as error:  # operands of two dtypes
                errors[head] = {"refused": str(error).splitlines()[0]}
        setups.append({"name": name, "errors": errors})
    return {"shape": {"N": tokens, "H": width, "V": vocab}, "setups": setups}


def main() -> None:
    options = parser_of("operands", __doc__).parse_args()
    device = torch.device("cpu")
    output = measure.destination("operands", device, options.output, options.tiny)
    print(measure.save("operands", device, study(*(TINY if options.tiny else FULL)), output))
