"""The settings that the readers know. For each trainer X:

    X            all settings that can change the loss, with their defaults
    X_OTHERS     the names of all settings that cannot change the loss
    X_SECTIONS   the names of nested settings

Releases: TRL 1.16.0, verl 0.9.1, ROLL of July 2026 and the keys of earlier versions, StateSet Agents 0.69.0, ms-swift
4.6.0. TRL's and ms-swift's settings include those of transformers (`training_arguments`).
"""

from __future__ import annotations

from typing import Any

from gspo_kernels.extras import needs

# A GRPOConfig brings the defaults of its release. The defaults here apply to fields that its release lacks.
TRL: dict[str, Any] = {
    "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "beta": 0.0, "use_bias_correction_kl": False, "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "scale_rewards": "group", "reward_weights": None,
    "multi_objective_aggregation": "sum_then_normalize", "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False, "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2, "off_policy_mask_threshold": None,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None, "router_aux_loss_coef": None, "temperature": 1.0,
}  # fmt: skip  # a table
TRL_OTHERS = frozenset(
    """
    cache_implementation cast_lm_head_to_fp32 chat_template_kwargs disable_dropout ds3_gather_for_generation
    generation_batch_size generation_kwargs log_completions log_completions_hub_repo log_multimodal log_unique_prompts
    max_completion_length max_tool_calling_iterations min_p model_init_kwargs num_completions_to_print num_generations
    num_generations_eval num_iterations pad_to_multiple_of repetition_penalty shuffle_dataset steps_per_generation
    top_k top_p transformers_continuous_batching_config trust_remote_code use_transformers_continuous_batching
    use_transformers_paged use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
    vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
    """.split()
)

_CORRECTION: dict[str, Any] = {
    "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None,
    "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip",
}  # fmt: skip  # a table
VERL: dict[str, Any] = {
    "policy_loss.loss_mode": "vanilla", "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "token-mean", "loss_scale_factor": None,
    "entropy_coeff": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl",
    "use_rollout_log_probs": False, "policy_loss.clip_cov_ratio": 0.0002, "policy_loss.clip_cov_lb": 1.0,
    "policy_loss.clip_cov_ub": 5.0, "policy_loss.kl_cov_ratio": 0.0002, "policy_loss.ppo_kl_coef": 0.1,
    "policy_loss.dro_beta": None, "algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0, "algorithm.use_kl_in_reward": False, "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1, "algorithm.use_pf_ppo": False, "algorithm.gdpo_reward_keys": None,
    "algorithm.gdpo_reward_weights": None,
    **{f"policy_loss.rollout_correction.{name}": value for name, value in _CORRECTION.items()},
    **{f"algorithm.rollout_correction.{name}": value for name, value in _CORRECTION.items()},
}  # fmt: skip  # a table
VERL_SECTIONS = (
    "policy_loss",
    "policy_loss.rollout_correction",
    "algorithm",
    "algorithm.rollout_correction",
    "algorithm.kl_ctrl",
)
VERL_OTHERS = frozenset(
    """
    _target_ algorithm._target_ algorithm.filter_groups algorithm.kl_ctrl._target_ algorithm.lam algorithm.pf_ppo
    algorithm.rollout_correction._target_ calculate_entropy calculate_sum_pi_squared checkpoint data_loader_seed
    engine entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking freeze_vision_tower
    fsdp_config global_batch_info grad_clip megatron model_config optim pad_to_length policy_loss._target_
    policy_loss.rollout_correction._target_ ppo_epochs ppo_infer_max_token_len_per_gpu
    ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu
    ppo_mini_batch_size profile profiler qat rollout_n shuffle strategy torchtitan ulysses_sequence_parallel_size
    use_dynamic_bsz use_fused_kernels use_prefix_grouper use_remove_padding use_torch_compile veomni
    """.split()
)

