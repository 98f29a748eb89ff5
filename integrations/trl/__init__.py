"""Compute the log-probs of TRL's GRPOTrainer with `gspo_kernels`. Use either the class or the function:

    trainer = GSPOTrainer(model, reward_funcs, args=GSPOConfig(...), train_dataset=...)
    accelerate_trainer(trainer)  # for an existing trainer of any subclass of GRPOTrainer

`linear_log_probs`, called at the model's head, computes old, reference and new log-probs with the same kernel, in fp32
and without storing logits. The backward of the head skips tokens whose log-prob gets no gradient from the loss. TRL's
own code computes the loss and its metrics, so all of TRL's options work.

TRL 1.15 and later asks the model for log-probs (`model(..., fused_lm_head=True)`), so we wrap the model's forward. TRL
0.29 to 1.14 computes log-probs from logits in the trainer's method `_get_per_token_logps_and_entropies`, so we replace
that method on the instance.
"""

from gspo_kernels.extras import needs

with needs(__name__, "trl", "trl"):
    from .clip_noise import ClipNoiseCallback
    from .config import GSPOConfig
    from .trainer import GSPOTrainer, accelerate_trainer, restore_trainer

__all__ = ["ClipNoiseCallback", "GSPOConfig", "GSPOTrainer", "accelerate_trainer", "restore_trainer"]
