"""Check the Triton kernels on small ragged batches against float64: loss, forward, backward, cache, gradient budget.

`run_check` needs a few MiB, and spends most of its time compiling kernels. It calls the backend's functions directly,
without autograd or collectives. `verdict.py` decides when it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...layout import accumulator
from ...metrics import NAMES
from ...objective import Objective
from ...tolerance import (
    DROPPED_MASS_ABSOLUTE,
    DROPPED_MASS_RELATIVE,
    FLOAT64_RELATIVE,
    LARGEST_ERROR,
    LIVE_GRADIENT_RELATIVE,
    LOG_PROB_RMS_ON_GPUS,
    LOSS_PER_ADVANTAGE,
    METRIC_ABSOLUTE,
    METRIC_RELATIVE,
    RELATIVE_RMS,
    ROW_COSINE,
)
from ...validation import dtype_name
from .. import pairs as pair_functions
from .. import torch as torch_backend
from .. import triton as kernels
from ..rows import Cache, HeadGradients, HeadRows, LiveTiles, NeedsGradient
from ..triton.launch import Launch, launches
from ..triton.tuning import tile_config
from .samples import (
    ROWS,
    SMALL_WORKSPACE,
    VOCAB,
    LossSample,
    loss_samples,
    make_sample,
    pairs_of,
    true_loss,
    truth_of,
    wide_head,
)

BUDGET = 0.01


class WrongResult(Exception):
    """A kernel's result exceeds an error limit."""


def run_check(device: torch.device, dtype: torch.dtype, subject: str) -> str | None:
    """Compare the Triton kernels with float64. Return which kernels are wrong and by how much, or None.

    The check runs in its own thread, isolated from the caller's modes: autocast, grad and inference mode, default
    device, dispatch modes, current stream. It does not touch the global random state.

    Args:
        device: where to run the kernels. On a CPU they must be interpreted.
        dtype: of hidden states and head or, for "loss", of log-probs.
        subject: "head": the kernels of all public functions; "loss": only the kernels of `policy_loss`.
    """
    results: list[str | None] = []
    thread = threading.Thread(target=lambda: results.append(_checked(device, dtype, subject)), daemon=True)
    thread.start()
    thread.join()
    return results[0] if results else "the thread of the check ended early"


def _checked(device: torch.device, dtype: torch.dtype, subject: str) -> str | None:
    """Run all stages. On failure, name the kernels since the last correct result, or the last one before an error."""
    stages: list[Callable[[], None]] = [partial(_check_loss, device, x) for x in loss_samples(accumulator(dtype))]
    with launches() as seen:
        try:
            with _on(device):
                if subject == "head":
                    samples = (_Check(device, dtype, kind, seen) for kind in ("plain", "skewed", "ragged"))
                    plain, skewed, ragged = samples
                    stages += [lambda: _check_many_tiles(device, dtype), plain.backward, plain.backward_from_cache]
                    stages += [skewed.budget, skewed.budget_from_cache, ragged.backward, plain.pairs, ragged.pairs]
                    if dtype == torch.float32:
                        stages.append(_Check(device, dtype, "ragged", seen, split="both").backward_from_cache)
                for stage in stages:
                    seen.clear()
                    stage()
        except WrongResult as wrong:
            names = dict.fromkeys(x.kernel.__name__ for x in seen)
            return f"{', '.join(names)}: {wrong}"
        except Exception as error:  # a kernel that does not load may raise any exception
            text = " ".join(str(error).split())[:300]
            return f"{seen[-1].kernel.__name__ if seen else 'no kernel'}: {type(error).__name__}: {text}"
    return None


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make `device` current, and allow the host to wait for it."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with torch.cuda.device(device):
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


# -- the loss


def _check_loss(device: torch.device, sample: LossSample) -> None:
    """Check loss, log-ratios, derivatives, clip decisions and metrics."""
    objective, log_probs, entropy, mask, policy = sample
    dtype = log_probs.dtype
    entropy = None if entropy is None else entropy.to(device)
    ours = kernels.policy_forward(log_probs.to(device), entropy, mask.to(device), _to(policy, device), objective)
    truth = true_loss(sample)
    size = max(policy.advantages.abs().mean().item(), abs(truth.loss.item()))
    _limit("loss", dtype, abs(ours.loss.item() - truth.loss.item()), LOSS_PER_ADVANTAGE * size)
    _compare("log-ratios", ours.log_ratio, truth.log_ratio, dtype)
    _check_decisions(ours.coefficient, truth.coefficient)
    _compare("d_log_probs", ours.coefficient, truth.coefficient, dtype)
    if objective.entropy_coef != 0:
        _compare("d_entropy", ours.entropy_coefficient, truth.entropy_coefficient, dtype)
    for name, x, expected in zip(NAMES, ours.metrics.tolist(), truth.metrics.tolist(), strict=True):
        _limit(f"metric {name}", dtype, abs(x - expected), METRIC_RELATIVE * abs(expected) + METRIC_ABSOLUTE)


