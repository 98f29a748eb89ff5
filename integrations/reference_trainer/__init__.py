"""A reference trainer for GSPO: the complete loop in plain PyTorch and `transformers`, short enough to read in full.

`gspo train` is its command line, docs/trainer.md its manual. Read `trainer.py` and `update.py` first. All modules:

    trainer      the loop                  update       from a rollout to an optimizer step
    config       options                   config_file  presets, YAML files, key=value
    policy       the model                 loading      checkpoints, LoRA, quantised weights
    examples     prompts with answers      tasks        sorting, format, calculator, arithmetic, the user's jsonl
    rewards      reward functions          advantages   from rewards to advantages
    sampling     rollouts                  optimizer    AdamW, fp32 masters, learning rate
    distributed  several processes         checkpoints  the state of a run on disk
    report       files and tables          curves       curves.png
    progress     printed progress          trackers     TensorBoard, Weights & Biases
    stopping     Ctrl-C and SIGTERM        memory       predicted memory
    routing      experts of a mixture
"""

from gspo_kernels.extras import needs

with needs(__name__, "train", "transformers", "tokenizers", "rich"):
    from .config import InputError, TrainConfig, train_config
    from .config_file import read_config
    from .memory import forecast
    from .trainer import train
    from .update import TrainingError

__all__ = ["InputError", "TrainConfig", "TrainingError", "forecast", "read_config", "train", "train_config"]
