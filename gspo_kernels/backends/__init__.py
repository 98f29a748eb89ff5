"""The torch and Triton backends, which have the same functions, and code that both use."""
