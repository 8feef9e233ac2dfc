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

from bertlite.parity.cases import CASES as CASES
from bertlite.parity.cases import Case as Case
from bertlite.parity.check import check as check
from bertlite.parity.check import check_all as check_all
from bertlite.parity.compare import Report as Report
from bertlite.parity.compare import compare as compare
from bertlite.parity.compare import first_divergence as first_divergence
from bertlite.parity.compare import trace as trace
from bertlite.support import extras

__getattr__, _ = extras.on_demand(__name__)  # an error names the new home of a name that was here
