"""Train a language model with GSPO in TRL: sort three letters.

The script downloads nothing unless you pass the hub id or folder of a model. Install: pip install -e '.[train,trl]'

    python examples/trl_gspo.py                                      # a tiny random model; minutes on a CPU
    python examples/trl_gspo.py --model Qwen/Qwen2.5-0.5B-Instruct   # one GPU
    accelerate launch --config_file examples/accelerate/ddp.yaml --num_processes 8 examples/trl_gspo.py --model ...
"""

import argparse

import torch
from datasets import Dataset

from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a model of the hub or a folder (default: a Qwen3 with 76,000 random weights)")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()


def letters_in_place(completions, answer, **kwargs):
    """Return the share of letters in the right place for each completion."""
    pairs = zip(completions, answer)
    return [sum(a == b for a, b in zip(text, right)) / max(len(text), len(right)) for text, right in pairs]


words = [a + b + c for a in "abcdef" for b in "abcdef" for c in "abcdef"]
prompts = Dataset.from_list([{"prompt": f"sort {word}:", "answer": "".join(sorted(word))} for word in words])

torch.manual_seed(0)
tiny = demo_policy()
gpu = torch.cuda.is_available()
config = GSPOConfig(  # TRL's GRPOConfig with the paper's clip window and four updates per rollout
    output_dir="runs/trl_gspo",
    learning_rate=1e-6 if options.model else 3e-3,
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=6,
    max_steps=options.steps,
    logging_steps=max(1, options.steps // 10),
    bf16=gpu,
    use_cpu=not gpu,
)
trainer = GSPOTrainer(
    model=options.model or tiny.model,
    reward_funcs=letters_in_place,
    args=config,
    train_dataset=prompts,
    processing_class=None if options.model else tiny.tokenizer,
)
trainer.train()
if trainer.is_world_process_zero():
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"mean reward: {rewards[0]:.2f} in the first tenth of the updates, {rewards[-1]:.2f} in the last")
