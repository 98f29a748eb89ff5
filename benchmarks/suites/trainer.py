"""A whole optimizer step of a real model, and the share of it that the loss takes.

    python -m gspo_kernels.benchmarks trainer

A Qwen2.5-0.5B of random weights (nothing is downloaded): body forward, loss and its gradients from the last hidden
states, body backward, AdamW. Only the loss differs between candidates, and the body is by far the larger part: this is
what changing the loss can and cannot do for a step. Random weights make a flat policy, so nothing could be dropped by a
gradient budget, and none is tried.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from .. import workloads
from ..candidates import Candidate
from ..measure import Record, destination, over, save, spread, turns
from ..peaked import Policy
from ..workloads import Head, Old, Workload
from . import bench
from .step import arguments, chosen_by, say, told

PARTS = ("body forward", "loss", "body backward", "optimizer")
QWEN25_05B: dict[str, Any] = dict(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    max_position_embeddings=32_768,
)
TINY = QWEN25_05B | dict(vocab_size=2000, hidden_size=56, intermediate_size=64, num_hidden_layers=2)
SEQUENCES, ZERO, CLIPPED = 8, 2, 1  # of zero advantage, beyond the clip


class Step:
    """One model, one batch, one optimizer; every candidate takes its steps on them in turn."""

    def __init__(self, config: dict[str, Any], tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Qwen2ForCausalLM(Qwen2Config(**config))
        self.model.to(device=device, dtype=dtype)  # pyright: ignore[reportCallIssue] - transformers hides its signature
        self.ids = torch.randint(config["vocab_size"], (SEQUENCES, tokens // SEQUENCES), device=device)
        # A rate so small that the policy stays where the old log-probs were taken.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, weight_decay=0.0)
        self.device = device
        self.w = self.batch()

    def batch(self) -> Workload:
        with torch.no_grad():
            hidden = self.hidden()
        flat, ids = hidden.flatten(0, 1), self.ids.flatten()
        policy = Policy(flat, self.weight, ids, torch.zeros(len(flat), device=self.device))
        return workloads.batch(policy, SEQUENCES, ZERO, CLIPPED, hidden.dtype)

    @property
    def weight(self) -> torch.Tensor:
        return self.model.lm_head.weight

    def hidden(self) -> torch.Tensor:
        return self.model.model(input_ids=self.ids, use_cache=False).last_hidden_state

    def run(self, candidate: Candidate, old: Old) -> dict[str, float]:
        """Seconds of every part."""
        taken: dict[str, float] = {}

        def timed(part: str, work: Callable[[], Any]) -> Any:
            start = self._now()
            result = work()
            taken[part] = self._now() - start
            return result

        self.optimizer.zero_grad(set_to_none=True)
        hidden = timed("body forward", self.hidden)
        leaf = hidden.detach().requires_grad_()
        timed("loss", lambda: candidate.loss(self.w, old, leaf, self.weight).backward())
        timed("body backward", lambda: hidden.backward(leaf.grad))
        timed("optimizer", self.optimizer.step)
        return taken

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure(step: Step, chosen: list[Candidate], rounds: int) -> list[Record]:
    """A record per candidate: errors of its gradients, seconds of the step and of its parts, and the loss's share. No
    seconds of one whose gradients are wrong."""
    w = step.w
    head = Head(w.hidden.shape[-1], len(w.weight))
    present = [candidate for candidate in chosen if not candidate.absent(head, w.hidden.dtype, step.device)]
    records: dict[str, Record] = {
        candidate.name: {"name": candidate.name, "against": candidate.against} for candidate in present
    }
    olds = {candidate.name: candidate.old(w) for candidate in present}
    bench.check(w, present, olds, records, say, w)
    right = [candidate for candidate in present if not records[candidate.name].keys() & bench.OUT]
    taken: dict[str, list[dict[str, float]]] = {candidate.name: [] for candidate in right}
    for turn, candidate in turns(right, rounds):
        say(f"{'warm-up' if turn == 0 else f'round {turn}'}: {candidate.name}")
        parts = step.run(candidate, olds[candidate.name])
        if turn:
            taken[candidate.name].append(parts)
    step_seconds = {name: [sum(parts.values()) for parts in runs] for name, runs in taken.items()}
    for name, runs in taken.items():
        parts = {part: spread([run[part] for run in runs]) for part in PARTS}
        shares = [run["loss"] / seconds for run, seconds in zip(runs, step_seconds[name], strict=True)]
        records[name] |= {**spread(step_seconds[name]), "parts": parts, "loss share": statistics.median(shares)}
        if bench.NAIVE in step_seconds:
            records[name]["over_naive"] = over(step_seconds[name], step_seconds[bench.NAIVE])
    return list(records.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks trainer", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--tokens", type=told(bench.tokens_of), help="of the batch")
    arguments(parser)
    options = parser.parse_args()
    device = options.device
    on_gpu = device.type == "cuda"
    tokens, rounds = options.tokens or (16_384 if on_gpu else 1024), options.rounds or (10 if on_gpu else 5)
    config, output = QWEN25_05B, destination("trainer", device, options.output, options.tiny)
    if options.tiny:
        config, tokens, rounds = TINY, 64, 1
    chosen = [
        candidate
        for candidate in chosen_by(parser, options.against)
        if not candidate.per_token and not candidate.budget and candidate.against != "compile"
    ]
    step = Step(config, tokens, device, getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32")))
    parameters = sum(p.numel() for p in step.model.parameters())
    results = {"model": "Qwen2.5-0.5B" if config is QWEN25_05B else "tiny", "parameters": parameters}
    results |= {
        "tokens": step.w.rows,
        "dtype": str(step.w.hidden.dtype).removeprefix("torch."),
        "steps": measure(step, chosen, rounds),
    }
    print(save("trainer", device, results, output))
