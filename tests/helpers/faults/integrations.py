"""Faults in the integrations."""

from __future__ import annotations

from helpers.faults.table import Fault

FAULTS: dict[str, Fault] = {
    "head not restored after an error": (
        "integrations/huggingface/fused_head",
        "finally:\n            for module, name in parents:\n                module._modules[name] = self.head",
        "except ValueError:\n            raise\n"
        "        for module, name in parents:\n            module._modules[name] = self.head",
        "huggingface::test_the_head_is_restored_after_an_error_inside_the_model",
    ),
    "the measurement changes the random state": (
        "integrations/huggingface/fused_head",
        "torch.random.fork_rng(devices=devices), torch.no_grad()",
        "torch.no_grad()",
        "huggingface::test_the_measurement_keeps_the_random_state",
    ),
    "logit_options removes a fused head": (
        "integrations/huggingface/fused_head",
        "if not was_fused:\n            fused.remove()",
        "fused.remove()",
        "huggingface::test_logit_options_keeps_a_fused_model_fused",
    ),
    "torch.compile not unwrapped": (
        "integrations/huggingface/fused_head",
        'elif hasattr(model, "_orig_mod"):',
        "elif False:",
        "huggingface::test_base_model_unwraps_torch_compile",
    ),
    "a NaN difference accepted": (
        "integrations/huggingface/head_options",
        "if not error <= allowed:",
        "if error > allowed:",
        "huggingface::test_a_head_with_nan_weights_is_refused",
    ),
    "sign of a scale ignored": (
        "integrations/huggingface/head_options",
        "slope, plateau = from_small[0].item() / 2.0**-10, abs(from_large[0].item())",
        "slope, plateau = abs(from_small[0].item()) / 2.0**-10, abs(from_large[0].item())",
        "huggingface::test_negative_and_unlisted_scales_are_measured",
    ),
    "numbers of the text configuration ignored": (
        "integrations/huggingface/head_options",
        "values |= text.to_dict() if text is not None else {}",
        "pass",
        "huggingface::test_numbers_of_the_text_configuration_are_candidates",
    ),
    "every scale rounded to the nearest number of the configuration": (
        "integrations/huggingface/head_options",
        "return nearest if abs(nearest - measured) <= _SCALE_ERROR * abs(measured) else measured",
        "return nearest",
        "huggingface::test_negative_and_unlisted_scales_are_measured",
    ),
    "logged loss with a gradient": (
        "integrations/seams/trainer_methods",
        '"loss": out.loss.detach()',
        '"loss": out.loss',
        "seams::test_logged_metrics_have_no_gradient_and_the_dtype_of_the_loss",
    ),
    "logged metrics in several dtypes": (
        "integrations/seams/common",
        "{name: x.to(out.loss.dtype) for name, x in out.metrics.items()}",
        "dict(out.metrics)",
        "seams::test_logged_metrics_have_no_gradient_and_the_dtype_of_the_loss",
    ),
    "evaluation logged as training": (
        "integrations/seams/trainer_methods",
        '"train" if trainer.model.training else "eval"',
        '"train"',
        "seams::test_ms_swifts_mode_is_train_or_eval",
    ),
    "a sum over answers instead of their mean": (
        "integrations/seams/losses",
        "normalizer = None if global_batch_size is None else",
        "normalizer = 1.0 if global_batch_size is None else",
        "seams::test_openrlhfs_loss_without_a_batch_size_is_a_mean_over_answers",
    ),
    "TRL's mean loss divided by all positions": (
        "integrations/trl",
        "(mask.sum().clamp(min=1) if num_items",
        "(mask.numel() if num_items",
        "trainers/trl::test_policy_and_reference_model_return_a_mean_loss_over_labels",
    ),
    "reference model not accelerated": (
        "integrations/trl",
        '[x for x in (trainer.model, getattr(trainer, "ref_model", None)) if x is not None]',
        "[trainer.model]",
        "trainers/trl::test_policy_and_reference_model_return_a_mean_loss_over_labels",
    ),
    "TRL's check of adapters not restored": (
        "integrations/trl",
        '    finally:\n        setattr(grpo_trainer, "BaseTunerLayer", tuner_layer)',
        "    finally:\n        pass",
        "trainers/trl::test_trls_check_of_adapters_is_restored",
    ),
    "TRL's logs of evaluations take the metrics of training": (
        "integrations/trl_logs",
        '_metrics["train"]',
        '_metrics["eval"]',
        "trainers/trl_budget::test_logs_are_means_over_micro_batches_and_only_of_training",
    ),
    "a second call of accelerate_trainer keeps the settings": (
        "integrations/trl",
        "setattr(model, _SETTINGS, _ModelSettings(",
        "vars(model).setdefault(_SETTINGS, _ModelSettings(",
        "trainers/trl_budget::test_the_last_call_decides_and_each_change_is_printed_once",
    ),
    "trainers of one model share their settings": (
        "integrations/trl",
        "call_before_each_batch(trainer, functools.partial(_use_settings, trainer, models))",
        "pass",
        "trainers/trl_budget::test_trainers_of_one_model_use_their_own_settings",
    ),
    "masses of tiles kept without autograd": (
        "log_probs",
        "if any(needed_by_autograd(head.rows)) else 0.0",
        "if True else 0.0",
        "trainers/trl_budget::test_calls_without_autograd_keep_nothing",
    ),
    "temperature missing before TRL 1.15": (
        "integrations/trl",
        "mask=mask, temperature=self.trainer.temperature, entropy=entropy",
        "mask=mask, entropy=entropy",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "hidden states shifted by one token before TRL 1.15": (
        "integrations/trl",
        "hidden[:, :-1][:, -targets.shape[1] :]",
        "hidden[:, -targets.shape[1] :]",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "a logged entropy has a gradient": (
        "integrations/trl",
        "return out if bonus or out.entropy is None else",
        "return out if True else",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "batches concatenated in reverse": (
        "integrations/trl",
        "torch.cat([x.log_probs for x in scores])",
        "torch.cat([x.log_probs for x in scores[::-1]])",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "prompt mask used for the completion": (
        "integrations/trl",
        "self._score(ids[:, -logits_to_keep:], attended[:, -logits_to_keep:]",
        "self._score(ids[:, -logits_to_keep:], attended[:, :logits_to_keep]",
        "trainers/trl::test_log_probs_before_trl_1_15_equal_those_of_logits",
    ),
    "verl's bounds swapped": (
        "integrations/verl_config",
        "low, high = config.clip_ratio_low, config.clip_ratio_high",
        "high, low = config.clip_ratio_low, config.clip_ratio_high",
        "trainers/verl_engine::test_each_clip_bound_defaults_to_clip_ratio",
    ),
    "verl's clip_ratio ignored": (
        "integrations/verl_config",
        "config.clip_ratio if high is None else high",
        "low if high is None else high",
        "trainers/verl_engine::test_each_clip_bound_defaults_to_clip_ratio",
    ),
    "verl's nested responses read as padded": (
        "integrations/verl",
        "if responses.is_nested:",
        "if False:",
        "trainers/verl_engine::test_positions_of_nested_responses_are_masked_correctly",
    ),
    "replies of the environment trained on": (
        "integrations/reference_trainer/sampling",
        "dialogue.add(ids, reply, sampled=False)",
        "dialogue.add(ids, reply, sampled=True)",
        "trainer_tasks::test_a_dialogue_masks_the_calculators_replies",
    ),
    "sampling without the temperature": (
        "integrations/reference_trainer/sampling",
        "choose(scores / self._temperature,",
        "choose(scores,",
        "trainer_sampling::test_answers_have_the_probabilities_that_the_loss_computes",
    ),
    "all prompts of a rollout have the same random numbers": (
        "integrations/reference_trainer/sampling",
        "np.random.default_rng(seed)",
        "np.random.default_rng(0)",
        "trainer_sampling::test_an_answer_does_not_depend_on_the_others_of_its_batch",
    ),
    "the turns of a dialogue have the same random numbers": (
        "integrations/reference_trainer/sampling",
        "row[len(d.ids) :]",
        "row",
        "trainer_sampling::test_each_position_of_an_answer_has_a_random_number_of_its_own",
    ),
    "cumulative probabilities in fp32": (
        "integrations/reference_trainer/sampling",
        "probabilities.cumsum(-1, dtype=torch.float64)",
        "probabilities.cumsum(-1)",
        "trainer_sampling::test_small_probabilities_of_a_large_vocabulary_are_kept",
    ),
    "all steps have the same random numbers": (
        "integrations/reference_trainer/trainer",
        "(self.seed, step, place)",
        "(self.seed, 1, place)",
        "trainer_sampling::test_a_run_names_each_stream_by_seed_step_and_place",
    ),
    "each process numbers its prompts from 0": (
        "integrations/reference_trainer/trainer",
        "distributed.share([(self.seed, step, place) for place in range(len(examples))])",
        "[(self.seed, step, place) for place in range(len(distributed.share(examples)))]",
        "trainer_ranks::test_two_processes_train_like_one[ddp]",
    ),
    "generators seeded alike in all steps": (
        "integrations/reference_trainer/trainer",
        "hash((self.seed, step, distributed.rank()))",
        "hash((self.seed, distributed.rank()))",
        "trainer_sampling::test_rewards_with_random_numbers_are_the_same_after_a_resume",
    ),
    "W&B's variable wins over the option": (
        "integrations/reference_trainer/trackers",
        'config.wandb_project or os.environ.get("WANDB_PROJECT")',
        'os.environ.get("WANDB_PROJECT") or config.wandb_project',
        "trainer_options::test_wandb_writes_runs_offline_where_options_and_variables_say[True]",
    ),
    "an error in a reward function stops the run": (
        "integrations/tasks/rewards",
        "except Exception as error:",
        "except ValueError as error:",
        "trainer_tasks::test_a_failed_component_scores_zero_and_is_reported",
    ),
    "the caller's timer lost after a reward": (
        "integrations/tasks/rewards",
        "if remaining:",
        "if False:",
        "trainer_tasks::test_the_time_limit_restores_the_callers_timer_and_handler",
    ),
    "routing recorded but not replayed": (
        "integrations/reference_trainer/routing",
        "return logits, probabilities.to(weights.dtype), experts",
        "return output",
        "compare::test_replayed_routing_computes_with_the_recorded_experts",
    ),
    "compared objectives begin with different weights": (
        "tools/compare",
        "torch.manual_seed(seed)",
        "torch.manual_seed(len(name))",
        "compare::test_all_arms_begin_alike_and_gspo_token_trains_as_gspo",
    ),
}
