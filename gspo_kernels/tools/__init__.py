"""The `gspo` command, the diagnosis of an installation, and the compile gate."""
