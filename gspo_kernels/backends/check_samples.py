"""Small ragged batches with their results in float64, for the check of the Triton kernels (`kernel_check.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import accumulator
from ..objective import Objective
from ..reference import projection_log_probs, surrogate
from .rows import HeadRows, PolicyRows

# Lengths, log-ratios and advantages of packed sequences. The clip window is -3e-4 to 4e-4. Sequences 3 and 5 are
# clipped. Sequences 4 and 6 are also outside the window, but on the side that does not clip for the sign of their
# advantage. Sequence 1 is longer than a block of 256 tokens, sequence 2 is empty, and sequence 7 has advantage 0.
LENGTHS = (270, 0, 24, 33, 17, 29, 1)
LOG_RATIOS = (1e-4, 0.0, 5.5e-4, -4.5e-4, -4.5e-4, 5.5e-4, 0.0)
ADVANTAGES = (1.2, 0.3, 0.7, 0.9, -0.8, -1.1, 0.0)
ROWS = sum(LENGTHS)
VOCAB = 1301  # V, not a multiple of any tile width, as ROWS is not a multiple of any block height
WIDTH = 512  # H, which the kernels sum in several steps
# The ragged head has all options. Its H selects the kernels of "heavy" heads (`tuning.tile_config`).
RAGGED_WIDTH = 328
RANK = 8  # of its adapter
PADDING = 22  # columns of padding in its vocabulary
# The wide head has more tiles than one step of `reduce_rows` covers.
WIDE_ROWS = 24
WIDE_VOCAB = 8400
WIDE_WIDTH = 128
FIRST = 256  # columns that get nearly all probability in the skewed batch
UPSTREAM = 1024.0  # gradient of the loss, large enough that small gradients are within the range of fp16


class Truth(NamedTuple):
    """Results in float64, on the CPU."""

    log_probs: Tensor  # [N], 0 where masked
    entropy: Tensor  # [N], 0 where masked
    d_logits: Tensor  # [N, V]: d(loss) / d(h W^T + a B^T + bias)


class Sample(NamedTuple):
    """A batch on the CPU, and its true results."""

    head: HeadRows
    policy: PolicyRows
    d_log_probs: Tensor  # [N], in the accumulators' dtype
    d_entropy: Tensor | None  # [N]
    truth: Truth


def make_sample(kind: str, dtype: torch.dtype) -> Sample:
    """Make a batch with operands of `dtype`: "plain", "ragged" or "skewed".

    The plain head uses the same kernels as most models, with H a multiple of 64. The skewed batch has nearly all
    probability in the first columns, so that a gradient budget can drop most cells.
    """
    head = _ragged_head(dtype) if kind == "ragged" else _plain_head(dtype, skewed=kind == "skewed")
    zeros = torch.zeros(ROWS, dtype=torch.float64)
    log_probs = truth_of(head, zeros, None).log_probs
    policy = policy_of(log_probs, head.mask, accumulator(dtype))
    coefficient = true_loss(log_probs, head.mask, policy)[1]
    d_log_probs = (UPSTREAM * coefficient).to(accumulator(dtype))
    d_entropy = torch.where(head.mask, d_log_probs[0], 0) if head.entropy else None
    return Sample(head, policy, d_log_probs, d_entropy, truth_of(head, d_log_probs, d_entropy))


class _Random:
    """Normally distributed tensors from a separate generator."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)).to(self.dtype)

    def ids(self, vocab: int, rows: int) -> Tensor:
        return torch.randint(vocab, (rows,), generator=self.generator)


def unmasked_rows() -> Tensor:
    """Return the mask of the batches, [N] bool."""
    return torch.arange(ROWS) % 17 != 10


def _head(hidden: Tensor, weight: Tensor, target_ids: Tensor, mask: Tensor) -> HeadRows:
    target_ids = torch.where(mask, target_ids, -100)
    vocab = weight.shape[0]
    return HeadRows(hidden, weight, None, None, None, target_ids, mask, None, 1.0, None, vocab, False)


def _plain_head(dtype: torch.dtype, skewed: bool) -> HeadRows:
    random = _Random(dtype)
    hidden, weight = random(ROWS, WIDTH), random(VOCAB, WIDTH, scale=3 / WIDTH**0.5)
    ids = random.ids(VOCAB, ROWS)
    if skewed:
        hidden[:, 0], weight[:FIRST, 0], weight[FIRST:, 0] = 4, 0, -3
        last = VOCAB - VOCAB % 64  # a few targets are in the last, ragged tile
        ids = torch.where(torch.arange(ROWS) % 40 == 0, last + ids % (VOCAB - last), ids % FIRST)
    return _head(hidden, weight, ids, unmasked_rows())


