"""What several tests share. Tests import from here, never from each other."""
