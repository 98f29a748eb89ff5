"""A package, so that spawned processes import these tests and not the `tests` that verl's wheel installs."""
