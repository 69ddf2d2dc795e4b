"""From a rollout to a batch: values of all states, advantages, targets, statistics."""

from __future__ import annotations

import copy
import math
import random
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import (
    forget_returns,
    is_recurrent,
    make_run,
    old_of_critics,
    policy_params,
    prepare,
    prepare_rollout,
    roll,
    value_outputs,
)
from torch.testing import assert_close

import distributional_ppo_categorical
import distributional_ppo_lstm


def sequences(script, seq_len):
    """The flag for short training sequences, where a script has it."""
    return {"seq_len": seq_len} if is_recurrent(script) else {}


def critic_pass(run):
    """Outputs of s_t and s'_t of the last rollout, as `prepare_batch` gets them."""
    see = run.agent.normalize_obs
    facts = (run.agent, run.rollout, see(run.rollout.obs), see(run.rollout.next_obs))
    with torch.no_grad():
        if is_recurrent(run.script):
            return run.script.run_critics(*facts, run.critic_state, run.args)[:2]
        return run.script.run_critics(*facts)


def spy(monkeypatch, script, name):
    """Arguments of every call of a function of the script, which does what it did. Those that are
    given by name come last."""
    calls, function = [], getattr(script, name)

    def look(*args, **named):
        calls.append((*args, *named.values()))
        return function(*args, **named)

    monkeypatch.setattr(script, name, look)
    return calls


@pytest.mark.parametrize("seq_len", [0, 3, 4])
@pytest.mark.parametrize("env", ["Counter", "VectorBox", "NestedMultiDiscrete"])
def test_a_second_look_gives_ratio_one_and_the_old_values(script, value_from, env, seq_len):
    """With unchanged weights the batch reproduces the rollout, through resets and statistics.
    Atoms are clipped around what their mean was before the statistics moved."""
    if seq_len and not is_recurrent(script):
        pytest.skip("it has no sequences")
    run = make_run(script, env, value_from=value_from, **sequences(script, seq_len))
    prepare(run)
    moments = copy.deepcopy(run.agent.value_dist.moments)
    batch = prepare(run)  # the second rollout starts from a carried state
    if is_recurrent(script):  # episodes begin in mid-rollout
        assert batch.episode_start[run.args.sequence_length > 1 :].any()
    params = policy_params(run.agent, batch)
    log_prob = run.agent.action_dist.log_prob(params, batch.actions)
    assert_close((log_prob - batch.log_probs).exp(), torch.ones_like(log_prob), rtol=0, atol=1e-5)
    assert_close(params, batch.params, rtol=1e-5, atol=1e-5)
    outputs, old = value_outputs(run.agent, batch), old_of_critics(batch)
    if not is_recurrent(script):
        support = run.agent.value_dist.support
        means = (outputs[..., : len(support)].softmax(-1) @ support)[..., None]
        now = run.agent.value_dist.moments
        means = ((means.double() * moments.std + moments.mean - now.mean) / now.std).float()
        outputs = torch.cat((means, means + 0.1 * outputs[..., len(support) :]), -1)
    assert_close(outputs, old, rtol=1e-5, atol=1e-5)
    assert (old[0] - old[1]).abs().mean() > 1e-3  # of two critics, each its own


