"""Fixtures that several files share."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """Two rows of random token ids, as long as the test models allow."""
    return models.random_ids()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random documents, for --text."""
    return models.write_ids(tmp_path_factory.mktemp("text") / "ids.npy")
