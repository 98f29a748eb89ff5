"""A reference trainer for GSPO: the whole loop in plain PyTorch and `transformers`, short enough to read at once.

Read `trainer.py` first. `sampling.py` makes its rollouts, `policy.py` its models, `tasks.py` its rewards and
`report.py` its files. `gspo train` is its command line.
"""

from .config import InputError, TrainConfig, train_config
from .trainer import TrainingError, train

__all__ = ["InputError", "TrainConfig", "TrainingError", "train", "train_config"]
