"""The rollout, the value pass over it, and the batch made of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import make_run, prepare, roll, seen_minibatches
from torch.testing import assert_close

import distributional_ppo_lstm

CATEGORICAL = "distributional_ppo_categorical"


def sequences(script, seq_len):
    """The flag for short training sequences, where a script has it."""
    return {"seq_len": seq_len} if script is distributional_ppo_lstm else {}


def test_rollout_books_every_step_where_it_belongs(script):
    """Observations, true successors, flags and returns of an environment that counts."""
    run = make_run(script, "Counter", num_envs=3, num_minibatches=3)
    rollout = roll(run)
    # Episodes last 3, 5, 2, 3 steps: the ends are steps 2, 7, 9 and 12 (after this rollout),
    # truncated, terminated, both, truncated.
    episode = [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3]
    step = [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 0, 1]
    for n in range(3):
        name = run.args.seed + n  # the seed environment n was reset with
        for t in range(12):
            assert rollout.obs[t, n].tolist() == [name, episode[t], step[t]]
            assert rollout.next_obs[t, n].tolist() == [name, episode[t], step[t] + 1]
            paid = 100 * episode[t] + step[t] + 5 + int(rollout.actions[t, n])  # actions from 5
            assert rollout.rewards[t, n] == paid
        assert rollout.terminated[:, n].nonzero().flatten().tolist() == [7, 9]
        assert rollout.truncated[:, n].nonzero().flatten().tolist() == [2, 9]
        assert rollout.episode_start[:, n].nonzero().flatten().tolist() == [0, 3, 8, 10]
    first = rollout.rewards[:3].sum(0).tolist()
    assert rollout.episodes[:3] == [(2, first[n], 3) for n in range(3)]
    assert [(t, length) for t, _, length in rollout.episodes[3:]] == [(7, 5)] * 3 + [(9, 2)] * 3
    assert run.carry[0][:, 2].tolist() == [2, 2, 2]
    assert not run.carry[1].any()


def test_ends_that_do_not_align_are_booked_each_for_itself(script):
    """The true successor is always one step on in the same episode; every end is reported."""
    rollout = roll(make_run(script, "Staggered"))
    over = rollout.terminated | rollout.truncated
    assert over.any(1).sum() > over.all(1).sum()
    step_on = rollout.obs + torch.tensor([0.0, 0.0, 1.0])
    assert torch.equal(rollout.next_obs, step_on)
    assert torch.equal(rollout.episode_start[1:], over[:-1])
    ends = sorted((t, rollout.obs[t, n, 2] + 1) for t, n in over.nonzero().tolist())
    assert sorted((t, length) for t, _, length in rollout.episodes) == ends


def test_the_next_rollout_goes_on_where_this_one_ended(script):
    """A rollout that ends with an episode opens the next rollout with a start."""
    run = make_run(script, "Counter", num_envs=2, num_steps=3, num_minibatches=1)
    roll(run)
    assert run.carry[1].all()
    rollout = roll(run)
    assert rollout.obs[:, 0, 1:].tolist() == [[1, 0], [1, 1], [1, 2]]
    assert rollout.episode_start.tolist() == [[True, True], [False, False], [False, False]]


def test_the_actors_state_goes_on_until_an_episode_ends(script):
    """Step by step from zero over three rollouts, zero again where an episode opens."""
    run = make_run(script, "Staggered", num_envs=3, num_steps=9, num_minibatches=1)
    rollouts, state = [roll(run) for _ in range(3)], run.agent.initial_state(3)
    for rollout in rollouts:
        assert_close(rollout.actor_state[0], state * ~rollout.episode_start[0, :, None])
        for obs, start in zip(rollout.obs, rollout.episode_start):
            seen = run.agent.normalize_obs(obs)
            _, state = script.Body.step(run.agent.actor, seen, state * ~start[:, None])
    assert rollouts[2].episode_start.any()
    assert script.__name__ == CATEGORICAL or (rollouts[2].actor_state != 0).any()


def test_acting_moves_no_statistics_and_no_parameters(script):
    """Statistics are frozen within a rollout."""
    run = make_run(script, "Counter")
    before = {k: v.clone() for k, v in run.agent.state_dict().items()}
    roll(run)
    for key, value in run.agent.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("seq_len", [0, 3, 4])
@pytest.mark.parametrize("env", ["Counter", "VectorBox", "NestedMultiDiscrete"])
def test_a_second_look_gives_ratio_one_and_the_old_values(script, env, seq_len):
    """With unchanged weights the batch reproduces the rollout, through resets and statistics."""
    run = make_run(script, env, **sequences(script, seq_len))
    prepare(run)
    moments = run.agent.dist.moments
    old_mean, old_std = moments.mean.clone(), moments.std
    batch = prepare(run)  # the second rollout starts from a carried state
    actions = run.agent.actions
    outputs = run.agent.actor(batch.obs, batch.actor_state, batch.episode_start)
    params = actions(outputs[0])
    log_prob = actions.distribution(params).log_prob(batch.actions)
    assert batch.episode_start[run.args.chunk_len > 1 :].any()  # episodes begin in mid-rollout
    assert_close((log_prob - batch.log_probs).exp(), torch.ones_like(log_prob), rtol=0, atol=1e-5)
    outputs = run.agent.critic(batch.obs, batch.critic_state, batch.episode_start)
    old = batch.old.movedim(2, 0)
    if script.__name__ == CATEGORICAL:  # atoms stay: the old means alone are in the new units
        means = outputs.softmax(-1) @ run.agent.dist.support
        outputs = (means[..., None] * old_std + old_mean).float()
        old = moments.denormalize(old)
    assert_close(outputs, old, rtol=1e-5, atol=1e-4 if script.__name__ == CATEGORICAL else 1e-5)


def features_by_steps(script, net, obs, next_obs, start, state):
    """Features of s_t and s'_t and the final state, by single steps."""
    here, after = [], []
    for t in range(len(obs)):
        state = state * (~start[t])[:, None]
        features, state = script.Body.step(net, obs[t], state)
        here.append(features)
        after.append(script.Body.step(net, next_obs[t], state)[0])  # the state does not go on
    return torch.stack(here), torch.stack(after), state


