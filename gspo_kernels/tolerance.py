"""Error limits that the self-check and `gspo doctor` share with the tests. More limits: tests/tolerance.py.

To loosen a limit, make a separate commit that gives the reason.
"""

from __future__ import annotations

import torch

# RMS error of a gradient divided by the RMS of the true gradient.
RELATIVE_RMS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-12}
ROW_COSINE = 0.999

# fp64 compared with the fp64 oracle: only the order of additions differs.
FLOAT64_RELATIVE = 1e-11

# RMS error of log-probs on a GPU, for |logit| <= 30. For a large H, tests add `truncation` of tests/tolerance.py.
LOG_PROB_RMS_ON_GPUS = 3e-5

# On-policy, GSPO's loss is about 0. So errors of the loss are divided by the mean |advantage|, not by the loss.
LOSS_PER_ADVANTAGE = 1e-6

# Metrics of a loss in fp32, compared with fp64.
METRIC_RELATIVE, METRIC_ABSOLUTE = 1e-5, 1e-7

# The L1 mass of d_logits that a gradient budget drops, in fp32, compared with fp64.
DROPPED_MASS_RELATIVE = 1e-4
DROPPED_MASS_ABSOLUTE = 1e-9  # in addition, in the self-check
# Gradients from the kept entries of d_logits, by dtype. These limits detect wrong entries, not rounding.
LIVE_GRADIENT_RELATIVE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5, torch.float64: 1e-11}

# Largest error that the self-check allows, divided by eps(dtype) and by the largest value. The tests allow 2 (r + 1),
# where r is plain PyTorch's error in the same units. Rounding to half precision once gives r = 0.5. In fp32, r is up to
# 15 for the batches of the self-check.
LARGEST_ERROR = {torch.bfloat16: 3.0, torch.float16: 3.0, torch.float32: 32.0}
