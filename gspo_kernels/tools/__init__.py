"""The `gspo` command. `gspo doctor` is in doctor/."""
