"""Everything that plugs the losses into a trainer; import the module you need."""


def missing(error: ModuleNotFoundError, trainer: str) -> ModuleNotFoundError:
    """Return what to raise where an adapter's imports failed: an error that names the extra, or `error` itself."""
    if error.name is None or error.name.partition(".")[0] != trainer:
        return error
    return ModuleNotFoundError(
        f"gspo_kernels.integrations.{trainer} needs {trainer}, which is not installed: "
        f"pip install 'gspo-kernels[{trainer}]'",
        name=trainer,
    )
