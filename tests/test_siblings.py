"""The two scripts are the same but for listed seams, and their value distributions exchange."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from pathlib import Path

import pytest
from helpers import small_args

ROOT = Path(__file__).resolve().parents[1]
LSTM, CATEGORICAL = "distributional_ppo_lstm.py", "distributional_ppo_categorical.py"
SEAMS = {  # defined in both, different on purpose
    "Args": "flags of the LSTM and of the distribution, defaults, what minibatches must divide",
    "ValueDistribution": "quantiles or atoms, behind the same methods",
    "Body": "LSTM or two hidden layers, behind the same methods",
}


def source(name: str) -> str:
    """Text of a script."""
    return (ROOT / name).read_text()


def definitions(text: str) -> dict[str, str]:
    """Top-level functions, classes and constants by name, with their text and decorators."""
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        body = "\n".join(lines[start - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = body
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = body
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found[body] = body
    return found


def test_what_both_define_is_identical_but_for_the_seams():
    """Copies that nobody guards drift: equality of sets, so that a healed seam fails too."""
    one, two = definitions(source(LSTM)), definitions(source(CATEGORICAL))
    shared = [name for name in one if name in two]
    assert {name for name in shared if one[name] != two[name]} == set(SEAMS)
    assert shared == [name for name in two if name in one]  # and in the same order
    assert len(shared) > 30


def methods(text: str, name: str) -> dict[str, str]:
    """Signatures of the methods of a class."""
    node = next(n for n in ast.parse(text).body if getattr(n, "name", None) == name)
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    return {n.name: ast.unparse(n.args) + ast.unparse(n.returns or ast.Name("")) for n in functions}


@pytest.mark.parametrize("name", SEAMS)
def test_seams_have_the_same_methods_and_signatures(name):
    """Behind a seam anything may differ, but not how it is called."""
    assert methods(source(LSTM), name) == methods(source(CATEGORICAL), name)


@pytest.mark.parametrize("name", [LSTM, CATEGORICAL])
def test_ceiling(name):
    """No script has more than 1,000 lines."""
    assert len(source(name).splitlines()) <= 1000


def test_sizes(capsys):
    """The number of differing lines is what the README says."""
    one, two = (source(name).splitlines() for name in (LSTM, CATEGORICAL))
    sizes = [len(one), len(two)]
    changed = sum(line[:2] in ("- ", "+ ") for line in difflib.ndiff(one, two))
    with capsys.disabled():
        print(f"\n{changed} lines differ between the scripts ({sizes} lines)")
    assert changed <= 500
    assert f"{changed} lines differ" in source("README.md")


@pytest.mark.parametrize("index", [0, 1])
def test_exchanged_value_distributions_learn_cartpole(tmp_path, index, monkeypatch):
    """Recurrent categorical and feed-forward quantile PPO are one paste away, and they learn."""
    spec = importlib.util.spec_from_file_location("compose", ROOT / "benchmarks" / "compose.py")
    compose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compose)
    path = compose.compose(tmp_path)[index]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, script)  # dataclasses look their module up
    spec.loader.exec_module(script)
    flags = {"num_envs": 8, "num_steps": 64, "total_timesteps": 10_240, "update_epochs": 8}
    flags |= {"hidden_size": 32, "lstm_hidden_size": 32, "num_quantiles": 16, "num_atoms": 31}
    known = script.Args.__dataclass_fields__
    flags = {k: v for k, v in flags.items() if k in known}
    args = small_args(script, "", env_id="CartPole-v1", run_dir=str(tmp_path), **flags)
    assert script.train(args)["eval/return_mean"] > 150