def _ragged_head(dtype: torch.dtype) -> HeadRows:
    random = _Random(dtype)
    hidden, weight = random(ROWS, RAGGED_WIDTH), random(VOCAB, RAGGED_WIDTH, scale=3 / RAGGED_WIDTH**0.5)
    temperature = 1 + 0.3 * torch.sin(torch.arange(ROWS, dtype=torch.float64))
    return _head(hidden, weight, random.ids(VOCAB - PADDING, ROWS), unmasked_rows())._replace(
        bias=random(VOCAB),
        adapter_hidden=random(ROWS, RANK),
        adapter_weight=random(VOCAB, RANK, scale=0.3),
        temperature=temperature.to(accumulator(dtype)),
        logit_scale=0.7,
        logit_softcap=20.0,
        vocab_size=VOCAB - PADDING,
        entropy=True,
    )


def wide_head(dtype: torch.dtype) -> HeadRows:
    """Make a head with few rows and many columns."""
    random = _Random(dtype)
    hidden, weight = random(WIDE_ROWS, WIDE_WIDTH), random(WIDE_VOCAB, WIDE_WIDTH, scale=3 / WIDE_WIDTH**0.5)
    return _head(hidden, weight, random.ids(WIDE_VOCAB, WIDE_ROWS), torch.arange(WIDE_ROWS) % 5 != 3)


def truth_of(head: HeadRows, d_log_probs: Tensor, d_entropy: Tensor | None) -> Truth:
    """Compute log-probs, entropies and d_logits from full logits in float64, on the CPU."""
    raw = head.hidden.double() @ head.weight.double().t()
    if head.adapter_hidden is not None and head.adapter_weight is not None and head.bias is not None:
        raw += head.adapter_hidden.double() @ head.adapter_weight.double().t() + head.bias.double()
    raw.requires_grad_()
    ids = torch.where(head.mask, head.target_ids, 0)
    temperature = 1.0 if head.temperature is None else head.temperature.double()
    options = (head.logit_scale, head.logit_softcap, temperature, head.vocab_size)
    log_probs, entropy = projection_log_probs(raw, ids, *options)
    total = (d_log_probs.double() * log_probs).sum()
    if d_entropy is not None:
        total = total + (d_entropy.double() * entropy).sum()
    (d_logits,) = torch.autograd.grad(total, raw)
    log_probs, entropy = (torch.where(head.mask, x.detach(), 0) for x in (log_probs, entropy))
    return Truth(log_probs, entropy, d_logits)


def policy_of(log_probs: Tensor, mask: Tensor, dtype: torch.dtype) -> PolicyRows:
    """Make the inputs of the loss, on the CPU. The sequences have the log-ratios LOG_RATIOS."""
    noise = 0.02 * torch.randn(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    difference = [  # log-probs minus old log-probs
        x - x[unmasked].mean() + log_ratio
        for x, unmasked, log_ratio in zip(noise.split(LENGTHS), mask.split(LENGTHS), LOG_RATIOS, strict=True)
    ]
    lengths = torch.tensor(LENGTHS)
    return PolicyRows(
        offsets=torch.tensor([0, *LENGTHS]).cumsum(0),
        advantages=torch.tensor(ADVANTAGES, dtype=dtype).repeat_interleave(lengths),
        old_log_probs=(log_probs - torch.cat(difference)).to(dtype),
        ref_log_probs=None,
        token_weights=None,
        normalizer=None,
        kl_normalizer=None,
        invalid=torch.zeros((), dtype=torch.int64),
    )


def true_loss(log_probs: Tensor, mask: Tensor, policy: PolicyRows) -> tuple[Tensor, Tensor]:
    """Compute the loss [] and its derivative with respect to log-probs [N], in float64."""
    assert policy.old_log_probs is not None
    leaf = log_probs.double().requires_grad_()
    token_log_ratio = (leaf - policy.old_log_probs.double()).split(LENGTHS)
    terms = [
        surrogate(ratios[unmasked].mean(), advantages[0].double(), Objective())
        for ratios, unmasked, advantages in zip(
            token_log_ratio, mask.split(LENGTHS), policy.advantages.split(LENGTHS), strict=True
        )
        if unmasked.any()
    ]
    loss = torch.stack(terms).mean()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]
