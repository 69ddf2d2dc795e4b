"""From a rollout to a batch: values of all states, advantages, targets, statistics."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers import (
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
            return run.script.run_critics(*facts, run.carry.critic_state, run.args)[:2]
        return run.script.run_critics(*facts)


def spy(monkeypatch, script, name):
    """Arguments of every call of a function of the script, which does what it did."""
    calls, function = [], getattr(script, name)

    def look(*args):
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(script, name, look)
    return calls


@pytest.mark.parametrize("seq_len", [0, 3, 4])
@pytest.mark.parametrize("env", ["Counter", "VectorBox", "NestedMultiDiscrete"])
def test_a_second_look_gives_ratio_one_and_the_old_values(script, env, seq_len):
    """With unchanged weights the batch reproduces the rollout, through resets and statistics."""
    run = make_run(script, env, **sequences(script, seq_len))
    prepare(run)
    moments = run.agent.value_dist.moments
    old_mean, old_std = moments.mean.clone(), moments.std
    batch = prepare(run)  # the second rollout starts from a carried state
    if is_recurrent(script):  # episodes begin in mid-rollout
        assert batch.episode_start[run.args.sequence_length > 1 :].any()
    params = policy_params(run.agent, batch)
    log_prob = run.agent.action_dist.distribution(params).log_prob(batch.actions)
    assert_close((log_prob - batch.log_probs).exp(), torch.ones_like(log_prob), rtol=0, atol=1e-5)
    assert_close(params, batch.params, rtol=1e-5, atol=1e-5)
    outputs, old = value_outputs(run.agent, batch), old_of_critics(batch)
    if script is distributional_ppo_categorical:  # old means alone are in the new units
        means = outputs.softmax(-1) @ run.agent.value_dist.support
        outputs = (means[..., None] * old_std + old_mean).float()
        old = moments.denormalize(old)
    atol = 1e-4 if script is distributional_ppo_categorical else 1e-5
    assert_close(outputs, old, rtol=1e-5, atol=atol)
    assert (old[0] - old[1]).abs().min() > atol  # of two critics, each its own


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
    before = run.carry
    rollout = roll(run)
    some = rollout.truncated.any(1)
    assert some.any()
    assert (env == "Counter") == torch.equal(some, rollout.truncated.all(1))

    agent, see = run.agent, run.agent.normalize_obs
    obs, next_obs, start = see(rollout.obs), see(rollout.next_obs), rollout.episode_start
    critic = features_by_steps(agent.critic_body, obs, next_obs, start, before.critic_state)
    found = script.run_critics(agent, rollout, obs, next_obs, before.critic_state, run.args)
    outputs, next_outputs, states, state = found
    assert_close(outputs, agent.value_outputs(critic[0]), rtol=1e-5, atol=1e-5)
    alive = ~rollout.terminated
    expected = agent.value_outputs(critic[1])[:, alive]
    assert_close(next_outputs[:, alive], expected, rtol=1e-5, atol=1e-5)
    assert_close(state, critic[2], rtol=1e-5, atol=1e-5)
    assert len(states) == 12 // run.args.sequence_length
    assert torch.equal(states[0], before.critic_state)

    *_, actor = features_by_steps(agent.actor_body, obs, next_obs, start, before.actor_state)
    kept = actor * ~torch.as_tensor(run.carry.episode_start)[:, None]
    assert_close(run.carry.actor_state, kept, rtol=1e-5, atol=1e-5)
    _, carry, _ = prepare_rollout(run)
    assert_close(carry.critic_state, critic[2], rtol=1e-5, atol=1e-5)
    assert torch.equal(carry.actor_state, run.carry.actor_state)  # acting alone moves it
    assert carry.obs is run.carry.obs


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
def lively(script):
    """A run with a rollout of returns in the hundreds, of which either critic is the smaller one
    on half of the steps."""
    run = make_run(script, "Counter", gamma=0.9, gae_lambda=0.8)
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
    direction, start = 1 if is_recurrent(run.script) else support, bias.detach().clone()
    low, high, share = -30.0, 30.0, 0.0
    while abs(share - 0.5) > 0.2:  # not on to a tie
        shift = (low + high) / 2
        with torch.no_grad():
            bias.copy_(start + shift * direction)
        one, two = run.agent.value_dist.mean(critic_pass(run)[0])
        share = float((two > one).float().mean())
        low, high = (low, shift) if share > 0.5 else (shift, high)
        assert high - low > 1e-6


def decoded(run):
    """Values of s_t and s'_t, of both critics and of the smaller one, by the statistics of now."""
    plain = run.script.ValueDistribution(run.args)  # its own statistics have not moved
    mean, std = float(run.agent.value_dist.moments.mean), float(run.agent.value_dist.moments.std)
    outputs, next_outputs = critic_pass(run)
    twins, next_twins = (
        plain.mean(x).double().numpy() * std + mean for x in (outputs, next_outputs)
    )
    stats = plain.describe(plain.reduce_twins(outputs))
    stats = {key: x.double().numpy() * std for key, x in stats.items()}
    stats |= {key: x + mean for key, x in stats.items() if key != "std"}
    return twins, twins.min(0), next_twins.min(0), stats


