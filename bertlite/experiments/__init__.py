"""Experiments with pruned heads: data, fine-tuning, evaluation, statistics and figures.

Needs the extra `experiments`.  `bertlite prune` is its command.
"""
