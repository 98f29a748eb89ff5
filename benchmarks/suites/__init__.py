"""Measure times and counts of our loss and of other implementations."""
