"""Train a transformers model with GSPO under FSDP2: sort three letters.

The loop of plain_loop.py with four changes: each rank samples its own prompts, `fully_shard` shards the model, the loss
is divided by the number of sequences on all ranks, and gradients are accumulated over micro-batches.
Install: pip install -e '.[train]'

    torchrun --nproc_per_node 8 examples/fsdp2.py --model Qwen/Qwen2.5-0.5B-Instruct   # eight GPUs
    torchrun --nproc_per_node 2 examples/fsdp2.py   # a tiny random model, on two GPUs or two CPU processes
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from plain_loop import GROUP, LENGTH, MICRO_BATCHES, UPDATES, at_head, letters_in_place, sample
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from gspo_kernels import gspo_fused_loss, linear_log_probs
from gspo_kernels.advantages import group_advantages
from gspo_kernels.integrations.huggingface import fuse_head
from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.metrics import combine

PROMPTS = 8  # per rank and rollout


def mean_over_ranks(number, device):
    total = torch.tensor(number, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model of the hub or a folder (default: a Qwen3 with 76,000 random weights)")
    parser.add_argument("--steps", type=int, default=100, help="rollouts, each followed by four updates")
    parser.add_argument("--output", default="runs/fsdp2", help="folder of the checkpoint")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda" if gpu else "cpu", (ranks,))

    torch.manual_seed(0)  # the same random weights on every rank
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    else:
        tiny = demo_policy()
        model, tokenizer = tiny.model, tiny.tokenizer
    model.eval()  # without dropout
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if gpu else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fuse_head(model)
    # Sample from the distribution that the loss computes: without the checkpoint's top-k, top-p and penalties.
    ids = {"eos_token_id": model.generation_config.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=LENGTH, **ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if options.model else 3e-3, weight_decay=0.0)

    torch.manual_seed(rank)  # other prompts and answers on every rank
    random.seed(rank)
    for step in range(options.steps):
        words = ["".join(random.choices("abcdef", k=3)) for _ in range(PROMPTS)]
        # synced_gpus: a rank whose answers have ended goes on until all ranks have ended, because every call of the
        # model gathers its parameters from all ranks.
        batch = sample(model, tokenizer, [f"sort {word}:" for word in words], synced_gpus=True)
        texts = tokenizer.batch_decode(batch["answers"], skip_special_tokens=True)
        rewards = torch.tensor([letters_in_place(t, "".join(sorted(words[i // GROUP]))) for i, t in enumerate(texts)])
        batch["advantages"] = group_advantages(rewards, GROUP).to(model.device)
        with torch.no_grad():
            batch["old"] = at_head(model, batch, linear_log_probs).log_probs

        measured = []
        for rows in torch.randperm(PROMPTS * GROUP).chunk(UPDATES):
            sequences = torch.tensor(len(rows), device=model.device)
            dist.all_reduce(sequences)  # the sequences of this update, on all ranks
            for micro_rows in rows.chunk(MICRO_BATCHES):
                part = {name: x[micro_rows.to(x.device)] for name, x in batch.items()}
                # FSDP averages gradients over ranks. Divided by ranks, the normalizer turns the average into a sum.
                at = {"old_log_probs": part["old"], "normalizer": sequences / ranks}
                out = at_head(model, part, gspo_fused_loss, part["advantages"], **at)
                out.loss.backward()
                measured.append(out.metrics)  # tensors: the host does not wait for them
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
        reward = mean_over_ranks(rewards.mean().item(), model.device)
        share = combine(measured, dist.group.WORLD)["clip_fraction"]  # of all sequences on all ranks
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:3}: reward {reward:.2f}, clipped {share:.2f}, gradient norm {norm:.2f}", flush=True)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(options.output, state_dict=weights)
        tokenizer.save_pretrained(options.output)
        print(f"checkpoint in {options.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
