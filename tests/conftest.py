"""Shared test helpers: where the real data lies, and offline mode for everything that would ask a hub."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data():
    """Returns a function name -> Path of a file of real data; skips the test where the data is not there."""

    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.exists():
            pytest.skip(f"real data file {name} is not at {SHARED_DATA}")
        return path

    return find


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory) -> str:
    """Directory with a tiny Llama and a character tokenizer."""
    from tiny import save_policy

    return save_policy(tmp_path_factory.mktemp("policy"))
