"""`gspo doctor`: checks against float64, memory of the loss, and the compile gate."""
