"""What computes: two backends with the same functions, and what they share."""