def test_a_second_look_gives_the_old_v_of_an_output_alone(monkeypatch):
    """The same of the feed-forward script, where PopArt rescales V with `mean_output` value.
    Targets and advantages are by that V."""
    script = distributional_ppo_categorical
    run = make_run(script, "VectorBox", mean_output="value")
    prepare(run)
    moments = copy.deepcopy(run.agent.value_dist.moments)
    values = spy(monkeypatch, script, "gae")
    batch = prepare(run)
    outputs, old = value_outputs(run.agent, batch), old_of_critics(batch)
    assert_close(outputs[..., -1], old[..., 1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(moments.mean, run.agent.value_dist.moments.mean)
    now = run.agent.value_dist.moments.denormalize(outputs[..., -1].double())
    used = values[0][1]  # of the steps, (T, N), the smaller one of the twins'
    assert_close(now.amin(0).flatten(), used.flatten(), rtol=1e-4, atol=1e-4)


def features_by_steps(body, obs, next_obs, start, state):
    """Features of s_t and s'_t and the final state, by single steps."""
    here, after = [], []
    for t in range(len(obs)):
        state = state * ~start[t, :, None]
        features, state = body.step(obs[t], state)
        here.append(features)
        after.append(body.step(next_obs[t], state)[0])  # the state does not go on
    return torch.stack(here), torch.stack(after), state


@pytest.mark.parametrize("seq_len", [0, 3, 4])
@pytest.mark.parametrize("env", ["Counter", "Staggered"])
def test_the_recurrent_value_pass_equals_single_steps(env, seq_len):
    """Values of all states and true successors, and both carried states, against a step loop."""
    script = distributional_ppo_lstm
    run = make_run(script, env, seq_len=seq_len)
    prepare(run)
    before, state_before = run.carry, run.critic_state
    rollout = roll(run)
    some = rollout.truncated.any(1)
    assert some.any()
    assert (env == "Counter") == torch.equal(some, rollout.truncated.all(1))

    agent, see = run.agent, run.agent.normalize_obs
    obs, next_obs, start = see(rollout.obs), see(rollout.next_obs), rollout.episode_start
    critic = features_by_steps(agent.critic_body, obs, next_obs, start, state_before)
    found = script.run_critics(agent, rollout, obs, next_obs, state_before, run.args)
    outputs, next_outputs, states, state = found
    assert_close(outputs, agent.value_outputs(critic[0]), rtol=1e-5, atol=1e-5)
    alive = ~rollout.terminated
    expected = agent.value_outputs(critic[1])[:, alive]
    assert_close(next_outputs[:, alive], expected, rtol=1e-5, atol=1e-5)
    assert_close(state, critic[2], rtol=1e-5, atol=1e-5)
    assert len(states) == 12 // run.args.sequence_length
    assert torch.equal(states[0], state_before)

    state_before = torch.as_tensor(before.actor_state)
    *_, actor = features_by_steps(agent.actor_body, obs, next_obs, start, state_before)
    kept = actor.detach().numpy() * ~run.carry.episode_start[:, None]
    np.testing.assert_allclose(run.carry.actor_state, kept, rtol=1e-5, atol=1e-5)
    carried, ahead = copy.deepcopy(run.carry), run.critic_state.clone()
    _, critic_state, _ = prepare_rollout(run)
    assert_close(critic_state, critic[2], rtol=1e-5, atol=1e-5)
    assert torch.equal(run.critic_state, ahead)
    np.testing.assert_array_equal(carried.actor_state, run.carry.actor_state)  # acting moves it
    np.testing.assert_array_equal(carried.obs, run.carry.obs)


@pytest.mark.parametrize("env", ["Counter", "Staggered"])
def test_the_feed_forward_value_pass_looks_at_every_state(env):
    """Each s_t and each true successor on its own, final observations included."""
    run = make_run(distributional_ppo_categorical, env)
    prepare(run)
    rollout = roll(run)
    assert rollout.truncated.any()
    outputs, next_outputs = critic_pass(run)
    see = run.agent.normalize_obs
    for t in range(12):
        for n in range(4):
            for found, raw in ((outputs, rollout.obs), (next_outputs, rollout.next_obs)):
                expected = run.agent.value_outputs(see(raw[t, n]))
                assert_close(found[:, t, n], expected, rtol=1e-5, atol=1e-5)


def advantages_and_returns(rollout, values, next_values, gamma, gae_lambda):
    """GAE with time limits in plain loops, float64. Schulman et al. 2016, eq. 16."""
    advantages = np.zeros(values.shape)
    for n in range(values.shape[1]):
        last = 0.0
        for t in reversed(range(len(values))):
            dead, over = rollout.terminated[t, n], rollout.truncated[t, n]
            ahead = 0 if dead else gamma * next_values[t, n]
            delta = float(rollout.rewards[t, n]) + ahead - values[t, n]
            last = delta + (0 if dead or over else gamma * gae_lambda * last)
            advantages[t, n] = last
    return advantages, advantages + values


@pytest.fixture
def lively(script, value_from):
    """A run with a rollout of returns in the hundreds, of which either critic has the smaller V on
    half of the steps."""
    flags = {"gamma": 0.9, "gae_lambda": 0.8, "norm_returns_memory": 10}
    run = make_run(script, "Counter", value_from=value_from, **flags)
    one, two = run.agent.critic_heads
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        two[0].weight[::2].neg_()
        two[-1].weight.mul_(20)
    prepare(run)
    run.agent.value_dist.moments.mean += 1200  # to where the returns are
    roll(run)
    balance(run)
    return run


def balance(run):
    """Raise or lower what critic 2 predicts, by bisection, until about half is below critic 1."""
    bias, support = run.agent.critic_heads[1][-1].bias, run.agent.value_dist.support
    direction, start = torch.ones_like(bias), bias.detach().clone()
    if not is_recurrent(run.script):
        direction[: len(support)] = support
    low, high, share = -30.0, 30.0, 0.0
    while abs(share - 0.5) > 0.2:  # not on to a tie
        shift = (low + high) / 2
        with torch.no_grad():
            bias.copy_(start + shift * direction)
        one, two = values_of(run, critic_pass(run)[0])
        share = (two > one).mean()
        low, high = (low, shift) if share > 0.5 else (shift, high)
        assert high - low > 1e-6


def units(run):
    """Mean and standard deviation of returns as the statistics have them now."""
    moments = run.agent.value_dist.moments
    return float(moments.mean), float(moments.var) ** 0.5


def distribution_of(run, outputs):
    """Points in the task's units and their probabilities, both (..., K), in NumPy."""
    mean, std = units(run)
    z = outputs[..., : len(run.agent.value_dist.support)].double()
    if is_recurrent(run.script):
        return z.numpy() * std + mean, np.full(z.shape, 1 / z.shape[-1])
    atoms = np.linspace(run.args.v_min, run.args.v_max, z.shape[-1])
    return np.broadcast_to(atoms * std + mean, z.shape), z.softmax(-1).numpy()


def values_of(run, outputs):
    """V (...): the mean of the distribution, with an output of its own that alone, of quantiles, or
    a tenth of it added to the mean of atoms."""
    mean, std = units(run)
    points, weights = distribution_of(run, outputs)
    of_distribution = (points * weights).sum(-1)
    if run.args.value_from == "distribution":
        return of_distribution
    own = outputs[..., len(run.agent.value_dist.support)].double().numpy() * std
    return own + mean if is_recurrent(run.script) else 0.1 * own + of_distribution


def decoded(run):
    """What is predicted for s_t and for s'_t by the statistics of now: V of both critics, and V and
    distribution of the one with the smaller V."""
    found = []
    for outputs in critic_pass(run):
        twins = values_of(run, outputs)
        second = twins[1] < twins[0]
        points, weights = (
            np.where(second[..., None], x[1], x[0]) for x in distribution_of(run, outputs)
        )
        facts = {"twins": twins, "values": twins.min(0), "points": points, "weights": weights}
        found.append(SimpleNamespace(**facts, outputs=outputs))
    return found


def lambda_returns(run, gae_lambda=0.8):
    """Advantages and returns of the run's last rollout, from what is predicted for it now."""
    here, ahead = decoded(run)
    return advantages_and_returns(run.rollout, here.values, ahead.values, 0.9, gae_lambda)


def inverse_cdf(run, z, levels):
    """F^-1 at some levels, (..., levels). Quantiles are joined by lines that go on beyond the outer
    two; the mass of an atom is spread over its bin."""
    points, levels = np.sort(z.points, -1), np.atleast_1d(levels)
    K = points.shape[-1]
    if is_recurrent(run.script):
        left = np.clip(np.floor(levels * K - 0.5), 0, K - 2).astype(int)
        share = levels * K - 0.5 - left
        return points[..., left] * (1 - share) + points[..., left + 1] * share
    half = (points[..., 1:2] - points[..., :1]) / 2
    edges = np.concatenate((points - half, points[..., -1:] + half), -1)
    cdf = np.pad(z.weights.cumsum(-1), [(0, 0), (0, 0), (1, 0)])
    rows = zip(cdf.reshape(-1, K + 1), edges.reshape(-1, K + 1))
    return np.array([np.interp(levels, *row) for row in rows]).reshape(*cdf.shape[:-1], -1)


def tail_mean(run, z, alpha):
    """Mean of F^-1 below alpha, by a sum; of atoms the steps."""
    levels = (np.arange(4000) + 0.5) / 4000 * alpha
    if is_recurrent(run.script):
        return inverse_cdf(run, z, levels).mean(-1)
    index = (z.weights.cumsum(-1)[..., None] < levels).sum(-2)
    return np.take_along_axis(z.points, index, -1).mean(-1)


def completed_returns(run, ahead):
    """Rewards to the end of the episode or of the rollout and, there, all of the distribution that
    is predicted: samples and probabilities, (T, N, K)."""
    samples, weights = np.zeros(ahead.points.shape), ahead.weights.copy()
    for n in range(samples.shape[1]):
        for t in reversed(range(len(samples))):
            dead, over = run.rollout.terminated[t, n], run.rollout.truncated[t, n]
            goes_on = t + 1 < len(samples) and not dead and not over
            after = samples[t + 1, n] if goes_on else 0 if dead else ahead.points[t, n]
            samples[t, n] = float(run.rollout.rewards[t, n]) + 0.9 * after
            if goes_on:
                weights[t, n] = weights[t + 1, n]
    return samples, weights


def merged(run, mean, scale):
    """Mean and standard deviation of returns after two more samples, mean -+ scale. Chan et al.
    1983."""
    moments = run.agent.value_dist.moments
    before, var, count = (float(x) for x in (moments.mean, moments.var, moments.count))
    new = (count * before + mean) / (count + 1)
    square = (count * (var + before**2) + mean**2 + scale**2) / (count + 1)
    return new, (square - new**2) ** 0.5


def test_advantages_and_targets_follow_from_the_values(lively):
    """The whole chain in NumPy: decode with the old statistics, GAE, encode with the new."""
    run = lively
    advantages, returns = lambda_returns(run)
    batch, _, _ = prepare_rollout(run)
    np.testing.assert_allclose(batch.advantages.reshape(12, 4), advantages, rtol=1e-5, atol=1e-5)
    mean, std = units(run)
    normalised = (returns - mean) / std
    np.testing.assert_allclose(batch.returns.reshape(12, 4), normalised, rtol=1e-4, atol=1e-6)
    if is_recurrent(run.script):
        assert torch.equal(batch.targets[..., 0], batch.returns)
        return
    edges = np.arange(-5.5, 6) - np.clip(normalised, -5, 5)[..., None]  # of 11 bins of width 1
    cdf = np.vectorize(math.erf)(edges / (0.75 * 2**0.5))  # twice it, minus 1
    mass = np.diff(cdf) / (cdf[..., -1:] - cdf[..., :1])
    np.testing.assert_allclose(batch.targets.reshape(12, 4, 11), mass, rtol=1e-4, atol=1e-5)


def test_metrics_of_a_rollout_against_numpy(lively):
    """Every one of them: what was predicted ahead of the update, what came, what has moved."""
    run, script = lively, lively.script
    here, ahead = decoded(run)
    _, returns = lambda_returns(run)
    deciles = np.moveaxis(inverse_cdf(run, here, np.array([0.1, 0.5, 0.9])), -1, 0)
    mean = (here.points * here.weights).sum(-1)
    variance = ((here.points - mean[..., None]) ** 2 * here.weights).sum(-1)
    one, two = here.twins
    assert 0.2 < (one <= two).mean() < 0.8
    samples, weights = completed_returns(run, ahead)
    below = samples < inverse_cdf(run, here, 0.05)
    scale = max(returns.std(), ((here.twins - returns.mean()) ** 2).mean() ** 0.5)
    new_mean, new_std = merged(run, returns.mean(), scale)
    old_mean, old_std = units(run)
    jump = 0.0  # rescaled heads say what they said
    if not is_recurrent(script):  # atoms do
        points, masses = distribution_of(run, critic_pass(run)[0])
        means = (points * masses).sum(-1)
        jump = abs((means - old_mean) / old_std * new_std + new_mean - means).mean()
        assert jump > 0.1
    cut = run.rollout.truncated & ~run.rollout.terminated  # what has ended is not cut
    expected = {
        "value/p10": deciles[0].mean(), "value/p50": deciles[1].mean(),
        "value/p90": deciles[2].mean(), "value/predicted_returns": deciles,
        "value/realised_returns": (weights * samples).sum(-1),
        "value/bias": (here.values - returns).mean(),
        "value/std_target": returns.std(), "value/std_predicted": (variance**0.5).mean(),
        "value/distribution_gap": abs(mean - here.values).mean(),
        "losses/explained_variance": 1 - (returns - here.values).var() / returns.var(),
        "cvar/predicted": tail_mean(run, here, 0.05).mean(), "cvar/weight": 0.0,
        "cvar/coverage": (weights * below).sum(-1).mean(),
        "twin/abs_difference": abs(one - two).mean(), "twin/critic1_is_min": (one <= two).mean(),
        "data/truncated_fraction": cut.double().mean().item(),
        "norm/return_mean": new_mean, "norm/return_std": new_std, "norm/value_shift": jump,
    }  # fmt: skip
    if is_recurrent(script):
        crossing = np.diff(here.outputs[..., :7], axis=-1) < 0
        expected["value/crossing_fraction"] = crossing.mean()
    else:
        beyond = abs(returns - new_mean) > 5 * new_std
        expected["value/outside_support"] = beyond.mean()
    _, _, metrics = prepare_rollout(run)
    if not is_recurrent(script) and beyond.mean() > 0.01:
        assert f" {beyond.mean():.1%} of the targets' mass" in metrics.pop(
            "warning/outside_support"
        )
    assert metrics.keys() == expected.keys()
    for tag, value in expected.items():
        tolerance = {"rtol": 1e-4, "atol": 1e-6 * new_std}
        np.testing.assert_allclose(metrics[tag], value, **tolerance, err_msg=tag)
    assert abs(expected["value/bias"] - (one - returns).mean()) > 0.05
    gap = expected["value/distribution_gap"]
    assert (gap > 1) == (run.args.value_from == "mean_head")


def spread_rewards(run):
    """Give the rollout rewards with which returns are about as large, and as wide, as predicted."""
    here, _ = decoded(run)
    torch.manual_seed(2)
    noise = float(here.points.std(-1).mean()) * torch.randn(12, 4, dtype=torch.float64)
    mean = float((here.points * here.weights).sum(-1).mean())
    run.rollout = run.rollout._replace(rewards=0.1 * mean + noise)  # 0.1 + 0.9 gives the mean


def test_coverage_counts_returns_completed_by_what_is_predicted(lively):
    """Rewards up to an end and, at limits and at the last step, the whole distribution there: not
    lambda-returns, and no V, which has no spread."""
    run = lively
    run.args.cvar_alpha = 0.3
    here, ahead = decoded(run)
    spread_rewards(run)
    limit = inverse_cdf(run, here, 0.3)
    samples, weights = completed_returns(run, ahead)
    share = (weights * (samples < limit)).sum(-1).mean()
    for gae_lambda in (1.0, 0.8):
        assert abs(share - (lambda_returns(run, gae_lambda)[1] < limit[..., 0]).mean()) > 1e-3
    _, _, metrics = prepare_rollout(run)
    assert float(metrics["cvar/coverage"]) == pytest.approx(share)
    assert 0.1 < share < 0.9


def task_distribution(run, z):
    """As the functions of either kind of distribution take it: quantiles, or probabilities."""
    return torch.tensor(z.points if is_recurrent(run.script) else z.weights)


def test_sr_lambda_gets_decoded_distributions_of_true_successors(lively, monkeypatch):
    """Rewards in the task's units, both masks, the outputs of the smaller V by old statistics; for
    the targets and then, with lambda 1, for the coverage."""
    run, recurrent = lively, is_recurrent(lively.script)
    run.args.value_target = "sr_lambda"
    here, ahead = decoded(run)
    uniform = (12, 4, 7) if recurrent else (12, 4)  # each quantile is drawn for itself
    calls = spy(monkeypatch, run.script, "sr_lambda_targets" if recurrent else "sr_lambda_atoms")
    prepare_rollout(run)
    assert len(calls) == 2
    for (rewards, found, *rest), gae_lambda in zip(calls, (0.8, 1.0)):
        if not recurrent:
            assert_close(rest.pop(0), torch.tensor(here.points[0, 0]))
        assert_close(found, task_distribution(run, ahead), rtol=1e-6, atol=1e-6)  # of float32
        assert not torch.allclose(found, task_distribution(run, here), atol=1e-3)
        assert torch.equal(rewards, run.rollout.rewards)
        assert torch.equal(rest[0], run.rollout.terminated)
        assert torch.equal(rest[1], run.rollout.truncated)
        assert rest[2:-1] == [0.9, gae_lambda]
        assert rest[-1].shape == uniform
    assert 0 <= calls[0][-1].min() < 0.2
    assert 0.8 < calls[0][-1].max() < 1
    assert not calls[1][-1].any()  # nothing is drawn, for nothing is replaced


def test_looking_draws_no_random_number(script, value_from):
    """Lambda-returns need none, and metrics take none: the RNG stands where it stood."""
    run = make_run(script, "Counter", value_from=value_from)
    roll(run)

    def drawn():
        """A number of each generator, which goes back to where it was."""
        before = script.global_generators()
        found = random.random(), np.random.random(), float(torch.rand(()))
        script.set_global_generators(before)
        return found

    before = drawn()
    batch, *_ = prepare_rollout(run)
    scaled = script.scale_advantages(run.agent, batch.advantages, run.args)
    script.describe_advantages(batch.advantages, scaled)
    assert drawn() == before
    run.args.value_target = "sr_lambda"
    prepare_rollout(run)
    assert drawn() != before


def test_risk_is_read_from_samples_of_the_return(lively):
    """All of `averse` in NumPy, Rockafellar & Uryasev 2000, theorem 1. With lambda 0 SR(lambda) has
    no chance left: r + gamma z', where z' is all that is predicted for the true successor."""
    run = lively
    run.args.value_target, run.args.gae_lambda = "sr_lambda", 0.0
    run.args.cvar_weight, run.args.cvar_alpha = 1.0, 0.3
    spread_rewards(run)
    here, ahead = decoded(run)
    alive = ~run.rollout.terminated.numpy()[..., None]
    samples = run.rollout.rewards.double().numpy()[..., None] + 0.9 * alive * ahead.points
    if is_recurrent(run.script):
        nu = inverse_cdf(run, here, 0.3)
    else:  # the least atom with F >= alpha; what lies beyond the atoms counts as the outer ones
        index = (here.weights.cumsum(-1) < 0.3).sum(-1, keepdims=True)
        nu = np.take_along_axis(here.points, index, -1)
        samples = samples.clip(here.points[..., :1], here.points[..., -1:])
    utilities = nu + np.minimum(samples - nu, 0) / 0.3
    expected = (ahead.weights * utilities).sum(-1) - tail_mean(run, here, 0.3)
    batch, _, _ = prepare_rollout(run)
    found = batch.advantages.reshape(12, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.std())
    assert 0.1 < (samples < nu).mean() < 0.9  # on both sides of where the utility bends


def test_the_risk_term_gets_targets_and_the_state_in_the_tasks_units(lively, monkeypatch):
    """The distribution of s_t of the smaller V, the samples of the target, and alpha."""
    run, recurrent = lively, is_recurrent(lively.script)
    run.args.cvar_weight, run.args.cvar_alpha = 0.3, 0.2
    here, _ = decoded(run)
    advantages, returns = lambda_returns(run)
    name = "cvar_advantages" if recurrent else "cvar_advantages_categorical"
    calls, function = spy(monkeypatch, run.script, name), getattr(run.script, name)
    batch, _, metrics = prepare_rollout(run)
    ((targets, found, *rest),) = calls
    risk = function(targets, found, *rest).double().numpy()
    if recurrent:
        np.testing.assert_allclose(targets[..., 0], returns)
    else:
        atoms = rest.pop(0)
        assert_close(atoms, torch.tensor(here.points[0, 0]))
        inside = np.clip(returns, float(atoms[0]), float(atoms[-1]))
        np.testing.assert_allclose(targets.double() @ atoms, inside, rtol=1e-6)
    assert_close(found, task_distribution(run, here))
    assert rest == [0.2]
    expected = 0.7 * advantages + 0.3 * risk
    np.testing.assert_allclose(batch.advantages.reshape(12, 4), expected, rtol=1e-5, atol=1e-4)
    assert float(metrics["cvar/weight"]) == 0.3
    assert float(metrics["cvar/predicted"]) == pytest.approx(
        tail_mean(run, here, 0.2).mean(), rel=1e-4
    )


def test_a_neutral_run_asks_for_no_risk(lively, monkeypatch):
    """Weight 0 and alpha 1 go past all of it: bit-equal to each other, the RNG included."""
    run = lively
    name = "cvar_advantages" if is_recurrent(run.script) else "cvar_advantages_categorical"
    calls = spy(monkeypatch, run.script, name)
    batches, rngs = [], []
    for weight, alpha in ((0.0, 0.3), (0.8, 1.0)):
        other = copy.deepcopy({"agent": run.agent, "args": run.args})
        other["args"].cvar_weight, other["args"].cvar_alpha = weight, alpha
        other["agent"].value_dist.args = other["args"]
        torch.manual_seed(1)
        batches.append(prepare_rollout(run, **other)[0])
        rngs.append(torch.get_rng_state())
    assert not calls
    assert torch.equal(*rngs)
    assert all(torch.equal(one, two) for one, two in zip(*batches))


@pytest.mark.parametrize("norm_returns", [True, False])
def test_moving_statistics_change_no_prediction(script, norm_returns):
    """PopArt: both critics decode to the same values before and after, while the scale moves.
    van Hasselt et al. 2016, eq. 5. Of atoms what V exceeds their mean by; the mean jumps."""
    run = make_run(script, "Counter", norm_returns=norm_returns)
    prepare(run)
    roll(run)
    moments, first = run.agent.value_dist.moments, 0 if is_recurrent(script) else 11

    def look():
        outputs = critic_pass(run)[0][..., first:].double()
        return moments.std * outputs if first else moments.denormalize(outputs)

    logits = critic_pass(run)[0][..., :first]
    before, old = look(), (moments.mean.clone(), moments.std.clone())
    _, _, metrics = prepare_rollout(run)
    after = look()
    moved = abs(float(old[0] - moments.mean)) > 1 and abs(float(old[1] - moments.std)) > 1
    assert moved == norm_returns
    scale = max(1.0, float(moments.std), float(before.abs().max()))
    assert_close(after / scale, before / scale, rtol=0, atol=1e-5)
    assert torch.equal(critic_pass(run)[0][..., :first], logits)
    assert before[0].ne(before[1]).all()  # two different critics, neither of them lost
    if not first or not norm_returns:
        assert float(metrics["norm/value_shift"]) / scale < 1e-5
    assert float(metrics["norm/return_mean"]) == float(moments.mean)
    assert float(metrics["norm/return_std"]) == float(moments.std)


def test_rewards_times_ten_leave_the_normalised_problem_as_it_is(script):
    """Targets and clipping references are in units of the return's spread, not in raw units."""
    batches = []
    for scale in (1.0, 10.0):
        run = make_run(script, "Counter", num_critics=2)
        moments = run.agent.value_dist.moments
        moments.mean, moments.var = scale * moments.mean, scale**2 * moments.var
        rollout = roll(run)
        run.rollout = rollout._replace(rewards=scale * rollout.rewards)
        batches.append(prepare_rollout(run)[0])
    for name in ("targets", "old_predictions"):
        one, two = (getattr(batch, name) for batch in batches)
        assert_close(one, two, rtol=1e-4, atol=1e-4)
    one, two = (batch.advantages for batch in batches)  # these are in the task's units
    assert_close(10 * one, two, rtol=1e-4, atol=1e-4)


def first_batches(script, monkeypatch, scale, value_from):
    """The first two batches, with an update in between, of a fresh agent whose rewards are scaled,
    and the old values of the first one."""
    make_env = script.make_env

    def scaled(args):
        return gym.wrappers.TransformReward(make_env(args), lambda reward: scale * reward)

    with monkeypatch.context() as patch:
        patch.setattr(script, "make_env", scaled)
        run = make_run(script, "Staggered", value_from=value_from, ent_coef=0.01)
    forget_returns(run)
    torch.manual_seed(4)
    one = prepare(run)
    script.update(run.agent, run.optimizers, one, run.args, progress=0.0)
    return one, prepare(run)


@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1e12, 1e18])
def test_the_first_rollouts_know_no_units(script, monkeypatch, value_from, scale):
    """Rewards times s, from the first prediction on: untrained critics are off by what the returns
    of their own task spread, not by 1 of whatever unit."""
    batches = [first_batches(script, monkeypatch, s, value_from) for s in (1.0, scale)]
    for one, two in zip(*batches):
        assert_close(two.advantages / scale, one.advantages, rtol=1e-3, atol=1e-4)
        for name in ("targets", "old_predictions", "returns"):
            expected = getattr(one, name)
            assert_close(getattr(two, name), expected, rtol=1e-3, atol=1e-4, msg=name)
            assert expected.std() > 0.01