def _check_decisions(ours: Tensor, truth: Tensor) -> None:
    """Check which tokens are clipped. The gradient of a clipped token is exactly 0."""
    wrong = int(((ours.cpu() != 0) != (truth != 0)).sum())
    if wrong:
        raise WrongResult(f"clip decisions of {wrong} of {len(truth)} tokens differ from float64")


# -- the head


class _Check:
    """Comparisons of the kernels with the true results of a sample.

    `launched` lists the launches that may have caused a wrong result. It is cleared after every correct result.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kind: str, launched: list[Launch], split: str = ""
    ) -> None:
        self.device = device
        self.launched = launched
        self.sample = make_sample(kind, dtype)
        self.head = _to(self.sample.head, device)._replace(split=split)
        self.dtype = self.head.kernel_dtype  # of the limits
        self.d_log_probs = self.sample.d_log_probs.to(device)

    def backward(self, cache: Cache | None = None) -> None:
        """Check log-probs, clip decisions, the exact gradients of all operands, and entropies if the sample has them.

        With a cache, there are several chunks of rows and slabs of columns.
        """
        head = self.head if cache is None else self.head._replace(workspace=SMALL_WORKSPACE)
        truth = self.sample.truth
        d_entropy = self.sample.d_entropy
        result, cached = kernels.forward_and_cache(head, cache=cache)
        _compare_rows("log-probs", result.log_probs, truth.log_probs, self.dtype)
        if d_entropy is not None:
            _compare_rows("entropies", result.entropy, truth.entropy, self.dtype)
            d_entropy = d_entropy.to(self.device)
        policy = _to(self.sample.policy, self.device)
        coefficient = kernels.policy_forward(result.log_probs, None, head.mask, policy, Objective()).coefficient
        _check_decisions(coefficient, self.sample.d_log_probs)
        self.launched.clear()
        gradients = kernels.head_backward(head, result, self.d_log_probs, d_entropy, _needs(head), None, cached)
        for name, ours, expected in self._gradients(gradients, truth.d_logits):
            _compare(f"d_{name}", ours, expected, self.dtype)

    def backward_from_cache(self) -> None:
        """Check a backward that recomputes some logits and takes others from the cache."""
        self.backward(self._cache())

    def budget(self, cache: Cache | None = None) -> None:
        """Check which cells are chosen, and the gradients computed from them. Chunks and slabs are as in `backward`."""
        head = self.head if cache is None else self.head._replace(workspace=SMALL_WORKSPACE)
        cell = kernels.cell_shape(self.head)
        assert cell is not None
        result, cached = kernels.forward_and_cache(head, True, cache)
        _compare_rows("log-probs", result.log_probs, self.sample.truth.log_probs, self.dtype)
        self.launched.clear()
        live, work = kernels.choose(head, result, self.d_log_probs, cached, cell, BUDGET)
        d_logits = self._live_entries(live, cell, work.dropped.item())
        self.launched.clear()
        gradients = kernels.head_backward(head, result, self.d_log_probs, None, _needs(head), live, cached)
        for name, ours, expected in self._gradients(gradients, d_logits):
            error = (ours - expected).norm() / expected.norm()
            allowed = LIVE_GRADIENT_RELATIVE[self.dtype]
            _limit(f"d_{name} of the live cells, relative", self.dtype, error.item(), allowed)

    def budget_from_cache(self) -> None:
        """Check a backward that takes some cells from the cache."""
        self.budget(self._cache())

    def pairs(self) -> None:
        """Check the logits of (row, id) pairs, and the gradients of all operands, against the torch backend in fp64."""
        pairs, d_logits = pairs_of(self.sample.head)
        exact = _to(self.sample.head, torch.device("cpu"), torch.float64)
        head, ours = self.head, _to(pairs, self.device)
        true_logits, slope = pair_functions.logits_at(torch_backend, exact, pairs)
        truth = pair_functions.gradients_at(torch_backend, exact, pairs, slope, d_logits, _needs(exact))
        logits, slope = pair_functions.logits_at(kernels, head, ours)
        _compare_rows("logits of pairs", logits, true_logits, self.dtype)
        self.launched.clear()
        d_pairs = d_logits.to(self.device, logits.dtype)
        gradients = pair_functions.gradients_at(kernels, head, ours, slope, d_pairs, _needs(head))
        for name, x, expected in zip(HeadGradients._fields, gradients, truth, strict=True):
            if x is not None and expected is not None:
                _compare(f"d_{name} of pairs", x, expected, self.dtype)

    def _cache(self) -> Cache:
        """A cache for all row blocks except the last."""
        block = tile_config(self.head, "forward").block_n
        return Cache((ROWS - 1) // block * block, self.head.mask)

    def _gradients(self, ours: HeadGradients, d_logits: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        """(name, our gradient, gradient computed from `d_logits`) for each operand, on the CPU."""
        head = self.sample.head
        truth = {"hidden": d_logits @ head.weight.double(), "weight": d_logits.t() @ head.hidden.double()}
        if head.adapter_hidden is not None and head.adapter_weight is not None:
            truth["bias"] = d_logits.sum(0)
            truth["adapter_hidden"] = d_logits @ head.adapter_weight.double()
            truth["adapter_weight"] = d_logits.t() @ head.adapter_hidden.double()
        return [(name, getattr(ours, name).cpu().double(), x) for name, x in truth.items()]

    def _live_entries(self, live: LiveTiles, cell: tuple[int, int], reported: float) -> Tensor:
        """Check that cells are dropped, and how much mass. Return d_logits [N, V] with 0 in dropped cells."""
        order = live.order.cpu()
        cells = live.cells.cpu()
        _, sparse = live.counts.tolist()
        if not sparse:
            raise WrongResult("no cells are dropped, although few have most of the mass")
        entries = cells.repeat_interleave(cell[0], 0).repeat_interleave(cell[1], 1)[:ROWS, :VOCAB]
        entries = torch.zeros_like(entries).index_copy_(0, order, entries)
        d_logits = self.sample.truth.d_logits
        dropped = (torch.where(entries, 0, d_logits.abs()).sum() / d_logits.abs().sum()).item()
        _limit("dropped mass", self.dtype, dropped, BUDGET)
        allowed = DROPPED_MASS_RELATIVE * reported + DROPPED_MASS_ABSOLUTE
        _limit("reported dropped mass", self.dtype, abs(dropped - reported), allowed)
        return torch.where(entries, d_logits, 0)


def _check_many_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """Check log-probs over more tiles than one step of the reduction covers."""
    head = wide_head(dtype)
    truth = truth_of(head, torch.zeros(head.hidden.shape[0]), None)
    _compare_rows("log-probs", kernels.head_forward(_to(head, device)).log_probs, truth.log_probs, dtype)


def _needs(head: HeadRows) -> NeedsGradient:
    return NeedsGradient(*(getattr(head, name) is not None for name in NeedsGradient._fields))


def _to(rows: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move the tensors of a named tuple to `device`. With a dtype, cast those of floating point."""

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype if x.is_floating_point() else None)

    return type(rows)(*map(move, rows))


