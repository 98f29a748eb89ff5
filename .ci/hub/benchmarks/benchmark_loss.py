"""Time loss and gradients, and assert that the gradients are as close to float64 as we promise."""

from __future__ import annotations

from typing import Any

import torch
from kernels.benchmark import Benchmark
from torch import Tensor


class FusedLossBenchmark(Benchmark):
    seed = 0
    dtype = torch.bfloat16  # of hidden states and weight
    tokens = 256
    width = 256
    vocab = 4099  # not a multiple of any tile size

    def setup(self) -> None:
        self.hidden = torch.randn(4, self.tokens // 4, self.width, device=self.device).to(self.dtype)
        self.weight = (3 / self.width**0.5 * torch.randn(self.vocab, self.width, device=self.device)).to(self.dtype)
        self.target_ids = torch.randint(self.vocab, (4, self.tokens // 4), device=self.device)
        self.advantages = torch.tensor([1.0, -1.0, 0.5, -0.5], device=self.device)
        # Log-ratios far from the bounds of the clip window. The third sequence is clipped.
        log_ratios = torch.tensor([[1e-4], [2e-4], [8e-4], [-2e-4]], dtype=torch.float64, device=self.device)
        exact, _ = self.kernel.reference.token_log_probs(
            self.hidden.double().flatten(0, 1), self.weight.double(), self.target_ids.flatten()
        )
        self.old = (exact.view_as(self.target_ids) - log_ratios).float()
        # Not in a method `verify_loss`: the runner would time it and call the result a speedup.
        self.check_gradients()

    def gradients(self, loss: Any, dtype: torch.dtype) -> Tensor:
        """Return the gradients of hidden states and weight in one vector."""
        operands = [x.to(dtype).requires_grad_() for x in (self.hidden, self.weight)]
        wide = torch.promote_types(dtype, torch.float32)
        options = {"old_log_probs": self.old.to(wide), "objective": self.kernel.Objective()}
        out = loss(*operands, self.target_ids, self.advantages.to(wide), **options)
        return torch.cat([x.flatten() for x in torch.autograd.grad(out.loss, operands)])

    def benchmark_loss(self) -> None:
        self.out = self.gradients(self.kernel.gspo_fused_loss, self.dtype)

    def check_gradients(self) -> None:
        """Raise an AssertionError if an error is larger than 2 (PyTorch's error with fp32 logits + eps max|truth|)."""
        ours = self.gradients(self.kernel.gspo_fused_loss, self.dtype)
        truth = self.gradients(self.kernel.reference.gspo_reference_loss, torch.float64)
        plain = self.gradients(self.kernel.reference.gspo_reference_loss, torch.float32).to(self.dtype)
        split = self.hidden.numel()
        for name, part in (("d_hidden", slice(split)), ("d_weight", slice(split, None))):
            exact = truth[part]
            error, of_plain = ((x[part].double() - exact).abs().max() for x in (ours, plain))
            allowed = 2 * (of_plain + torch.finfo(self.dtype).eps * exact.abs().max())
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        assert not ours[:split].view_as(self.hidden)[2].any(), "the clipped sequence has a gradient"