def test_the_first_rewards_count_as_a_rollout(script, value_from):
    """Statistics without data take in mean and variance of the discounted rewards, ahead of the
    first prediction; those of an agent that has seen them already do not."""
    run = make_run(script, "Staggered", value_from=value_from)
    forget_returns(run)
    roll(run)
    zeros = np.zeros((12, 4))
    _, sums = advantages_and_returns(run.rollout, zeros, zeros, run.args.gamma, 1.0)
    other = copy.deepcopy(run.agent)
    moments = other.value_dist.moments
    moments.mean.fill_(sums.mean())
    moments.var.fill_(sums.var())
    moments.count.fill_(1)
    found = [prepare_rollout(run, agent)[0] for agent in (run.agent, other)]
    assert float(run.agent.value_dist.moments.count) == float(moments.count) == 2
    for name in ("mean", "var"):
        assert_close(getattr(run.agent.value_dist.moments, name), getattr(moments, name))
    for one, two in zip(*found):
        assert_close(one, two)


def test_heads_that_train_without_rewards_keep_their_size(script, value_from):
    """The same with ten updates, whose steps have the size of the learning rate."""
    run = make_run(script, "Staggered", value_from=value_from)
    forget_returns(run)
    for rewarded in [False] * 10 + [True]:
        rollout = roll(run)
        if not rewarded:
            run.rollout = rollout._replace(rewards=0 * rollout.rewards)
        before = [float(head[-1].weight.detach().norm()) for head in run.agent.critic_heads]
        batch, run.critic_state, _ = prepare_rollout(run)
        after = [float(head[-1].weight.detach().norm()) for head in run.agent.critic_heads]
        assert run.agent.value_dist.moments.at_floor == (not rewarded)
        assert after == pytest.approx(before, rel=0.5)
        script.update(run.agent, run.optimizers, batch, run.args, 0.0)


