"""Measure peak memory and time of a step of TRL's GRPOTrainer, each implementation in a process of its own.

    python -m gspo_kernels.benchmarks trainer                      25 minutes on two idle cores
    python -m gspo_kernels.benchmarks trainer --dtype bfloat16     replaces only this part of the JSON file

The model is a Qwen2 with random weights, so nothing is downloaded, and its completions are random. A step is TRL's
`training_step`: forward, loss and backward, without the optimizer's memory. Every token has a gradient. The gradient
norm must equal that of full logits. The fastest of the timed steps counts, because other work on the machine only slows
a step.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from types import MethodType
from typing import Any

import torch

from gspo_kernels.extras import needs

from ..measure import Record, Tick, destination, fresh, peak_bytes, save_part, turns
from .options import DTYPES, device_of, parser_of, positive, say

QWEN2: Record = dict(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=2, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip  # numbers
TINY = QWEN2 | dict(vocab_size=2000, hidden_size=56, intermediate_size=64)
FULL, OURS = "naive GSPO", "ours"
CAST = "TRL cast_lm_head_to_fp32"  # TRL 1.16 keeps its fused head, and multiplies fp32 copies of the operands
NAMES = (FULL, "TRL fused head", CAST, OURS, "ours, all in the cache")
SEQUENCES, PROMPT, LENGTH = 8, 8, 256  # completions of the prompt, and tokens of the prompt and of each
STEPS = 2  # timed steps in a process, after one untimed step
DIFFER = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}  # largest relative difference of a norm


def names_of(dtype: str) -> tuple[str, ...]:
    """The implementations to measure. In fp32, the cast to fp32 is left out, because it changes nothing."""
    return tuple(name for name in NAMES if name != CAST or dtype != "float32")


def check_packages(user: str) -> None:
    """Raise an error that names the missing package, before the first process is started."""
    with needs(user, "trl", "trl", "datasets"):
        for package in ("transformers", "datasets", "trl"):
            importlib.import_module(package)


def step_of(name: str, config: Record, length: int, dtype: str, device: str) -> Record:
    """Take steps with one implementation. Return the seconds, peak bytes and results of each. Needs a new process."""
    from gspo_kernels.integrations.trl import accelerate_trainer

    size = SEQUENCES * length * config["vocab_size"] * getattr(torch, dtype).itemsize  # of all exponentials
    cache_mib = -(-size // 2**20) if "cache" in name else 0
    place = torch.device(device)
    steps = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, length, dtype, folder, on_cpu=place.type == "cpu", cast=name == CAST)
        step = trainer.training_step

        def measured(*arguments: Any) -> Any:
            losses = []
            start = time.perf_counter()
            peak = peak_bytes(lambda: losses.append(step(*arguments)), place)
            loss = losses[0].item()  # waits for a GPU
            steps.append({"seconds": time.perf_counter() - start, "peak_bytes": peak, "loss": loss})
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


def make_trainer(config: Record, length: int, dtype: str, folder: str, on_cpu: bool, cast: bool) -> Any:
    """Make a GRPOTrainer with GSPO's settings and random completions of `length` tokens."""
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
        folder, use_cpu=on_cpu, bf16=False, per_device_train_batch_size=SEQUENCES, num_generations=SEQUENCES,
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
    """Make a forward that computes full logits, as TRL did before 1.15. TRL 1.16 has no option for it."""
    from trl.trainer.utils import FusedCausalLMOutput, selective_log_softmax_and_entropy

    def from_logits(_: Any, labels: Any = None, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return forward(labels=labels, **inputs)
        keep = int((labels != -100).any(0).sum())  # only completions are scored, and their logits
        logits = forward(**inputs, logits_to_keep=keep + 1).logits[:, :-1]
        lp, entropy = selective_log_softmax_and_entropy(logits, labels[:, -keep:], entropy_requires_grad=False)
        return FusedCausalLMOutput(log_probs=lp, entropy=entropy)

    return from_logits


def compare(
    names: tuple[str, ...],
    rounds: int,
    dtype: str,
    device: torch.device,
    config: Record = QWEN2,
    length: int = LENGTH,
    tick: Tick = say,
) -> Record:
    """Measure steps of the named implementations, which must include full logits, in `rounds` processes each."""
    runs: dict[str, list[Record]] = {name: [] for name in names}
    setting: Record = dict(config=config, length=length, dtype=dtype, device=str(device))
    for turn, name in turns(list(names), rounds - 1):
        tick(f"{name}, round {turn + 1} of {rounds}")
        run = fresh("suites.trainer", "step_of", name=name, **setting)
        if run is None:
            raise MemoryError(f"{name} ran out of memory")
        runs[name].append(run)
    on = {"model": config, "tokens": SEQUENCES * length, "sequences": SEQUENCES, "dtype": dtype}
    return {**on, "steps": [record_of(name, runs, dtype) for name in names]}


def record_of(name: str, runs: dict[str, list[Record]], dtype: str) -> Record:
    """Summarize runs: largest peak, seconds of the fastest step, loss, and norm of the gradients."""
    last, base = (runs[x][0]["steps"][-1] for x in (name, FULL))
    steps, full = ([step for run in runs[x] for step in run["steps"]] for x in (name, FULL))
    seconds, of_full = (min(step["seconds"] for step in each) for each in (steps, full))
    record: Record = {key: runs[name][0][key] for key in ("gradient_bytes", "cache_mib")}
    record |= {"name": name, "peak_bytes": max(step["peak_bytes"] for step in steps), "runs": len(steps)}
    record |= {"loss": last["loss"], "norm_over_full": last["norm"] / base["norm"]}
    record |= {"seconds": seconds, "over_naive": {"ratio": seconds / of_full}}
    if not abs(record["norm_over_full"] - 1) <= DIFFER[dtype]:
        record["wrong"] = "its gradient norm differs from that of full logits"
    return record


def main() -> None:
    parser = parser_of("trainer", __doc__)
    parser.add_argument("--rounds", type=positive, default=3, help="processes per implementation")
    parser.add_argument("--dtype", choices=DTYPES, help="of the model: default float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", type=device_of, default=str(device_of(None)))
    options = parser.parse_args()
    check_packages("gspo_kernels.benchmarks trainer")
    device = options.device
    tiny = {"config": TINY, "length": 16} if options.tiny else {}
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    output = destination("trainer", device, options.output, options.tiny)
    names = (FULL, OURS) if options.tiny else names_of(dtype)
    results = compare(names, options.rounds, dtype, device, **tiny)
    print(save_part("trainer", device, dtype, results, output))
