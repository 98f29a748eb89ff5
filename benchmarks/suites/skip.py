"""Measure what a step of TRL's trainer costs if the answers to some prompts have advantage 0, and skip the model.

    python -m gspo_kernels.benchmarks skip

Stock TRL's GRPOTrainer and our GSPOTrainer train the same Qwen2, with random weights, on the same rollouts. A rollout
has four updates. Its time includes generation by transformers, rewards, old log-probs, and the optimizer. In each
round, both trainers take all updates of a rollout, one after the other. The gradient norms of all updates must equal
stock TRL's. On a CPU, one thread computes in fp32, and times are processor seconds, so other work on the machine counts
little. On a GPU, the model has the size of Qwen2.5-1.5B and bf16 weights, and answers are random tokens that take no
time to generate: transformers' generation is far slower than an inference engine's.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..measure import Record, Tick, destination, save
from .options import device_of, parser_of, positive, say
from .trainer import check_packages

QWEN2: Record = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip  # numbers
QWEN2_1B = dict(
    vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip  # numbers
TINY = QWEN2 | dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
SHARES = (0.0, 0.25, 0.5, 0.75)  # of the prompts, whose answers all have the same reward
PROMPTS = 8  # of a rollout
GROUP = 8  # answers to each prompt
LENGTH, LENGTH_ON_GPU = 64, 512  # tokens of an answer
UPDATES = 4  # of a rollout
STOCK, OURS = "TRL", "GSPOTrainer"
DIFFER, DIFFER_IN_BF16 = 1e-4, 2e-2  # largest relative difference of a gradient norm


def rollout_of(name: str, share: float, config: Record, length: int, device: torch.device) -> Record:
    """Train on one rollout. Return seconds, in total and of generation, gradient norms, rows that ran, peak memory."""
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
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(name, share, config, length, folder, on_gpu)
        generate = trainer._generate

        def generation(*arguments: Any, **options: Any) -> Any:
            add_time("generation", -1)
            answers = generate(*arguments, **options)
            add_time("generation", 1)
            return answers

        trainer._generate = generation
        trainer.add_callback(Clock())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    rows_run = statistics.fmean(row.get("gspo/rows_run", 1.0) for row in logs)
    record: Record = {**spent, "norms": [row["grad_norm"] for row in logs], "rows_run": rows_run}
    return record | ({"peak_bytes": torch.cuda.max_memory_allocated() - before} if on_gpu else {})


def make_trainer(name: str, share: float, config: Record, length: int, folder: str, on_gpu: bool) -> Any:
    """Make stock TRL's trainer or ours. Both have the same settings, weights, prompts and random numbers."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
    from trl.trainer.grpo_trainer import GRPOTrainer

    from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        pairs = zip(prompts, completion_ids, strict=True)
        return [1.0 if int(prompt) < share * PROMPTS else float(sum(ids)) for prompt, ids in pairs]

    def random_answers(prompts: list[str], *_: Any) -> Record:
        answers = torch.randint(2, config["vocab_size"], (len(prompts), length), generator=torch.manual_seed(1))
        ids = [[2 + int(prompt)] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": answers.tolist(), "logprobs": None}

    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**config), dtype=dtype)
    digits = {"<pad>": 0, "<eos>": 1, **{str(i): 2 + i for i in range(PROMPTS)}}
    words: Any = Tokenizer(models.WordLevel(digits, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    # In bf16, rounding changes ratios by more than GSPO's clip window, and differently in every run. With a wide window
    # nothing is clipped, so both trainers have the same gradients.
    window: Record = {"epsilon": 0.2, "epsilon_high": 0.2} if on_gpu else {}
    args = GSPOConfig(
        folder, use_cpu=not on_gpu, bf16=False, per_device_train_batch_size=PROMPTS * GROUP // UPDATES,
        num_generations=GROUP, steps_per_generation=UPDATES, max_steps=UPDATES, max_completion_length=length,
        learning_rate=1e-9, gradient_checkpointing=False, logging_steps=1, disable_tqdm=True, report_to=[],
        save_strategy="no", **window,
    )  # fmt: skip  # related settings share a line
    return (GRPOTrainer if name == STOCK else GSPOTrainer)(
        model,
        reward,
        args,
        train_dataset=datasets.Dataset.from_list([{"prompt": str(i)} for i in range(PROMPTS)]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        rollout_func=random_answers if on_gpu else None,
    )


def compare(rounds: int, config: Record, length: int, device: torch.device, tick: Tick = say) -> Iterator[Record]:
    """Measure rollouts of both trainers for each share. Yield all results so far after every timed round."""
    allowed = DIFFER if device.type == "cpu" else DIFFER_IN_BF16
    runs: dict[float, list[tuple[Record, Record]]] = {share: [] for share in SHARES}
    for number in range(rounds + 1):
        for share in SHARES:
            tick(f"{share:.0%} of the prompts without a signal, round {number} of {rounds}")
            stock, ours = (rollout_of(name, share, config, length, device) for name in (STOCK, OURS))
            for norm, expected in zip(ours["norms"], stock["norms"], strict=True):
                if not abs(norm - expected) <= allowed * expected:
                    raise ValueError(f"a gradient norm of {OURS} is {norm}, and of {STOCK} {expected}")
            if number:
                runs[share].append((stock, ours))
        if number:
            on = {"model": config, "answers": PROMPTS * GROUP, "tokens": length, "updates": UPDATES, "rounds": number}
            yield {**on, "shares": [record_of(share, pairs) for share, pairs in runs.items()]}


def record_of(share: float, pairs: list[tuple[Record, Record]]) -> Record:
    """Medians over rounds of our time divided by stock TRL's, without and with generation."""
    updates = [[x["total"] - x["generation"] for x in pair] for pair in pairs]
    return {
        "without signal": share,
        "rows_run": pairs[0][1]["rows_run"],
        "stock seconds": statistics.median(stock for stock, _ in updates),
        "update": statistics.median(ours / stock for stock, ours in updates),
        "with generation": statistics.median(ours["total"] / stock["total"] for stock, ours in pairs),
        **{
            f"{name} peak_bytes": x["peak_bytes"]
            for name, x in zip((STOCK, OURS), pairs[-1], strict=True)
            if "peak_bytes" in x
        },
    }


def main() -> None:
    parser = parser_of("skip", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="timed rollouts of each trainer and share")
    parser.add_argument("--device", type=device_of, default=str(device_of(None)))
    options = parser.parse_args()
    check_packages("gspo_kernels.benchmarks skip")
    device = options.device
    output = destination("skip", device, options.output, options.tiny)
    model, length = (QWEN2, LENGTH) if device.type == "cpu" else (QWEN2_1B, LENGTH_ON_GPU)
    if options.tiny:
        model, length = TINY, 8
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device.index or 0)
    for results in compare(1 if options.tiny else options.rounds, model, length, device):
        print(save("skip", device, results, output))