ROLL: dict[str, Any] = {
    "importance_sampling": "token", "loss_agg_mode": None, "pg_clip": 0.2, "use_pg_clip_range": False,
    "pg_clip_low": 0.2, "pg_clip_high": 0.2, "dual_clip_loss": False, "use_kl_loss": False, "kl_loss_coef": 0.0,
    "entropy_loss_coef": 0.0, "rl_loss_coef": 1.0, "postive_loss_coef": 0.0, "use_topr_neg_loss_coef": 0.0,
    "sft_loss_coef": 0.0, "use_topr_loss": False, "use_policy_loss_type": "PPO", "pg_variant": None,
    "actor_train.pg_variant": None, "actor_train.worker_cls": None, "actor_train.apply_loss_scale": True,
    "adv_estimator": "gae", "gamma": 1.0, "norm_mean_type": None, "norm_std_type": None, "reward_norm": None,
    "reward_shift": False, "reward_scale": False, "reward_clip": None, "whiten_rewards": False,
    "whiten_advantages": False, "advantage_clip": None, "add_token_level_kl": False, "kl_penalty": "kl",
    "init_kl_coef": 0.2, "target_kl": None, "is_pure_opd": False, "use_opd": False, "opd_kl_coef": 1.0,
    "use_reward_scaling": False, "use_reward_norm": False, "add_len_reward": False, "difficulty_loss_weight": False,
    "length_loss_weight": False, "max_len_mask": False, "difficulty_mask": False, "difficulty_low_threshold": 0.0,
    "difficulty_high_threshold": 1.0, "error_max_len_clip": False, "error_max_len_threshold": 9999999999,
    "mask_type": "loss", "defaults": None, "train_infer_correction.filters": None,
    "train_infer_correction.is_weight.enabled": False, "train_infer_correction.is_weight.weight_type": "token",
    "train_infer_correction.is_weight.upper_bound": 1.2, "train_infer_correction.is_weight.detach": True,
}  # fmt: skip  # a table
ROLL_SECTIONS = ("actor_train", "train_infer_correction", "train_infer_correction.is_weight")
ROLL_OTHERS = frozenset(
    """
    actor_infer actor_train.backend_timeout actor_train.data_args actor_train.device_mapping
    actor_train.generating_args actor_train.infer_batch_size actor_train.logits_in_fp32 actor_train.max_concurrency
    actor_train.max_tokens_per_microbatch_in_infer actor_train.max_tokens_per_microbatch_in_train
    actor_train.model_args actor_train.model_update_frequency actor_train.name actor_train.num_gpus_per_worker
    actor_train.offload_nccl actor_train.sequence_length_round_in_infer actor_train.sequence_length_round_in_train
    actor_train.sequence_packing_args actor_train.strategy_args actor_train.system_envs
    actor_train.topr_negative_weight actor_train.topr_positive_weight actor_train.training_args
    actor_train.use_dynamic_batching_in_infer actor_train.use_dynamic_batching_in_train
    actor_train.use_sequence_packing actor_train.world_size async_generation_ratio balance_length base_dir
    checkpoint_config critic critic_warmup dataset_filter enable_old_logprobs_recompute enable_reference eval_steps
    exp_name force_disable_old_logprobs_recompute generate_opt_level global_template hydra
    is_num_return_sequences_expand is_offload_optimizer_states_in_train_step is_offload_states
    is_use_additional_prompts kl_horizon l2 lambd length_profiler_dir local_rank logging_dir logging_steps
    max_additional_running_prompts max_ckpt_to_keep max_grad_norm max_running_requests max_steps
    minibatch_data_iter_num model_download_type model_update_buffer_size_mb num_gpus_per_node num_nodes
    num_return_sequences_in_group output_dir ppo_epochs pretrain profiler_memory profiler_output_dir profiler_timeline
    prompt_length reference report_length_and_rewards response_length resume_from_checkpoint reward reward_model
    reward_pretrain rewards rollout_batch_size rollout_dump_dir rollout_mock router_args rpc_timeout
    save_logging_board_dir save_steps seed sequence_length system_envs track_with tracker_kwargs
    user_defined_rollout_loop_cls val_batch_size val_greedy val_n_sample val_prompt_length val_sequence_length
    validation value_clip vlm_filter
    """.split()
)

