"""The records of speed: every engine beside the limits of the machine, and the time before the first batch."""
