"""Makes the scripts importable from the repository root and tests repeatable."""

import functools
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)
# tyro reads the source of the flags' classes at each of the hundreds of parses.
inspect.getsource = functools.cache(inspect.getsource)

SCRIPTS = ["distributional_ppo_lstm", "distributional_ppo_categorical"]

# Much of the code is the same in both scripts, byte for byte (test_siblings.py). Where tests of it
# take long, one of them is enough, and -m slow has the other one.
ONE_SCRIPT = [SCRIPTS[1], pytest.param(SCRIPTS[0], marks=pytest.mark.slow)]
with_one_script = pytest.mark.parametrize("script", ONE_SCRIPT, indirect=True)
with_both_scripts = pytest.mark.parametrize("script", SCRIPTS, indirect=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; runs with -m slow")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.hookimpl(optionalhook=True)  # the suite runs without xdist as well
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process that has finished its half takes tests of the other's."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def each_of(scripts: list) -> Any:
    """A fixture that is each of these scripts in turn."""

    @pytest.fixture(params=scripts)
    def script(request: pytest.FixtureRequest) -> ModuleType:
        """The script that is tested."""
        return importlib.import_module(request.param)

    return script


script = each_of(SCRIPTS)  # what they share must hold in both


@pytest.fixture(params=["distribution", "mean_head"])
def value_from(request: pytest.FixtureRequest) -> str:
    """Each source of V in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