def test_heads_survive_a_long_time_without_rewards(script, value_from):
    """Ours: ten rollouts without a reward, then one. The std stood at its floor of 1e-30; heads
    rescaled from there would vanish. They keep their size, and old values are what they say now."""
    run = make_run(script, "Staggered", value_from=value_from)
    forget_returns(run)
    heads = run.agent.critic_heads
    before = [head[-1].weight.detach().clone() for head in heads]
    for rewarded in [False] * 10 + [True]:
        rollout = roll(run)
        if not rewarded:
            run.rollout = rollout._replace(rewards=0 * rollout.rewards)
        batch, run.critic_state, _ = prepare_rollout(run)
        assert run.agent.value_dist.moments.at_floor == (not rewarded)
        for head, weight in zip(heads, before):
            assert torch.equal(head[-1].weight, weight)
    assert float(run.agent.value_dist.moments.std) > 0.1
    outputs, old = value_outputs(run.agent, batch), old_of_critics(batch)
    if not is_recurrent(script):
        support = run.agent.value_dist.support
        means = (outputs[..., : len(support)].softmax(-1) @ support)[..., None]
        outputs = torch.cat((means, means + 0.1 * outputs[..., len(support) :]), -1)
    assert_close(outputs, old, rtol=1e-5, atol=1e-5)
    roll(run)
    prepare_rollout(run)  # from now on they are rescaled
    last = [head[-1].weight[-1:] for head in heads]
    if value_from == "mean_head" or is_recurrent(script):
        assert not any(torch.equal(x, weight[-1:]) for x, weight in zip(last, before))


