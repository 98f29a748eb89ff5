"""A reference trainer for GSPO: the complete loop in plain PyTorch and `transformers`, short enough to read at once.

Read `trainer.py` first. `config.py` has its options, `policy.py` its models, `tasks.py` its prompts and rewards,
`sampling.py` its rollouts, `report.py` its files, `progress.py` what it prints, `stopping.py` how Ctrl-C stops it.
`gspo train` is its command line.
"""

from gspo_kernels.extras import needs

with needs(__name__, "train", "transformers", "tokenizers", "rich"):
    from .config import InputError, TrainConfig, train_config
    from .trainer import TrainingError, train

__all__ = ["InputError", "TrainConfig", "TrainingError", "train", "train_config"]
