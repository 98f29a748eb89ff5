"""Import verl once. `helpers.verl_worker.run_ranks` forks the ranks of a test from a process that imported this."""

import os

from helpers.verl_worker import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import verl.workers.engine_workers
import verl.workers.utils.losses  # noqa: F401