def test_returns_that_are_not_normalised_stay_in_the_tasks_units(script, value_from):
    """A fresh agent without --norm-returns: nothing is taken in, first of all not ahead of all."""
    run = make_run(script, "Staggered", value_from=value_from, norm_returns=False)
    forget_returns(run)
    for _ in range(2):
        roll(run)
        here, ahead = decoded(run)
        facts = (run.rollout, here.values, ahead.values, run.args.gamma, run.args.gae_lambda)
        _, returns = advantages_and_returns(*facts)
        batch, run.critic_state, _ = prepare_rollout(run)
        np.testing.assert_allclose(batch.returns.reshape(12, 4), returns, rtol=1e-4)
        moments = run.agent.value_dist.moments
        assert [float(x) for x in (moments.mean, moments.std, moments.count)] == [0, 1, 0]


def perfect_outputs(run):
    """Outputs (K or K + 1) of a critic of returns that are N(0, 1) once normalised."""
    normal = torch.distributions.Normal(0.0, 1.0)
    support = run.agent.value_dist.support
    if is_recurrent(run.script):
        outputs = normal.icdf(support)
    else:
        half = (support[1] - support[0]) / 2
        outputs = (normal.cdf(support + half) - normal.cdf(support - half)).clamp(min=1e-12).log()
    return torch.cat((outputs, torch.zeros(1)))[: len(run.agent.critic_heads[0][-1].bias)]


