"""What runs on a GPU and nowhere else. A machine without one skips it, and says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_engine import Built, build
from gpu_models import SHAPES, save_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no usable GPU: torch sees no CUDA device"))


@pytest.fixture(scope="session", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def engine(model: Path, cache: str) -> Iterator[Built]:
    """With decode graphs, as it is served."""
    with build(model, cache) as built:
        yield built
