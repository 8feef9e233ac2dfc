"""`bertlite prune to`: from a checkpoint to a smaller one that meets a budget of time or work."""
