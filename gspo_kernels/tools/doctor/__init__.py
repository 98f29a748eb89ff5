"""`gspo doctor`: checks against float64, and the memory of a batch."""
