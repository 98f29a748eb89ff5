"""Measure the time of an optimizer step of a model, and the share of the loss in it.

    python -m gspo_kernels.benchmarks trainer

The model is a Qwen2.5-0.5B with random weights, so nothing is downloaded. A step is the forward of the transformer, the
loss with its gradients of last hidden states and head, the transformer's backward, and AdamW. Candidates differ only in
the loss. Random weights give nearly uniform probabilities. A gradient budget could leave out nothing, so none is used.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from .. import workloads
from ..candidates import Candidate
from ..measure import Record, destination, over, save, spread, turns
from ..peaked import Policy
from ..workloads import Head, Old
from . import bench
from .options import add_comparison, parser_of, say

QWEN25_05B: dict[str, Any] = dict(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32_768,
)  # fmt: skip  # numbers
TINY = QWEN25_05B | dict(vocab_size=2000, hidden_size=56, intermediate_size=64, num_hidden_layers=2)
SEQUENCES, ZERO, CLIPPED = 8, 2, 1  # 8 sequences, of which 2 have advantage 0 and 1 is clipped


class Step:
    """One model, batch and optimizer, on which the candidates take steps in turn."""

    def __init__(self, config: dict[str, Any], tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Qwen2ForCausalLM(Qwen2Config(**config))
        self.model.to(device=device, dtype=dtype)  # pyright: ignore[reportCallIssue] - transformers hides its signature
        self.ids = torch.randint(config["vocab_size"], (SEQUENCES, tokens // SEQUENCES), device=device)
        # The learning rate is so small that the policy remains the one that computed the old log-probs.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, weight_decay=0.0)
        self.weight: Tensor = self.model.lm_head.weight
        with torch.no_grad():
            hidden = self.hidden().flatten(0, 1)
        policy = Policy(hidden, self.weight, self.ids.flatten(), torch.zeros(len(hidden), device=device))
        self.w = workloads.batch(policy, SEQUENCES, ZERO, CLIPPED, dtype=dtype)

    def hidden(self) -> Tensor:
        """Return the last hidden states [S, L, H]."""
        return self.model.model(input_ids=self.ids, use_cache=False).last_hidden_state

    def run(self, candidate: Candidate, old: Old) -> tuple[float, float]:
        """Take a step. Return its seconds, and the seconds of loss, d_hidden and d_weight."""
        self.optimizer.zero_grad(set_to_none=True)
        start = self._now()
        hidden = self.hidden()
        leaf = hidden.detach().requires_grad_()
        before = self._now()
        candidate.loss(self.w, old, leaf, self.weight).backward()
        loss = self._now() - before
        hidden.backward(leaf.grad)
        self.optimizer.step()
        return self._now() - start, loss

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure(step: Step, chosen: list[Candidate], rounds: int) -> list[Record]:
    """Return a record per candidate: errors and, unless they are too large, the seconds of the step and of the loss."""
    w, head = step.w, Head(step.w.hidden.shape[-1], len(step.weight))
    present = [candidate for candidate in chosen if not candidate.absent(head, w.hidden.dtype, step.device)]
    olds = {candidate.name: candidate.old(w) for candidate in present}
    records: dict[str, Record] = {c.name: {"name": c.name, "against": c.against} for c in present}
    bench.check(w, present, olds, records, say, w)
    right = [candidate for candidate in present if not records[candidate.name].keys() & {*bench.NOT_TIMED}]
    taken: dict[str, list[tuple[float, float]]] = {candidate.name: [] for candidate in right}
    for turn, candidate in turns(right, rounds):
        seconds = step.run(candidate, olds[candidate.name])
        say(f"{candidate.name}, {f'round {turn} of {rounds}' if turn else 'warm-up'}: {seconds[0]:.2f} s")
        if turn:
            taken[candidate.name].append(seconds)
    totals = {name: [total for total, _ in runs] for name, runs in taken.items()}
    for name, runs in taken.items():
        share, loss = statistics.median(loss / total for total, loss in runs), spread([loss for _, loss in runs])
        records[name] |= {**spread(totals[name]), "parts": {"loss": loss}, "loss share": share}
        if bench.NAIVE in totals:
            ratio = records[name]["over_naive"] = over(totals[name], totals[bench.NAIVE])
            print(f"{name}: {ratio['ratio']:.2f} times naive GSPO's step; the loss takes {share:.0%} of it")
    return list(records.values())


def main() -> None:
    parser = parser_of("trainer", __doc__)
    add_comparison(parser, bench.candidates)
    options = parser.parse_args()
    device, on_gpu = options.device, options.device.type == "cuda"
    config, tokens, rounds = (QWEN25_05B, 16_384, 10) if on_gpu else (QWEN25_05B, 1024, 5)
    if options.tiny:
        config, tokens, rounds = TINY, 64, 1
    chosen = options.against or bench.candidates("torch" if options.tiny else None)
    chosen = [c for c in chosen if not (c.per_token or c.budget or c.against == "compile")]
    trial = bool(options.tiny or options.against or options.dtype)
    output = destination("trainer", device, options.output, trial)
    step = Step(config, tokens, device, getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32")))
    results = {
        "model": "tiny" if options.tiny else "Qwen2.5-0.5B",
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "tokens": step.w.rows,
        "dtype": str(step.w.hidden.dtype).removeprefix("torch."),
        "steps": measure(step, chosen, options.rounds or rounds),
    }
    print(save("trainer", device, results, output))