def test_coverage_of_a_perfect_critic_is_alpha(script, monkeypatch, value_from):
    """N(0, 1) rewards without an end: the return of every state is N(0, 1 / (1 - gamma^2)), and 5 %
    of the returns are below its quantile 0.05; completed by V, which has no spread, half of it."""
    flags = {"num_quantiles": 64, "num_atoms": 101, "gamma": 0.9, "num_steps": 10}
    run = make_run(script, "Endless", value_from=value_from, **flags)
    rollout, many = roll(run), 400
    run.args.num_envs = 4 * many
    wide = {
        name: x.repeat_interleave(many, 2 if name == "actor_state" else 1)
        for name, x in rollout._asdict().items()
        if name != "episodes"
    }
    wide["rewards"] = torch.randn(10, 4 * many, dtype=torch.float64)
    run.rollout = rollout._replace(**wide)
    moments = run.agent.value_dist.moments
    moments.mean, moments.var = 0 * moments.mean, 0 * moments.var + 1 / (1 - 0.9**2)
    outputs = perfect_outputs(run).expand(2, 10, 4 * many, -1)
    states = [wide["actor_state"], run.critic_state] if is_recurrent(script) else []
    monkeypatch.setattr(script, "run_critics", lambda *inputs: (outputs, outputs, *states))
    _, _, metrics = prepare_rollout(run)
    assert 0.04 < metrics["cvar/coverage"] < 0.06


def test_observation_statistics_stand_still_and_serve_the_whole_batch(script):
    """What the policy saw while acting is what it is trained on; preparing moves no obs moments."""
    run = make_run(script, "Counter")
    rollout = roll(run)
    moments = run.agent.obs_moments
    mean, std = moments.mean.clone(), moments.std.clone()
    batch, _, _ = prepare_rollout(run)
    assert torch.equal(moments.mean, mean)
    seen = ((rollout.obs.double() - mean) / std).clamp(-10, 10).float()
    assert_close(batch.obs.reshape(seen.shape), seen, rtol=1e-5, atol=1e-6)


def test_nothing_in_a_batch_has_a_graph(script):
    """Gradients must not reach what acted and what was predicted then."""
    batch = prepare(make_run(script, "VectorBox"))
    assert not any(x.requires_grad for x in batch)


def flip(run, flag, value):
    """Batch and metrics of the same rollout with one flag changed."""
    other = copy.deepcopy({"agent": run.agent, "args": run.args})
    setattr(other["args"], flag, value)
    other["agent"].value_dist.args = other["args"]
    torch.manual_seed(2)
    batch, _, metrics = prepare_rollout(run, **other)
    return batch, metrics


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("gamma", 0.5),
        ("gae_lambda", 0.5),
        ("norm_returns", False),
        ("twin_reduce", "mean"),
    ],
)
def test_a_flag_of_the_targets_changes_the_batch(script, value_from, flag, value):
    """No option gets lost on the way. The unit of targets does not change advantages."""
    run = make_run(script, "VectorDiscrete", value_from=value_from, value_target="sr_lambda")
    prepare(run)
    roll(run)
    base, _ = flip(run, "seed", 1)
    changed, _ = flip(run, flag, value)
    assert not torch.equal(base.targets, changed.targets)
    assert torch.equal(base.advantages, changed.advantages) == (flag == "norm_returns")


