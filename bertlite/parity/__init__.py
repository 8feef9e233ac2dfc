"""Proof that a bertlite model is transformers' BertModel, number by number.

Its modules::

    families    other families, compared with transformers' classes
    cases       model x backend x batch x dtype x feature x mode,
                and a few cases that cover everything
    inputs      the sentences and masks of a case
    reference   transformers' BERT, and what each version of it supports
    compare     the rules, and the comparison of two runs
    check       one case, or many, from checkpoint to report
    command     `bertlite parity`: checkpoints, table and record
"""

from bertlite.parity.cases import CASES, Case
from bertlite.parity.check import check, check_all
from bertlite.parity.command import ParitySettings, parity
from bertlite.parity.compare import Report, compare, first_divergence, trace

__all__ = [
    "CASES",
    "Case",
    "ParitySettings",
    "Report",
    "check",
    "check_all",
    "compare",
    "first_divergence",
    "parity",
    "trace",
]
