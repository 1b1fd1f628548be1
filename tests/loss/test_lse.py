"""Merging log-sum-exps: exact, overflow-free, with -inf as the neutral element."""

import math

import torch
import torch.nn.functional as F

from infcl.loss.inf_cl import cross_entropies, merge_lse


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


def test_losses_keep_their_precision_where_pairs_are_told_apart():
    others = torch.tensor([-math.inf, 3.0, 10.0, 31.0, 95.0, 1e30, -1e30])
    matched = torch.tensor([5.0, 3.5, 30.0, 30.0, 30.0, 1e30, 1e30])
    losses = cross_entropies(others, matched)
    difference = (others.double() - matched.double()).clamp_min(-1e4)
    torch.testing.assert_close(losses.double(), F.softplus(difference, threshold=100))
    torch.testing.assert_close(torch.expm1(-losses).double(), -difference.sigmoid())
    assert not losses.signbit().any()


def test_a_matched_logit_that_is_not_finite_is_not_hidden():
    others = torch.tensor([[-math.inf, 3.0, math.inf, 3.0], [2.0, math.inf, 3.0, math.nan]])
    assert cross_entropies(others, torch.full((4,), math.inf)).isnan().all()
    assert cross_entropies(others, torch.full((4,), math.nan)).isnan().all()
