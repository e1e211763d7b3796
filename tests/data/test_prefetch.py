import threading
import time
import traceback

import pytest

from hfseq.training.loader import prefetch


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hfseq-prefetch")]


def test_batches_come_in_order_with_their_steps():
    assert list(prefetch(lambda step: step**2, 3, 7)) == [(3, 9), (4, 16), (5, 25), (6, 36)]
    assert list(prefetch(lambda step: step, 5, 5)) == []
    assert not workers()


def test_prefetch_is_bounded():
    created, fourth = [], threading.Event()

    def make(step):
        created.append(step)
        if len(created) == 4:
            fourth.set()

    iterator = prefetch(make, 0, 100, depth=2)
    next(iterator)
    assert fourth.wait(60)
    time.sleep(0.05)  # enough time for a fifth item
    assert created == [0, 1, 2, 3]  # one consumed, two in the queue, one waiting
    iterator.close()


def test_an_error_reaches_the_consumer_after_the_batches_before_it():
    def fails_at_two(step):
        if step == 2:
            raise ValueError("row 7 is broken")
        return step

    visited = []
    with pytest.raises(ValueError, match="row 7 is broken") as caught:
        for step, _ in prefetch(fails_at_two, 0, 5):
            visited.append(step)
    assert visited == [0, 1]
    assert "fails_at_two" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert not workers()


@pytest.mark.parametrize("received", [1, 3])
def test_stopping_early_ends_the_thread(received):
    iterator = prefetch(lambda step: step, 0, 1000)
    for _ in range(received):
        next(iterator)
    assert workers()
    iterator.close()
    assert not workers()


def test_an_error_of_the_consumer_ends_the_thread():
    with pytest.raises(KeyError):
        for _ in prefetch(lambda step: step, 0, 1000):
            raise KeyError
    assert not workers()
