"""Seeds of micro-batches never change: runs resume with them."""

import itertools

from infcl.parallel import micro_batch_seed


def test_every_micro_batch_has_a_seed_of_its_own_that_never_changes():
    """Of dropout: a change here breaks the resume of every run that has any."""
    places = list(itertools.product(range(3), range(5), range(4), range(3)))  # seed, step, micro-batch, rank
    assert len({micro_batch_seed(*place) for place in places}) == len(places)
    assert micro_batch_seed(1, 2, 3, 4) == 9130766517534196204
