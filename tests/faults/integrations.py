"""Faults in the integrations."""

from __future__ import annotations

from faults.table import Fault

FAULTS: dict[str, Fault] = {
    "head not restored after an error": (
        "FusedHead._forward_with",
        "try:\n"
        "    for module, name in parents:\n"
        "        module._modules[name] = stand_in\n"
        "    output = forward(*args, **kwargs)\n"
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
    "slime's clip fraction counts both bounds for every advantage": (
        "trainers/slime:_clipped",
        "bounded * advantages < ratio * advantages",
        "bounded != ratio",
        "seams::test_slimes_loss_and_metrics_are_its_sums_of_sample_means",
    ),
    "prime-rl's soft-cap ignored": (
        "trainers/prime_rl:head",
        'getattr(layer, "softcap", None)',
        "None",
        "seams::test_prime_rls_head_equals_its_logits[4.0-False]",
    ),
    "prime-rl's means weighted by sequences": (
        "trainers/prime_rl:_repeated",
        "counts.get(divisor_of(name), 1)",
        "min(counts.get(divisor_of(name), 1), 1)",
        "seams::test_metrics_of_micro_batches_are_logged_as_those_of_the_step[step_of_prime_rl-1]",
    ),
    "packed sequences attend to each other": (
        "_check_packed",
        "begins.any().item()",
        "False",
        "huggingface::test_packed_sequences_are_kept_apart_or_refused",
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
    "TRL's mean loss divided by all positions": (
        "ModelLogProbs.__call__",
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
    "learning rate of the previous update": (
        "Optimizer.step",
        "self._config.learning_rate_at(self.updates)",
        "self._config.learning_rate_at(max(0, self.updates - 1))",
        "trainer_numbers::test_the_optimizer_takes_the_step_of_adamw",
    ),
    "trainers of one model share their settings": (
        "_accelerate",
        "call_before_each_batch(trainer, lambda: _use_settings(trainer, vars(trainer)[_MODELS]))",
        "pass",
        "trainers/trl_budget::test_trainers_of_one_model_use_their_own_settings",
    ),
    "hidden states shifted by one token before TRL 1.15": (
        "_score.score",
        "hidden[:, :-1][:, -targets.shape[1] :]",
        "hidden[:, -targets.shape[1] :]",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "verl: entropies that are only logged have a gradient": (
        "verl/engine:_Score.__init__",
        "self.detach_entropy = entropy_is_only_logged",
        "self.detach_entropy = entropy_is_only_logged and settings.gradient_budget > 0",
        "trainers/verl_budget::test_entropies_that_are_only_logged_have_no_backward",
    ),
    "verl: the loss divides by the tokens of the answers that ran": (
        "LiveBatch.loss",
        "tu.assign_non_tensor(data, batch_num_tokens=self._batch_num_tokens)",
        "pass",
        "trainers/verl_zero_advantage::test_training_and_metrics_equal_those_of_all_answers[1]",
    ),
    "verl's loss_scale_factor ignored": (
        "verl/policy_loss:gspo_policy_loss",
        'batch.get("loss_scale_factor") or response_mask.shape[1]',
        "response_mask.shape[1]",
        "trainers/verl_parity::test_our_policy_loss_in_verls_registry_equals_verls_gspo[seq-mean-token-sum-norm]",
    ),
    "verl's bounds swapped": (
        "clip_window",
        "low, high = config.clip_ratio_low, config.clip_ratio_high",
        "high, low = config.clip_ratio_low, config.clip_ratio_high",
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
    "the end token of a turn repeated before a reply": (
        "reply_text",
        "ends[-1].end() if ends else 0",
        "0",
        "trainer_tasks::test_any_end_token_stands_for_the_end_of_a_turn",
    ),
    "sampling without the temperature": (
        "ChosenTokens.__call__",
        "scores / self._temperature",
        "scores",
        "trainer_sampling::test_answers_have_the_probabilities_that_the_loss_computes",
    ),
    "all steps have the same random numbers": (
        "Learner.prepare",
        "(self.seed, step, place)",
        "(self.seed, 1, place)",
        "trainer_sampling::test_a_run_names_each_stream_by_seed_step_and_place",
    ),
    "each process numbers its prompts from 0": (
        "Learner.prepare",
        "distributed.share([(self.seed, step, place) for place in range(len(examples))])",
        "[(self.seed, step, place) for place in range(len(distributed.share(examples)))]",
        "trainer_ranks::test_two_processes_train_like_one[ddp]",
    ),
    "an error in a reward function stops the run": (
        "attempt",
        "Exception",
        "ValueError",
        "trainer_tasks::test_a_failed_component_scores_zero_and_is_reported",
    ),
    "running moments of rewards not restored": (
        "Training.restore",
        'self.running = RunningMoments(**{name: saved["running"][name] for name in CHECKPOINT["running"]})',
        "pass",
        "trainer_resume::test_an_interrupted_run_continues_to_the_bit[checkpoint]",
    ),
    "gradients of all but the last micro-batch lost in half precision": (
        "Optimizer.collect",
        "gradient if master.grad is None else master.grad + gradient",
        "gradient",
        "trainer_options::test_half_precision_weights_have_fp32_masters[dtype0]",
    ),
    "failed rewards of the first process only": (
        "joined",
        "[x for part in parts for x in part.failures]",
        "list(parts[0].failures)",
        "trainer_numbers::test_every_number_of_two_processes_equals_its_definition",
    ),
    "kl_aggregation ignored in the trainer's divisor": (
        "normalizers",
        "of.kl_aggregation",
        "False",
        "trainer_numbers::test_an_update_equals_the_formulas[sequences, KL of tokens-0]",
    ),
    "old log-probs without the temperature": (
        "log_probs_of.log_probs",
        '{"mask": rollout.answer_mask, "temperature": config.temperature, "backend": config.backend}',
        '{"mask": rollout.answer_mask, "backend": config.backend}',
        "trainer_numbers::test_an_update_equals_the_formulas[tokens of all-0]",
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
    "a diverged training loses the others": (
        "studies/compare:train",
        "break",
        "raise",
        "compare::test_a_training_that_is_not_finite_stops_and_the_others_are_kept",
    ),
    "changed prompts accepted": (
        "start_of",
        'then.get("prompts", record["prompts"]) != record["prompts"]',
        "False",
        "trainer_resume::test_changed_data_are_refused",
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
    "checksums of a checkpoint not compared": (
        "read_checkpoint",
        "archive.testzip()",
        "None",
        "trainer_resume::test_a_flipped_bit_is_found",
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
    "half of a step saved": (
        "Training.save_stopped",
        "self.updating",
        "False",
        "trainer_resume::test_a_second_signal_in_the_updates_saves_nothing",
    ),
    "a reward's columns not checked before the run": (
        "task_of",
        "task.rewards.check([*task.train, *task.held_out])",
        "pass",
        "trainer_tasks::test_a_wrong_signature_is_an_error_before_anything_is_sampled[mode1]",
    ),
    "pass@k of samples drawn with replacement": (
        "pass_at_k",
        "comb(samples - correct, k) / comb(samples, k)",
        "((samples - correct) / samples) ** k",
        "trainer_held_out::test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer",
    ),
    "an export replaces a folder": (
        "export",
        "check_free(out)",
        "pass",
        "trainer_export::test_wrong_arguments_change_nothing",
    ),
    "a tied head merged into the embeddings": (
        "untie",
        "module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)",
        "pass",
        "trainer_options::test_merging_adapters_of_tied_embeddings_keeps_the_logits[lora-lm_head]",
    ),
    "an adapter merged in the base's 16 bits": (
        "merged",
        "adapted.float()",
        "adapted",
        "trainer_export::test_a_change_smaller_than_the_rounding_of_bf16_is_kept[base]",
    ),
    "a merged adapter evaluated": (
        "evaluate",
        "load_policy(str(config.model), config, merge=False)",
        "load_policy(str(config.model), config)",
        "trainer_export::test_a_change_smaller_than_the_rounding_of_bf16_is_kept[base]",
    ),
    "gspo eval without the run's truncation": (
        "batches_of",
        'sampling["truncation"] = config.truncation',
        "pass",
        "trainer_eval::test_a_run_of_the_demo_has_the_rewards_and_the_truncation_of_its_run",
    ),
    "a verdict without its interval": (
        "verdict",
        "change.low > 0",
        "change.mean > 0",
        "trainer_held_out::test_a_verdict_needs_an_interval_without_0_and_enough_prompts",
    ),
    "a resumed run compares with its last evaluation": (
        "Training.restore",
        "self.comparable(rows[0])",
        'self.comparable([row for row in rows if "eval_rewards" in row][-1])',
        "trainer_held_out::test_a_resumed_run_compares_with_its_first_evaluation",
    ),
    "a process that stops alone": (
        "Learner.evaluate",
        "together = joined(distributed.gather(joined(rewards)))",
        "together = joined(rewards)",
        "trainer_ranks::test_processes_stop_together_if_the_calls_of_all_fail",
    ),
    "answers without a reward counted": (
        "RewardBatch.scored",
        "any(column[i] is not None for column in columns)",
        "True",
        "trainer_tasks::test_a_component_that_returns_none_does_not_apply",
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
    "restore_trainer takes a shared model from the other trainer": (
        "restore_trainer",
        "others = users.trainers()",
        "others = []",
        "trainers/trl_restore::test_trainers_that_share_a_model_are_restored_one_by_one",
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
    "a changed scale of logits not noticed": (
        "FusedHead._identity",
        "return *identity(self.head), *numbers, *((name, x, x._version) for name, x in tensors)",
        "return identity(self.head)",
        "huggingface::test_a_changed_number_is_noticed_by_the_next_call[scale of the model]",
    ),
    "a token that the sampler could not score makes the loss NaN": (
        "loss_of_log_probs",
        'torch.where(rollout.isnan(), options["old_log_probs"], rollout)',
        "rollout",
        "seams::test_a_token_that_the_sampler_could_not_score_has_weight_one",
    ),
    "an answer that did not run gets the log-prob 0": (
        "LiveAnswers._run_live_rows",
        "batch.get(_OLD, torch.zeros(mask.shape, device=mask.device))",
        "torch.zeros(mask.shape, device=mask.device)",
        "trainers/trl_zero_advantage::test_old_log_probs_far_below_the_new_ones_make_no_nan[1]",
    ),
    "a batch without live answers leaves gradients None": (
        "LiveAnswers._run_live_rows",
        "full + 0 * log_probs.sum()",
        "full + 0 * torch.zeros((), requires_grad=True)",
        "trainers/trl_zero_advantage::test_old_log_probs_far_below_the_new_ones_make_no_nan[2]",
    ),
    "answers move to another optimizer step": (
        "LiveAnswers._move_live_rows",
        "math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)",
        "args.steps_per_generation",
        "trainers/trl_zero_advantage::test_training_equals_stock_trl[half dead]",
    ),
    "answers that moved stay there after an interrupted optimizer step": (
        "LiveAnswers._prepare_inputs",
        "not (self.skipping.moves and self._steps_consist_of(size))",
        "False",
        "trainers/trl_zero_advantage::test_an_interrupted_optimizer_step_is_trained_as_in_stock_trl[1-False]",
    ),
    "a setting that a callback changes does not act": (
        "LiveAnswers._prepare_inputs",
        "self.decide()",
        "pass",
        "trainers/trl_zero_advantage::test_a_setting_that_a_callback_changes_acts_as_in_stock_trl[loss_type]",
    ),
    "the correction of vLLM's mismatch compares with log-probs of 0": (
        "LiveAnswers._can_defer",
        "not needs_all",
        "True",
        "trainers/trl_zero_advantage::test_log_probs_of_a_rollout_func_are_computed[True]",
    ),
    "answers move although a token's weight depends on its micro-batch": (
        "_dependence_on_order",
        'trainer.loss_type == "bnpo"',
        "False",
        "trainers/trl_zero_advantage::test_training_equals_stock_trl[bnpo, tool mask]",
    ),
    "answers that run are spread over all micro-batches": (
        "live_rows_last",
        "live.flatten().int()",
        "torch.zeros_like(live.flatten().int())",
        "trainers/trl_zero_advantage::test_live_answers_share_micro_batches[grpo]",
    ),
    "old log-probs that no batch gets": (
        "LiveAnswers._prepare_inputs",
        "self._is_deferred and trainer.accelerator.sync_gradients",
        "False",
        "trainers/trl_zero_advantage::test_only_live_rows_run_and_old_log_probs_have_the_bits_of_new_ones",
    ),
    "the entropy counts answers that did not run": (
        "LiveAnswers._log",
        "ran < rows",
        "False",
        "trainers/trl_zero_advantage::test_training_equals_stock_trl[half dead]",
    ),
    "a KL term does not switch skipping off": (
        "_inexact_setting",
        "trainer.beta != 0",
        "False",
        "trainers/trl_zero_advantage::test_settings_that_make_skipping_inexact_are_named",
    ),
    "a sampler weight of 0 does not skip the model": (
        "live_rows",
        'live = live & batch["importance_sampling_ratio"].ne(0)',
        "pass",
        "trainers/trl_zero_advantage::test_rows_are_live_by_mask_advantage_and_weight",
    ),
    "stock TRL gets a rollout without old log-probs": (
        "restore_trainer",
        "vars(trainer)[_LIVE].leave()",
        "pass",
        "trainers/trl_zero_advantage::test_a_rollout_without_old_log_probs_is_not_left_to_stock_trl",
    ),
    "the divisors of an update count only answers that run": (
        "gradients",
        "divisors = normalizers(config, mask)",
        "divisors = normalizers(config, take(batch.rollout, rows_to_run(batch.live, rows)).answer_mask)",
        "integrations/trainer_zero_advantage::test_training_equals_training_without_skipping[divided by tokens]",
    ),
    "live answers keep the sampler's log-probs": (
        "reference_trainer/update:with_log_probs",
        "old[ran] = log_probs",
        "pass",
        "integrations/trainer_zero_advantage::test_old_log_probs_have_the_bits_of_the_updates[options0]",
    ),
    "the second epoch compares with the sampler's log-probs": (
        "gradients",
        "batch.old_log_probs[to_run] = gather_rows(torch.cat(log_probs))",
        "pass",
        "integrations/trainer_zero_advantage::test_the_first_update_stores_its_log_probs_for_the_second_epoch",
    ),
    "clip fractions leave out answers that did not run": (
        "reference_trainer/measures:numbers",
        "measures.skipped.any()",
        "False",
        "integrations/trainer_zero_advantage::test_training_equals_training_without_skipping[routing replay]",
    ),
    "one process runs more answers than another": (
        "rows_to_run",
        "max(1, -(-int(is_live.sum()) // world())) * world()",
        "max(1, int(is_live.sum()))",
        "integrations/trainer_zero_advantage::test_all_processes_run_equally_many_rows[2-expected1]",
    ),
    "a stopped run saves the moments of the next step": (
        "Learner.prepare",
        "running = replace(self.running)",
        "running = self.running",
        "trainer_resume::test_a_run_that_skips_answers_continues_to_the_bit",
    ),
    "every rank takes the equal rewards of the first": (
        "EqualRewards._generate_and_score",
        'trainer.accelerator.process_index * len(output["advantages"])',
        "0",
        "trainers/trl_zero_advantage::test_equal_groups_get_advantage_0_on_every_rank[True-group-0.5]",
    ),
    "rounding moves weights for equal rewards": (
        "EqualRewards._generate_and_score",
        'output["advantages"].masked_fill(local, 0)',
        'output["advantages"]',
        "trainers/trl_zero_advantage::test_equal_rewards_move_weights_in_stock_trl_only[GSPOTrainer]",
    ),
    "clip noise measured with dropout": (
        "log_probs_by_precision",
        "in_mode(list(model.modules()), training=False)",
        "contextlib.nullcontext()",
        "trainers/trl_settings::test_clip_noise_is_logged_and_training_does_not_change[dropout]",
    ),
    "a measurement moves the generators": (
        "log_probs_by_precision",
        "generators_restored(model)",
        "contextlib.nullcontext()",
        "clip_noise::test_modes_and_generators_are_those_of_before[False]",
    ),
    "clip noise without the sampler's log-probs": (
        "ClipNoiseProbe.measure",
        "self.before._replace(used=old)",
        "self.before",
        "trainer_mismatch::test_clip_noise_compares_with_the_samplers_log_probs",
    ),
    "clip noise of the first mini-batch, in TRL": (
        "ClipNoiseCallback.on_pre_optimizer_step",
        "self._rollout[-1]",
        "self._rollout[0]",
        "trainers/trl_settings::test_clip_noise_is_logged_and_training_does_not_change[bf16]",
    ),
}
