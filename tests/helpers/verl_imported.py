"""Import verl, in the process that the ranks of verl's tests are forked from: `helpers.verl_worker.run_ranks`."""

import os

from helpers.verl_worker import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import verl.workers.engine_workers
import verl.workers.utils.losses  # noqa: F401
