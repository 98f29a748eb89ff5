"""A reference trainer for GSPO: the complete loop in plain PyTorch and `transformers`, short enough to read in full.

`gspo train` is its command line. Read `trainer.py` first. The other modules:

    config      options
    policy      the model and its tokenizer
    examples    prompts with answers
    rewards     reward functions, their weights and time limits
    tasks       sorting, format, calculator (a dialogue), arithmetic, and the user's own jsonl
    sampling    rollouts, also of dialogues
    report      files of a run
    progress    printed progress
    stopping    Ctrl-C and SIGTERM
"""

from gspo_kernels.extras import needs

with needs(__name__, "train", "transformers", "tokenizers", "rich"):
    from .config import InputError, TrainConfig, train_config
    from .trainer import TrainingError, train

__all__ = ["InputError", "TrainConfig", "TrainingError", "train", "train_config"]
