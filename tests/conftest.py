"""Makes the scripts importable from the repository root and tests repeatable."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)

SCRIPTS = ["distributional_ppo_lstm", "distributional_ppo_categorical"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; runs with -m slow")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.hookimpl(optionalhook=True)  # the suite runs without xdist as well
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process that has finished its half takes tests of the other's."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest) -> ModuleType:
    """Each script in turn: what they share must hold in all of them."""
    return importlib.import_module(request.param)


@pytest.fixture(params=["distribution", "mean_head"])
def value_from(request: pytest.FixtureRequest) -> str:
    """Each source of V in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
