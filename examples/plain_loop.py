"""Train a transformers model with GSPO in a plain PyTorch loop: sort three letters.

Each step samples a rollout, rewards it, computes old log-probs and makes four updates, each on a quarter of the
rollout, in two micro-batches. `fuse_head` lets the loss run at the model's head, so no logits are stored.
Install: pip install -e '.[train]'

    python examples/plain_loop.py                                      # a tiny random model; a minute on a CPU
    python examples/plain_loop.py --model Qwen/Qwen2.5-0.5B-Instruct   # one GPU
"""

import argparse
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from gspo_kernels import gspo_fused_loss, linear_log_probs
from gspo_kernels.advantages import group_advantages
from gspo_kernels.integrations.huggingface import fuse_head
from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.metrics import combine

PROMPTS = 16  # per rollout
GROUP = 8  # answers per prompt
UPDATES = 4  # per rollout
MICRO_BATCHES = 2  # per update
LENGTH = 6  # tokens per answer


def letters_in_place(text, right):
    """Return the share of letters in the right place."""
    return sum(a == b for a, b in zip(text, right)) / max(len(text), len(right))


def sample(model, tokenizer, prompts, **options):
    """Sample GROUP answers to each prompt. Return tensors with B = prompts * GROUP rows."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, num_return_sequences=GROUP, **options)  # [B, P + T]
    answers = ids[:, inputs.input_ids.shape[1] :]  # [B, T]
    ends = torch.isin(answers, torch.tensor(model.generation_config.eos_token_id, device=ids.device))
    mask = ends.cumsum(1) - ends.int() == 0  # the tokens up to the first end-of-sequence token, inclusive
    attention = torch.cat([inputs.attention_mask.repeat_interleave(GROUP, 0), mask.long()], 1)
    return {"ids": ids, "attention": attention, "answers": answers, "mask": mask}


def at_head(model, batch, function, *arguments, **options):
    """Run the model, and call `function` with hidden states, head, target ids and mask in place of the logits."""
    length = batch["answers"].shape[1]

    def call(hidden, lm_head, **of_the_model):  # of_the_model: what the model does to its logits, such as a soft-cap
        hidden = hidden[:, -length - 1 : -1]  # position t predicts token t + 1
        return function(hidden, lm_head, batch["answers"], *arguments, mask=batch["mask"], **options, **of_the_model)

    positions = (batch["attention"].cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": batch["ids"], "attention_mask": batch["attention"], "position_ids": positions}
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        return model(**inputs, with_head=call).result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model of the hub or a folder (default: a Qwen3 with 76,000 random weights)")
    parser.add_argument("--steps", type=int, default=100, help="rollouts, each followed by four updates")
    options = parser.parse_args()

    torch.manual_seed(0)
    random.seed(0)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    else:
        tiny = demo_policy()
        model, tokenizer = tiny.model, tiny.tokenizer
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # without dropout
    fuse_head(model)
    # Sample from the distribution that the loss computes: without the checkpoint's top-k, top-p and penalties.
    ids = {"eos_token_id": model.generation_config.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=LENGTH, **ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if options.model else 3e-3, weight_decay=0.0)

    for step in range(options.steps):
        words = ["".join(random.choices("abcdef", k=3)) for _ in range(PROMPTS)]
        batch = sample(model, tokenizer, [f"sort {word}:" for word in words])
        texts = tokenizer.batch_decode(batch["answers"], skip_special_tokens=True)
        rewards = torch.tensor([letters_in_place(t, "".join(sorted(words[i // GROUP]))) for i, t in enumerate(texts)])
        batch["advantages"] = group_advantages(rewards, GROUP).to(model.device)
        with torch.no_grad():
            batch["old"] = at_head(model, batch, linear_log_probs).log_probs

        updates = []  # their metrics
        for rows in torch.randperm(PROMPTS * GROUP).chunk(UPDATES):
            measured = []
            for micro_rows in rows.chunk(MICRO_BATCHES):
                part = {name: x[micro_rows.to(x.device)] for name, x in batch.items()}
                # Dividing by the sequences of the whole update makes the losses of its micro-batches add up.
                at = {"old_log_probs": part["old"], "normalizer": len(rows)}
                out = at_head(model, part, gspo_fused_loss, part["advantages"], **at)
                out.loss.backward()
                measured.append(out.metrics)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            updates.append(combine(measured))  # as of an undivided batch; tensors: the host does not wait for them
        if step % 10 == 0 or step == options.steps - 1:
            shares = ", ".join(f"{metrics['clip_fraction']:.2f}" for metrics in updates)
            print(
                f"step {step:3}: reward {rewards.mean():.2f}, clipped in each update {shares}, gradient norm {norm:.2f}"
            )


if __name__ == "__main__":
    main()
