"""Check and cast the arguments of the public functions, and flatten them to rows."""
