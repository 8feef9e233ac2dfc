"""The records of speed: every engine, pruned models, training, and the time before the first batch."""