def test_the_twin_that_is_used_is_the_configured_one(script, value_from):
    """V is the smaller one of both or their mean; critic 1 is the minimum on some steps. Without a
    future returns are rewards, from which the bias tells V."""
    run = make_run(script, "VectorDiscrete", value_from=value_from, gamma=0.0)
    prepare(run)
    roll(run)
    twins = values_of(run, critic_pass(run)[0])
    values = {"min": twins.min(0).mean(), "mean": twins.mean()}
    assert values["min"] < values["mean"] - 1e-3
    for mode, value in values.items():
        _, metrics = flip(run, "twin_reduce", mode)
        bias = value - float(run.rollout.rewards.mean())
        assert float(metrics["value/bias"]) == pytest.approx(bias, rel=1e-4)
    assert float(metrics["twin/abs_difference"]) > 0
    assert 0 <= float(metrics["twin/critic1_is_min"]) <= 1


@pytest.mark.parametrize("shift", [0, -3000])
@pytest.mark.parametrize("value_target", ["lambda_return", "sr_lambda"])
def test_statistics_take_in_the_targets_of_a_rollout(lively, value_target, shift):
    """Two samples, mean -+ scale, written out and merged (Chan et al. 1983): the spread of all
    samples of all targets or, where V is far off, its error."""
    run, moments, dist = lively, lively.agent.value_dist.moments, lively.agent.value_dist
    run.args.value_target = value_target
    moments.mean = moments.mean + shift
    here, _ = decoded(run)
    _, returns = lambda_returns(run)
    samples, weights = returns[..., None], np.ones((12, 4, 1))
    if value_target == "sr_lambda":
        reduced = dist.reduce_twins(critic_pass(run)[1].double())
        torch.manual_seed(8)  # draws
        drawn = dist.sample_targets(run.rollout, reduced, 0.8)
        if is_recurrent(run.script):
            drawn = (drawn, torch.ones_like(drawn))
        samples, weights = (x.numpy() for x in drawn)
        assert samples.shape == (12, 4, 7 if is_recurrent(run.script) else 11)
    mean = np.average(samples, weights=weights)
    spread = np.average((samples - mean) ** 2, weights=weights) ** 0.5
    error = ((here.twins - mean) ** 2).mean() ** 0.5
    assert (spread < 0.95 * error) if shift else (spread > 1.05 * error)
    expected = merged(run, mean, max(spread, error))
    torch.manual_seed(8)
    prepare_rollout(run)
    assert units(run) == pytest.approx(expected)
    assert float(moments.count) == moments.max_count == 10


