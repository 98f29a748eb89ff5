"""A reference trainer for GSPO: the complete loop in plain PyTorch and `transformers`, short enough to read in full.

`gspo train` is its command line. Read `trainer.py` first. The other modules:

    config      options
    policy      the model and its tokenizer
    tasks       prompts and rewards
    arithmetic  problems with worked solutions, to pretrain a small model on
    sampling    rollouts
    report      files of a run
    progress    printed progress
    stopping    Ctrl-C and SIGTERM
"""

from gspo_kernels.extras import needs

with needs(__name__, "train", "transformers", "tokenizers", "rich"):
    from .config import InputError, TrainConfig, train_config
    from .trainer import TrainingError, train

__all__ = ["InputError", "TrainConfig", "TrainingError", "train", "train_config"]
