"""Small ragged batches with their results in float64, for the check of the Triton kernels (`kernel_check.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import accumulator
from ...objective import Objective
from ...reference import projection_log_probs
from .. import torch as torch_backend
from ..rows import HeadRows, Pairs, PolicyResult, PolicyRows

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
# So small that the backward takes several chunks of rows and several slabs of columns in every dtype.
SMALL_WORKSPACE = 2**19
# Objectives besides GSPO's. Token log-ratios have a standard deviation of 0.02, so all bounds bind at some tokens.
_TOKEN = Objective(
    ratio="token",
    clip_low=0.02,
    clip_high=0.02,
    dual_clip=1.03,
    aggregation="seq-mean-token-sum",
    kl_coef=0.1,
    kl_aggregation="token-mean",
    entropy_coef=0.01,
)
_GMPO = Objective(surrogate="gmpo", clip_low=0.02, clip_high=0.02, kl_coef=0.1, kl_ratio_factor=True)
_SAPO = Objective(ratio="token", surrogate="sapo", aggregation="token-mean", kl_coef=0.1, kl_estimator="unbiased")


class Truth(NamedTuple):
    """Results in float64, on the CPU."""

    log_probs: Tensor  # [N], 0 where masked
    entropy: Tensor  # [N], 0 where masked
    d_logits: Tensor  # [N, V]: d(loss) / d(h W^T + a B^T + bias)


class LossSample(NamedTuple):
    """Inputs of the loss, on the CPU."""

    objective: Objective
    log_probs: Tensor  # [N]
    entropy: Tensor | None  # [N]
    mask: Tensor  # [N] bool
    policy: PolicyRows


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
    coefficient = true_loss(LossSample(Objective(), log_probs, None, head.mask, policy)).coefficient
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
    """The mask of all batches, [N] bool."""
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


def pairs_of(head: HeadRows) -> tuple[Pairs, Tensor]:
    """Make pairs of the first rows with up to 40 ids, and gradients of their logits, [K] fp64, on the CPU.

    One id is in every row, so its group takes several steps.
    """
    sizes = torch.where(torch.arange(ROWS) < 16, 9 * torch.arange(ROWS) % 41, 0)
    rows = torch.repeat_interleave(torch.arange(ROWS), sizes)
    count = torch.arange(len(rows))
    ids = torch.where(count % 7 == 0, 3, (31 * count + 5 * rows) % head.vocab_size)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    live = head.mask[rows] & (count % 11 != 4)
    return Pairs(offsets, rows, ids, live), torch.sin(count.double())


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


def loss_samples(dtype: torch.dtype) -> list[LossSample]:
    """Make inputs of the loss with log-probs of `dtype`, for GSPO and for objectives with all optional inputs."""
    rng = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    log_probs = random(ROWS).square().neg().to(dtype)
    mask = unmasked_rows()
    gspo = policy_of(log_probs.double(), mask, dtype)
    options = gspo._replace(
        ref_log_probs=(log_probs + 0.3 * random(ROWS)).to(dtype),
        token_weights=(0.5 + random(ROWS).square()).to(dtype),
    )
    normalizers = {"normalizer": torch.tensor(5.0, dtype=dtype), "kl_normalizer": torch.tensor(300.0, dtype=dtype)}
    return [
        LossSample(Objective(), log_probs, None, mask, gspo),
        LossSample(_TOKEN, log_probs, random(ROWS).square().to(dtype), mask, options._replace(**normalizers)),
        LossSample(_GMPO, log_probs, None, mask, options),
        LossSample(_SAPO, log_probs, None, mask, options),
        _cancelling_sample(gspo, dtype),
    ]


def _cancelling_sample(gspo: PolicyRows, dtype: torch.dtype) -> LossSample:
    """Make a sequence for which an fp32 sum would lose digits: log-ratios 1, 8e-4, -1 and advantages that cancel.

    Each lane of the kernel adds tokens that are one block, 256 or 128 tokens, apart.
    """
    signs = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).repeat_interleave(256)
    signs = torch.where(torch.arange(768) % 2 == 0, signs, -signs)
    old_log_probs = torch.where(signs == 0, -1.6e-3, -1 - signs / 2)
    policy = gspo._replace(
        offsets=torch.tensor([0, 768]),
        advantages=torch.where(signs == 0, 0.7, 1000 * signs).to(dtype),
        old_log_probs=old_log_probs.to(dtype),
    )
    log_probs = torch.where(signs == 0, -8e-4, -1 + signs / 2).to(dtype)
    return LossSample(Objective(), log_probs, None, torch.ones(768, dtype=torch.bool), policy)


def true_loss(sample: LossSample) -> PolicyResult:
    """Compute the loss, its derivatives and the metrics in float64, with the torch backend."""

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    policy = PolicyRows(*map(wide, sample.policy))
    return torch_backend.policy_forward(
        sample.log_probs.double(), wide(sample.entropy), sample.mask, policy, sample.objective
    )
