"""Experiments and benchmarks; the library imports nothing from here."""
