"""The command line, the diagnosis of an installation, and the compile gate."""
