"""Failures name exceptions and back, over the whole tree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from srt import errors
from srt.wire.convert import LEAVES, from_failure, to_failure
from srt.wire.params import Failure

GROUPS = {errors.TandemError, errors.RequestError, errors.EngineError}


def descendants(kind: type[errors.TandemError]) -> Iterator[type[errors.TandemError]]:
    for child in kind.__subclasses__():
        yield child
        yield from descendants(child)


def test_every_leaf_of_the_tree_is_mapped() -> None:
    ours = {k for k in descendants(errors.TandemError) if k.__module__ == "srt.errors"}
    assert set(LEAVES) == ours - GROUPS
    assert len({leaf.code for leaf in LEAVES}) == len(LEAVES)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_comes_back_as_itself(leaf: type[errors.TandemError]) -> None:
    error = from_failure(to_failure(leaf("words", param="n", retry_after=2.0)))
    assert type(error) is leaf
    assert (error.message, error.param, error.retry_after) == ("words", "n", 2.0)


def test_foreign_errors_do_not_leak_their_text() -> None:
    failure = to_failure(KeyError("a secret prompt"))
    assert failure.code == "internal"
    assert "secret" not in failure.message


def test_an_unknown_code_is_an_internal_error() -> None:
    error = from_failure(Failure(code="from_the_future", message="words"))
    assert type(error) is errors.InternalError
    assert "from_the_future" in error.message
