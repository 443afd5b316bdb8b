"""Every error survives pickle and copy with its message, its attributes and its cause."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from hotswap import errors
from hotswap.errors import HotswapError, InstanceLost, MigrationAborted, QueueFull, SwapFailed

# A value for each type of keyword argument that an error takes.
VALUES = {"float": 2.5, "int": 3, "str": "unload", "float | None": 1.5, "str | None": "load"}


class KeywordsOnly(Exception):
    """An error of another library that pickles but cannot be unpickled."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def classes(root: type[HotswapError] = HotswapError) -> Iterator[type[HotswapError]]:
    """Every error class of the package, parents first."""
    yield root
    for child in root.__subclasses__():
        if child.__module__.partition(".")[0] == "hotswap":
            yield from classes(child)


def made(kind: type[HotswapError]) -> HotswapError:
    """Make an error with a value for each of its keyword arguments."""
    fields = {
        name: VALUES[parameter.annotation]
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return kind(f"A {kind.__name__} of 'e0'; do something else.", **fields)


def pickled(error: HotswapError, protocol: int) -> HotswapError:
    restored = pickle.loads(pickle.dumps(error, protocol))
    assert isinstance(restored, HotswapError)
    return restored


METHODS: dict[str, Callable[[HotswapError], HotswapError]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {n}": partial(pickled, protocol=n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
}


@pytest.mark.parametrize("kind", list(classes()))
def test_an_error_survives_copy_and_pickle_with_its_message_and_all_attributes(
    kind: type[HotswapError],
) -> None:
    error = made(kind)
    error.add_note("It happened at night.")
    for method, duplicated in METHODS.items():
        again = duplicated(error)
        assert type(again) is kind, method
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error)), method


@pytest.mark.parametrize("kind", [SwapFailed, MigrationAborted, InstanceLost, QueueFull])
def test_an_error_that_was_pickled_keeps_the_chain_of_its_causes(kind: type[HotswapError]) -> None:
    root, middle, error = OSError(5, "the disk failed"), InstanceLost("Engine 'e0' is lost."), made(kind)
    middle.__cause__, error.__cause__ = root, middle
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again.__cause__, InstanceLost)
    assert str(again.__cause__) == str(middle)
    assert isinstance(again.__cause__.__cause__, OSError)
    assert again.__cause__.__cause__.args == (5, "the disk failed")


def test_a_cause_that_cannot_be_pickled_is_replaced_by_its_type_and_message() -> None:
    error = SwapFailed("The load failed.", phase="load")
    error.__cause__ = KeywordsOnly(code=7)
    again = pickle.loads(pickle.dumps(error))
    assert str(again.__cause__) == "KeywordsOnly: code 7"


def test_every_public_error_is_in_the_tree() -> None:
    public = {getattr(errors, name) for name in errors.__all__}
    assert public <= set(classes())
