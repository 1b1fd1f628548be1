import pytest

from benchmarks.data_memory import LIMIT, growth_after, soak


@pytest.mark.slow
def test_workers_do_not_grow_over_twenty_epochs():
    memory = soak(epochs=20, images=256, size=96, workers=2)
    assert growth_after(memory, settle=4) < LIMIT
