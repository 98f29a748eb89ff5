"""Train a GPTModel of Megatron Core with GSPO, its vocabulary sharded over tensor-parallel ranks: sort three letters.

`model_log_probs` returns the log-probs of the sampled tokens, so no rank stores logits in training. With more processes
than --tp, there are several replicas, each with its own prompts. The model is small and random, and the sampler is a
plain loop. Replace both; the log-probs, the loss and its normalizer stay the same. docs/trainers/megatron.md has the
lines for Megatron's pipeline schedules. Install: pip install -e '.[train,megatron]'

    torchrun --nproc_per_node 2 examples/megatron_tp.py           # two GPUs, or two CPU processes
    torchrun --nproc_per_node 8 examples/megatron_tp.py --tp 4    # TP 4 x DP 2
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_kernels import policy_loss
from gspo_kernels.advantages import group_advantages
from gspo_kernels.integrations.megatron import model_log_probs

CHARACTERS = ["<end>", *"abcdefsort :"]
PROMPTS = 16  # per rank and rollout
GROUP = 8  # answers per prompt
UPDATES = 4  # per rollout
LENGTH = 4  # tokens per answer


def letters_in_place(text, right):
    """Return the share of letters in the right place."""
    return sum(a == b for a, b in zip(text, right)) / max(len(text), len(right))


def run_megatron_on_cpu():
    """Megatron Core asks for the GPU by name. Without one, give it the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *arguments, **options: self
    initialize_rng_tracker(inference_rng_tracker=True)


def make_model(hidden, layers, tp, device):
    """Return this rank's shard of a random model."""
    padded = -(-len(CHARACTERS) // tp) * tp  # Megatron pads the vocabulary to a multiple of TP
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,  # every rank draws the complete weights and keeps its shard
        init_method_std=0.1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), padded, 64, position_embedding_type="rope")
    return model.to(device)


def inputs_of(ids):
    """Return the arguments of a GPTModel's forward for ids [B, S] without padding."""
    length = ids.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
    return {
        "input_ids": ids,
        "position_ids": torch.arange(length, device=ids.device).expand_as(ids),
        "attention_mask": future[None, None],  # True where attention is forbidden
    }


@torch.no_grad()
def sample(model, prompts):
    """Sample LENGTH tokens for each row of prompts [B, P]. Return ids [B, P + LENGTH], equal on all ranks of TP."""
    ids = prompts
    for _ in range(LENGTH):
        logits = model(**inputs_of(ids), runtime_gather_output=True)[:, -1, : len(CHARACTERS)]
        token = torch.multinomial(logits.float().softmax(-1), 1)
        source = parallel_state.get_tensor_model_parallel_src_rank()
        dist.broadcast(token, source, group=parallel_state.get_tensor_model_parallel_group())
        ids = torch.cat([ids, token], 1)
    return ids


def log_probs(model, ids, mask):
    """Return the log-probs [B, S] of the tokens that follow each position of ids [B, S + 1]."""
    return model_log_probs(model, ids[:, 1:], mask=mask, vocab_size=len(CHARACTERS), **inputs_of(ids[:, :-1])).log_probs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2, help="ranks that share the head and the layers")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="rollouts, each followed by four updates")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        run_megatron_on_cpu()
    dist.init_process_group("nccl" if gpu else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tp)
    if gpu:
        model_parallel_cuda_manual_seed(0)
    data_group = parallel_state.get_data_parallel_group()
    replica = parallel_state.get_data_parallel_rank()

    torch.manual_seed(0)  # the same weights on all replicas
    model = make_model(options.hidden, options.layers, options.tp, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    torch.manual_seed(replica)  # other prompts and answers on each replica, the same on the ranks of its TP group
    random.seed(replica)

    for step in range(options.steps):
        words = ["".join(random.choices("abcdef", k=3)) for _ in range(PROMPTS)]
        prompts = [[CHARACTERS.index(character) for character in f"sort {word}:"] for word in words]
        prompts = torch.tensor(prompts, device=device).repeat_interleave(GROUP, 0)  # [B, P]
        ids = sample(model, prompts)  # [B, P + T]
        answers = ids[:, prompts.shape[1] :]
        ends = answers == 0
        mask = torch.zeros_like(ids[:, 1:], dtype=torch.bool)  # position t predicts token t + 1
        mask[:, prompts.shape[1] - 1 :] = ends.cumsum(1) - ends.int() == 0  # up to the end token, inclusive
        texts = ["".join(CHARACTERS[i] for i in row).partition("<end>")[0] for row in answers.tolist()]
        rewards = torch.tensor([letters_in_place(t, "".join(sorted(words[i // GROUP]))) for i, t in enumerate(texts)])
        advantages = group_advantages(rewards, GROUP).to(device)

        with torch.no_grad():
            old = log_probs(model, ids, mask)
        clipped = []
        for rows in torch.randperm(PROMPTS * GROUP).chunk(UPDATES):
            sequences = torch.tensor(len(rows), device=device)
            dist.all_reduce(sequences, group=data_group)  # the sequences of this update, on all replicas
            out = policy_loss(
                log_probs(model, ids[rows], mask[rows]),
                advantages[rows],
                mask=mask[rows],
                old_log_probs=old[rows],
                normalizer=sequences,
            )
            out.loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=data_group)  # a sum, because the normalizer counts all replicas
            optimizer.step()
            optimizer.zero_grad()
            clipped.append(out.metrics["clip_fraction"])  # a tensor: the host does not wait for it
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            shares = ", ".join(f"{share:.2f}" for share in clipped)
            print(f"step {step:3}: reward {rewards.mean():.2f}, clipped in each update {shares}", flush=True)
    shard = "x".join(map(str, model.output_layer.weight.shape))
    print(f"rank {dist.get_rank()}: head {shard} of {len(CHARACTERS)}x{options.hidden}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
