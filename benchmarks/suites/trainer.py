"""Measure peak memory and time of a step of TRL's GRPOTrainer, each implementation in a process of its own.

    python -m gspo_kernels.benchmarks trainer    15 minutes on two idle cores; with --memory, times are not recorded

The model is a Qwen2 with random weights, so nothing is downloaded, and its completions are random. A step is TRL's
`training_step`: forward, loss and backward, without the optimizer's memory. Every token has a gradient. The norm of the
gradients must agree with that of full logits. Of the timed steps, the fastest counts: other work on the machine only
slows a step.
"""

from __future__ import annotations

import tempfile
import time
from types import MethodType
from typing import Any

import torch

from gspo_kernels.extras import needs

from ..measure import Record, destination, fresh, peak_bytes, save, turns
from .options import DTYPES, parser_of, positive, say

QWEN2: Record = dict(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=2, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip  # numbers
TINY = QWEN2 | dict(vocab_size=2000, hidden_size=56, intermediate_size=64)
FULL, OURS = "naive GSPO", "ours"
CAST = "TRL cast_lm_head_to_fp32"  # TRL 1.16 keeps its fused head, and multiplies fp32 copies of the operands
NAMES = (FULL, "TRL fused head", CAST, OURS, "ours, all in the cache")
SEQUENCES, PROMPT = 8, 8  # completions of the prompt, and its tokens
STEPS = 2  # timed steps in a process, after one that is not
CPU = torch.device("cpu")
DIFFER = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}  # largest relative difference of a norm


def step_of(name: str, config: Record, length: int, dtype: str) -> Record:
    """Take steps with one implementation. Return the seconds, peak bytes and results of each. Needs a new process."""
    with needs("python -m gspo_kernels.benchmarks trainer", "trl", "trl", "datasets"):
        from gspo_kernels.integrations.trl import accelerate_trainer
    size = SEQUENCES * length * config["vocab_size"] * getattr(torch, dtype).itemsize  # of all exponentials
    cache_mib = -(-size // 2**20) if "cache" in name else 0
    steps: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, length, dtype, folder, cast=name == CAST)
        step = trainer.training_step

        def measured(*arguments: Any) -> Any:
            losses, start = [], time.perf_counter()
            peak = peak_bytes(lambda: losses.append(step(*arguments)), CPU)
            steps.append({"seconds": time.perf_counter() - start, "peak_bytes": peak, "loss": losses[0].item()})
            return losses[0]

        if name == FULL:
            trainer.model.forward = MethodType(full_logits(trainer.model.forward), trainer.model)
        elif name.startswith(OURS):
            accelerate_trainer(trainer, cache_mib=cache_mib)
        trainer.training_step = measured
        trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    gradients = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    timed = [step | {"norm": norm} for step, norm in zip(steps, norms, strict=True)][1:]  # the first makes the rollout
    return {"steps": timed, "gradient_bytes": gradients, "cache_mib": cache_mib}


def make_trainer(config: Record, length: int, dtype: str, folder: str, cast: bool) -> Any:
    """Return a GRPOTrainer with GSPO's settings and random completions of `length` tokens."""
    import datasets
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    def rollout(*_: Any) -> Record:
        ids = torch.randint(2, config["vocab_size"], (SEQUENCES, PROMPT + length)).tolist()
        return {"prompt_ids": [x[:PROMPT] for x in ids], "completion_ids": [x[PROMPT:] for x in ids], "logprobs": None}

    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**config)).to(getattr(torch, dtype))
    words: Any = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    args = GRPOConfig(
        folder, use_cpu=True, bf16=False, per_device_train_batch_size=SEQUENCES, num_generations=SEQUENCES,
        num_iterations=STEPS + 1, max_steps=STEPS + 1, max_completion_length=length, cast_lm_head_to_fp32=cast,
        importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, learning_rate=1e-9,
        optim="sgd", gradient_checkpointing=False, logging_steps=1, disable_tqdm=True, report_to=[], save_strategy="no",
    )  # fmt: skip  # related settings share a line
    return GRPOTrainer(
        model,
        lambda completions, **_: [float(i % 3) for i in range(len(completions))],
        args,
        train_dataset=datasets.Dataset.from_list([{"prompt": "x"}] * SEQUENCES),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        rollout_func=rollout,
    )


def full_logits(forward: Any) -> Any:
    """Return a forward that makes full logits, as TRL did before 1.15. TRL 1.16 has no option for it."""
    from trl.trainer.utils import FusedCausalLMOutput, selective_log_softmax_and_entropy

    def from_logits(_: Any, labels: Any = None, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return forward(labels=labels, **inputs)
        keep = int((labels != -100).any(0).sum())  # only completions are scored, and their logits
        logits = forward(**inputs, logits_to_keep=keep + 1).logits[:, :-1]
        lp, entropy = selective_log_softmax_and_entropy(logits, labels[:, -keep:], entropy_requires_grad=False)
        return FusedCausalLMOutput(log_probs=lp, entropy=entropy)

    return from_logits


def measure(names: tuple[str, ...], rounds: int, time_too: bool = True, **setting: Any) -> list[Record]:
    """Return a record per implementation: largest peak, seconds of the fastest step, loss and norm of the gradients."""
    runs: dict[str, list[Record]] = {name: [] for name in names}
    for turn, name in turns(list(names), rounds - 1):
        run = fresh("suites.trainer", "step_of", name=name, **setting)
        if run is None:
            raise MemoryError(f"{name} ran out of memory")
        shown = [f"{x['seconds']:.2f} s, {x['peak_bytes'] / 2**20:,.0f} MiB" for x in run["steps"]]
        say(f"{name}, round {turn + 1} of {rounds}: {'; '.join(shown)}")
        runs[name].append(run)
    best = {name: min(x["seconds"] for run in each for x in run["steps"]) for name, each in runs.items()}
    base, records = runs[FULL][0]["steps"][-1]["norm"], []
    for name, each in runs.items():
        last, peaks = each[0]["steps"][-1], [x["peak_bytes"] for run in each for x in run["steps"]]
        record: Record = {"name": name, "peak_bytes": max(peaks), "runs": len(peaks), "loss": last["loss"]}
        record |= {key: each[0][key] for key in ("gradient_bytes", "cache_mib")} | {
            "norm_over_full": last["norm"] / base
        }
        if time_too:
            record |= {"seconds": best[name], "over_naive": {"ratio": best[name] / best[FULL]}}
        if not abs(record["norm_over_full"] - 1) <= DIFFER[setting["dtype"]]:
            record["wrong"] = "its gradients have another norm than those of full logits"
        records.append(record)
    return records


def main() -> None:
    parser = parser_of("trainer", __doc__)
    parser.add_argument("--rounds", type=positive, default=3, help="processes per implementation")
    parser.add_argument("--memory", action="store_true", help="record no times, because other work slows this machine")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model (default float32)")
    options = parser.parse_args()
    config, length = (TINY, 16) if options.tiny else (QWEN2, 256)
    output = destination("trainer", CPU, options.output, options.tiny or options.dtype != "float32")
    names = (FULL, OURS) if options.tiny else tuple(x for x in NAMES if x != CAST or options.dtype != "float32")
    results = {"model": config, "tokens": SEQUENCES * length, "sequences": SEQUENCES, "dtype": options.dtype}
    setting: Record = dict(config=config, length=length, dtype=options.dtype, time_too=not options.memory)
    results["steps"] = measure(names, options.rounds, **setting)
    print(save("trainer", CPU, results, output))
