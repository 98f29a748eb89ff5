"""Adapters that bring the losses into trainers. Import the module you need.

`huggingface`: heads of transformers models. `trl`, `verl`: these two trainers. `seams`: loss functions for five more
trainers. `settings`: readers of trainers' settings. `reference_trainer`: a trainer to read, run by `gspo train`.
"""
