"""Products come in few sizes, since the library keeps half a mebibyte for every size that it meets."""

from troupellm.kernels.linear.onednn import padded_rows


def test_few_sizes_and_little_waste():
    sizes = {rows: padded_rows(rows) for rows in range(1, 2049)}
    assert all(size >= rows for rows, size in sizes.items())
    assert len(set(sizes.values())) <= 64
    assert all(size < rows * 1.13 for rows, size in sizes.items() if rows > 28)
    assert all(size - rows < 4 for rows, size in sizes.items() if rows <= 64)
    assert [padded_rows(rows) for rows in (1, 4, 5, 256, 257, 2048)] == [4, 4, 8, 256, 288, 2048]
