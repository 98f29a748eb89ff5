"""From the caller's arguments to flat rows: every check, cast and flattening."""
