import numpy as np
import pytest

from hfseq.data.batches import Batches, PackedRows, RowRandom, permute
from hfseq.data.store import TokenStore
from hfseq.errors import DataError


def make_rows(count):
    return PackedRows(TokenStore(np.arange(count, dtype=np.int32), np.array([0, count]), 0), 1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 31, 97, 128, 1000, 1009, 65537])
def test_permutations_are_bijections(n):
    for key in (0, 1, 2**64 - 1):
        assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


def test_permuted_index_does_not_depend_on_other_indices():
    full = permute(np.arange(1009), 1009, 5)
    assert permute(np.array([17, 900]), 1009, 5).tolist() == full[[17, 900]].tolist()


def test_ten_million_rows_are_permuted_without_a_table():
    n = 10**7
    some = permute(np.arange(0, n, 97), n, 3)
    assert len(np.unique(some)) == len(some) and some.min() >= 0 and some.max() < n
    assert abs(some.mean() / n - 0.5) < 0.01


def test_small_permutations_are_all_reached_evenly():
    counts = {}
    for key in range(3000):
        order = tuple(permute(np.arange(3), 3, key).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 500) < 5 * (500 * 5 / 6) ** 0.5 for count in counts.values())


def test_permutations_decorrelate_neighbors():
    order = permute(np.arange(20_000), 20_000, 11)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / 20_000**0.5
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 5 / 20_000**0.5


@pytest.mark.parametrize(("count", "size"), [(10, 4), (8, 4), (3, 8), (1, 1)])
def test_an_epoch_visits_every_row_once(count, size):
    batches = Batches(make_rows(count), size, seed=7)
    for epoch in range(3):
        visited = []
        for step in range(epoch * len(batches), (epoch + 1) * len(batches)):
            indices, valid = batches.indices(step)
            assert indices.shape == valid.shape == (size,) and indices.dtype == np.int64
            assert indices.max() < count
            visited += indices[valid].tolist()
        assert sorted(visited) == list(range(count))


def test_order_depends_on_epoch_and_seed():
    rows = make_rows(100)
    first, second = (Batches(rows, 100, 1).indices(step)[0].tolist() for step in (0, 1))
    other = Batches(rows, 100, 2).indices(0)[0].tolist()
    assert first != second and first != other and second != other
    assert Batches(rows, 100, 1).indices(1)[0].tolist() == second  # a pure function


def test_without_shuffling_rows_come_in_order():
    batches = Batches(make_rows(5), 2, 0, shuffle=False)
    assert [batches.indices(step)[0].tolist() for step in range(4)] == [
        [0, 1],
        [2, 3],
        [4, 0],
        [0, 1],
    ]
    assert batches.indices(2)[1].tolist() == [True, False]


def test_drop_skips_the_partial_batch():
    batches = Batches(make_rows(10), 4, 0, drop_last=True)
    assert len(batches) == 2
    assert all(batches.indices(step)[1].all() for step in range(4))


def test_too_few_rows_are_rejected():
    with pytest.raises(DataError, match="0 rows"):
        Batches(make_rows(0), 4, 0)
    with pytest.raises(DataError, match="3 rows do not fill a batch of 4"):
        Batches(make_rows(3), 4, 0, drop_last=True)


def test_process_batches_concatenate_to_the_global_batch():
    batches = Batches(make_rows(10), 4, 3)
    full, (indices, valid) = batches[2], batches.indices(2)
    width = batches.rows.width(indices)
    parts = [batches.rows.fetch(indices[part], width) for part in (slice(0, 2), slice(2, 4))]
    for name in parts[0]:
        np.testing.assert_array_equal(full[name], np.concatenate([part[name] for part in parts]))
    assert np.array_equal(full["valid"], valid)
    assert full["valid"].tolist() == [True, True, False, False]


def draws(rows, seed=1, step=2, length=64):
    random = RowRandom(seed, step, np.asarray(rows))
    return random.uniform(length), random.integers(1000, length), random.uniform(length)


def test_row_noise_does_not_depend_on_other_rows():
    for full, part in zip(draws(range(8)), draws([5, 2]), strict=True):
        np.testing.assert_array_equal(full[[5, 2]], part)


def test_a_longer_draw_begins_like_a_shorter_one():
    np.testing.assert_array_equal(draws([3], length=64)[2][:, :10], draws([3], length=10)[2])


def test_seeds_steps_rows_and_draws_differ():
    base = draws([0])
    for other in (draws([0], seed=2), draws([0], step=3), draws([1])):
        assert (base[0] != other[0]).mean() > 0.9
    assert (base[0] != base[2]).mean() > 0.9
    a, b = (RowRandom(1, 2, np.array([0])).generators()[0] for _ in range(2))
    assert a.random() == b.random()


def test_uniform_numbers_are_uniform():
    numbers = RowRandom(0, 0, np.arange(200)).uniform(1000)
    assert numbers.dtype == np.float32 and numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, 100, (0, 1))[0]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 99 - 5 * 198**0.5 < chi_square < 99 + 5 * 198**0.5
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.012
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.012


@pytest.mark.parametrize("high", [1, 7, 50265, 2**31])
def test_integers_cover_their_range(high):
    numbers = RowRandom(0, 1, np.arange(100)).integers(high, 1000)
    assert numbers.dtype == np.int32 and numbers.min() >= 0 and int(numbers.max()) < high
    mean = (high - 1) / 2
    assert abs(numbers.mean() - mean) <= 5 * high / (12 * 100_000) ** 0.5
    if high == 7:
        assert set(numbers.ravel().tolist()) == set(range(7))
