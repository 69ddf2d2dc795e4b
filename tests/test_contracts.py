"""Every contract function stands alone: it can be lifted out of its script."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
LSTM, CATEGORICAL = "distributional_ppo_lstm.py", "distributional_ppo_categorical.py"
SHARED = [
    "gae",
    "normalize_advantages",
    "explained_variance",
    "clipped_policy_loss",
    "entropy_loss",
    "linear_schedule",
    "clipped_value_loss",
    "squared_error",
    "clip_values",
    "RunningMoments",
]
CONTRACTS = {
    LSTM: [
        *SHARED,
        "quantile_midpoints",
        "quantile_huber_loss",
        "clip_quantiles",
        "cvar_weights",
        "cvar",
        "value_at_risk",
        "rescale_head",
        "sr_lambda_targets",
        "cvar_advantages",
        "unroll_lstm",
    ],
    CATEGORICAL: [
        *SHARED,
        "project_categorical",
        "two_hot",
        "hl_gauss",
        "categorical_cross_entropy",
        "clip_categorical",
        "cvar_categorical",
        "categorical_quantile",
        "sr_lambda_probs",
        "cvar_advantages_categorical",
    ],
}
# The distribution ahead of its projection, which training takes. It goes along.
GOES_ALONG = {CATEGORICAL: ["sr_lambda_atoms"], LSTM: []}
GIVEN = {"torch": torch, "math": math, "nn": nn, "Tensor": Tensor, "Callable": Callable}


@functools.cache
def definitions(name: str) -> dict[str, ast.AST]:
    """Top-level functions and classes of a script."""
    return {n.name: n for n in ast.parse((ROOT / name).read_text()).body if hasattr(n, "name")}


def with_callees(name: str, function: str) -> list[str]:
    """A contract and the contracts that it calls, directly or not."""
    known = definitions(name)
    allowed = {*CONTRACTS[name], *GOES_ALONG[name]}
    wanted, lifted = [function], []
    while wanted:
        one = wanted.pop()
        if one in lifted:
            continue
        lifted.append(one)
        used = {n.id for n in ast.walk(known[one]) if isinstance(n, ast.Name)}
        wanted += sorted(used & allowed)
    return lifted


def lift(name: str, function: str) -> dict[str, Any]:
    """An empty module with one contract and the contracts that it calls."""
    known, lifted = definitions(name), with_callees(name, function)
    source = "from __future__ import annotations\n"
    source += "\n".join(ast.unparse(known[one]) for one in lifted)
    module = dict(GIVEN)
    exec(compile(source, function, "exec"), module)
    return module


T, N, K = 5, 3, 7
x = torch.linspace(-1, 1, T * N).reshape(T, N)
END = torch.zeros(T, N, dtype=torch.bool)
QUANTILES = torch.linspace(-2, 2, K).expand(N, K)
PROBS = torch.full((N, K), 1 / K)
ATOMS = torch.linspace(-3, 3, K)
ONE = torch.tensor(1.0)
CALLS = {
    "gae": lambda f: f(x, x, x, END, END, 0.9, 0.8),
    "normalize_advantages": lambda f: f(x),
    "explained_variance": lambda f: f(x, x + x.square()),
    "clipped_policy_loss": lambda f: f(x.flatten(), x.flatten(), 0.2),
    "entropy_loss": lambda f: f(x.flatten(), 0.1, 2.0, 1.0),
    "linear_schedule": lambda f: f(1.0, 0.0, 0.3),
    "clipped_value_loss": lambda f: f(x[0], x[1]),
    "squared_error": lambda f: f(x[..., None], x),
    "clip_values": lambda f: f(x, x + 1, 0.2),
    "RunningMoments": lambda f: f().update(x),
    "quantile_midpoints": lambda f: f(K),
    "quantile_huber_loss": lambda f: f(QUANTILES, QUANTILES, torch.rand(K), 0.1),
    "clip_quantiles": lambda f: f(QUANTILES, QUANTILES + 1, 0.2, "mean_and_variance"),
    "cvar_weights": lambda f: f(K, 0.1),
    "cvar": lambda f: f(QUANTILES, 0.1),
    "value_at_risk": lambda f: f(QUANTILES, 0.1),
    "rescale_head": lambda f: f(nn.Linear(2, 3), ONE, ONE, ONE, 2 * ONE),
    "sr_lambda_targets": lambda f: f(x, QUANTILES.expand(T, N, K), END, END, 0.9, 0.5),
    "cvar_advantages": lambda f: f(x[..., None], QUANTILES.expand(T, N, K), 0.1),
    "unroll_lstm": lambda f: f(
        nn.LSTM(2, 4), torch.ones(T, N, 2), (torch.ones(1, N, 4),) * 2, ~END
    ),
    "project_categorical": lambda f: f(PROBS, ATOMS + 0.3, ATOMS),
    "two_hot": lambda f: f(x[0], ATOMS),
    "hl_gauss": lambda f: f(x[0], ATOMS, 0.7),
    "categorical_cross_entropy": lambda f: f(PROBS, QUANTILES),
    "clip_categorical": lambda f: f(PROBS, x[0], 0.1, ATOMS),
    "cvar_categorical": lambda f: f(PROBS, ATOMS, 0.1),
    "categorical_quantile": lambda f: f(PROBS, ATOMS, 0.1),
    "sr_lambda_probs": lambda f: f(x, PROBS.expand(T, N, K), ATOMS, END, END, 0.9, 0.5),
    "cvar_advantages_categorical": lambda f: f(
        PROBS.expand(T, N, K), PROBS.expand(T, N, K), ATOMS, 0.1
    ),
}


@pytest.mark.parametrize(
    ("name", "function"), [(name, one) for name in CONTRACTS for one in CONTRACTS[name]]
)
def test_a_contract_runs_in_an_empty_module(name, function):
    """It needs torch, math and other contracts, and nothing else of its script."""
    CALLS[function](lift(name, function)[function])


def test_the_readme_names_what_goes_along():
    """A line for every contract, with its arguments, its script, and the contracts it calls."""
    readme = (ROOT / "README.md").read_text()
    table = readme.split("| function | gives | script | copy as well |")[1].split("\n\n")[0]
    told = {}
    for line in table.splitlines()[2:]:
        call, _, kind, others = line.split("|")[1:5]
        function, arguments = re.fullmatch(r" `(\w+)\((.*)\)` ", call).groups()
        told[function] = arguments, kind.strip(), {*re.findall(r"`(\w+)`", others)}
    expected = {}
    for name, functions in CONTRACTS.items():
        for function in functions:
            node = definitions(name)[function]
            arguments = [arg.arg for arg in node.args.args] if hasattr(node, "args") else []
            kind = "recurrent" if name == LSTM else "feed-forward"
            kind = "both" if function in SHARED else kind
            others = {*with_callees(name, function)} - {function}
            expected[function] = ", ".join(arguments), kind, others
    assert told == expected


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_that_training_does_not_call_says_so(name):
    """A reader of the algorithm must not look for its caller."""
    known = definitions(name)
    for function in CONTRACTS[name]:
        called = any(
            isinstance(node, ast.Name) and node.id == function
            for other, tree in known.items()
            if other not in CONTRACTS[name]
            for node in ast.walk(tree)
        )
        called |= any(
            isinstance(node, ast.Name) and node.id == function
            for other in CONTRACTS[name]
            if other != function and "does not call" not in ast.get_docstring(known[other])
            for node in ast.walk(known[other])
        )
        first_line = ast.get_docstring(known[function]).splitlines()[0]
        says = "Training does not call it" in first_line
        assert called != says, function


# ------------------------------------------------------------------ inputs that would broadcast
def test_a_discount_is_not_rounded_to_bfloat16(script):
    """0.999 would become 1. Rewards of 1 for 1,000 steps: (1 - 0.999^1000) / 0.001 = 632.3."""
    rewards, no = torch.ones(1000, 1), torch.zeros(1000, 1, dtype=torch.bool)
    zeros = torch.zeros(1000, 1, dtype=torch.bfloat16)
    end = no.clone()
    end[-1] = True
    advantages, _ = script.gae(rewards, zeros, zeros, end, no, 0.999, 1.0)
    assert float(advantages[0]) == pytest.approx(632.3, abs=0.1)


def test_masks_of_integers_are_no_resets():
    """They would pick steps by their number."""
    import distributional_ppo_lstm as script

    lstm, state = torch.nn.LSTM(2, 3), (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    starts = torch.tensor([[0, 1], [1, 0], [0, 0]])
    with pytest.raises(TypeError, match="unroll_lstm: episode_start must be"):
        script.unroll_lstm(lstm, torch.zeros(3, 2, 2), state, starts)


@pytest.mark.parametrize(
    "kind", [{"num_layers": 2}, {"bidirectional": True}, {"bias": False}, {"batch_first": True}]
)
def test_other_lstms_are_refused(kind):
    """Of two layers one would be trained, in silence; ahead of the first end all would be well."""
    import distributional_ppo_lstm as script

    lstm, state = torch.nn.LSTM(2, 3, **kind), (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    projecting = torch.nn.LSTM(2, 3, proj_size=2)
    for other in (lstm, projecting, torch.nn.GRU(2, 3), torch.nn.RNN(2, 3)):
        for started in (False, True):
            starts = torch.full((3, 2), started)
            with pytest.raises(ValueError, match=r"must be an nn\.LSTM with one layer"):
                script.unroll_lstm(other, torch.zeros(3, 2, 2), state, starts)


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (3,), (3, 2, 1)])
def test_starts_of_another_shape_are_refused(shape):
    """With and without a start: whether a mistake is found does not depend on the data."""
    import distributional_ppo_lstm as script

    lstm, state = torch.nn.LSTM(2, 3), (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    for started in (False, True):
        with pytest.raises(ValueError, match=r"episode_start is .* and inputs \(3, 2, 2\); give"):
            script.unroll_lstm(lstm, torch.zeros(3, 2, 2), state, torch.full(shape, started))


def test_integers_are_not_normalised(script):
    """1, 2 and 4 would become -1, 0 and 1."""
    moments = script.RunningMoments()
    moments.update(torch.tensor([1.0, 2, 4]))
    with pytest.raises(TypeError, match=r"x is torch\.int64, not a float"):
        moments.normalize(torch.tensor([1, 2, 4]))


def test_images_without_bounds_are_refused(script):
    """Divided by infinity all of them would be black."""
    space = gym.spaces.Box(0, np.inf, (3, 8, 8))
    with pytest.raises(ValueError, match="Convolutions: pixels need finite bounds"):
        script.Convolutions(space, torch.nn.ReLU)


@pytest.mark.parametrize("shape", [(4, 32), (5, 8), ()])
def test_a_batch_of_other_entries_is_refused(script, shape):
    """Its entries would be shuffled among the four."""
    moments = script.RunningMoments((4,))
    with pytest.raises(ValueError, match="RunningMoments: the batch is"):
        moments.update(torch.zeros(shape))
    moments.update(torch.ones(7, 2, 4))
    assert moments.mean.tolist() == [1] * 4


@pytest.mark.parametrize("shape", [(5, 1), (1, 3), (4, 3)])
def test_actions_of_some_parts_are_refused(script, shape):
    """`gather` would give the probability of those alone."""
    dist = script.make_action_dist(gym.spaces.MultiDiscrete([2, 3, 4]), script.Args())
    params = dist(torch.zeros(5, dist.num_outputs))
    with pytest.raises(ValueError, match="log_prob: actions are"):
        dist.log_prob(params, torch.zeros(shape, dtype=torch.int64))


def test_outputs_of_one_head_are_no_twins(script):
    """Of two states the one with the smaller V would be taken. A third critic would be left out."""
    dist = script.ValueDistribution(script.Args())
    for critics in (1, 3):
        with pytest.raises(ValueError, match=f"reduce_twins: {critics} critics, not 2"):
            dist.reduce_twins(torch.zeros(critics, 5, dist.num_outputs))


def test_old_values_of_another_shape_are_refused(script):
    """(B, 1) beside (B,) would give (B, B)."""
    with pytest.raises(ValueError, match="clip_values: values and old values are"):
        script.clip_values(torch.zeros(4, 1), torch.zeros(4), 0.2)


def test_atoms_of_each_state_have_no_quantiles():
    """The function takes those that all states share."""
    import distributional_ppo_categorical as script

    with pytest.raises(ValueError, match=r"categorical_quantile: atoms are \(4, 3\)"):
        script.categorical_quantile(torch.ones(4, 3) / 3, torch.zeros(4, 3), 0.1)
