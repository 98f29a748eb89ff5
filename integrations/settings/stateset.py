"""Read the settings of the GSPO trainer of StateSet Agents 0.69.0."""

from __future__ import annotations

from typing import Any

from .keys import NOT_NEGATIVE, Keys, Reading, Step

LOSS_DEFAULTS: dict[str, Any] = {
    "clip_range_left": 3e-4, "clip_range_right": 4e-4, "beta": 0.0, "use_reference_model": False, "objective": None,
    "objective_overrides": None, "use_gspo_token": False, "rescore_old_log_probs": True,
}  # fmt: skip  # a table
OTHER_NAMES = frozenset(  # the first lines: what GSPOConfig inherits from the GRPO trainer, but its trainer never reads
    """
    advantage_normalization baseline_type clip_ratio seq_clip_ratio value_clip entropy_coef gamma gae_lambda reward_clip
    num_gradient_updates old_logprobs_source continual_kl_beta ewc_lambda
    adam_beta1 adam_beta2 allow_missing_sampler_logprobs allow_sequence_fallback auto_adjust batch_size
    batched_rollouts bf16 compute_cost_per_hour continual_strategy data_format dataloader_num_workers
    dataloader_pin_memory disable_dropout disable_tqdm early_stopping eval_num_generations eval_split_size eval_steps
    ewc_decay ewc_num_samples fp16 generation_batch_size generations_per_iteration gradient_accumulation_steps
    gradient_checkpointing learning_rate logging_steps lora_alpha lora_dropout lora_r lora_target_modules
    lr_scheduler_type max_completion_length max_consecutive_nonfinite_skips max_examples max_grad_norm
    max_prompt_length max_steps_per_episode mini_batch_size model_name model_revision nonfinite_grad_policy
    num_episodes num_epochs num_generations num_iterations num_outer_iterations output_dir overwrite_output_dir
    patience per_device_train_batch_size post_eval_detailed post_eval_samples remove_unused_columns repetition_penalty
    replay_buffer_size replay_min_size replay_ratio replay_sampling replay_storage report_to resume_from_checkpoint
    rollout_concurrency rollout_sync run_name run_post_eval save_steps save_total_limit seed stratify_by_task
    task_id_key task_schedule task_switch_steps temperature top_k top_p trust_remote_code use_4bit use_8bit use_cpu
    use_lora use_vllm vllm_enable_chunked_prefill vllm_enable_prefix_caching vllm_gpu_memory_utilization
    vllm_max_model_len vllm_quantization vllm_tensor_parallel_size wandb_entity wandb_notes wandb_project
    wandb_run_name wandb_tags warmup_ratio weight_decay zero_signal_patience
    """.split()
)


def from_stateset(config: Any) -> Reading:
    """Read StateSet Agents' `GSPOConfig`, or a mapping of its fields.

    The trainer's loss does not divide logits by a temperature, so `Reading.temperature` is 1.

    Raises:
        TypeError: `config` has another type.
        ValueError: no Objective can express a field, or this reader does not know the field. The message names it.
    """
    keys = Keys("from_stateset", config, LOSS_DEFAULTS, OTHER_NAMES)
    for name in ("objective", "objective_overrides"):
        keys.must(name, None, {}, why="only the default objective of its GSPO trainers is supported")
    token = keys.flag("use_gspo_token")
    if token and "objective" not in keys:
        keys.refuse(
            "use_gspo_token",
            "False, or given together with `objective`: releases without that field computed "
            "Objective(surrogate='cispo', ratio='sequence')",
        )
    if keys.flag("use_reference_model"):
        keys.must("beta", 0.0, why="its KL is k3 of an answer's mean log-probs, ours is the mean of k3")
    fields = {
        "ratio": "sequence-token" if token else "sequence",
        "clip_low": keys.number("clip_range_left", NOT_NEGATIVE),
        "clip_high": keys.number("clip_range_right", NOT_NEGATIVE),
    }
    group = Step("group_advantages", {"group_size": keys.count("num_generations", 4), "ddof": 0, "eps": 0.0})
    return keys.reading(
        fields,
        "rows",
        temperature=1.0,
        advantages=(group,),
        old_log_probs="trainer" if keys.flag("rescore_old_log_probs") else "rollout",
    )
