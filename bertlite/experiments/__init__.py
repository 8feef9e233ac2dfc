"""Experiments with pruned heads: data, fine-tuning, evaluation, statistics, measurements, sweeps and figures.

Needs the extra `experiments`.  `bertlite prune` is its command.
"""
