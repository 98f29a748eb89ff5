"""Code that several tests share. Test files import from here, never from each other."""
