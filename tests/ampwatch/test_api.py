"""The public names of the package."""

import importlib.metadata
import inspect

import pytest

import ampwatch


def test_every_public_name_is_there():
    assert {name for name in ampwatch.__all__ if not hasattr(ampwatch, name)} == set()
    assert dir(ampwatch) == sorted(ampwatch.__all__)


def test_every_public_name_says_what_it_is():
    names = set(ampwatch.__all__) - {"__version__"}
    assert {name for name in names if not inspect.getdoc(getattr(ampwatch, name))} == set()


def test_the_version_is_that_of_the_distribution():
    assert ampwatch.__version__ == importlib.metadata.version("ampwatch")


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match="module 'ampwatch' has no attribute 'gradscaler'; it has Ampwatch"
    ):
        ampwatch.gradscaler  # noqa: B018


def test_every_error_has_one_base():
    errors = [value for name in ampwatch.__all__ if isinstance(value := getattr(ampwatch, name), type)]
    raised = [error for error in errors if issubclass(error, Exception)]
    assert len(raised) == 6
    assert all(issubclass(error, ampwatch.AmpwatchError) for error in raised)
