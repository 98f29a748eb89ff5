"""`gspo doctor`: checks against float64, and the compile gate."""
