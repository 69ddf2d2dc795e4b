"""Distributions of actions against NumPy, for every kind of action space."""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ONE_SCRIPT, each_of
from probes import ACTIONS
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence
from torch.testing import assert_close

script = each_of(ONE_SCRIPT)  # both have the same functions

SIZES = (2, 4, 3)  # parts of the MultiDiscrete space


def actions_of(script: ModuleType, space: str) -> Any:
    """The action distribution of a space, log-std 0."""
    args = SimpleNamespace(log_std_init=0.0, env_id="")
    return script.make_action_dist(ACTIONS[space], args)


def log_softmax(x: Tensor) -> np.ndarray:
    """float64 reference."""
    shifted = np.asarray(x, np.float64) - float(x.max())
    return shifted - math.log(np.exp(shifted).sum())


# ------------------------------------------------------------------------------- categorical parts
def parts(outputs: Tensor) -> list[np.ndarray]:
    """Log-probabilities of each part; all have 4 outputs, those past a part's size are idle."""
    rows = outputs.view(3, 4)
    return [log_softmax(row[:size]) for row, size in zip(rows, SIZES)]


def test_log_probabilities_of_multi_discrete_parts_are_summed(script):
    """Schulman et al. 2017, eq. 6; parts are independent (ours): 2, 4 and 3 choices."""
    actions = actions_of(script, "MultiDiscrete")
    outputs = torch.randn(5, 12, dtype=torch.float64)
    chosen = torch.tensor([[1, 3, 0], [0, 0, 2], [1, 2, 1], [0, 1, 0], [1, 0, 2]])
    expected = np.zeros(5)
    for b in range(5):
        for q, i in zip(parts(outputs[b]), chosen[b]):
            expected[b] += q[i]
    assert_close(actions.log_prob(actions(outputs), chosen).numpy(), expected)


def test_entropies_of_multi_discrete_parts_are_summed(script):
    """Schulman et al. 2017, eq. 9; parts are independent (ours): 2, 4 and 3 choices."""
    actions = actions_of(script, "MultiDiscrete")
    outputs = torch.randn(5, 12, dtype=torch.float64)
    expected = np.zeros(5)
    for b in range(5):
        for q in parts(outputs[b]):
            expected[b] -= (np.exp(q) * q).sum()
    assert_close(actions.entropy(actions(outputs)).numpy(), expected)


def test_divergences_of_multi_discrete_parts_are_summed(script):
    """Schulman et al. 2017, eq. 8, KL(old || new); parts are independent (ours)."""
    actions = actions_of(script, "MultiDiscrete")
    old, new = torch.randn(2, 5, 12, dtype=torch.float64)
    expected = np.zeros(5)
    for b in range(5):
        for p, q in zip(parts(old[b]), parts(new[b])):
            expected[b] += (np.exp(p) * (p - q)).sum()
    assert_close(actions.kl(actions(old), actions(new)).numpy(), expected)


def bernoulli(outputs: Tensor) -> np.ndarray:
    """Probability of 1 per entry: sigmoid(l_1 - l_0)."""
    difference = outputs.view(-1, 3, 2).diff(dim=-1)[..., 0]
    return torch.sigmoid(difference).numpy()


def test_log_probability_of_multi_binary_is_that_of_bernoullis(script):
    """Schulman et al. 2017, eq. 6; entries are independent (ours)."""
    actions = actions_of(script, "MultiBinary")
    outputs = torch.randn(2, 6, dtype=torch.float64)
    chosen = torch.tensor([[1, 0, 1], [0, 0, 1]])
    p = bernoulli(outputs)
    expected = np.where(chosen.numpy() == 1, np.log(p), np.log(1 - p))
    assert_close(actions.log_prob(actions(outputs), chosen).numpy(), expected.sum(1))


def test_entropy_of_multi_binary_is_that_of_bernoullis(script):
    """Schulman et al. 2017, eq. 9; entries are independent (ours)."""
    actions = actions_of(script, "MultiBinary")
    outputs = torch.randn(2, 6, dtype=torch.float64)
    p = bernoulli(outputs)
    expected = -p * np.log(p) - (1 - p) * np.log(1 - p)
    assert_close(actions.entropy(actions(outputs)).numpy(), expected.sum(1))


def test_divergence_of_multi_binary_is_that_of_bernoullis(script):
    """Schulman et al. 2017, eq. 8, KL(old || new); entries are independent (ours)."""
    actions = actions_of(script, "MultiBinary")
    old, new = torch.randn(2, 4, 6, dtype=torch.float64)
    p, q = bernoulli(old), bernoulli(new)
    expected = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    assert_close(actions.kl(actions(old), actions(new)).numpy(), expected.sum(1))


# --------------------------------------------------------------------------------------- Gaussians
OLD = torch.tensor([[[0.5, -1.0], [0.2, -0.3]]], dtype=torch.float64)  # means, log-stds
NEW = torch.tensor([[[0.1, 0.4], [-0.1, 0.5]]], dtype=torch.float64)


def dimensions(params: Tensor) -> list[tuple[float, float]]:
    """Mean and std of each dimension."""
    means, log_stds = params[0].tolist()
    return [(m, math.exp(s)) for m, s in zip(means, log_stds)]


