"""Faults in the integrations."""

from __future__ import annotations

from helpers.faults.table import Fault

FAULTS: dict[str, Fault] = {
    "head not restored after an error": (
        "FusedHead._forward_with",
        "try:\n"
        "    for module, name in parents:\n"
        "        module._modules[name] = stand_in\n"
        "    output = self._forward(*args, **kwargs)\n"
        "finally:\n"
        "    for module, name in parents:\n"
        "        module._modules[name] = self.head",
        "try:\n"
        "    for module, name in parents:\n"
        "        module._modules[name] = stand_in\n"
        "    output = self._forward(*args, **kwargs)\n"
        "except ValueError:\n"
        "    raise\n"
        "for module, name in parents:\n"
        "    module._modules[name] = self.head",
        "huggingface::test_the_head_is_restored_after_an_error_inside_the_model",
    ),
    "the measurement changes the random state": (
        "_probe",
        "torch.random.fork_rng(devices=devices)",
        "torch.no_grad()",
        "huggingface::test_the_measurement_keeps_the_random_state",
    ),
    "logit_options removes a fused head": (
        "logit_options",
        "if not was_fused:\n            fused.remove()",
        "fused.remove()",
        "huggingface::test_logit_options_keeps_a_fused_model_fused",
    ),
    "torch.compile not unwrapped": (
        "_unwrap",
        'hasattr(model, "_orig_mod")',
        "False",
        "huggingface::test_base_model_unwraps_torch_compile",
    ),
    "a NaN difference accepted": (
        "compare",
        "not error <= allowed",
        "error > allowed",
        "huggingface::test_a_model_that_cannot_be_fused_is_refused_and_unchanged[a NaN in the weight]",
    ),
    "sign of a scale ignored": (
        "measure",
        "slope, plateau = from_small[0].item() / 2.0**-10, abs(from_large[0].item())",
        "slope, plateau = abs(from_small[0].item()) / 2.0**-10, abs(from_large[0].item())",
        "huggingface::test_negative_and_unlisted_scales_are_measured",
    ),
    "numbers of the text configuration ignored": (
        "_numbers",
        "values |= text.to_dict() if text is not None else {}",
        "pass",
        "huggingface::test_numbers_of_the_text_configuration_are_candidates",
    ),
    "every scale rounded to the nearest number of the configuration": (
        "_snap",
        "return nearest if abs(nearest - measured) <= _SCALE_ERROR * abs(measured) else measured",
        "return nearest",
        "huggingface::test_negative_and_unlisted_scales_are_measured",
    ),
    "logged loss with a gradient": (
        "trainers/slime:loss",
        "out.loss.detach()",
        "out.loss",
        "seams::test_logged_metrics_have_no_gradient_and_the_dtype_of_the_loss",
    ),
    "slime's clip fraction counts both bounds for every advantage": (
        "trainers/slime:_clipped",
        "bounded * advantages < ratio * advantages",
        "bounded != ratio",
        "seams::test_slimes_metrics_are_its_sums_of_sample_means",
    ),
    "slime's pg_loss with the KL term": (
        "trainers/slime:loss",
        "loss_of(log_probs, objective=policy_term).loss",
        "out.loss",
        "seams::test_slimes_metrics_are_its_sums_of_sample_means",
    ),
    "slime's difference to the sampler always of old log-probs": (
        "trainers/slime:loss",
        "log_probs if args.use_rollout_logprobs else old",
        "old",
        "seams::test_slimes_metrics_are_its_sums_of_sample_means",
    ),
    "prime-rl's soft-cap ignored": (
        "trainers/prime_rl:head",
        'getattr(layer, "softcap", None)',
        "None",
        "seams::test_prime_rls_head_equals_its_logits[4.0]",
    ),
    "prime-rl's entropy has a gradient": (
        "trainers/prime_rl:head",
        "out.entropy.detach()",
        "out.entropy",
        "seams::test_prime_rls_head_equals_its_logits[None]",
    ),
    "logged metrics in several dtypes": (
        "logged_metrics",
        "{name: x.to(out.loss.dtype) for name, x in out.metrics.items() if name not in COUNTS}",
        "{name: x for name, x in out.metrics.items() if name not in COUNTS}",
        "seams::test_logged_metrics_have_no_gradient_and_the_dtype_of_the_loss",
    ),
    "evaluation logged as training": (
        "trainers/ms_swift:loss",
        '"train" if trainer.model.training else "eval"',
        '"train"',
        "seams::test_ms_swifts_mode_is_train_or_eval",
    ),
    "a sum over answers instead of their mean": (
        "trainers/openrlhf:PolicyLoss.forward",
        "None if global_batch_size is None else global_batch_size / dp_size",
        "1.0 if global_batch_size is None else global_batch_size / dp_size",
        "seams::test_openrlhfs_loss_without_a_batch_size_is_a_mean_over_answers",
    ),
    "OpenRLHF's KL to the engine": (
        "trainers/openrlhf:PolicyLoss.forward",
        "torch.where(mask, old_log_probs - log_probs.detach(), 0).sum() / mask.sum().clamp(min=1)",
        'out.metrics["kl_to_old"]',
        "seams::test_openrlhfs_loss_is_its_gspo",
    ),
    "TRL's mean loss divided by all positions": (
        "_log_probs",
        "mask.sum().clamp(min=1)",
        "mask.numel()",
        "trainers/trl::test_policy_and_reference_model_return_a_mean_loss_over_labels",
    ),
    "reference model not accelerated": (
        "_accelerate",
        '[x for x in (trainer.model, getattr(trainer, "ref_model", None)) if x is not None]',
        "[trainer.model]",
        "trainers/trl::test_policy_and_reference_model_return_a_mean_loss_over_labels",
    ),
    "TRL's check of adapters not restored": (
        "_head_adapters_allowed",
        'setattr(grpo_trainer, "BaseTunerLayer", tuner_layer)',
        "pass",
        "trainers/trl::test_trls_check_of_adapters_is_restored",
    ),
    "TRL's logs of evaluations take the metrics of training": (
        "log_backwards.log_with_backwards",
        'trainer._metrics["train"]',
        'trainer._metrics["eval"]',
        "trainers/trl_budget::test_logs_are_means_over_tokens_of_micro_batches_and_only_of_training",
    ),
    "backwards before an update counted": (
        "BackwardMetrics.begin",
        "self._latest = last_backward()",
        "pass",
        "trainers/trl_budget::test_collected_backwards_are_weighted_by_tokens_and_released",
    ),
    "learning rate of the previous update": (
        "Optimizer.step",
        "self._config.learning_rate_at(self.updates)",
        "self._config.learning_rate_at(max(0, self.updates - 1))",
        "trainer_numbers::test_the_optimizer_takes_the_step_of_adamw",
    ),
    "learning rate of the previous update logged": (
        "Training.train_step",
        "self.optimizer.updates - 1",
        "self.optimizer.updates - 2",
        "trainer_numbers::test_every_number_of_a_step_equals_its_definition",
    ),
    "standard deviation of tokens without that of answers": (
        "measures:numbers",
        "variance + (mean - center).square()",
        "variance",
        "trainer_numbers::test_an_update_equals_the_formulas[sequences, KL of tokens-4]",
    ),
    "empty answers in sequence_log_ratio_std": (
        "measures:numbers",
        "measures.log_ratios[measures.log_ratios[:, 0] > 0]",
        "measures.log_ratios",
        "trainer_numbers::test_an_update_equals_the_formulas[sequences, KL of tokens-4]",
    ),
    "a second call of accelerate_trainer keeps the settings": (
        "_use_settings",
        "setattr(model, SETTINGS, ModelSettings(trainer.temperature, vars(trainer)[_SETTINGS]))",
        "vars(model).setdefault(SETTINGS, ModelSettings(trainer.temperature, vars(trainer)[_SETTINGS]))",
        "trainers/trl_budget::test_the_last_call_decides_and_each_change_is_printed_once",
    ),
    "trainers of one model share their settings": (
        "_accelerate",
        "call_before_each_batch(trainer, lambda: _use_settings(trainer, vars(trainer)[_MODELS]))",
        "pass",
        "trainers/trl_budget::test_trainers_of_one_model_use_their_own_settings",
    ),
    "masses of tiles kept without autograd": (
        "inputs/head:head_rows",
        "float(arguments.gradient_budget) if any(needs) else 0.0",
        "float(arguments.gradient_budget)",
        "trainers/trl_budget::test_calls_without_autograd_keep_nothing",
    ),
    "temperature missing before TRL 1.15": (
        "_score.score",
        "linear_log_probs(states, lm_head, targets, mask=mask, temperature=self.trainer.temperature, "
        "entropy=entropy, **options)",
        "linear_log_probs(states, lm_head, targets, mask=mask, entropy=entropy, **options)",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "hidden states shifted by one token before TRL 1.15": (
        "_score.score",
        "hidden[:, :-1][:, -targets.shape[1] :]",
        "hidden[:, -targets.shape[1] :]",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "a logged entropy has a gradient": (
        "_score.score",
        "bonus or out.entropy is None",
        "True",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "batches concatenated in reverse": (
        "_LogProbs.__call__",
        "torch.cat([x.log_probs for x in scores])",
        "torch.cat([x.log_probs for x in scores[::-1]])",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "prompt mask used for the completion": (
        "_LogProbs.__call__",
        "attended[:, -logits_to_keep:]",
        "attended[:, :logits_to_keep]",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "verl: entropies that are only logged have a gradient": (
        "verl/engine:_Score.__init__",
        "self.detach_entropy = entropy_is_only_logged",
        "self.detach_entropy = entropy_is_only_logged and settings.gradient_budget > 0",
        "trainers/verl_budget::test_entropies_that_are_only_logged_have_no_backward",
    ),
    "verl's loss_scale_factor ignored": (
        "verl/policy_loss:gspo_policy_loss",
        'batch.get("loss_scale_factor") or response_mask.shape[1]',
        "response_mask.shape[1]",
        "trainers/verl_parity::test_our_policy_loss_in_verls_registry_equals_verls_gspo[seq-mean-token-sum-norm]",
    ),
    "the rewards of earlier turns subtracted from the total": (
        "advantages_of_turns",
        "reward - sum(row) + sum(row[k:])",
        "reward - sum(row[:k])",
        "trainer_options::test_a_large_reward_of_a_turn_costs_the_returns_of_later_turns_no_digits",
    ),
    "verl's bounds swapped": (
        "clip_window",
        "low, high = config.clip_ratio_low, config.clip_ratio_high",
        "high, low = config.clip_ratio_low, config.clip_ratio_high",
        "trainers/verl_parity::test_each_clip_bound_defaults_to_clip_ratio",
    ),
    "verl's clip_ratio ignored": (
        "clip_window",
        "config.clip_ratio if high is None else high",
        "low if high is None else high",
        "trainers/verl_parity::test_each_clip_bound_defaults_to_clip_ratio",
    ),
    "verl's nested responses read as padded": (
        "_predicts_response",
        "responses.is_nested",
        "False",
        "trainers/verl_parity::test_positions_of_nested_responses_are_masked_correctly",
    ),
    "replies of the environment trained on": (
        "reply_to",
        "dialogue.add(ids, reply, log_probs=None)",
        "dialogue.add(ids, reply, log_probs=[0.0] * len(ids))",
        "trainer_tasks::test_a_dialogue_masks_the_calculators_replies",
    ),
    "sampling without the temperature": (
        "ChosenTokens.__call__",
        "scores / self._temperature",
        "scores",
        "trainer_sampling::test_answers_have_the_probabilities_that_the_loss_computes",
    ),
    "all prompts of a rollout have the same random numbers": (
        "converse",
        "np.random.default_rng(seed)",
        "np.random.default_rng(0)",
        "trainer_sampling::test_an_answer_does_not_depend_on_the_others_of_its_batch",
    ),
    "the turns of a dialogue have the same random numbers": (
        "converse",
        "row[len(d.ids) :]",
        "row",
        "trainer_sampling::test_each_position_of_an_answer_has_a_random_number_of_its_own",
    ),
    "cumulative probabilities in fp32": (
        "choose",
        "probabilities.cumsum(-1, dtype=torch.float64)",
        "probabilities.cumsum(-1)",
        "trainer_sampling::test_small_probabilities_of_a_large_vocabulary_are_kept",
    ),
    "all steps have the same random numbers": (
        "Training.train_step",
        "(self.seed, step, place)",
        "(self.seed, 1, place)",
        "trainer_sampling::test_a_run_names_each_stream_by_seed_step_and_place",
    ),
    "each process numbers its prompts from 0": (
        "Training.train_step",
        "distributed.share([(self.seed, step, place) for place in range(len(examples))])",
        "[(self.seed, step, place) for place in range(len(distributed.share(examples)))]",
        "trainer_ranks::test_two_processes_train_like_one[ddp]",
    ),
    "generators seeded alike in all steps": (
        "Training.seed_generators",
        "hash((self.seed, step, distributed.rank()))",
        "hash((self.seed, distributed.rank()))",
        "trainer_sampling::test_rewards_with_random_numbers_are_the_same_after_a_resume",
    ),
    "W&B's variable wins over the option": (
        "Trackers.write",
        'config.wandb_project or os.environ.get("WANDB_PROJECT") or "gspo"',
        'os.environ.get("WANDB_PROJECT") or config.wandb_project or "gspo"',
        "trainer_options::test_wandb_writes_runs_offline_where_options_and_variables_say[True]",
    ),
    "an error in a reward function stops the run": (
        "Rewards._call",
        "Exception",
        "ValueError",
        "trainer_tasks::test_a_failed_component_scores_zero_and_is_reported",
    ),
    "the caller's timer lost after a reward": (
        "time_limit",
        "if remaining:\n"
        "    signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - started), 0.001), "
        "interval)",
        "if False:\n"
        "    signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - started), 0.001), "
        "interval)",
        "trainer_tasks::test_the_time_limit_restores_the_callers_timer_and_handler",
    ),
    "running moments of rewards not restored": (
        "Training.restore",
        'self.running = RunningMoments(**saved["running"])',
        "pass",
        "trainer_resume::test_an_interrupted_run_continues_to_the_bit[checkpoint]",
    ),
    "weights of half precision not restored from their masters": (
        "Optimizer.load",
        "self._copy_masters()",
        "pass",
        "trainer_resume::test_an_interrupted_run_continues_to_the_bit[checkpoint]",
    ),
    "gradients of all but the last micro-batch lost in half precision": (
        "Optimizer.collect",
        "gradient if master.grad is None else master.grad + gradient",
        "gradient",
        "trainer_options::test_bf16_weights_have_fp32_masters",
    ),
    "failed rewards of the first process only": (
        "joined",
        "[x for part in parts for x in part.failures]",
        "list(parts[0].failures)",
        "trainer_numbers::test_every_number_of_two_processes_equals_its_definition",
    ),
    "metrics of the last update only": (
        "Training.train_step",
        "numbers_of_step(updates)",
        "numbers_of_step(updates[-1:])",
        "trainer_numbers::test_every_number_of_a_step_equals_its_definition",
    ),
    "kl_aggregation ignored in the trainer's divisor": (
        "normalizers",
        "of.kl_aggregation",
        "False",
        "trainer_numbers::test_an_update_equals_the_formulas[sequences, KL of tokens-0]",
    ),
    "logged loss divided by the number of micro-batches": (
        "update",
        "sum(x.item() for x in losses)",
        "sum(x.item() for x in losses) / len(parts)",
        "trainer_numbers::test_an_update_equals_the_formulas[sequences, KL of tokens-4]",
    ),
    "old log-probs without the temperature": (
        "log_probs_of.log_probs",
        '{"mask": rollout.answer_mask, "temperature": config.temperature, "backend": config.backend}',
        '{"mask": rollout.answer_mask, "backend": config.backend}',
        "trainer_numbers::test_an_update_equals_the_formulas[tokens of all-0]",
    ),
    "log-ratio of a sequence averaged over padding": (
        "measured",
        "log_ratios.sum(1) / tokens.clamp(min=1)",
        "log_ratios.mean(1)",
        "trainer_numbers::test_an_update_equals_the_formulas[sequences, KL of tokens-0]",
    ),
    "turns of all answers counted as equally many": (
        "advantages_of_turns",
        "[answer // config.group_size for answer, count in enumerate(counts) for _ in range(count)]",
        "[row // (config.group_size * max(counts)) for row in range(sum(counts))]",
        "trainer_numbers::test_turns_of_unequal_number_belong_to_the_prompt_of_their_answer",
    ),
    "KL of masked tokens subtracted from rewards": (
        "advantages_of_scored",
        '(kl(options["kl_estimator"]) * mask).sum(1)',
        'kl(options["kl_estimator"]).sum(1)',
        "trainer_numbers::test_the_kl_in_advantages_is_that_of_unmasked_tokens[k3]",
    ),
    "routing recorded but not replayed": (
        "routing.hook",
        "return logits, probabilities.to(weights.dtype), experts",
        "return output",
        "compare::test_replayed_routing_computes_with_the_recorded_experts",
    ),
    "compared objectives begin with different weights": (
        "compare",
        "torch.manual_seed(seed)",
        "torch.manual_seed(len(name))",
        "compare::test_all_arms_begin_alike_and_gspo_token_trains_as_gspo",
    ),
    "a run from Python resumed with options alone": (
        "check_arguments",
        "started != resumed",
        "False",
        "trainer_resume::test_a_run_with_arguments_from_python_continues_with_them_only",
    ),
    "changed prompts accepted": (
        "start_of",
        'then.get("prompts", record["prompts"]) != record["prompts"]',
        "False",
        "trainer_resume::test_changed_data_are_refused",
    ),
    "digest without the order": (
        "Task.digest",
        "examples",
        "sorted(examples, key=lambda x: x.key)",
        "trainer_tasks::test_the_digest_of_a_task_depends_on_prompts_answers_and_their_order",
    ),
    "changed options not said": (
        "start_of",
        "changes.items()",
        "()",
        "trainer_resume::test_changed_options_are_said_and_taken",
    ),
    "a run that has trained starts again": (
        "start_of",
        "check_untrained(config.folder)",
        "pass",
        "trainer_resume::test_without_a_checkpoint_a_run_that_has_trained_is_kept[model-seed0]",
    ),
    "two runs in one folder": (
        "RunFolder._lock",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "trainer_resume::test_a_folder_is_written_by_one_run_at_a_time",
    ),
    "a folder used by another run since the start": (
        "RunFolder._open",
        "self._check_unused()",
        "pass",
        "trainer_resume::test_a_folder_is_written_by_one_run_at_a_time",
    ),
    "checksums of a checkpoint not compared": (
        "read_checkpoint",
        "archive.testzip()",
        "None",
        "trainer_resume::test_a_flipped_bit_is_found",
    ),
    "an unfinished file keeps a disk full": (
        "replacing",
        "remove(partial)\nremove(replaced)",
        "pass",
        "trainer_resume::test_a_file_that_the_system_refuses_is_named_and_nothing_is_left[checkpoint.pt]",
    ),
    "half of a line stays in the metrics": (
        "RunFolder._append",
        "file.truncate(size)",
        "pass",
        "trainer_resume::test_a_file_that_the_system_refuses_is_named_and_nothing_is_left[metrics.jsonl]",
    ),
    "a model lost if its successor cannot replace it": (
        "replacing",
        "replaced.rename(path)",
        "pass",
        "trainer_resume::test_a_folder_that_cannot_be_replaced_is_kept[KeyboardInterrupt()]",
    ),
    "sizes of files from before they were cut": (
        "RunFolder.sizes",
        "os.fstat(file.fileno()).st_size",
        "file.tell()",
        "trainer_resume::test_a_second_signal_in_the_updates_saves_nothing[later]",
    ),
    "a checkpoint that stays behind the end": (
        "Training.train_step",
        "every or config.resume",
        "every",
        "trainer_resume::test_a_resumed_run_without_checkpoints_ends_with_one",
    ),
    "merged keys override a mapping's own": (
        "_UniqueKeyLoader.flatten_mapping",
        "mapping.value + node.value",
        "node.value + mapping.value",
        "readers::test_yaml_merge_keys_are_read_and_a_key_given_twice_is_refused",
    ),
    "half of a step saved": (
        "Training.save_stopped",
        "self.updating",
        "False",
        "trainer_resume::test_a_second_signal_in_the_updates_saves_nothing",
    ),
    "moments of a step that is sampled again": (
        "train_step",
        "batch = with_log_probs(config, self.policy, rollout, epochs[0])",
        "self.running.update(torch.zeros(2))\nbatch = with_log_probs(config, self.policy, rollout, epochs[0])",
        "trainer_resume::test_an_interrupted_run_continues_to_the_bit[old log-probs]",
    ),
    "a process that stops alone": (
        "Training.evaluate",
        "together = joined(distributed.gather(joined(rewards)))",
        "together = joined(rewards)",
        "trainer_ranks::test_processes_stop_together_if_the_calls_of_all_fail",
    ),
    "failures of a first evaluation allowed": (
        "Training.evaluate",
        "step > 0",
        "True",
        "trainer_runs::test_a_reward_whose_every_call_fails_in_the_first_evaluation_stops_the_run",
    ),
    "answers without a reward counted": (
        "RewardBatch.scored",
        "any(column[i] is not None for column in columns)",
        "True",
        "trainer_tasks::test_a_component_that_returns_none_does_not_apply",
    ),
    "groups of the scored answers only": (
        "advantages_of_scored",
        'rows // options.pop("group_size", config.group_size)',
        'torch.arange(len(rows)) // options.pop("group_size", config.group_size)',
        "trainer_options::test_answers_without_a_reward_have_no_advantage_and_do_not_count",
    ),
    "a token one beyond the embeddings": (
        "check_tokens",
        "max(ids) >= rows",
        "max(ids) > rows",
        "trainer_options::test_prompts_that_the_model_cannot_read_are_refused",
    ),
    "a clip window of GSPOConfig is not checked": (
        "GSPOConfig.__post_init__",
        "_check_loss(self)",
        "pass",
        "trainers/trl_settings::test_a_setting_of_the_loss_is_checked_when_the_config_is_made",
    ),
    "restore_trainer leaves the trainer's methods": (
        "restore_trainer",
        "restore_methods(trainer, check)",
        "pass",
        "trainers/trl_restore::test_a_restored_trainer_is_a_stock_trainer[False-False]",
    ),
    "restore_trainer leaves the model's forward": (
        "restore_trainer",
        "fused.remove()",
        "pass",
        "trainers/trl_restore::test_a_restored_trainer_is_a_stock_trainer[True-False]",
    ),
    "restore_trainer takes a shared model from the other trainer": (
        "restore_trainer",
        "others = users.trainers()",
        "others = []",
        "trainers/trl_restore::test_trainers_that_share_a_model_are_restored_one_by_one",
    ),
    "restore_trainer removes the user's FusedHead": (
        "restore_trainer",
        "users.fused_before",
        "False",
        "trainers/trl_restore::test_a_model_that_the_user_fused_stays_fused",
    ),
    "an enclosed forward still computes log-probs after restore_trainer": (
        "restore_trainer",
        "fused.fused_lm_head = None",
        "pass",
        "trainers/trl_restore::test_a_forward_inside_autocast_passes_calls_on",
    ),
    "restore_trainer checks methods after it has changed some": (
        "restore_methods",
        "vars(trainer).get(name) is not ours",
        "False",
        "trainers/trl_restore::test_a_method_that_was_replaced_later_is_named_and_nothing_changes",
    ),
    "restore_trainer accepts a head whose adapter TRL ignores": (
        "restore_trainer",
        "ASKS_THE_MODEL and any(isinstance(base.get_output_embeddings(), tuner_layer) for base in models)",
        "False",
        "trainers/trl_restore::test_a_head_with_an_adapter_is_refused",
    ),
    "log-probs of the sampler at temperature 1": (
        "ChosenTokens.__call__",
        "logits.log_softmax(-1)",
        "scores.log_softmax(-1)",
        "integrations/trainer_mismatch::test_the_sampler_reports_the_log_probs_of_its_tokens[0.7]",
    ),
    "weights stay rounded after sampling": (
        "sampler_weights",
        "parameter.data = data",
        "pass",
        "integrations/trainer_mismatch::test_rounded_weights_sample_and_the_exact_ones_come_back",
    ),
    "models of deleted trainers are held": (
        "_accelerate",
        "vars(base)[_USERS].add(trainer)",
        "Users.last = vars(base)[_USERS].add(trainer) or models",
        "trainers/trl_restore::test_a_deleted_trainer_frees_its_models_by_one_collection[False-False]",
    ),
    "a deep copy runs the original": (
        "_method_of",
        "forward if function is None else types.MethodType(function, model)",
        "forward",
        "trainers/trl_restore::test_a_copy_of_a_trainers_model_can_be_trained[False-deepcopy]",
    ),
    "a pickled model counts as fused": (
        "fused_head_of",
        "fused._forwards[-1].__func__ is type(model).forward",
        "False",
        "huggingface::test_a_copied_model_has_its_own_fused_head[pickled]",
    ),
    "a changed scale of logits not noticed": (
        "FusedHead._identity",
        "return *identity(self.head), *numbers",
        "return identity(self.head)",
        "huggingface::test_a_changed_number_is_noticed_by_the_next_call[scale of the model]",
    ),
    "logit_options of a changed model are outdated": (
        "logit_options",
        "_measure(fused, model)",
        "pass",
        "huggingface::test_a_changed_number_is_noticed_by_the_next_call[soft-cap removed]",
    ),
    "num_iterations replaces the four mini-batches": (
        "GSPOConfig.__post_init__",
        "batch_size is None",
        "batch_size is None and self.num_iterations == 1",
        "trainers/trl_settings::test_default_settings_clip_in_training[1-2]",
    ),
    "the version of TRL that knows sequence_token not named": (
        "_check_loss",
        "level == TOKEN_LEVEL and not HAS_GSPO_TOKEN",
        "False",
        "trainers/trl_settings::test_the_level_of_gspo_token_is_accepted_where_its_trainer_can_be_imported",
    ),
    "GSPOTrainer checks settings after it has loaded the model": (
        "GSPOTrainer.__init__",
        "_settings_of_gspo_trainer(type(self), args)",
        "BackwardSettings()",
        "trainers/trl_settings::test_gspo_trainer_refuses_settings_before_it_loads_the_model[a budget set later]",
    ),
    "a token that the sampler could not score makes the loss NaN": (
        "loss_of_log_probs",
        'torch.where(rollout.isnan(), options["old_log_probs"], rollout)',
        "rollout",
        "seams::test_a_token_that_the_sampler_could_not_score_has_weight_one",
    ),
    "the model card names GRPO": (
        "GSPOTrainer",
        '_name = "GSPO"',
        '_name = "GRPO"',
        "trainers/trl_settings::test_the_model_card_names_the_method_and_its_paper[sequence-GSPO-2507.18071]",
    ),
    "a benchmark's gradients: the larger scale instead of the larger error": (
        "benchmarks/truth:errors",
        "max(scales, key=abs)",
        "max(scales)",
        "bench::test_the_scale_of_an_error_is_that_of_the_worse_gradient",
    ),
    "freed memory that is still resident hides a benchmark's allocations": (
        "peak_bytes",
        "libc.malloc_trim(0)",
        "pass",
        "bench::test_memory_that_was_freed_before_the_run_does_not_hide_its_allocations",
    ),
}
