"""Times and counts, beside those of other implementations."""
