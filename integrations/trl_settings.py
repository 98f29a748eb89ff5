"""Settings of TRL's GRPO trainer: `GSPOConfig`, and warnings of settings with which nothing is ever clipped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gspo_kernels.objective import TOKEN_WINDOW
from gspo_kernels.validation import Field, warn_once

UPDATES_PER_ROLLOUT = 4  # GSPO's paper splits every batch of rollouts into four mini-batches
# The loss types that clip the ratio to [1 - epsilon, 1 + epsilon_high]. cispo's epsilon_high is the bound itself.
CLIPPING_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass
class GSPOConfig(GRPOConfig):
    """GRPOConfig with the settings of GSPO's paper (arXiv 2507.18071, section 5.1).

    One ratio per sequence, equal weight for every sequence, a clip window of 3e-4 and 4e-4, and four updates per
    rollout. TRL's own defaults with importance_sampling_level="sequence" are LUSPO (loss_type="dapo"), a window of 0.2
    and one update per rollout, with which the ratio is always 1 and nothing is clipped.

    The four updates come from `steps_per_generation`, whose default here is 4 * gradient_accumulation_steps: a rollout
    is four times as large as GRPOConfig's, and each update trains on a quarter of it. A rollout is generated at once,
    from generation_batch_size / num_generations prompts; TRL drops the prompts of an epoch that do not fill one. The
    default holds only where the number of updates is not set already:

    - With `steps_per_generation` or `generation_batch_size`, TRL's arithmetic is unchanged.
    - With `num_iterations` above 1, steps_per_generation defaults to gradient_accumulation_steps, as in GRPOConfig:
      the same completions are trained on `num_iterations` times.

    For one update per rollout, set steps_per_generation=gradient_accumulation_steps. The trainer then warns once.

    GRPOConfig refuses `generation_batch_size` together with `steps_per_generation`. GSPOConfig accepts both if they
    agree, so `GSPOConfig(**config.to_dict())` and `dataclasses.replace(config, ...)` work.

    Raises:
        ValueError: as GRPOConfig; or `generation_batch_size` and `steps_per_generation` disagree.
    """

    importance_sampling_level: str = field(default="sequence", metadata={"help": "One ratio per sequence."})
    loss_type: str = field(default="grpo", metadata={"help": "A mean over tokens, then over sequences."})
    epsilon: float = field(default=3e-4, metadata={"help": "Lower bound of the window, arXiv 2507.18071, 5.1."})
    epsilon_high: float | None = field(default=4e-4, metadata={"help": "Upper bound of the window."})
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Number of steps per generation. If `None`, it defaults to 4 * `gradient_accumulation_steps`, or "
            "with `num_iterations` above 1 to `gradient_accumulation_steps`."
        },
    )

    def __post_init__(self) -> None:
        batch_size = self.generation_batch_size
        if self.steps_per_generation is not None:
            self.generation_batch_size = None  # computed by TRL, compared below
        elif batch_size is None and self.num_iterations == 1:
            self.steps_per_generation = UPDATES_PER_ROLLOUT * self.gradient_accumulation_steps
        super().__post_init__()
        if batch_size is not None and batch_size != self.generation_batch_size:
            factors = (self.per_device_train_batch_size, self.world_size, self.steps_per_generation)
            Field("GSPOConfig").fail(
                "generation_batch_size",
                f"None or {self.generation_batch_size} (per_device_train_batch_size * processes * steps_per_generation "
                f"= {' * '.join(map(str, factors))})",
                batch_size,
            )


def warn_of_idle_clipping(trainer: GRPOTrainer, stacklevel: int) -> None:
    """Warn once if the importance ratio is always 1, and once if the clip window is too wide for a sequence ratio.

    stacklevel as in warnings.warn, counted from `warn_once`: 3 is the caller of this function.
    """
    args: Any = trainer.args
    steps, iterations = args.steps_per_generation, args.num_iterations
    accumulation = args.gradient_accumulation_steps
    # TRL's condition for taking the current log-probs as the old ones. With vLLM it may compute old ones nevertheless,
    # but with the same weights.
    if accumulation % (steps * iterations) == 0:
        warn_once(
            f"gspo_kernels: steps_per_generation={steps}, num_iterations={iterations} and gradient_accumulation_steps="
            f"{accumulation} give each rollout one update, so the importance ratio is always 1 and nothing is clipped. "
            f"For four, as in GSPO's paper and by GSPOConfig's default, set steps_per_generation="
            f"{UPDATES_PER_ROLLOUT * accumulation}, or raise num_iterations",
            stacklevel,
        )
    low, high = trainer.epsilon_low, trainer.epsilon_high
    level = trainer.importance_sampling_level
    # "sequence_token" is the level of trl.experimental.gspo_token.
    clips_sequences = level in ("sequence", "sequence_token") and trainer.loss_type in CLIPPING_LOSS_TYPES
    if clips_sequences and max(low, high) >= TOKEN_WINDOW:
        warn_once(
            f"gspo_kernels: epsilon={low:g}, epsilon_high={high:g} is a clip window for token ratios; the ratio of "
            f"importance_sampling_level={level!r} hardly ever leaves it. GSPO's paper: epsilon=3e-4, epsilon_high=4e-4",
            stacklevel,
        )
