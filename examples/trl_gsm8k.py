"""Train Qwen2.5-0.5B-Instruct on GSM8K with GSPO in TRL.

The reward is 1 if the answer ends with "#### number" and the number is right, and 0.5 if the last number is right but
the marker is missing. Install: pip install -e '.[train,trl]'

    python examples/trl_gsm8k.py                   # one GPU; downloads the model (1 GB) and the dataset (5 MB)
    accelerate launch --config_file examples/accelerate/fsdp2.yaml --num_processes 8 examples/trl_gsm8k.py
    python examples/trl_gsm8k.py --toy             # no download: a tiny random model adds digits; a CPU is enough
"""

import argparse
import re

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer

INSTRUCTION = 'Think step by step. End your answer with "#### " and the number.'
NUMBER = r"-?\d[\d,]*\.?\d*"


def correct(completions, solution, **kwargs):
    """Return the reward of each completion, a list with one chat message."""
    return [score(completion[0]["content"], right) for completion, right in zip(completions, solution)]


def score(text, solution):
    """Compare the last number of a text with the number after "####" in GSM8K's solution."""
    numbers = re.findall(NUMBER, text)
    if not numbers or value(numbers[-1]) != value(solution.split("####")[1]):
        return 0.0
    return 1.0 if re.search(rf"#### {NUMBER}\W*$", text) else 0.5


def value(text):
    return float(text.replace(",", ""))


def with_prompt(row):
    """Make a prompt of chat messages. TRL passes the column "solution" to the reward."""
    return {"prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}], "solution": row["answer"]}


def toy():
    """Return a random model, its tokenizer and problems in GSM8K's format whose results are at most 5."""
    from gspo_kernels.integrations.reference_trainer.policy import demo_policy

    policy = demo_policy("012345+=#")
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message['content'].split('\n')[0] }}{% endfor %}"
    problems = [
        {"question": f"{a}+{b}+{c}=", "answer": f"{a} + {b} + {c} = {a + b + c}\n#### {a + b + c}"}
        for a in range(6)
        for b in range(6 - a)
        for c in range(6 - a - b)
    ]
    return policy.model, policy.tokenizer, Dataset.from_list(problems)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps; four of them train on one rollout")
    parser.add_argument("--length", type=int, default=512, help="most tokens of an answer")
    parser.add_argument("--output", default="runs/trl_gsm8k")
    parser.add_argument("--toy", action="store_true", help="a tiny random model and generated problems")
    options = parser.parse_args()

    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    if options.toy:
        model, tokenizer, problems = toy()
        sizes = {"per_device_train_batch_size": 32, "max_completion_length": 4, "learning_rate": 5e-3}
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)  # bf16=True runs it in bf16
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        problems = load_dataset("openai/gsm8k", "main", split="train")
        sizes = {"per_device_train_batch_size": 8, "max_completion_length": options.length, "learning_rate": 1e-6}
        sizes |= {"gradient_accumulation_steps": 4, "gradient_checkpointing": True}

    config = GSPOConfig(
        output_dir=options.output,
        num_generations=8,
        max_steps=options.steps,
        logging_steps=max(1, options.steps // 20),
        save_steps=100,
        bf16=gpu,
        use_cpu=not gpu,
        **sizes,
    )
    trainer = GSPOTrainer(
        model=model,
        reward_funcs=correct,
        args=config,
        train_dataset=problems.map(with_prompt, remove_columns=["question", "answer"]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        clipped = [row["clip_ratio/region_mean"] for row in trainer.state.log_history if "reward" in row]
        print(f"mean reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last; checkpoint in {options.output}")
        print(f"clipped answers: {sum(clipped) / len(clipped):.0%}")


if __name__ == "__main__":
    main()
