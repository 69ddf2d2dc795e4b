"""Action distributions against NumPy, and actions as the environment receives them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import make_run, roll
from torch.distributions import kl_divergence
from torch.testing import assert_close


def log_softmax(x):
    """float64 reference."""
    x = np.asarray(x, np.float64)
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


def test_multi_discrete_parts_are_summed(script):
    """Log-probability, entropy and KL of parts of 2, 4 and 3 choices, by NumPy."""
    actions = make_run(script, "VectorMultiDiscrete").agent.actor.actions
    sizes = (2, 4, 3)
    old_out, new_out = torch.randn(2, 5, actions.num_outputs, dtype=torch.float64)
    chosen = torch.tensor([[1, 3, 0], [0, 0, 2], [1, 2, 1], [0, 1, 0], [1, 0, 2]])
    old, new = (actions.distribution(actions(out)) for out in (old_out, new_out))
    log_prob, entropy, kl = np.zeros((3, 5))
    for b in range(5):
        for part, size in enumerate(sizes):  # each part has 4 outputs; those past its size are idle
            p = log_softmax(old_out[b].view(3, 4)[part, :size])
            q = log_softmax(new_out[b].view(3, 4)[part, :size])
            log_prob[b] += q[chosen[b, part]]
            entropy[b] -= (np.exp(q) * q).sum()
            kl[b] += (np.exp(p) * (p - q)).sum()
    assert_close(new.log_prob(chosen).numpy(), log_prob)
    assert_close(new.entropy().numpy(), entropy)
    assert_close(kl_divergence(old, new).numpy(), kl)


def test_multi_binary_is_a_product_of_bernoullis(script):
    """p = sigmoid(l_1 - l_0) per entry; log-probability, entropy and KL sum over entries."""
    actions = make_run(script, "VectorMultiBinary").agent.actor.actions
    out = torch.randn(2, 6, dtype=torch.float64)
    p = torch.sigmoid(out.view(2, 3, 2).diff(dim=-1))[..., 0].numpy()
    chosen = torch.tensor([[1, 0, 1], [0, 0, 1]])
    policy = actions.distribution(actions(out))
    expected = np.where(chosen.numpy() == 1, np.log(p), np.log(1 - p)).sum(1)
    assert_close(policy.log_prob(chosen).numpy(), expected)
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).sum(1)
    assert_close(policy.entropy().numpy(), entropy)
    kl = p[0] * np.log(p[0] / p[1]) + (1 - p[0]) * np.log((1 - p[0]) / (1 - p[1]))
    first, second = (actions.distribution(actions(out[i])) for i in range(2))
    assert float(kl_divergence(first, second)) == pytest.approx(kl.sum())


def test_gaussian_closed_forms(script):
    """Two dimensions, different means and spreads: density, entropy and KL in closed form."""
    actions = make_run(script, "VectorBox").agent.actor.actions
    old = torch.tensor([[[0.5, -1.0], [0.2, -0.3]]], dtype=torch.float64)  # mean, log-std
    new = torch.tensor([[[0.1, 0.4], [-0.1, 0.5]]], dtype=torch.float64)
    x = torch.tensor([[0.7, -0.2]], dtype=torch.float64)
    policy, before = actions.distribution(new), actions.distribution(old)
    log_prob = entropy = kl = 0.0
    for i in range(2):
        m0, s0 = float(old[0, 0, i]), math.exp(old[0, 1, i])
        m1, s1 = float(new[0, 0, i]), math.exp(new[0, 1, i])
        z = (float(x[0, i]) - m1) / s1
        log_prob += -0.5 * z * z - math.log(s1) - 0.5 * math.log(2 * math.pi)
        entropy += 0.5 * math.log(2 * math.pi * math.e * s1 * s1)
        kl += math.log(s1 / s0) + (s0**2 + (m0 - m1) ** 2) / (2 * s1**2) - 0.5
    assert float(policy.log_prob(x)) == pytest.approx(log_prob)
    assert float(policy.entropy()) == pytest.approx(entropy)
    assert float(kl_divergence(before, policy)) == pytest.approx(kl)


@pytest.mark.parametrize(
    ("env", "outputs", "values"),
    [
        ("VectorDiscrete", 4, {3, 4, 5, 6}),  # Discrete(4, start=3)
        ("VectorMultiDiscrete", 12, {0, 1, 2, 3}),  # parts of 2, 4 and 3, padded to 4
        ("VectorMultiBinary", 6, {0, 1}),  # three parts of two
    ],
)
def test_every_action_of_a_discrete_space_is_reachable(script, env, outputs, values):
    """As many outputs as choices, and all of them arrive at the environment."""
    actions = make_run(script, env).agent.actor.actions
    assert actions.num_outputs == outputs
    params = actions(torch.zeros(300, outputs))
    assert set(actions.to_env(actions.sample(params)).flatten().tolist()) == values


@pytest.mark.parametrize("env", ["VectorMultiDiscrete", "VectorBox"])
def test_samples_follow_the_distribution(script, env):
    """Frequencies or moments of 40,000 samples; the deterministic action is the mode."""
    run = make_run(script, env)
    actions = run.agent.actor.actions
    params = actions(torch.randn(actions.num_outputs)).detach()
    sample = actions.sample(params.expand(40_000, *params.shape))
    mode = actions.sample(params, deterministic=True)
    if env == "VectorBox":
        mean, std = params[0], params[1].exp()
        assert torch.equal(mode, mean)
        assert_close(sample.mean(0), mean, rtol=0, atol=0.05)
        assert_close(sample.std(0), std, rtol=0.03, atol=0)
    else:
        for part, size in enumerate((2, 4, 3)):
            p = params[part].softmax(-1)
            share = torch.bincount(sample[:, part], minlength=4) / 40_000
            assert_close(share, p, rtol=0, atol=0.012)
            assert sample[:, part].max() < size
            assert int(mode[part]) == int(p.argmax())


def test_environment_receives_clipped_actions_and_the_buffer_keeps_the_samples(script):
    """A wide Gaussian leaves the bounds; log-probabilities are those of what was sampled."""
    run = make_run(script, "VectorBox")
    with torch.no_grad():
        run.agent.actor.actions.log_std.fill_(1.5)
    rollout = roll(run)  # the environment asserts that every action is inside the bounds
    assert rollout.actions.abs().max() > 1
    assert rollout.actions.shape == (12, 4, 2)


@pytest.mark.parametrize(("value", "kept"), [(-60.0, -5.0), (60.0, 2.0), (0.3, 0.3)])
def test_log_std_stays_finite_and_keeps_its_gradient(script, value, kept):
    """A log-std outside of [-5, 2] is put back to the bound, where it still learns."""
    actions = make_run(script, "VectorBox").agent.actor.actions
    with torch.no_grad():
        actions.log_std.fill_(value)
    policy = actions.distribution(actions(torch.zeros(3, 2)))
    policy.log_prob(torch.ones(3, 2)).sum().backward()
    assert_close(actions.log_std.detach(), torch.full((2,), kept))
    assert actions.log_std.grad.abs().min() > 0


@pytest.mark.parametrize("env", ["DiscreteDiscrete", "NestedMultiBinary", "ImageBox"])
def test_act_works_for_one_observation_and_for_many(script, env):
    """Valid actions for the environment, the same one by one as in a batch, with memory."""
    run = make_run(script, env)
    single = script.make_env(run.args)
    rows = np.stack([single.reset(seed=s)[0] for s in range(3)])
    many, many_state = run.agent.act(rows)
    many, _ = run.agent.act(rows[::-1].copy(), many_state)
    for i in range(3):
        _, state = run.agent.act(rows[i])
        one, _ = run.agent.act(rows[2 - i], state)
        assert single.action_space.contains(one)
        np.testing.assert_allclose(one, many[i], rtol=1e-5, atol=1e-6)
        single.step(one)
        single.reset()
    drawn = [run.agent.act(rows, deterministic=False)[0] for _ in range(20)]
    assert any(not np.array_equal(drawn[0], other) for other in drawn[1:])


def test_act_remembers_through_the_state_it_returns(script):
    """The recurrent agent acts differently after another past; the feed-forward one does not."""
    run = make_run(script, "VectorBox")
    obs, _ = script.make_env(run.args).reset(seed=0)
    fresh, state = run.agent.act(obs)
    _, other = run.agent.act(-obs)
    after = [run.agent.act(obs, s)[0] for s in (None, state, other)]
    np.testing.assert_array_equal(fresh, after[0])
    recurrent = script.__name__ == "distributional_ppo_lstm"
    assert (abs(after[1] - after[0]).max() > 1e-4) == recurrent
    assert (abs(after[2] - after[1]).max() > 1e-4) == recurrent
