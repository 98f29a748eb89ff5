"""Checks, casts and flattening of the caller's arguments to rows."""
