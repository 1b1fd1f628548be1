"""Merging log-sum-exps: exact, overflow-free, with -inf as the neutral element."""

import math

import torch

from infcl.loss.lse import contrastive_loss_of, merge_lse


def test_merged_parts_equal_the_log_sum_exp_of_the_whole():
    logits = 100 * torch.randn(5, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = logits[:, :7].logsumexp(1)
    for part in logits[:, 7:].split([1, 20, 32], dim=1):
        merge_lse(total, part.logsumexp(1))
    torch.testing.assert_close(total, logits.logsumexp(1))


def test_empty_parts_and_huge_logits_merge_without_nan():
    empty = torch.tensor([-math.inf, -math.inf, 3.0, 1e30, -1e30])
    other = torch.tensor([-math.inf, 2.0, -math.inf, 1e30, 1e30])
    merged = merge_lse(empty, other)
    assert merged.tolist()[:3] == [-math.inf, 2.0, 3.0]
    torch.testing.assert_close(merged[3:], torch.tensor([1e30, 1e30]))


def test_merge_never_falls_below_either_part():
    a, b = 100 * torch.randn(2, 10000, generator=torch.Generator().manual_seed(1))
    merged = merge_lse(a.clone(), b)
    assert (merged >= a).all() and (merged >= b).all()


def test_loss_is_the_mean_over_rows_and_columns():
    row, col, matched = torch.tensor([[3.0, 4.0], [5.0, 6.0], [1.0, 2.0]])
    assert contrastive_loss_of(row, col, matched).item() == ((2 + 2) + (4 + 4)) / 4
