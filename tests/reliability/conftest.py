"""The tiny corpus and the short runs of the training tests."""

from tests.training.conftest import corpus, flags, train  # noqa: F401