@pytest.mark.parametrize("seq_len", [0, 3, 4])
@pytest.mark.parametrize("env", ["Counter", "Staggered"])
def test_the_value_pass_equals_single_steps(script, env, seq_len):
    """Values of all states and true successors, and both carried states, against a step loop."""
    run = make_run(script, env, **sequences(script, seq_len))
    prepare(run)
    before = run.carry
    rollout = roll(run)
    some = rollout.truncated.any(1)
    assert some.any()
    assert (env == "Counter") == torch.equal(some, rollout.truncated.all(1))
    _, carry, _ = script.prepare_batch(run.agent, rollout, run.carry, run.args)
    see = run.agent.normalize_obs
    obs, next_obs, start = see(rollout.obs), see(rollout.next_obs), rollout.episode_start
    _, _, state = features_by_steps(script, run.agent.actor, obs, next_obs, start, before[2])
    assert_close(carry[2], state, rtol=1e-5, atol=1e-5)
    critic = run.agent.critic
    here, after, state = features_by_steps(script, critic, obs, next_obs, start, before[3])
    assert_close(carry[3], state, rtol=1e-5, atol=1e-5)

    rollout.obs, rollout.next_obs = obs, next_obs
    features, next_features, states, _ = critic.over_rollout(rollout, before[3], run.args)
    assert_close(features, here, rtol=1e-5, atol=1e-5)
    alive = ~rollout.terminated
    assert_close(next_features[alive], after[alive], rtol=1e-5, atol=1e-5)
    assert_close(
        torch.stack([head(features) for head in critic.heads]),
        torch.stack([head(here) for head in critic.heads]),
    )
    assert len(states) == 12 // run.args.chunk_len
    assert torch.equal(states[0], before[3])


