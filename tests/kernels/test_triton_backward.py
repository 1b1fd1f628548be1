"""The backward tile's workspace: bounded, and never cut into needlessly small pieces."""

import pytest

from infcl.kernels.triton_launch import chunk_shape


@pytest.mark.parametrize("dim", [24, 512, 768, 1024])
@pytest.mark.parametrize("elements", [2**21, 2**25, 2**27, 2**28])
def test_chunks_fit_the_workspace_and_use_a_good_part_of_it(dim, elements):
    for rows in (1, 1000, 1449, 5000, 11585, 11586, 12000, 17000, 30001, 65536, 10**6):
        for columns in (rows, 4 * rows):
            height, width = chunk_shape(rows, columns, dim, elements, 132)
            assert height % 128 == 0 and width % 256 == 0 and height * width <= elements
            whole = (rows + 127) // 128 * 128 * ((columns + 255) // 256 * 256)
            assert height * width >= min(whole, elements) / 4, (rows, columns, height, width)
