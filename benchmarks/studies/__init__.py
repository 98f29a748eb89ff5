"""Experiments: clip decisions of whole models, and `gspo compare`."""
