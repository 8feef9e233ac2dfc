"""Experiments with pruned heads: data, fine-tuning, evaluation, statistics, measurements, sweeps and figures.

Needs `pip install bertlite[experiments]`.  `bertlite prune` is its command.
"""