@pytest.mark.parametrize("norm_adv", [True, False])
def test_advantages_and_targets_follow_from_the_values(lively, norm_adv):
    """The whole chain in NumPy: decode with the old statistics, GAE, encode with the new."""
    run = lively
    run.args.norm_adv = norm_adv
    _, values, next_values, _ = decoded(run)
    batch, _, metrics = prepare_rollout(run)
    advantages, returns = advantages_and_returns(run.rollout, values, next_values, 0.9, 0.8)
    expected = (advantages - advantages.mean()) / advantages.std() if norm_adv else advantages
    got = batch.advantages.reshape(12, 4).double().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    assert float(metrics["adv/mean_raw"]) == pytest.approx(advantages.mean(), rel=1e-3)
    assert float(metrics["adv/std_raw"]) == pytest.approx(advantages.std(), rel=1e-3)
    assert float(metrics["adv/abs_max"]) == pytest.approx(abs(expected).max(), rel=1e-3)
    if run.script is distributional_ppo_lstm:  # one sample; of probabilities their mean
        targets = batch.targets[..., 0]
        tolerance = 1e-3
    else:
        inside = abs(run.agent.value_dist.moments.normalize(torch.tensor(returns))).max() < 4
        assert inside
        targets = batch.targets @ run.agent.value_dist.support
        tolerance = 0.02 * float(run.agent.value_dist.moments.std)  # hl_gauss cuts its tails
    found = run.agent.value_dist.moments.denormalize(targets.double()).reshape(12, 4)
    np.testing.assert_allclose(found, returns, rtol=1e-4, atol=tolerance)


def test_metrics_of_the_critics_are_of_the_values_ahead_of_the_update(lively):
    """Bias, spread, quantiles, explained variance and twins, recomputed in float64."""
    run = lively
    twins, values, next_values, stats = decoded(run)
    _, returns = advantages_and_returns(run.rollout, values, next_values, 0.9, 0.8)
    _, _, metrics = prepare_rollout(run)
    for tag, key in (("value/p10", "p10"), ("value/p50", "p50"), ("value/p90", "p90"),
                     ("cvar/predicted", "cvar"), ("value/std_predicted", "std")):  # fmt: skip
        assert float(metrics[tag]) == pytest.approx(stats[key].mean(), rel=1e-4)
    gap = abs(twins[0] - twins[1])
    assert float(metrics["twin/abs_difference"]) == pytest.approx(gap.mean(), rel=1e-3)
    share = (twins[0] <= twins[1]).mean()
    assert 0.2 < share < 0.8
    assert float(metrics["twin/critic1_is_min"]) == pytest.approx(share)
    bias = (values - returns).mean()
    assert float(metrics["value/bias"]) == pytest.approx(bias, rel=1e-5, abs=1e-3)
    assert abs(bias - (twins[0] - returns).mean()) > 0.05
    assert float(metrics["value/std_target"]) == pytest.approx(returns.std(), rel=1e-4)
    variance = 1 - (returns - values).var() / returns.var()
    assert float(metrics["losses/explained_variance"]) == pytest.approx(variance, abs=1e-3)
    assert float(metrics["data/truncated_fraction"]) == pytest.approx(2 / 12, abs=0.1)