STATESET: dict[str, Any] = {
    "clip_range_left": 3e-4, "clip_range_right": 4e-4, "beta": 0.0, "use_reference_model": False, "objective": None,
    "objective_overrides": None, "use_gspo_token": False, "rescore_old_log_probs": True,
    # GSPOConfig inherits these from the GRPO trainer's configuration. The GSPO trainer reads none of them.
    "advantage_normalization": True, "baseline_type": "group_mean", "clip_ratio": 0.2, "seq_clip_ratio": 3e-4,
    "value_clip": 0.2, "entropy_coef": 0.01, "gamma": 0.99, "gae_lambda": 0.95, "reward_clip": 10.0,
    "num_gradient_updates": 1, "old_logprobs_source": "recompute", "continual_kl_beta": 0.0, "ewc_lambda": 0.0,
}  # fmt: skip  # a table
STATESET_OTHERS = frozenset(
    """
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

SWIFT: dict[str, Any] = {
    "rlhf_type": "grpo", "loss_type": "grpo", "importance_sampling_level": "token", "epsilon": 0.2,
    "epsilon_high": None, "delta": None, "tau_pos": 1.0, "tau_neg": 1.05, "beta": 0.04, "kl_in_reward": None,
    "advantage_estimator": "grpo", "scale_rewards": None, "reward_weights": None, "temperature": 0.9,
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "ref_model": None,
    "ref_adapters": None, "overlong_filter": False, "loss_scale": None, "router_aux_loss_coef": 0.0,
    "top_entropy_quantile": 1.0, "off_policy_sequence_mask_delta": None, "rollout_importance_sampling_mode": None,
    "rollout_importance_sampling_threshold": 2.0, "advantage_reweight": None, "sdar_loss_coef": 0.0,
    "teacher_model": None, "teacher_model_server": None, "chord_sft_dataset": None, "use_liger_kernel": False,
    "real_tau": 0.5, "fipo_decay_rate": 32.0, "fipo_clip_range": 0.2, "fipo_clip_high_only": True,
    "fipo_safety_threshold": 4.0,
    # Settings of ms-swift's PPO trainer.
    "kl_coef": 0.05, "cliprange": 0.2, "gamma": 1.0, "lam": 0.95, "whiten_rewards": False,
}  # fmt: skip  # a table
SWIFT_OTHERS = frozenset(
    """
    acc_strategy adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r adalora_orth_reg_weight adalora_target_r
    adalora_tfinal adalora_tinit adapter_act adapter_length adapters add_non_thinking_prefix add_version
    agent_template aligner_lr async_generate attn_impl bnb_4bit_compute_dtype bnb_4bit_quant_storage
    bnb_4bit_quant_type bnb_4bit_use_double_quant boft_block_num boft_block_size boft_dropout boft_n_butterfly_factor
    cached_dataset cached_val_dataset callbacks center_rewards_coefficient check_model chord_enable_phi_function
    chord_mu_decay_steps chord_mu_peak chord_mu_valley chord_mu_warmup_steps chord_sft_per_device_train_batch_size
    cliprange_value columns completion_length_limit_scope cosine_max_len cosine_max_len_value_correct
    cosine_max_len_value_wrong cosine_min_len_value_correct cosine_min_len_value_wrong cpo_alpha
    create_checkpoint_symlink custom_dataset_info custom_register_path dataset dataset_num_proc dataset_shuffle
    decision_drop_instructions decision_shuffle_fields decision_state_as_text decision_subsample_options
    deepspeed_autotp_size desirable_weight device_groups device_map disable_auto_column_mapping
    disable_ignore_empty_think discopop_tau download_mode ds3_gather_for_generation dynamic_sample early_stop_interval
    enable_channel_loss enable_dft_loss enable_flattened_weight_sync enable_npu_model_patch enable_thinking
    eval_dataset eval_dataset_args eval_generation_config eval_limit eval_metric eval_use_evalscope experts_impl
    external_plugins extra_eval_args fourier_n_frequency fourier_scaling freeze_aligner freeze_llm freeze_parameters
    freeze_parameters_ratio freeze_parameters_regex freeze_vit galore_cos_threshold galore_gamma_proj
    galore_optim_per_parameter galore_proj_bits galore_proj_group_size galore_proj_quant galore_proj_type
    galore_quantization galore_queue_size galore_rank galore_scale galore_target_modules galore_update_proj_gap
    galore_with_embedding generation_batch_size gkd_logits_topk group_by_length gym_env hqq_axis ignore_args_error
    init_strategy init_weights interleave_prob is_binary_loss_scale label_smoothing lazy_tokenize ld_alpha
    lisa_activated_layers lisa_step_interval llamapro_num_groups llamapro_num_new_blocks lmbda load_args
    load_data_args load_from_cache_file local_repo_path local_rollout_forward_batch_size log_completions log_entropy
    log_rollout_offpolicy_metrics logging_dir logprobs lora_alpha lora_bias lora_dropout lora_dtype lora_ga_batch_size
    lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale lora_ga_stable_gamma lora_rank lorap_lr_ratio
    loss_weights max_completion_length max_epochs max_length max_memory max_model_len max_new_tokens max_pixels
    max_resample_times max_shard_size max_turns min_p missing_eos_penalty model model_author model_kwargs model_name
    model_revision model_type modules_to_save move_model_batches mrl_dims multi_turn_scheduler new_special_tokens
    norm_bbox num_beams num_generations num_generations_eval num_iterations num_labels num_mini_batches num_ppo_epochs
    num_sample_generations offload_model offload_optimizer offload_teacher_model optimizer packing packing_length
    packing_num_proc packing_strategy padding_free padding_side preserve_thinking problem_type quant_bits quant_method
    ray_exp_name ref_model_revision ref_model_type reft_args reft_intervention_type reft_layer_key reft_layers
    reft_rank repetition_max_penalty repetition_n_grams repetition_penalty response_length response_prefix
    resume_only_model reward_adapters reward_funcs reward_model reward_model_plugin reward_model_revision
    reward_model_type reward_template rlsd_lambda rlsd_lambda_decay_steps rlsd_lambda_warmup_steps rlsd_negative_only
    rlsd_reweight_clip_range rope_scaling rpo_alpha safe_serialization sdar_gate_beta seq_kd sequence_parallel_size
    sft_alpha shuffle_buffer_size simpo_gamma sleep_level soft_cache_length soft_max_length split_dataset_ratio
    steps_per_generation stop_words stopping_strategy stream streaming strict structured_outputs_regex
    swanlab_email_language swanlab_exp_name swanlab_mode swanlab_notification_method swanlab_project
    swanlab_receiver_email swanlab_secret swanlab_sender_email swanlab_smtp_port swanlab_smtp_server swanlab_token
    swanlab_webhook_url swanlab_workspace system target_modules target_parameters target_regex task_type
    teacher_adapters teacher_deepspeed teacher_kl_coef teacher_model_revision teacher_model_type teacher_tag_key
    template template_backend top_k top_logprobs top_p torch_dtype train_dataloader_shuffle train_type
    trainable_parameters trainable_parameters_regex truncation_strategy tuner_backend tuner_type undesirable_weight
    use_chat_template use_dora use_flash_ckpt use_galore use_gym_env use_hf use_logits_to_keep use_ray use_rslora
    use_swift_lora use_vllm val_dataset val_dataset_shuffle vera_d_initial vera_dropout vera_projection_prng_key
    vera_rank vf_coef vit_gradient_checkpointing vit_lr vllm_data_parallel_size vllm_disable_cascade_attn
    vllm_disable_custom_all_reduce vllm_enable_expert_parallel vllm_enable_lora vllm_enable_prefix_caching
    vllm_enforce_eager vllm_engine_kwargs vllm_gpu_memory_utilization vllm_limit_mm_per_prompt vllm_max_lora_rank
    vllm_max_model_len vllm_max_num_seqs vllm_mm_processor_cache_gb vllm_mode vllm_pipeline_parallel_size
    vllm_quantization vllm_reasoning_parser vllm_server_base_url vllm_server_group_port vllm_server_host
    vllm_server_pass_dataset vllm_server_port vllm_server_timeout vllm_speculative_config vllm_tensor_parallel_size
    vllm_use_async_engine wandb_log_unique_prompts warmup_ratio zero_hpz_partition_size
    """.split()
)


def training_arguments() -> frozenset[str]:
    """Return the names of transformers' training arguments, which TRL's and ms-swift's settings inherit."""
    from dataclasses import fields

    with needs("The reader of TRL's and ms-swift's settings", "train", "transformers"):
        from transformers import Seq2SeqTrainingArguments  # importing it takes seconds

    return frozenset(f.name for f in fields(Seq2SeqTrainingArguments))