# -- limits


def _compare_rows(name: str, ours: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Check log-probs or entropies. `dtype`: of hidden states and head."""
    if dtype.itemsize > 2:
        _compare(name, ours, truth, dtype)
        return
    rms = (ours.cpu().double() - truth).square().mean().sqrt()
    _limit(f"{name}, RMS", dtype, rms.item(), LOG_PROB_RMS_ON_GPUS)


def _compare(name: str, ours: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Check the largest error, the RMS error and the direction of each row. NaN fails every limit."""
    ours = ours.cpu().double()
    largest = truth.abs().max().item()
    unit = FLOAT64_RELATIVE if dtype == torch.float64 else LARGEST_ERROR[dtype] * torch.finfo(dtype).eps
    _limit(f"{name} {list(truth.shape)}", dtype, (ours - truth).abs().max().item(), unit * largest)
    rms = ((ours - truth).square().mean() / truth.square().mean()).sqrt().item()
    _limit(f"{name}, relative RMS", dtype, rms, RELATIVE_RMS[dtype])
    if truth.ndim == 2:
        rows = truth.norm(dim=1) > torch.finfo(dtype).eps * largest * truth.shape[1] ** 0.5
        cosine = torch.cosine_similarity(ours[rows], truth[rows], dim=1, eps=1e-300).min().item()
        _limit(f"{name}, 1 - cosine of a row", dtype, 1 - cosine, 1 - ROW_COSINE)


def _limit(name: str, dtype: torch.dtype, error: float, allowed: float) -> None:
    if not error <= allowed:
        raise WrongResult(f"{name} in {dtype_name(dtype)}: error {error:.2e}, allowed {allowed:.2e}")
