"""The torch and Triton backends, which have the same functions, and the code that they share."""
