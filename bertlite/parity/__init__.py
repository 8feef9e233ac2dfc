"""Proving that a bertlite model is transformers' BertModel, number by number."""

from bertlite.parity.cases import CASES, Case
from bertlite.parity.check import check, run
from bertlite.parity.compare import Report, compare, first_divergence, trace

__all__ = ["CASES", "Case", "Report", "check", "compare", "first_divergence", "run", "trace"]
