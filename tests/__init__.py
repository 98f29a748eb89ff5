"""Make the tests a package: spawned processes import it, and not the package `tests` that verl's wheel installs."""