def test_coverage_counts_realised_returns_below_the_value_at_risk(lively):
    """Rewards up to an end, with a value at limits and at the last step: not lambda-returns."""
    run = lively
    mean = run.agent.value_dist.moments.mean
    for shift in range(-800, 1200, 50):  # until the two kinds of returns give another share
        run.agent.value_dist.moments.mean = mean + shift
        _, values, next_values, stats = decoded(run)
        facts = (run.rollout, values, next_values, 0.9)
        _, realised = advantages_and_returns(*facts, 1.0)
        below = (realised < stats["value_at_risk"]).mean()
        others = (advantages_and_returns(*facts, 0.8)[1] < stats["value_at_risk"]).mean()
        if 0 < below < 1 and below != others:
            break
    assert below != others
    _, _, metrics = prepare_rollout(run)
    got = metrics["value/realised_returns"].reshape(12, 4)
    np.testing.assert_allclose(got, realised, rtol=1e-4, atol=1e-3)
    assert float(metrics["cvar/coverage"]) == pytest.approx(below)


def smaller_critic(run, outputs):
    """Of each state the distribution with the smaller mean: quantiles, or probabilities."""
    z = outputs.double()
    if not is_recurrent(run.script):
        z = z.softmax(-1)
    mean = z.mean(-1) if is_recurrent(run.script) else z @ run.agent.value_dist.support.double()
    return torch.where((mean[0] <= mean[1])[..., None], z[0], z[1])


def test_sr_lambda_gets_decoded_distributions_of_true_successors(lively, monkeypatch):
    """Rewards in the task's units, both masks, the smaller critic's outputs by old statistics."""
    run, recurrent = lively, is_recurrent(lively.script)
    run.args.value_target = "sr_lambda"
    mean, std = float(run.agent.value_dist.moments.mean), float(run.agent.value_dist.moments.std)
    theta = smaller_critic(run, critic_pass(run)[1])
    name = "sr_lambda_targets" if recurrent else "sr_lambda_atoms"
    calls = spy(monkeypatch, run.script, name)
    prepare_rollout(run)
    ((rewards, found, *rest),) = calls
    if recurrent:
        theta = theta * std + mean
    else:
        atoms, *rest = rest
        support = run.agent.value_dist.support.double() * std + mean
        assert_close(atoms.double(), support, rtol=1e-5, atol=1e-3)
    assert_close(found.double(), theta, rtol=1e-5, atol=1e-3)
    assert torch.equal(rewards, run.rollout.rewards)
    assert torch.equal(rest[0], run.rollout.terminated)
    assert torch.equal(rest[1], run.rollout.truncated)
    assert rest[2:4] == [0.9, 0.8]


def test_the_risk_term_gets_targets_and_the_state_in_the_tasks_units(lively, monkeypatch):
    """The smaller critic's distribution of s_t, the samples of the target, and alpha."""
    run, recurrent = lively, is_recurrent(lively.script)
    run.args.cvar_weight, run.args.cvar_alpha, run.args.norm_adv = 0.3, 0.2, False
    mean, std = float(run.agent.value_dist.moments.mean), float(run.agent.value_dist.moments.std)
    z = smaller_critic(run, critic_pass(run)[0])
    _, values, next_values, _ = decoded(run)
    advantages, returns = advantages_and_returns(run.rollout, values, next_values, 0.9, 0.8)
    name = "cvar_advantages" if recurrent else "cvar_advantages_categorical"
    calls, function = spy(monkeypatch, run.script, name), getattr(run.script, name)
    batch, _, _ = prepare_rollout(run)
    ((targets, found, *rest),) = calls
    risk = function(targets, found, *rest).double().numpy()
    if recurrent:
        z = z * std + mean
        np.testing.assert_allclose(targets[..., 0], returns, rtol=1e-5, atol=1e-3)
    else:
        atoms = rest.pop(0).double()
        assert_close(
            atoms, run.agent.value_dist.support.double() * std + mean, rtol=1e-5, atol=1e-3
        )
        inside = np.clip(returns, float(atoms[0]), float(atoms[-1]))
        np.testing.assert_allclose(targets.double() @ atoms, inside, rtol=1e-5, atol=1e-2)
    assert_close(found.double(), z, rtol=1e-5, atol=1e-3)
    assert rest == [0.2]
    expected = 0.7 * advantages + 0.3 * risk
    np.testing.assert_allclose(batch.advantages.reshape(12, 4), expected, rtol=1e-4, atol=1e-2)


