"""Train LoRA adapters with GSPO in TRL: sort three letters.

`--head` chooses what is trained in the language-model head: nothing ("frozen", the cheapest, because no gradient of the
weight is computed), an adapter ("lora"), or a copy of the complete weight ("full", PEFT's modules_to_save).
Install: pip install -e '.[train,trl]'

    python examples/trl_gspo_lora.py --head lora                          # a tiny random model; a minute on a CPU
    python examples/trl_gspo_lora.py --model Qwen/Qwen2.5-0.5B-Instruct   # one GPU
    accelerate launch --config_file examples/accelerate/ddp.yaml --num_processes 8 examples/trl_gspo_lora.py --model ...
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig

from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a model of the hub or a folder (default: a Qwen3 with 76,000 random weights)")
parser.add_argument("--head", choices=["frozen", "lora", "full"], default="frozen")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--output", default="runs/trl_gspo_lora", help="folder of the adapter")
options = parser.parse_args()


def letters_in_place(completions, answer, **kwargs):
    """Return the share of letters in the right place for each completion."""
    pairs = zip(completions, answer)
    return [sum(a == b for a, b in zip(text, right)) / max(len(text), len(right)) for text, right in pairs]


words = [a + b + c for a in "abcdef" for b in "abcdef" for c in "abcdef"]
prompts = Dataset.from_list([{"prompt": f"sort {word}:", "answer": "".join(sorted(word))} for word in words])

body = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
lora = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=[*body, "lm_head"] if options.head == "lora" else body,
    modules_to_save=["lm_head"] if options.head == "full" else None,
    task_type="CAUSAL_LM",
)

torch.manual_seed(0)
tiny = demo_policy()
gpu = torch.cuda.is_available()
config = GSPOConfig(
    output_dir=options.output,
    learning_rate=1e-5 if options.model else 1e-2,
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=6,
    max_steps=options.steps,
    logging_steps=max(1, options.steps // 10),
    save_strategy="no",
    bf16=gpu,
    use_cpu=not gpu,
)
trainer = GSPOTrainer(
    model=options.model or tiny.model,
    reward_funcs=letters_in_place,
    args=config,
    train_dataset=prompts,
    processing_class=None if options.model else tiny.tokenizer,
    peft_config=lora,
)
trainer.train()
trainer.save_model()  # the adapter alone; PeftModel.from_pretrained(model, folder) loads it
if trainer.is_world_process_zero():
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"{trained:,} trained parameters, adapter in {options.output}")
    print(f"mean reward: {rewards[0]:.2f} in the first tenth of the updates, {rewards[-1]:.2f} in the last")
