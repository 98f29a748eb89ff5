"""Train a language model by GSPO in TRL to sort three letters.

Pass the hub id or folder of a causal language model as the first argument. Without it, the script trains a tiny random
model, which takes a few minutes on a CPU.
"""

import sys

import torch
from datasets import Dataset

from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer


def reward(completions, answer, **_):  # the share of letters in the right place
    return [sum(x == y for x, y in zip(c, a)) / max(len(c), len(a)) for c, a in zip(completions, answer)]


words = [a + b + c for a in "abcdef" for b in "abcdef" for c in "abcdef"]
prompts = Dataset.from_list([{"prompt": f"sort {word}:", "answer": "".join(sorted(word))} for word in words])
torch.manual_seed(0)
tiny, gpu = demo_policy(), torch.cuda.is_available()  # a Qwen3 with 76,000 random weights
model, tokenizer, rate = (sys.argv[1], None, 1e-6) if len(sys.argv) > 1 else (tiny.model, tiny.tokenizer, 3e-3)
options = {"learning_rate": rate, "max_steps": 200, "logging_steps": 20, "use_cpu": not gpu, "bf16": gpu}
# GSPOConfig: GRPOConfig with the paper's window and four updates per rollout, without a gradient_budget.
args = GSPOConfig("runs/trl", per_device_train_batch_size=32, num_generations=8, max_completion_length=6, **options)
trainer = GSPOTrainer(model, reward, args, train_dataset=prompts, processing_class=tokenizer)
trainer.train()
rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
print(f"mean reward: {rewards[0]:.2f} in the first 20 updates, {rewards[-1]:.2f} in the last 20")
