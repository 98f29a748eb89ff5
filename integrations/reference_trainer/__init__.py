"""A reference trainer for GSPO in plain PyTorch and `transformers`.

The algorithm is in three files: `trainer.py` (the loop), `sampling.py` (rollouts) and `update.py` (from a rollout to an
optimizer step). `gspo train` is the command line, and docs/trainer.md is its manual. Prompts and their rewards are in
`integrations/tasks`. All modules here:

    trainer      the loop                  update       from a rollout to an optimizer step
    config       options                   config_file  presets, YAML files, key=value
    policy       the model                 loading      checkpoints, LoRA
    data         prompts and rewards       sampling     rollouts
    advantages   from rewards to advantages
    zero_advantage  answers that do not run through the model
    optimizer    AdamW, fp32 masters       distributed  several processes
    held_out     held-out rewards: intervals, changes, pass@k
    evaluation   gspo eval                 exporting    gspo export
    report       files and tables          checkpoints  the state of a run; replacing files
    resuming     what may change when a run is resumed
    progress     printed progress          curves       curves.png
    stopping     Ctrl-C and SIGTERM        trackers     TensorBoard, Weights & Biases
"""

from gspo_kernels.extras import needs

with needs(__name__, "train", "transformers", "tokenizers", "rich"):
    from .config import InputError, TrainConfig
    from .config_file import read_config, train_config
    from .evaluation import evaluate, read_evaluation
    from .exporting import export
    from .resuming import forecast
    from .trainer import train
    from .update import TrainingError

__all__ = ["InputError", "TrainConfig", "TrainingError", "evaluate", "export", "forecast", "read_config"]
__all__ += ["read_evaluation", "train", "train_config"]