@pytest.mark.parametrize("norm_adv", [True, False])
def test_advantages_and_targets_follow_from_the_values(script, norm_adv):
    """The whole chain in NumPy: decode with the old statistics, GAE, encode with the new."""
    run = make_run(script, "Counter", norm_adv=norm_adv, gamma=0.9, gae_lambda=0.8)
    one, two = run.agent.critic.heads
    two.load_state_dict(one.state_dict())
    with torch.no_grad():  # now the one critic is smaller, now the other
        two[0].weight[::2].neg_()
    prepare(run)
    before = run.carry
    run.agent.dist.moments.mean += 1200  # to where the returns are: some are below their quantile
    mean, std = float(run.agent.dist.moments.mean), float(run.agent.dist.moments.std)
    rollout = roll(run)
    see = run.agent.normalize_obs
    seen = type(rollout)(**vars(rollout))
    seen.obs, seen.next_obs = see(rollout.obs), see(rollout.next_obs)
    with torch.no_grad():
        critic = run.agent.critic
        *features, _, _ = critic.over_rollout(seen, before[3], run.args)
        outputs, next_outputs = (torch.stack([h(x) for h in critic.heads]) for x in features)
        normalised = script.ValueDistribution(run.args)  # its own statistics have not moved
        decode = normalised.mean
        values = decode(outputs).amin(0).double().numpy() * std + mean  # the smaller critic
        next_values = decode(next_outputs).amin(0).double().numpy() * std + mean
        facts = normalised.describe(normalised.reduce_twins(outputs))
        twins = decode(outputs).double() * std + mean
    batch, _, metrics = script.prepare_batch(run.agent, rollout, run.carry, run.args)
    for tag, key in (("value/p10", "p10"), ("value/p50", "p50"), ("value/p90", "p90"),
                     ("cvar/predicted", "cvar")):  # fmt: skip
        expected = facts[key].double().numpy().mean() * std + mean
        assert float(metrics[tag]) == pytest.approx(expected, rel=1e-4)
    spread = facts["std"].double().numpy().mean() * std
    assert float(metrics["value/std_predicted"]) == pytest.approx(spread, rel=1e-4)
    gap = abs(twins[0] - twins[1]).numpy()
    assert float(metrics["twin/abs_difference"]) == pytest.approx(gap.mean(), rel=1e-3)
    share = (twins[0] <= twins[1]).double().numpy().mean()
    assert 0 < share < 1
    assert float(metrics["twin/critic1_is_min"]) == pytest.approx(share)

    rewards = rollout.rewards.double().numpy()
    advantages, realised = np.zeros((12, 4)), np.zeros((12, 4))
    for n in range(4):
        last = 0.0
        for t in reversed(range(12)):
            dead, over = rollout.terminated[t, n], rollout.truncated[t, n]
            delta = rewards[t, n] + (0 if dead else 0.9 * next_values[t, n]) - values[t, n]
            last = delta + (0 if dead or over else 0.9 * 0.8 * last)
            advantages[t, n] = last
            later = next_values[t, n] if over or t == 11 else realised[min(t + 1, 11), n]
            realised[t, n] = rewards[t, n] + (0 if dead else 0.9 * later)
    returns = advantages + values
    expected = (advantages - advantages.mean()) / advantages.std() if norm_adv else advantages
    got = batch.advantages.reshape(12, 4).double().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    assert float(metrics["adv/mean_raw"]) == pytest.approx(advantages.mean(), rel=1e-3)
    assert float(metrics["adv/std_raw"]) == pytest.approx(advantages.std(), rel=1e-3)
    assert float(metrics["adv/abs_max"]) == pytest.approx(abs(expected).max(), rel=1e-3)
    assert float(metrics["value/bias"]) == pytest.approx((values - returns).mean(), rel=1e-3)
    assert float(metrics["value/std_target"]) == pytest.approx(returns.std(), rel=1e-3)
    got = metrics["value/realised_returns"].reshape(12, 4)
    np.testing.assert_allclose(got, realised, rtol=1e-4, atol=1e-3)
    below = realised < facts["var"].double().numpy() * std + mean
    assert 0 < below.sum() < 48
    assert float(metrics["cvar/coverage"]) == pytest.approx(below.mean())
    variance = 1 - (returns - values).var() / returns.var()
    assert float(metrics["losses/explained_variance"]) == pytest.approx(variance, abs=1e-3)
    assert float(metrics["data/truncated_fraction"]) == pytest.approx(2 / 12, abs=0.1)
    if (
        script is distributional_ppo_lstm
    ):  # one sample; test_value_distribution.py has the other encoding
        decoded = batch.targets[..., 0].double() * run.agent.dist.moments.std
        decoded = decoded + run.agent.dist.moments.mean
        np.testing.assert_allclose(decoded, returns, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("norm_returns", [True, False])
def test_moving_statistics_change_no_prediction(norm_returns):
    """PopArt: both critics decode to the same values before and after, while the scale moves."""
    script = distributional_ppo_lstm
    run = make_run(script, "Counter", norm_returns=norm_returns)
    prepare(run)
    rollout = roll(run)
    moments = run.agent.dist.moments
    obs = run.agent.normalize_obs(rollout.obs)
    look = (obs, run.carry[3], rollout.episode_start)
    before = moments.denormalize(run.agent.critic(*look).double())
    old = (moments.mean.clone(), moments.std.clone())
    _, _, metrics = script.prepare_batch(run.agent, rollout, run.carry, run.args)
    after = moments.denormalize(run.agent.critic(*look).double())
    moved = abs(float(old[0] - moments.mean)) > 1 and abs(float(old[1] - moments.std)) > 1
    assert moved == norm_returns
    scale = max(1.0, float(moments.std), float(before.detach().abs().max()))
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
        moments = run.agent.dist.moments
        moments.mean, moments.var = scale * moments.mean, scale**2 * moments.var
        rollout = roll(run)
        rollout.rewards = scale * rollout.rewards
        batches.append(script.prepare_batch(run.agent, rollout, run.carry, run.args)[0])
    assert_close(batches[0].targets, batches[1].targets, rtol=1e-4, atol=1e-4)
    assert_close(batches[0].old, batches[1].old, rtol=1e-4, atol=1e-4)
    assert_close(batches[0].advantages, batches[1].advantages, rtol=1e-4, atol=1e-4)


def test_minibatches_are_a_shuffled_partition_of_the_sequences(script):
    """Every sequence once per epoch, its rows together, in a new order each time."""
    run = make_run(script, "Counter", num_envs=6, num_minibatches=3, **sequences(script, 4))
    batch = prepare(run)
    columns = batch.advantages.shape[1]
    with seen_minibatches(run) as parts:
        run.args.update_epochs = 2
        script.update(run.agent, run.optimizer, batch, run.args, 0.0)
    assert len(parts) == 6
    orders = []
    for epoch in (parts[:3], parts[3:]):
        seen = []
        for mb in epoch:
            assert mb.advantages.shape == (run.args.chunk_len, columns // 3)
            for j in range(columns // 3):
                same = (mb.obs[:, j, None] == batch.obs).all(-1).all(0)
                same &= (mb.advantages[:, j, None] == batch.advantages).all(0)
                i = int(same.nonzero()[0])
                seen.append(i)
                for key, value in vars(mb).items():
                    assert torch.equal(value[:, j], getattr(batch, key)[:, i]), key
        assert sorted(seen) == list(range(columns))
        orders.append(seen)
    assert orders[0] != orders[1]


def test_observations_are_clipped_only_when_normalised(script):
    """+-10 standard deviations with --norm-obs; untouched without."""
    for norm_obs, expected in ((True, [-10.0, 10.0, 0.5, 10.0]), (False, [-50.0, 90.0, 2.0, 21.5])):
        agent = make_run(script, "VectorBox", norm_obs=norm_obs).agent
        agent.obs_moments.mean.fill_(1.0)
        agent.obs_moments.var.fill_(4.0 - 1e-8)
        seen = agent.normalize_obs(torch.tensor([[-50.0, 90.0, 2.0, 21.5]]))
        assert seen[0].tolist() == pytest.approx(expected)


def test_environment_receives_clipped_actions_and_the_buffer_keeps_the_samples(script):
    """A wide Gaussian leaves the bounds; log-probabilities are those of what was sampled."""
    run = make_run(script, "VectorBox")
    with torch.no_grad():
        run.agent.actor.actions.log_std.fill_(1.5)
    rollout = roll(run)  # the environment asserts that every action is inside the bounds
    assert rollout.actions.abs().max() > 1
    assert rollout.actions.shape == (12, 4, 2)


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