def test_a_neutral_run_asks_for_no_risk(lively, monkeypatch):
    """Weight 0 and alpha 1 go past all of it: bit-equal to each other, no draw of the RNG."""
    run = lively
    name = "cvar_advantages" if is_recurrent(run.script) else "cvar_advantages_categorical"
    calls = spy(monkeypatch, run.script, name)
    batches = []
    for weight, alpha in ((0.0, 0.3), (0.8, 1.0)):
        other = copy.deepcopy({"agent": run.agent, "args": run.args})
        other["args"].cvar_weight, other["args"].cvar_alpha = weight, alpha
        other["agent"].value_dist.args = other["args"]
        before = torch.get_rng_state()
        batches.append(prepare_rollout(run, **other)[0])
        assert torch.equal(before, torch.get_rng_state())
    assert not calls
    assert all(torch.equal(one, two) for one, two in zip(*batches))


@pytest.mark.parametrize("norm_returns", [True, False])
def test_moving_statistics_change_no_prediction(norm_returns):
    """PopArt: both critics decode to the same values before and after, while the scale moves.
    van Hasselt et al. 2016, eq. 5."""
    script = distributional_ppo_lstm
    run = make_run(script, "Counter", norm_returns=norm_returns)
    prepare(run)
    rollout = roll(run)
    agent, moments = run.agent, run.agent.value_dist.moments

    def look():
        obs = agent.normalize_obs(rollout.obs)
        features = agent.critic_body(obs, run.carry.critic_state, rollout.episode_start)
        return moments.denormalize(agent.value_outputs(features).double()).detach()

    before, old = look(), (moments.mean.clone(), moments.std.clone())
    _, _, metrics = prepare_rollout(run)
    after = look()
    moved = abs(float(old[0] - moments.mean)) > 1 and abs(float(old[1] - moments.std)) > 1
    assert moved == norm_returns
    scale = max(1.0, float(moments.std), float(before.abs().max()))
    assert_close(after / scale, before / scale, rtol=0, atol=1e-5)
    assert before[0].ne(before[1]).all()  # two different critics, neither of them lost
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
    for name in ("targets", "old_values", "advantages"):
        one, two = (getattr(batch, name) for batch in batches)
        assert_close(one, two, rtol=1e-4, atol=1e-4)


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
    batch, _, metrics = prepare_rollout(run, **other)
    return batch, metrics


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("gamma", 0.5),
        ("gae_lambda", 0.5),
        ("norm_adv", False),
        ("norm_returns", False),
        ("twin_reduce", "mean"),
        ("twin_reduce", "min_quantile"),
    ],
)
def test_a_flag_of_the_targets_changes_the_batch(script, flag, value):
    """No option gets lost on the way."""
    run = make_run(script, "VectorDiscrete")
    prepare(run)
    roll(run)
    base, _ = flip(run, "seed", 1)
    changed, _ = flip(run, flag, value)
    assert not torch.equal(base.advantages, changed.advantages) or not torch.equal(
        base.targets, changed.targets
    )


def test_the_twin_that_is_used_is_the_configured_one(script):
    """Values rise from min_quantile over min to mean; critic 1 is the minimum on some steps."""
    run = make_run(script, "VectorDiscrete")
    prepare(run)
    roll(run)
    bias = {}
    for mode in ("min_quantile", "min", "mean"):
        _, metrics = flip(run, "twin_reduce", mode)
        bias[mode] = float(metrics["value/p50"])
    assert bias["min_quantile"] < bias["mean"]
    assert float(metrics["twin/abs_difference"]) > 0
    assert 0 <= float(metrics["twin/critic1_is_min"]) <= 1


