"""Sort three letters: train a transformers model with GSPO on packed sequences, with DDP and a KL term.

Each rank packs its sequences into micro-batches of at most TOKENS tokens, so ranks may have different numbers of
micro-batches, sequences and tokens. All ranks divide by the total number of sequences, so the gradients are those of
one large batch.
Install: pip install -e '.[train]'

    torchrun --nproc_per_node 8 examples/packed_ddp.py --model Qwen/Qwen2.5-0.5B-Instruct   # eight GPUs
    torchrun --nproc_per_node 2 examples/packed_ddp.py   # a tiny random model, on two GPUs or two CPU processes
"""

import argparse
import contextlib
import copy
import os
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs
from gspo_kernels.advantages import group_advantages
from gspo_kernels.integrations.huggingface import fuse_head
from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.metrics import combine

PROMPTS = 8  # per rank and rollout
GROUP = 8  # answers per prompt
LENGTH = 6  # tokens per answer, at most
UPDATES = 4  # per rollout
TOKENS = 96  # per micro-batch, at most
OBJECTIVE = Objective(kl_coef=0.01)


def letters_in_place(text, right):
    """Return the share of letters in the right place."""
    return sum(a == b for a, b in zip(text, right)) / max(len(text), len(right))


def sample(model, tokenizer, prompts):
    """Sample GROUP answers to each prompt. Return their texts, and ids [L] and masks [L] of prompts and answers."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, num_return_sequences=GROUP)  # [B, P + T]
    attended = inputs.attention_mask.bool().repeat_interleave(GROUP, 0)  # [B, P]
    answers = ids[:, attended.shape[1] :]
    ends = torch.isin(answers, torch.tensor(model.generation_config.eos_token_id, device=ids.device))
    answered = ends.cumsum(1) - ends.int() == 0  # the tokens up to the first end-of-sequence token, inclusive
    masks, unpadded = (torch.cat([x, answered], 1) for x in (torch.zeros_like(attended), attended))
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return texts, [x[keep] for x, keep in zip(ids, unpadded)], [x[keep] for x, keep in zip(masks, unpadded)]


def pack(sequences):
    """Concatenate S sequences (ids [L], mask [L], advantage). The last token of each is a target, but not an input."""
    ids, masks, advantages = zip(*sequences)
    device = ids[0].device
    positions = [torch.arange(len(x) - 1, device=device) for x in ids]
    return {
        "input_ids": torch.cat([x[:-1] for x in ids]),  # [N]
        "target_ids": torch.cat([x[1:] for x in ids]),  # [N]: input_ids[t] predicts target_ids[t]
        "mask": torch.cat([x[1:] for x in masks]),  # [N]: targets that the model sampled
        "position_ids": torch.cat(positions),  # [N]: from 0 in each sequence
        "cu_seqlens": torch.tensor([0, *map(len, positions)], device=device).cumsum(0),  # [S + 1]
        "advantages": torch.tensor(advantages, device=device),  # [S]
        "non_empty": sum(x[1:].any() for x in masks),  # []
    }


def micro_batches(sequences):
    """Pack sequences in their order, up to TOKENS tokens at a time. A longer sequence is packed alone."""
    parts = [[]]
    for sequence in sequences:
        if parts[-1] and sum(len(ids) - 1 for ids, *_ in [*parts[-1], sequence]) > TOKENS:
            parts.append([])
        parts[-1].append(sequence)
    return [pack(part) for part in parts]


def at_head(model, batch, function, *arguments, **options):
    """Run the model on a packed batch, and call `function` at its head in place of the logits."""

    def call(hidden, lm_head, **of_the_model):  # hidden [1, N, H]; of_the_model: such as a soft-cap
        arguments_of_head = hidden[0], lm_head, batch["target_ids"]
        return function(*arguments_of_head, *arguments, mask=batch["mask"], **options, **of_the_model)

    # Positions that restart at 0 keep attention within each sequence, but only without a cache or an attention_mask.
    inputs = {"input_ids": batch["input_ids"][None], "position_ids": batch["position_ids"][None], "use_cache": False}
    device = batch["mask"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return model(**inputs, with_head=call).result


@torch.no_grad()
def add_log_probs(batches, model, reference):
    """Add log-probs [N] of the policy before the rollout's first update, and of the reference model."""
    for batch in batches:
        batch["old_log_probs"] = at_head(model, batch, linear_log_probs).log_probs
        batch["ref_log_probs"] = at_head(reference, batch, linear_log_probs).log_probs


def backward(ddp, batches):
    """Compute the gradients of an update from the micro-batches of all ranks. Return this rank's metrics."""
    sequences = sum(batch["non_empty"] for batch in batches)
    dist.all_reduce(sequences)
    # DDP averages gradients over ranks. Divided by ranks, the normalizer turns the average into a sum.
    common = {"objective": OBJECTIVE, "normalizer": sequences / dist.get_world_size()}
    metrics = []
    for i, batch in enumerate(batches):
        options = {name: batch[name] for name in ("cu_seqlens", "old_log_probs", "ref_log_probs")}
        # Only the last micro-batch reduces gradients, so ranks may have different numbers of them.
        with ddp.no_sync() if i < len(batches) - 1 else contextlib.nullcontext():
            out = at_head(ddp, batch, gspo_fused_loss, batch["advantages"], **common, **options)
            out.loss.backward()
        metrics.append(out.metrics)
    return metrics


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model of the hub or a folder (default: a Qwen3 with 76,000 random weights)")
    parser.add_argument("--steps", type=int, default=100, help="rollouts, each followed by four updates")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same random weights on every rank
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    else:
        tiny = demo_policy()
        model, tokenizer = tiny.model, tiny.tokenizer
    model.to("cuda" if gpu else "cpu").eval()  # without dropout
    fuse_head(model)
    # Sample from the distribution that the loss computes: without the checkpoint's top-k, top-p and penalties.
    ids = {"eos_token_id": model.generation_config.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=LENGTH, **ids)
    reference = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-6 if options.model else 3e-3, weight_decay=0.0)

    torch.manual_seed(rank)  # other prompts and answers on every rank
    random.seed(rank)
    for step in range(options.steps):
        words = ["".join(random.choices("abcdef", k=3)) for _ in range(PROMPTS)]
        texts, ids, masks = sample(model, tokenizer, [f"sort {word}:" for word in words])
        rewards = torch.tensor([letters_in_place(t, "".join(sorted(words[i // GROUP]))) for i, t in enumerate(texts)])
        sequences = list(zip(ids, masks, group_advantages(rewards, GROUP).tolist()))
        random.shuffle(sequences)
        updates = [micro_batches(sequences[i::UPDATES]) for i in range(UPDATES)]
        for batches in updates:
            add_log_probs(batches, model, reference)

        measured = []
        for batches in updates:
            measured += backward(ddp, batches)
            norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        metrics = combine(measured, dist.group.WORLD)  # of all sequences on all ranks
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(
                f"step {step:3}: reward {rewards.mean():.2f}, clipped {metrics['clip_fraction']:.2f}, "
                f"KL {metrics['kl']:.3f}, gradient norm {norm:.2f}",
                flush=True,
            )
    dist.barrier()  # gloo must have released the tensors of the collective before, or its threads may hang at the end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
