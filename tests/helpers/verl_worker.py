"""verl's TrainingWorker with a small model on CPUs."""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from helpers import ranks
from helpers.tiny_model import SHAPE
from torch.distributed.fsdp import FullyShardedDataParallel

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "helpers.verl_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

run_ranks = functools.partial(ranks.run_ranks, imported="helpers.verl_imported")  # importing verl is slow

BASE: dict[str, Any] = {
    "packed": True,
    "tied": False,
    "lora": 0,
    "micro": 4,
    "advantages": None,  # one list per rank; None: the advantages of `batch`
    "calculate_entropy": True,
    "loss_mode": "gspo",
    "kl": 0.0,
    "entropy": 0.0,
    "aggregation": "seq-mean-token-mean",
    "weights": False,
    "softcap": False,
    "temperature": 1.0,
    "strategy": "fsdp2",
    "teacher": None,  # options of verl's DistillationLossConfig
}
TEACHER_K = 4


def checkpoint(folder: Path, tied: bool, softcap: bool) -> str:
    """Save a small random model and a tokenizer. Return the folder."""
    import transformers
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(
        **SHAPE,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        max_position_embeddings=64,
    )
    if softcap:
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape, final_logit_softcapping=2.0))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    model.save_pretrained(folder)
    return str(folder)


def make_worker(folder: Path, ours: bool, case: dict[str, Any], **model_options: Any) -> Any:
    """Return a TrainingWorker with our engine or with verl's. `case` has the keys of BASE."""
    from helpers import verl_cpu
    from verl.trainer.distillation import distillation_ppo_loss
    from verl.workers.config import (
        ActorConfig,
        DistillationConfig,
        DistillationLossConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    os.environ["VERL_ENGINE_VENDOR"] = "gspo" if ours else ""
    verl_cpu.let_fsdp1_run()
    model = HFModelConfig(
        path=checkpoint(folder / "model", case["tied"], case["softcap"]),
        use_remove_padding=case["packed"],
        override_config={"attn_implementation": "eager" if case["softcap"] else "sdpa"},
        lora_rank=case["lora"],
        lora_alpha=8,
        target_modules=["q_proj", "up_proj"],
        external_lib="gspo_kernels.integrations.verl",
        **model_options,
    )
    engine = FSDPEngineConfig(
        strategy=case["strategy"],
        fsdp_size=-1,
        use_torch_compile=False,
        use_dynamic_bsz=False,
        mixed_precision={
            "param_dtype": case.get("dtype", "float32"),
            "reduce_dtype": "float32",
            "buffer_dtype": "float32",
        },
        micro_batch_size_per_gpu=case["micro"] or 4,
        infer_micro_batch_size_per_gpu=case["micro"] or 4,
    )
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD",
        optimizer_impl="torch.optim",
        lr=0.05,
        weight_decay=0.0,
        total_training_steps=10,
        lr_warmup_steps=0,
        clip_grad=1.0,  # sums over tokens have gradients whose steps would enlarge rounding
    )
    torch.manual_seed(0)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine, optimizer_config=optimizer
        )
    )
    worker.reset()
    actor = ActorConfig(
        strategy=case["strategy"],
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=case["micro"] or 4,
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        loss_agg_mode=case["aggregation"],
        use_kl_loss=case["kl"] > 0,
        kl_loss_coef=case["kl"],
        entropy_coeff=case["entropy"],
        policy_loss={"loss_mode": "gspo" if case["loss_mode"] == "gspo_kernels" and not ours else case["loss_mode"]},
        loss_scale_factor=8,
    )
    loss = functools.partial(ppo_loss, config=actor)
    if case["teacher"] is not None:
        settings = {"loss_mode": "forward_kl_topk", "use_policy_gradient": False, "distillation_loss_coef": 0.5}
        config = DistillationConfig(distillation_loss=DistillationLossConfig(**settings | case["teacher"]))
        loss = functools.partial(distillation_ppo_loss, config=actor, distillation_config=config)
    worker.set_loss_fn(loss)
    return worker


def batch(rank: int, case: dict[str, Any]) -> Any:
    """Return a batch of four answers for this rank.

    Prompts are padded on the left, responses on the right. The mask of one response has a hole. Small advantages move
    the ratios of their answers less than the others do, so that an update clips some of the answers.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    rng = torch.Generator().manual_seed(7 + rank)
    prompts, responses = 3, 6
    ids = torch.randint(2, 50, (4, prompts + responses), generator=rng)
    prompt_lengths, response_lengths = torch.tensor([2, 3, 1, 3]), torch.tensor([6, 3, 5, 4])
    attention = torch.cat(
        [
            torch.arange(prompts)[None] >= prompts - prompt_lengths[:, None],
            torch.arange(responses)[None] < response_lengths[:, None],
        ],
        1,
    ).long()
    mask = attention[:, prompts:].clone()
    mask[2, 1] = 0
    data = TensorDict(
        {
            "input_ids": ids * attention,
            "attention_mask": attention,
            "prompts": (ids * attention)[:, :prompts],
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "responses": (ids * attention)[:, prompts:],
            "response_mask": mask,
            "advantages": torch.tensor([1.0, -1.0, 0.02, -0.02])[:, None].expand(4, responses).contiguous(),
        },
        batch_size=4,
    )
    if case["weights"]:
        data["rollout_is_weights"] = torch.rand(4, responses, generator=rng) + 0.5
    if case["teacher"] is not None:  # one of the answers has no advantage, so only the teacher gives it a gradient
        data["advantages"][2] = 0
        best = torch.randn(4, prompts + responses, 50, generator=rng).log_softmax(-1).topk(TEACHER_K)
        data["teacher_ids"], data["teacher_logprobs"] = best.indices.int(), best.values
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, temperature=case["temperature"], calculate_entropy=True, global_batch_size=8)
    return data


def step(worker: Any, rank: int, case: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Compute old and reference log-probs with the worker, then train three epochs on one batch."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    data = batch(rank, case)
    if case["advantages"] is not None:
        data["advantages"] = torch.tensor(case["advantages"][rank])[:, None].expand(4, 6).contiguous()
        if case["weights"]:
            data["rollout_is_weights"][0] = 0
    tu.assign_non_tensor(data, compute_loss=False, global_batch_size=4 * ranks)
    out = worker.infer_batch(data.copy())
    old, entropy = (no_padding_2_padding(out[name], data) for name in ("log_probs", "entropy"))
    data["old_log_probs"], data["ref_log_prob"] = old, old - 0.1
    if case["teacher"] is not None:
        only = not case["teacher"].get("use_task_rewards", True)
        tu.assign_non_tensor(data, distillation_use_topk=True, distillation_only=only)
    if case["micro"]:
        tu.assign_non_tensor(data, micro_batch_size_per_gpu=case["micro"])
    else:
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=64)
    tu.assign_non_tensor(data, calculate_entropy=case["calculate_entropy"])
    tu.assign_non_tensor(data, compute_loss=True, mini_batch_size=4 * ranks, epochs=3, seed=1)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    module = worker.engine.module
    fsdp1 = isinstance(module, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(module) if fsdp1 else nullcontext():
        parameters = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in module.named_parameters()
            if p.requires_grad
        }
    return {"old": old, "entropy": entropy, "metrics": metrics, "parameters": parameters}
