"""Batches within a budget of tokens: every sequence is in one batch, and `restore` puts results back in order."""

import random
from typing import Any

import pytest
import torch
from conftest import assert_same

from bertlite import token_budget_batches

LENGTHS = [5, 12, 3, 12, 1, 7, 3, 9]


@pytest.mark.parametrize("kind", [list, torch.tensor, iter])
def test_the_longest_come_first_and_a_batch_ends_where_the_next_sequence_does_not_fit(kind: Any) -> None:
    assert list(token_budget_batches(kind(LENGTHS), 24)) == [(1, 3), (7, 5), (0, 2, 6, 4)]  # equals keep their order
    assert list(token_budget_batches(kind(LENGTHS), 24, packed=True)) == [(1, 3), (7, 5, 0, 2), (6, 4)]


def test_restore_puts_results_back_in_the_order_of_the_sequences() -> None:
    draw = random.Random(3)
    lengths = [draw.randint(1, 30) for _ in range(57)]
    batches = token_budget_batches(lengths, 90)
    assert len(batches) > 5
    assert batches.restore([[lengths[i] for i in batch] for batch in batches]) == lengths
    wanted = torch.tensor([[n, -n] for n in lengths])
    assert_same(batches.restore(wanted[list(batch)] for batch in batches), wanted, atol=0)


def test_results_that_do_not_match_are_refused() -> None:
    batches = token_budget_batches(LENGTHS, 24)
    with pytest.raises(ValueError, match="2 results for 3 batches"):
        batches.restore([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="batch 1 has 2 sequences, and 1 results"):
        batches.restore([[1, 2], [3], [4, 5, 6, 7]])


@pytest.mark.parametrize(
    ("lengths", "budget", "error", "message"),
    [
        ([], 8, ValueError, "there are no lengths"),
        ([3, 0], 8, ValueError, "sequence 1 has length 0; it must be 1 or more"),
        ([-3], 8, ValueError, "sequence 0 has length -3"),
        ([3, 9], 8, ValueError, "sequence 1 has 9 tokens, above max_tokens 8: truncate it, or allow more"),
        ([3], 0, ValueError, "max_tokens is 0; it must be 1 or more"),
        ([3.5], 8, TypeError, "float"),
        ([3], 8.0, TypeError, "float"),
    ],
)
def test_impossible_lengths_and_budgets_are_refused(lengths: Any, budget: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        token_budget_batches(lengths, budget)
