"""The task heads."""
