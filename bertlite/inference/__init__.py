"""Models made ready to run, and only that."""