@pytest.mark.parametrize("value_target", ["lambda_return", "sr_lambda"])
def test_statistics_take_in_targets_and_values(lively, value_target):
    """Merged moments of what the rollout gave, written out (Chan et al. 1983); the count is capped.
    Mean and spread of a target's samples stand for all of them: the moments are the same."""
    run, moments, dist = lively, lively.agent.value_dist.moments, lively.agent.value_dist
    run.args.value_target = value_target
    mean, var, count = (float(x) for x in (moments.mean, moments.var, moments.count))
    _, values, next_values, _ = decoded(run)
    _, returns = advantages_and_returns(run.rollout, values, next_values, 0.9, 0.8)
    samples, weights = torch.tensor(returns)[..., None], torch.ones(12, 4, 1)
    if value_target == "sr_lambda":
        facts = (run.rollout.terminated, run.rollout.truncated, 0.9, 0.8)
        reduced = dist.reduce_twins(critic_pass(run)[1])
        torch.manual_seed(8)  # draws
        samples, weights = dist.sample_returns(run.rollout.rewards, reduced, *facts)
        assert samples.shape[-1] in (7, 11)
    torch.manual_seed(8)
    prepare_rollout(run)
    values, weights, samples = torch.tensor(values), weights.double(), samples.double()
    n = 4 * values.numel()  # two for the target and two for the value of every step
    first = (weights * samples).sum(-1) + values
    second = (weights * samples.square()).sum(-1) + values.square()
    expected_mean = (count * mean + 2 * float(first.sum())) / (count + n)
    square = (count * (var + mean**2) + 2 * float(second.sum())) / (count + n)
    assert float(moments.mean) == pytest.approx(expected_mean, rel=1e-5)
    assert float(moments.var) == pytest.approx(square - expected_mean**2, rel=1e-4)
    assert float(moments.count) == count + n
    assert moments.max_count == 40 * run.args.batch_size


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
    assert [x.shape[0] for x in batch] == [48] * 7


def test_the_risk_term_reaches_the_policy_and_not_the_critics(script):
    """One batch: advantages (1 - w) A_gae + w A_cvar, targets and old values bit-equal.
    Rockafellar & Uryasev 2000, as the advantage of the policy gradient of their CVaR."""
    batches = {}
    for weight in (0.0, 0.4, 1.0):
        facts = {"norm_adv": False, "value_target": "sr_lambda", "cvar_alpha": 0.3}
        run = make_run(script, "Counter", cvar_weight=weight, **facts)
        torch.manual_seed(0)
        roll(run)
        torch.manual_seed(1)
        batches[weight], _, metrics = prepare_rollout(run)
        assert metrics["cvar/weight"] == weight
    neutral, mixed, careful = (batch.advantages for batch in batches.values())
    assert_close(mixed, 0.6 * neutral + 0.4 * careful, rtol=1e-4, atol=1e-3)
    assert (neutral - careful).abs().max() > 1
    for weight in (0.4, 1.0):
        assert torch.equal(batches[weight].targets, batches[0.0].targets)
        assert torch.equal(batches[weight].old_values, batches[0.0].old_values)


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


def test_moving_statistics_are_logged_as_the_jump_they_are():
    """Atoms: outputs stay; the jump of decoded means is reported; old means are in the new units.
    Where PopArt, van Hasselt et al. 2016, would rescale, fixed atoms cannot."""
    run = make_run(distributional_ppo_categorical, "Counter", num_atoms=21)
    prepare(run)
    moments = run.agent.value_dist.moments
    old_mean, old_std = moments.mean.clone(), moments.std.clone()
    batch = prepare(run)
    with torch.no_grad():
        mean = value_outputs(run.agent, batch).softmax(-1) @ run.agent.value_dist.support
    was = mean * old_std + old_mean
    now = mean * moments.std + moments.mean
    shift = float((now - was).abs().mean())
    assert float(run.metrics["norm/value_shift"]) == pytest.approx(shift, rel=1e-4)
    assert run.metrics["norm/value_shift"] > 0.1
    kept = moments.denormalize(old_of_critics(batch)[..., 0].double())
    assert_close(kept, was.double(), rtol=1e-4, atol=1e-3)


def test_the_share_outside_is_that_of_what_the_critics_train_on():
    """Returns in the thousands are inside the support once the statistics have taken them in."""
    run = make_run(distributional_ppo_categorical, "Counter", num_atoms=21)
    run.agent.value_dist.moments.mean += 1e5
    run.agent.value_dist.moments.count.zero_()  # the first update replaces these statistics
    prepare(run)
    assert run.metrics["value/outside_support"] < 0.1
