"""Compute the log-probs of TRL's GRPOTrainer with `gspo_kernels`. Use either the class or the function:

    trainer = GSPOTrainer(model, reward_funcs, args=GSPOConfig(...), train_dataset=...)
    accelerate_trainer(trainer)  # for an existing trainer of any subclass of GRPOTrainer

`linear_log_probs`, called at the model's head, computes old, reference and new log-probs with the same kernel, in fp32
and without storing logits. The backward of the head skips tokens whose log-prob gets no gradient from the loss. TRL's
own code computes the loss and its metrics, so all of TRL's options work.

TRL asks the model for log-probs (`model(..., fused_lm_head=True)`), so we wrap the model's forward.
"""

from gspo_kernels.extras import needs

with needs(__name__, "trl", "trl"):
    import trl
    from packaging.version import Version

    if Version(trl.__version__) < Version("1.15"):
        raise ImportError(
            f"{__name__} needs TRL 1.15 or later, with Python 3.11 or later, got TRL {trl.__version__}: "
            "pip install 'trl>=1.15'"
        )
    from .clip_noise import ClipNoiseCallback
    from .config import GSPOConfig
    from .trainer import GSPOTrainer, accelerate_trainer

__all__ = ["ClipNoiseCallback", "GSPOConfig", "GSPOTrainer", "accelerate_trainer"]