def test_log_density_of_gaussians_in_closed_form(script):
    """Schulman et al. 2017, eq. 6; dimensions are independent (ours): different means, spreads."""
    actions = actions_of(script, "Box")
    x = [0.7, -0.2]
    expected = 0.0
    for value, (mean, std) in zip(x, dimensions(NEW)):
        expected -= 0.5 * ((value - mean) / std) ** 2
        expected -= math.log(std) + 0.5 * math.log(2 * math.pi)
    out = actions.log_prob(NEW, torch.tensor([x], dtype=torch.float64))
    assert float(out) == pytest.approx(expected)


def test_entropy_of_gaussians_in_closed_form(script):
    """Schulman et al. 2017, eq. 9; dimensions are independent (ours): log(2 pi e s^2) / 2 each."""
    actions = actions_of(script, "Box")
    expected = 0.0
    for _, std in dimensions(NEW):
        expected += 0.5 * math.log(2 * math.pi * math.e * std**2)
    assert float(actions.entropy(NEW)) == pytest.approx(expected)


def test_divergence_of_gaussians_in_closed_form(script):
    """Schulman et al. 2017, eq. 8, KL(old || new); dimensions are independent (ours)."""
    actions = actions_of(script, "Box")
    expected = 0.0
    for (m0, s0), (m1, s1) in zip(dimensions(OLD), dimensions(NEW)):
        expected += math.log(s1 / s0) - 0.5
        expected += (s0**2 + (m0 - m1) ** 2) / (2 * s1**2)
    assert float(actions.kl(OLD, NEW)) == pytest.approx(expected)


def test_a_tiny_divergence_of_gaussians_keeps_its_digits(script):
    """Equal means, log-std 0 and d = -2^-14: KL = (exp(-2 d) - 1 + 2 d) / 2, about d^2 = 2^-28.

    exp - 1 in float32 would give 0, or at worst sixteen times as much.
    """
    old, new = torch.zeros(2, 2, 1)
    new[1] = -(2.0**-14)
    assert float(actions_of(script, "Box").kl(old, new)) == pytest.approx(2.0**-28, rel=1e-2)


@pytest.mark.parametrize(("value", "kept"), [(-60.0, -5.0), (60.0, 2.0), (0.3, 0.3)])
def test_log_std_stays_finite_and_keeps_its_gradient(script, value, kept):
    """Ours: a log-std outside of [-5, 2] is put back to the bound, where it still learns."""
    actions = actions_of(script, "Box")
    with torch.no_grad():
        actions.log_std.fill_(value)
    actions.clamp_parameters()
    params = actions(torch.zeros(3, 2))
    actions.log_prob(params, torch.ones(3, 2)).sum().backward()
    assert_close(actions.log_std.detach(), torch.full((2,), kept))
    assert actions.log_std.grad.abs().min() > 0


# ------------------------------------------------------------------------------ torch.distributions
def reference(actions: Any, outputs: Tensor) -> Distribution:
    """What torch makes of the actor's outputs."""
    if hasattr(actions, "log_std"):
        std = actions.log_std.exp().to(outputs).expand_as(outputs)
        return Independent(Normal(outputs, std), 1)
    logits = outputs.unflatten(-1, actions.padding.shape) + actions.padding
    return Independent(Categorical(logits=logits), 1)


@pytest.mark.parametrize("space", sorted(ACTIONS))
def test_closed_forms_are_those_of_torch(script, space):
    """Log-probability, entropy and KL(old || new) with their gradients, in float64."""
    actions = actions_of(script, space).double()
    old, new = torch.randn(2, 7, actions.num_outputs, dtype=torch.float64)
    new.requires_grad_()
    params = actions(new)
    was, now = reference(actions, old), reference(actions, new)
    chosen = now.sample()
    ours = (
        actions.log_prob(params, chosen),
        actions.entropy(params),
        actions.kl(actions(old), params),
    )
    theirs = now.log_prob(chosen), now.entropy(), kl_divergence(was, now)
    leaves = [new, *actions.parameters()]
    for mine, other in zip(ours, theirs):
        assert_close(mine, other)
        weights = torch.arange(1.0, 8, dtype=torch.float64)
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(mine @ weights, leaves, **options)
        assert_close(grads, torch.autograd.grad(other @ weights, leaves, **options))


# ---------------------------------------------------------------------------------------- samples
@pytest.mark.parametrize(
    ("space", "outputs", "values"),
    [
        ("Discrete", 4, {3, 4, 5, 6}),  # Discrete(4, start=3)
        ("MultiDiscrete", 12, {0, 1, 2, 3}),  # parts of 2, 4 and 3, padded to 4
        ("MultiBinary", 6, {0, 1}),  # three parts of two
    ],
)
def test_every_action_of_a_discrete_space_is_reachable(script, space, outputs, values):
    """Ours: as many outputs as choices, and all of them arrive at the environment."""
    actions = actions_of(script, space)
    assert actions.num_outputs == outputs
    zeros = np.zeros((300, outputs), np.float32)
    sample = actions.sample(zeros, actions.noise(300).numpy())
    assert set(actions.to_env(sample).flatten().tolist()) == values