def test_sequences_are_unbroken_stretches_of_one_environment():
    """Sequence m of the batch: steps 3 i to 3 i + 2 of environment n, m = 4 i + n."""
    run = make_run(distributional_ppo_lstm, "Staggered", seq_len=3)
    rollout = roll(run)
    batch, _, _ = prepare_rollout(run)
    assert batch.obs.shape == (3, 16, 3)
    assert batch.actor_state.shape == batch.critic_state.shape == (2, 16, 5)
    for m in range(16):
        part, n = slice(m // 4 * 3, m // 4 * 3 + 3), m % 4
        seen = run.agent.normalize_obs(rollout.obs[part, n])
        assert torch.equal(batch.obs[:, m], seen)
        assert torch.equal(batch.actions[:, m], rollout.actions[part, n])
        assert torch.equal(batch.episode_start[:, m], rollout.episode_start[part, n])
        assert torch.equal(batch.actor_state[:, m], rollout.actor_state[m // 4, :, n])


def test_rows_are_steps_of_environments():
    """Row 4 t + n of the feed-forward batch is step t of environment n, in every tensor."""
    run = make_run(distributional_ppo_categorical, "Staggered", norm_adv=False)
    rollout = roll(run)
    batch, _, _ = prepare_rollout(run)
    for t in range(12):
        for n in range(4):
            row = 4 * t + n
            assert torch.equal(batch.obs[row], run.agent.normalize_obs(rollout.obs[t, n]))
            assert torch.equal(batch.actions[row], rollout.actions[t, n])
            assert torch.equal(batch.params[row], rollout.params[t, n])
    assert [x.shape[0] for x in batch] == [48] * 8


def test_the_risk_term_reaches_the_policy_and_not_the_critics(script):
    """One batch: advantages (1 - w) A_gae + w A_cvar, targets and old values bit-equal.
    Rockafellar & Uryasev 2000, as the advantage of the policy gradient of their CVaR."""
    batches = {}
    for weight in (0.0, 0.4, 1.0):
        facts = {"value_target": "sr_lambda", "cvar_alpha": 0.3}
        run = make_run(script, "Counter", cvar_weight=weight, **facts)
        torch.manual_seed(0)
        roll(run)
        torch.manual_seed(1)
        batches[weight], _, metrics = prepare_rollout(run)
        assert metrics["cvar/weight"] == weight
    run.args.cvar_alpha = 1.0  # the mean of all: the term is left out
    assert prepare_rollout(run)[2]["cvar/weight"] == 0
    neutral, mixed, careful = (batch.advantages for batch in batches.values())
    assert_close(mixed, 0.6 * neutral + 0.4 * careful, rtol=1e-4, atol=1e-3)
    assert (neutral - careful).abs().max() > 1
    for weight in (0.4, 1.0):
        assert torch.equal(batches[weight].targets, batches[0.0].targets)
        assert torch.equal(batches[weight].old_predictions, batches[0.0].old_predictions)


def test_sr_lambda_trains_on_its_samples(script):
    """The batch holds a distribution for each step that goes on, not the lambda-return alone.
    Nam et al. 2021 (GMAC)."""
    encoded = {}
    for target in ("lambda_return", "sr_lambda"):
        facts = {"target_encoding": "two_hot", "gamma": 0.95, "gae_lambda": 0.5}
        run = make_run(script, "Counter", value_target=target, **facts)
        encoded[target] = prepare(run).targets
    if is_recurrent(script):
        assert [x.shape[-1] for x in encoded.values()] == [1, 7]
        varied = encoded["sr_lambda"].std(-1) > 0
    else:  # a point takes two atoms
        assert (encoded["lambda_return"] > 1e-6).sum(-1).max() <= 2
        varied = (encoded["sr_lambda"] > 1e-6).sum(-1) > 2
    assert 0.3 < varied.float().mean() < 1  # after a termination one value is left


def test_the_share_outside_is_that_of_what_the_critics_train_on():
    """Returns in the thousands are inside the support once the statistics have taken them in."""
    run = make_run(distributional_ppo_categorical, "Counter", num_atoms=21)
    run.agent.value_dist.moments.mean += 1e5
    run.agent.value_dist.moments.count.zero_()  # the first update replaces these statistics
    prepare(run)
    assert run.metrics["value/outside_support"] < 0.1


def test_every_part_of_a_batch_is_cut_alike():
    """Four sequences of 3 steps for each environment hold what one sequence of 12 holds: sequence
    i of environment n is number 4 i + n, and has the steps 3 i to 3 i + 2."""
    script = distributional_ppo_lstm
    whole, cut = (prepare(make_run(script, "VectorBox", seq_len=length)) for length in (0, 3))
    states = {"actor_state", "critic_state"}
    for name in set(whole._fields) - states:
        one, other = getattr(whole, name), getattr(cut, name)
        assert one.shape[:2] == (12, 4)
        assert other.shape[:2] == (3, 16)
        for i in range(4):
            for n in range(4):
                part = one[3 * i : 3 * i + 3, n]
                assert_close(other[:, 4 * i + n], part, rtol=1e-4, atol=1e-4, msg=name)


def test_a_batch_is_of_float32(script):
    """Advantages are float64, since they are in the task's units."""
    batch = prepare(make_run(script, "VectorBox"))
    floats = {name for name, x in batch._asdict().items() if x.is_floating_point()}
    assert floats > {"obs", "log_probs", "returns", "targets", "old_predictions"}
    for name in floats:
        wanted = torch.float64 if name == "advantages" else torch.float32
        assert getattr(batch, name).dtype == wanted, name


def test_minibatches_are_drawn_where_the_batch_lies(script, monkeypatch):
    """A batch on another device is indexed there; the order is drawn on the CPU."""
    run = make_run(script, "Walk")
    batch = prepare(run)
    elsewhere = type(batch)(*(x.to("meta") for x in batch))
    calls = spy(monkeypatch, script, "some_sequences" if is_recurrent(script) else "some_rows")
    list(script.minibatches(elsewhere, run.args))
    assert {indices.device.type for _, indices in calls} == {"meta"}


def test_returns_far_from_zero_keep_their_digits(script, monkeypatch, value_from):
    """Returns of 1e7 +- 1000. In float32 they would be off by up to half, 0.0005 standard
    deviations. What was predicted is told in the new units as well."""
    run = make_run(script, "Staggered", value_from=value_from)
    dist = run.agent.value_dist
    dist.moments.mean.fill_(1e7)
    dist.moments.var.fill_(1e6)
    shape = (run.args.num_steps, run.args.num_envs)
    z = torch.randn(shape, generator=torch.manual_seed(0), dtype=torch.float64)
    returns = 1e7 + 1000 * z
    made = (torch.zeros(shape), returns, dist.point_targets(returns))
    monkeypatch.setattr(script, "advantages_and_targets", lambda *facts: made)
    known = []
    move = dist.move_statistics

    def look_and_move(heads, outputs, targets):
        if is_recurrent(script):
            known.append(dist.decode(outputs))
        else:
            known.append(torch.stack((dist.mean(outputs), dist.value(outputs)), -1))
        return move(heads, outputs, targets)

    monkeypatch.setattr(dist, "move_statistics", look_and_move)
    batch = prepare(run)

    def in_order(x):
        return x.double().flatten().sort().values

    expected = in_order((returns - dist.moments.mean) / dist.moments.std)
    torch.testing.assert_close(in_order(batch.returns), expected, rtol=0, atol=1e-5)
    learnt = batch.targets[..., 0] if is_recurrent(script) else batch.targets @ dist.support
    near = 1e-5 if is_recurrent(script) else 1e-4  # HL-Gauss keeps means a little less exactly
    torch.testing.assert_close(in_order(learnt), expected, rtol=0, atol=near)

    told = (known[0] - dist.moments.mean) / dist.moments.std
    if not is_recurrent(script) and value_from == "distribution":
        told = told[..., :1]
    torch.testing.assert_close(
        in_order(batch.old_predictions), in_order(told), rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("shift", [0.0, 1e9])
def test_the_spread_of_returns_far_from_zero(script, shift):
    """Mean 1e9 and +-1: the squares, 1e18, leave no digit for a variance of 1."""
    returns = torch.tensor([shift - 1, shift + 1], dtype=torch.float64)
    mean, var = script.batch_moments(returns)
    assert (float(mean), float(var)) == (shift, 1.0)
    run = make_run(script, "Walk")
    forget_returns(run)
    dist = run.agent.value_dist
    outputs = torch.zeros(2, 1, 2, dist.num_outputs)
    dist.moments.merge(mean, var, weight=1)  # as the first rollout does
    dist.move_statistics(torch.nn.ModuleList(), outputs, dist.point_targets(returns[None]))
    assert float(dist.moments.mean) == pytest.approx(shift)
    assert float(dist.moments.var) == pytest.approx(1, rel=0.2)


def test_the_shift_of_a_value_is_told_where_heads_stay(script, value_from):
    """Heads do not move with the statistics when these leave their floor, so what they predict
    does: from 0 +- 1e-15 to about the size of the first returns."""
    run = make_run(script, "Staggered", value_from=value_from)
    forget_returns(run)
    shifts = []
    for rewarded in (False, True):
        rollout = roll(run)
        if not rewarded:
            run.rollout = rollout._replace(rewards=0 * rollout.rewards)
        _, run.critic_state, metrics = prepare_rollout(run)
        shifts.append(float(metrics["norm/value_shift"]))
    assert shifts[0] == pytest.approx(0, abs=1e-12)
    assert shifts[1] > 0.1
