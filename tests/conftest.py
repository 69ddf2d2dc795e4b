"""Makes the scripts importable from the repository root and tests repeatable."""

import ast
import functools
import importlib
import inspect
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)


@functools.cache
def classes_of(file: str) -> dict[str, str]:
    """The sources of the classes of a file, by name."""
    lines = linecache.getlines(file)
    found = {}
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.ClassDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found[node.name] = "".join(lines[first - 1 : node.end_lineno])
    return found


source_of = functools.cache(inspect.getsource)


def fast_getsource(thing: Any) -> str:
    """What inspect gives, without reading whole files at each of the hundreds of parses.

    tyro asks nine times for the source of `Flags`, a class that is made and has none. (Python 3.12
    says "types" no more, and looks for it.)
    """
    if isinstance(thing, type) and thing.__module__ == "types":
        raise OSError("could not find class definition")
    if isinstance(thing, type) and thing.__qualname__ in classes_of(inspect.getfile(thing)):
        return classes_of(inspect.getfile(thing))[thing.__qualname__]
    return source_of(thing)


inspect.getsource = fast_getsource

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
