"""Measure what updates cost in TRL's trainer when answers differ in length, have advantage 0, or are clipped.

    python -m gspo_kernels.benchmarks skip

Stock TRL's GRPOTrainer and our GSPOTrainer train the same Qwen2, with random weights and gradient checkpointing, on the
same rollouts of random answers. A rollout has four updates of four micro-batches. Its time includes rewards, old
log-probs and the optimizer, but no generation. In each round, both trainers take all updates of a rollout, one after
the other. Their gradient norms must be equal, on a GPU those of the first update: later ones depend on clip decisions,
which bf16 changes. On a CPU, one thread computes in fp32, and times are processor seconds, so other work on the machine
counts little. On a GPU, the model has the size of Qwen2.5-1.5B, with fp32 weights and bf16 autocast.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from gspo_kernels.extras import needs

from ..measure import Record, Tick, destination, save
from .options import device_of, parser_of, positive, say

QWEN2: Record = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip  # numbers
QWEN2_1B = dict(
    vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip  # numbers
TINY = QWEN2 | dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
# Lengths of the answers, and the share of the prompts whose answers all have the same reward.
CASES = (("equal", 0.0), ("equal", 0.5), ("lognormal", 0.0), ("lognormal", 0.5))
PROMPTS = 8  # of a rollout
GROUP = 8  # answers to each prompt
LENGTH, LENGTH_ON_GPU = 192, 1024  # tokens of the longest answer
PROMPT = 24  # tokens of the longest prompt
MEDIAN, SPREAD = 0.35, 0.6  # of lognormal lengths: median over the longest answer, standard deviation of the logarithm
UPDATES = 4  # of a rollout
ACCUMULATION = 4  # micro-batches of an update
STOCK, OURS = "TRL", "GSPOTrainer"
DIFFER, DIFFER_IN_BF16 = 1e-3, 2e-2  # largest relative difference of a gradient norm


def lengths_of(kind: str, count: int, longest: int) -> list[int]:
    """The length of each answer of a rollout. Every call returns the same lengths."""
    if kind == "equal":
        return [longest] * count
    normal = torch.randn(count, generator=torch.Generator().manual_seed(7))
    return (longest * MEDIAN * (SPREAD * normal).exp()).clamp(2, longest).int().tolist()


def rollout_of(name: str, case: tuple[str, float], config: Record, length: int, device: torch.device) -> Record:
    """Train on one rollout. Return seconds, gradient norms, clipped and differentiated rows, tokens, peak memory."""
    from transformers import PrinterCallback, TrainerCallback

    on_gpu = device.type == "cuda"
    spent = {"total": 0.0, "generation": 0.0}

    def add_time(key: str, sign: int) -> None:
        if on_gpu:
            torch.cuda.synchronize()
        spent[key] += sign * (time.perf_counter() if on_gpu else time.process_time())

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            add_time("total", -1)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            add_time("total", 1)

    before = 0
    if on_gpu:
        gc.collect()  # the trainer before this one has reference cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    tokens = 0

    def count(embeddings: Any, inputs: tuple[torch.Tensor]) -> None:
        nonlocal tokens
        tokens += inputs[0].numel() * torch.is_grad_enabled()

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(name, case, config, length, folder, on_gpu)
        generate = trainer._generate

        def generation(*arguments: Any, **options: Any) -> Any:
            add_time("generation", -1)
            answers = generate(*arguments, **options)
            add_time("generation", 1)
            return answers

        trainer._generate = generation
        trainer.model.get_input_embeddings().register_forward_pre_hook(count)
        trainer.add_callback(Clock())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    record: Record = {
        "seconds": spent["total"] - spent["generation"],
        "norms": [row["grad_norm"] for row in logs],
        "clipped": [row["clip_ratio/region_mean"] for row in logs],
        "rows_run": statistics.fmean(row.get("gspo/rows_run", 1.0) for row in logs),
        "rows_differentiated": [row.get("gspo/rows_differentiated", 1.0) for row in logs],
        "tokens": tokens,  # of the forwards, with padding
    }
    return record | ({"peak_bytes": torch.cuda.max_memory_allocated() - before} if on_gpu else {})


def prompt_of(i: int) -> list[int]:
    """Ids of a prompt."""
    return [2 + i] * (1 + i * (PROMPT - 1) // (PROMPTS - 1))


def make_trainer(name: str, case: tuple[str, float], config: Record, length: int, folder: str, on_gpu: bool) -> Any:
    """Make stock TRL's trainer or ours. Both have the same settings, weights, prompts and random numbers."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
    from trl.trainer.grpo_trainer import GRPOTrainer

    from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer

    kind, share = case

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        pairs = zip(prompts, completion_ids, strict=True)
        return [1.0 if int(prompt) < share * PROMPTS else sum(ids) / len(ids) for prompt, ids in pairs]

    def random_answers(prompts: list[str], *_: Any) -> Record:
        generator = torch.Generator().manual_seed(1)
        answers = [
            torch.randint(2 + PROMPTS, config["vocab_size"], (size,), generator=generator).tolist()
            for size in lengths_of(kind, len(prompts), length)
        ]
        return {"prompt_ids": [prompt_of(int(x)) for x in prompts], "completion_ids": answers, "logprobs": None}

    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**config), dtype=torch.float32)
    digits = {"<pad>": 0, "<eos>": 1, **{str(i): 2 + i for i in range(PROMPTS)}}
    words: Any = Tokenizer(models.WordLevel(digits, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    args = GSPOConfig(
        folder, use_cpu=not on_gpu, bf16=on_gpu,
        per_device_train_batch_size=PROMPTS * GROUP // UPDATES // ACCUMULATION,
        gradient_accumulation_steps=ACCUMULATION, num_generations=GROUP, max_steps=UPDATES,
        max_completion_length=length, learning_rate=1e-6 if on_gpu else 3e-5, logging_steps=1, disable_tqdm=True,
        report_to=[], save_strategy="no",
    )  # fmt: skip  # related settings share a line
    return (GRPOTrainer if name == STOCK else GSPOTrainer)(
        model,
        reward,
        args,
        train_dataset=datasets.Dataset.from_list([{"prompt": str(i)} for i in range(PROMPTS)]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        rollout_func=random_answers,
    )


def compare(rounds: int, config: Record, length: int, device: torch.device, tick: Tick = say) -> Iterator[Record]:
    """Measure rollouts of both trainers for each case. Yield all results so far after every timed round."""
    compared, allowed = (UPDATES, DIFFER) if device.type == "cpu" else (1, DIFFER_IN_BF16)
    runs: dict[tuple[str, float], list[tuple[Record, Record]]] = {case: [] for case in CASES}
    for number in range(rounds + 1):
        for case in CASES:
            tick(f"{case[0]} lengths, {case[1]:.0%} of the prompts without a signal, round {number} of {rounds}")
            stock, ours = (rollout_of(name, case, config, length, device) for name in (STOCK, OURS))
            for norm, expected in list(zip(ours["norms"], stock["norms"], strict=True))[:compared]:
                if not abs(norm - expected) <= allowed * expected:
                    raise ValueError(f"a gradient norm of {OURS} is {norm}, and of {STOCK} {expected}")
            if number:
                runs[case].append((stock, ours))
        if number:
            on = {"model": config, "answers": PROMPTS * GROUP, "tokens": length, "updates": UPDATES, "rounds": number}
            yield {**on, "cases": [record_of(case, length, pairs) for case, pairs in runs.items()]}


def record_of(case: tuple[str, float], length: int, pairs: list[tuple[Record, Record]]) -> Record:
    """Summarize the rounds of a case: median time relative to stock TRL, and the rows and tokens that both ran."""
    stock, ours = pairs[-1]
    prompts = GROUP * sum(len(prompt_of(i)) for i in range(PROMPTS))
    return {
        "lengths": case[0],
        "without signal": case[1],
        "clipped": stock["clipped"],
        "rows_run": ours["rows_run"],
        "rows_differentiated": ours["rows_differentiated"],
        "real tokens": prompts + sum(lengths_of(case[0], PROMPTS * GROUP, length)),
        "stock seconds": statistics.median(x["seconds"] for x, _ in pairs),
        "update": statistics.median(y["seconds"] / x["seconds"] for x, y in pairs),
        **{f"{name} tokens": x["tokens"] for name, x in ((STOCK, stock), (OURS, ours))},
        **{f"{name} peak_bytes": x["peak_bytes"] for name, x in ((STOCK, stock), (OURS, ours)) if "peak_bytes" in x},
    }


def main() -> None:
    parser = parser_of("skip", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="timed rollouts of each trainer and case")
    parser.add_argument("--device", type=device_of, default=str(device_of(None)))
    options = parser.parse_args()
    with needs("gspo_kernels.benchmarks skip", "trl", "trl", "datasets"):
        for package in ("datasets", "trl"):
            importlib.import_module(package)
    device = options.device
    output = destination("skip", device, options.output, options.tiny)
    model, length = (QWEN2, LENGTH) if device.type == "cpu" else (QWEN2_1B, LENGTH_ON_GPU)
    if options.tiny:
        model, length = TINY, 16
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device.index or 0)
    for results in compare(1 if options.tiny else options.rounds, model, length, device):
        print(save("skip", device, results, output))