def test_samples_of_parts_follow_their_probabilities(script):
    """Ours, the largest logit after Gumbel noise: frequencies of 40,000 samples; the mode."""
    actions = actions_of(script, "MultiDiscrete")
    outputs = torch.randn(12)
    sample = torch.tensor(actions.sample(outputs.numpy(), actions.noise(40_000).numpy()))
    mode = actions.sample(outputs.numpy(), 0.0)
    for part, size in enumerate(SIZES):
        p = outputs.view(3, 4)[part, :size].softmax(-1)
        share = torch.bincount(sample[:, part], minlength=size) / 40_000
        assert_close(share, p, rtol=0, atol=0.012)  # nothing past the size: as long as p
        assert int(mode[part]) == int(p.argmax())


def test_samples_of_gaussians_have_their_moments(script):
    """Ours, mean and spread times noise: moments of 40,000 samples; the mode is the mean."""
    actions = actions_of(script, "Box")
    with torch.no_grad():
        actions.log_std.copy_(torch.tensor([-0.7, 0.4]))
    outputs = torch.randn(2)
    sample = torch.tensor(actions.sample(outputs.numpy(), actions.noise(40_000).numpy()))
    assert (actions.sample(outputs.numpy(), 0.0) == outputs.numpy()).all()
    std = torch.tensor([-0.7, 0.4]).exp()
    assert_close(sample.mean(0), outputs, rtol=0, atol=0.05)
    assert_close(sample.std(0), std, rtol=0.03, atol=0)


@pytest.mark.parametrize(("space", "saved"), [("Discrete", []), ("Box", ["log_std"])])
def test_what_is_saved_of_an_action_distribution(script, space, saved):
    """Ours: parameters alone; what follows from the space is made anew."""
    assert list(actions_of(script, space).state_dict()) == saved


def test_actions_in_two_dimensions_have_their_place_and_start(script):
    """2 x 2 parts with starts of their own: all actions are in the space, the least ones are the
    starts."""
    space = gym.spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, -1], [5, 0]])
    dist = script.make_action_dist(space, script.Args())
    noise = dist.noise(300).numpy()
    actions = dist.to_env(dist.sample(np.zeros((300, dist.num_outputs), np.float32), noise))
    assert all(space.contains(action) for action in actions)
    assert (actions.min(0) == space.start).all()


def test_a_box_of_whole_numbers_is_refused(script):
    """Samples of a Gaussian are none."""
    with pytest.raises(script.UsageError, match="its actions are Box"):
        script.make_action_dist(gym.spaces.Box(0, 9, (2,), np.int64), script.Args())


def test_spaces_without_an_entry_are_refused(script):
    """Of actions, and of observations, also where nothing is joined."""
    with pytest.raises(script.UsageError, match="must be one or more floats"):
        script.make_action_dist(gym.spaces.Box(-1, 1, (0,), np.float32), script.Args())
    for space in (gym.spaces.Dict(), gym.spaces.Box(-1, 1, (0,), np.float32)):
        with pytest.raises(script.UsageError, match=r"its observations are .*, which is empty"):
            script.vector_view(space, script.Args(), ())


def test_actions_of_two_axes(script):
    """A table of 2 x 3 floats or switches has six of them, and its shape in the environment."""
    for space in (gym.spaces.Box(-1, 1, (2, 3)), gym.spaces.MultiBinary((2, 3))):
        actions = script.make_action_dist(space, SimpleNamespace(log_std_init=0.0, env_id=""))
        switches = isinstance(space, gym.spaces.MultiBinary)
        assert actions.num_outputs == (12 if switches else 6)
        outputs = torch.randn(5, actions.num_outputs)
        sampled = actions.sample(outputs.numpy(), actions.noise(5).numpy())
        assert sampled.shape == (5, 6)
        for action in actions.to_env(sampled):
            assert action.shape == (2, 3)
            assert space.contains(action)
        assert actions.log_prob(actions(outputs), torch.as_tensor(sampled)).shape == (5,)


def test_the_range_of_entropies(script):
    """Two floats with a log-std of -5 or 2; parts of 2, 4 and 3 choices, so log 24."""
    half = 0.5 * math.log(2 * math.pi * math.e)
    expected = (2 * (half - 5), 2 * (half + 2))
    assert actions_of(script, "Box").entropy_range() == pytest.approx(expected)
    found = actions_of(script, "MultiDiscrete").entropy_range()
    assert found == pytest.approx((0, math.log(24)), rel=1e-5)


def test_actions_without_their_axis_are_refused(script):
    """Of five samples with one entry each, (5,) would be taken for (1, 5)."""
    dist = script.GaussianActions(gym.spaces.Box(-1, 1, (1,)), 0.0)
    params = dist(torch.zeros(5, 1))
    assert dist.log_prob(params, torch.zeros(5, 1)).shape == (5,)
    with pytest.raises(ValueError, match=r"log_prob: actions are \(5,\), not \(\.\.\., 1\)"):
        dist.log_prob(params, torch.zeros(5))
