"""Faults in the integrations."""

from __future__ import annotations

from faults.table import Fault

FAULTS: dict[str, Fault] = {
    "sign of a scale ignored": (
        "measure",
        "slope, plateau = [-from_small[0].item(-]{+abs(from_small[0].item()+}) / 2.0**-10, abs(from_large[0].item())",
        "huggingface::test_negative_and_unlisted_scales_are_measured",
    ),
    "slime's clip fraction counts both bounds for every advantage": (
        "trainers/slime:_clipped",
        "bounded [-* advantages < ratio * advantages-]{+!= ratio+}",
        "seams::test_slimes_loss_and_metrics_are_its_sums_of_sample_means",
    ),
    "prime-rl's soft-cap ignored": (
        "trainers/prime_rl:head",
        '[-getattr(layer, "softcap", None)-]{+None+}',
        "seams::test_prime_rls_head_equals_its_logits[4.0-False]",
    ),
    "packed sequences attend to each other": (
        "_check_packed",
        "[-begins.any().item()-]{+False+}",
        "huggingface::test_packed_sequences_are_kept_apart_or_refused",
    ),
    "a sum over answers instead of their mean": (
        "trainers/openrlhf:PolicyLoss.forward",
        "[-None-]{+1.0+} if global_batch_size is None else global_batch_size / dp_size",
        "seams::test_openrlhfs_loss_without_a_batch_size_is_a_mean_over_answers",
    ),
    "TRL's mean loss divided by all positions": (
        "ModelLogProbs.__call__",
        "mask.[-sum().clamp(min=1-]{+numel(+})",
        "trainers/trl::test_policy_and_reference_model_return_a_mean_loss_over_labels",
    ),
    "learning rate of the previous update": (
        "Optimizer.step",
        "self._config.learning_rate_at([-self.updates-]{+max(0, self.updates - 1)+})",
        "trainer_numbers::test_the_optimizer_takes_the_step_of_adamw",
    ),
    "TRL's hidden states shifted by one token": (
        "ModelLogProbs.__call__",
        "hidden if shift_labels is not None else hidden[:, [-:-1-]{+1:+}]",
        "trainers/trl::test_policy_and_reference_model_return_a_mean_loss_over_labels",
    ),
    "verl: the loss divides by the tokens of the answers that ran": (
        "LiveBatch.loss",
        "[-tu.assign_non_tensor(data, batch_num_tokens=self._batch_num_tokens)-]{+pass+}",
        "trainers/verl_zero_advantage::test_training_and_metrics_equal_those_of_all_answers[1]",
    ),
    "verl's loss_scale_factor ignored": (
        "verl/policy_loss:gspo_policy_loss",
        '[-batch.get("loss_scale_factor") or -]response_mask.shape[1]',
        "trainers/verl_parity::test_our_policy_loss_in_verls_registry_equals_verls_gspo[seq-mean-token-sum-norm]",
    ),
    "verl's bounds swapped": (
        "clip_window",
        "[-low, high-]{+high, low+} = config.clip_ratio_low, config.clip_ratio_high",
        "trainers/verl_parity::test_each_clip_bound_defaults_to_clip_ratio",
    ),
    "verl's nested responses read as padded": (
        "_predicts_response",
        "[-responses.is_nested-]{+False+}",
        "trainers/verl_parity::test_positions_of_nested_responses_are_masked_correctly",
    ),
    "replies of the environment trained on": (
        "reply_to",
        "dialogue.add(ids, reply, log_probs=[-None-]{+[0.0] * len(ids)+})",
        "trainer_tasks::test_a_dialogue_masks_the_calculators_replies",
    ),
    "sampling without the temperature": (
        "ChosenTokens.__call__",
        "scores[- / self._temperature-]",
        "trainer_sampling::test_answers_have_the_probabilities_that_the_loss_computes",
    ),
    "each process numbers its prompts from 0": (
        "Learner.prepare",
        "[-distributed.share([(self.seed, step, place) for place in range(len(examples))])-]{+[(self.seed, step, "
        "place) for place in range(len(distributed.share(examples)))]+}",
        "trainer_ranks::test_two_processes_train_like_one[ddp]",
    ),
    "running moments of rewards not restored": (
        "Training.restore",
        '[-self.running = RunningMoments(**{name: saved["running"][name] for name in CHECKPOINT["running"]})-]{+pass+}',
        "trainer_resume::test_an_interrupted_run_continues_to_the_bit[checkpoint]",
    ),
    "gradients of all but the last micro-batch lost in half precision": (
        "Optimizer.collect",
        "gradient[- if master.grad is None else master.grad + gradient-]",
        "trainer_options::test_half_precision_weights_have_fp32_masters[dtype0]",
    ),
    "kl_aggregation ignored in the trainer's divisor": (
        "normalizers",
        "[-of.kl_aggregation-]{+False+}",
        "trainer_numbers::test_an_update_equals_the_formulas[sequences, KL of tokens-0]",
    ),
    "old log-probs without the temperature": (
        "log_probs_of.log_probs",
        '{"mask": rollout.answer_mask, "[-temperature": config.temperature, "-]backend": config.backend}',
        "trainer_numbers::test_an_update_equals_the_formulas[tokens of all-0]",
    ),
    "turns of all answers counted as equally many": (
        "advantages_of_turns",
        "[-[answer // config.group_size for answer, count in enumerate(counts) for _ in range(count)]-]{+[row // "
        "(config.group_size * max(counts)) for row in range(sum(counts))]+}",
        "trainer_numbers::test_turns_of_unequal_number_belong_to_the_prompt_of_their_answer",
    ),
    "KL of masked tokens subtracted from rewards": (
        "advantages_of_scored",
        '[-(kl(options["kl_estimator"]) * mask-]{+kl(options["kl_estimator"]+}).sum(1)',
        "trainer_numbers::test_the_kl_in_advantages_is_that_of_unmasked_tokens[k3]",
    ),
    "half of a step saved": (
        "Training.save_stopped",
        "[-self.updating-]{+False+}",
        "trainer_resume::test_a_second_signal_in_the_updates_saves_nothing",
    ),
    "pass@k of samples drawn with replacement": (
        "pass_at_k",
        "[-comb(samples - correct, k) / comb(samples, k)-]{+((samples - correct) / samples) ** k+}",
        "trainer_held_out::test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer",
    ),
    "a tied head merged into the embeddings": (
        "untie",
        "[-module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)-]{+pass+}",
        "trainer_options::test_merging_adapters_of_tied_embeddings_keeps_the_logits[lora-lm_head]",
    ),
    "an adapter merged in the base's 16 bits": (
        "merged",
        "adapted[-.float()-]",
        "trainer_export::test_a_change_smaller_than_the_rounding_of_bf16_is_kept[base]",
    ),
    "answers without a reward counted": (
        "RewardBatch.scored",
        "[-any(column[i] is not None for column in columns)-]{+True+}",
        "trainer_tasks::test_a_component_that_returns_none_does_not_apply",
    ),
    "log-probs of the sampler at temperature 1": (
        "ChosenTokens.__call__",
        "[-logits-]{+scores+}.log_softmax(-1)",
        "integrations/trainer_mismatch::test_the_sampler_reports_the_log_probs_of_its_tokens[0.7]",
    ),
    "a changed scale of logits not noticed": (
        "FusedHead._identity",
        "[-return *identity(self.head), *numbers, *((name, x, x._version) for name, x in tensors)-]{+return "
        "identity(self.head)+}",
        "huggingface::test_a_changed_number_is_noticed_by_the_next_call[scale of the model]",
    ),
    "an answer that did not run gets the log-prob 0": (
        "LiveAnswers._run_live_rows",
        "[-batch.get(_OLD, torch.zeros(mask.shape, device=mask.device))-]{+torch.zeros(mask.shape, "
        "device=mask.device)+}",
        "trainers/trl_zero_advantage::test_old_log_probs_far_below_the_new_ones_make_no_nan[1]",
    ),
    "answers move to another optimizer step": (
        "LiveAnswers._move_live_rows",
        "[-math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)-]{+args.steps_per_generation+}",
        "trainers/trl_zero_advantage::test_training_equals_stock_trl[half dead]",
    ),
    "the correction of vLLM's mismatch compares with log-probs of 0": (
        "LiveAnswers._can_defer",
        "[-not needs_all-]{+True+}",
        "trainers/trl_zero_advantage::test_log_probs_of_a_rollout_func_are_computed[True]",
    ),
    "answers move although a token's weight depends on its micro-batch": (
        "_dependence_on_order",
        '[-trainer.loss_type == "bnpo"-]{+False+}',
        "trainers/trl_zero_advantage::test_training_equals_stock_trl[bnpo, tool mask]",
    ),
    "the entropy counts answers that did not run": (
        "LiveAnswers._log",
        "[-ran < rows-]{+False+}",
        "trainers/trl_zero_advantage::test_training_equals_stock_trl[half dead]",
    ),
    "a KL term does not switch skipping off": (
        "_inexact_setting",
        "[-trainer.beta != 0-]{+False+}",
        "trainers/trl_zero_advantage::test_settings_that_make_skipping_inexact_are_named",
    ),
    "the divisors of an update count only answers that run": (
        "gradients",
        "divisors = normalizers(config, [-mask-]{+take(batch.rollout, rows_to_run(batch.live, rows)).answer_mask+})",
        "integrations/trainer_zero_advantage::test_training_equals_training_without_skipping[divided by tokens]",
    ),
    "live answers keep the sampler's log-probs": (
        "reference_trainer/update:with_log_probs",
        "[-old[ran] = log_probs-]{+pass+}",
        "integrations/trainer_zero_advantage::test_old_log_probs_have_the_bits_of_the_updates[options0]",
    ),
    "clip fractions leave out answers that did not run": (
        "reference_trainer/measures:numbers",
        "[-measures.skipped.any()-]{+False+}",
        "integrations/trainer_zero_advantage::test_training_equals_training_without_skipping[one micro-batch]",
    ),
    "a stopped run saves the moments of the next step": (
        "Learner.prepare",
        "running = [-replace(self.running)-]{+self.running+}",
        "trainer_resume::test_a_run_that_skips_answers_continues_to_the_bit",
    ),
    "every rank takes the equal rewards of the first": (
        "EqualRewards._generate_and_score",
        '[-trainer.accelerator.process_index * len(output["advantages"])-]{+0+}',
        "trainers/trl_zero_advantage::test_equal_groups_get_advantage_0_on_every_rank[True-group-0.5]",
    ),
    "rounding moves weights for equal rewards": (
        "EqualRewards._generate_and_score",
        'output["advantages"][-.masked_fill(local, 0)-]',
        "trainers/trl_zero_advantage::test_equal_rewards_move_weights_in_stock_trl_only[GSPOTrainer]",
    ),
}
