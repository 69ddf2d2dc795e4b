"""The rollout: what is booked for every step, and what goes on to the next one."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import act, carried_obs, is_recurrent, make_run, prepare, roll
from probes import Walk
from torch.testing import assert_close

import distributional_ppo_lstm


class Lists(Walk):
    """Observations are lists of numbers."""

    def observe(self):
        """The place."""
        return [float(x) for x in self.place]


class Diary(Walk):
    """Has an `episode` of its own in what it tells beside."""

    def reset(self, *, seed=None, options=None):
        """A page."""
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"episode": "the first page"}

    def step(self, action):
        """A line, and at the end all of them."""
        *facts, _ = super().step(action)
        return *facts, {"episode": {"r": -1.0, "l": 77}}


gym.register("Lists-v0", Lists)
gym.register("Diary-v0", Diary)


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
        if is_recurrent(script):
            assert rollout.episode_start[:, n].nonzero().flatten().tolist() == [0, 3, 8, 10]
    first = rollout.rewards[:3].sum(0).tolist()
    assert rollout.episodes[:3] == [(2, first[n], 3) for n in range(3)]
    assert [(t, length) for t, _, length in rollout.episodes[3:]] == [(7, 5)] * 3 + [(9, 2)] * 3
    assert carried_obs(run.carry)[:, 2].tolist() == [2, 2, 2]
    assert not is_recurrent(script) or not run.carry.episode_start.any()


def test_ends_that_do_not_align_are_booked_each_for_itself(script):
    """The true successor is always one step on in the same episode; every end is reported."""
    rollout = roll(make_run(script, "Staggered"))
    over = rollout.terminated | rollout.truncated
    assert over.any(1).sum() > over.all(1).sum()
    step_on = rollout.obs + torch.tensor([0.0, 0.0, 1.0])
    assert torch.equal(rollout.next_obs, step_on)
    if is_recurrent(script):
        assert torch.equal(rollout.episode_start[1:], over[:-1])
    ends = sorted((t, rollout.obs[t, n, 2] + 1) for t, n in over.nonzero().tolist())
    assert sorted((t, length) for t, _, length in rollout.episodes) == ends


def test_the_next_rollout_goes_on_where_this_one_ended(script):
    """A rollout that ends with an episode opens the next rollout with a start."""
    run = make_run(script, "Counter", num_envs=2, num_steps=3, num_minibatches=1)
    roll(run)
    assert not is_recurrent(script) or run.carry.episode_start.all()
    rollout = roll(run)
    assert rollout.obs[:, 0, 1:].tolist() == [[1, 0], [1, 1], [1, 2]]
    if is_recurrent(script):
        starts = [[True, True], [False, False], [False, False]]
        assert rollout.episode_start.tolist() == starts


def test_what_is_carried_on_is_a_copy(script):
    """The next step overwrites what the environments return: nothing carried may change with it."""
    run = make_run(script, "Counter")
    roll(run)
    kept = carried_obs(run.carry).copy()
    run.envs.step(np.full(4, 5))
    np.testing.assert_array_equal(carried_obs(run.carry), kept)


def test_the_actors_state_goes_on_until_an_episode_ends():
    """Step by step from zero over three rollouts, zero again where an episode opens."""
    script = distributional_ppo_lstm
    run = make_run(script, "Staggered", num_envs=3, num_steps=9, num_minibatches=1)
    rollouts, state = [roll(run) for _ in range(3)], run.agent.initial_state(3)
    for rollout in rollouts:
        assert_close(rollout.actor_state[0], state * ~rollout.episode_start[0, :, None])
        for obs, start in zip(rollout.obs, rollout.episode_start):
            seen = run.agent.normalize_obs(obs)
            _, state = run.agent.actor_body.step(seen, state * ~start[:, None])
            state = state.detach()
    assert rollouts[2].episode_start.any()
    assert (rollouts[2].actor_state != 0).any()


def test_every_training_sequence_has_the_state_ahead_of_it():
    """Sequences of 3 steps: the states kept are those of single steps at 0, 3, 6 and 9."""
    script = distributional_ppo_lstm
    run = make_run(script, "Staggered", seq_len=3)
    roll(run)
    state = torch.as_tensor(run.carry.actor_state)
    rollout = roll(run)
    assert rollout.actor_state.shape == (4, 2, 4, 5)
    for t in range(12):
        state = state * ~rollout.episode_start[t, :, None]
        if t % 3 == 0:
            assert_close(rollout.actor_state[t // 3], state)
        _, state = run.agent.actor_body.step(run.agent.normalize_obs(rollout.obs[t]), state)
        state = state.detach()
    last = state * ~torch.as_tensor(run.carry.episode_start)[:, None]
    assert_close(torch.as_tensor(run.carry.actor_state), last)


def stepwise(agent, rows, state):
    """The actor's outputs by torch for raw observations (N, ...), and the next state."""
    seen = agent.normalize_obs(torch.as_tensor(rows))
    if state is None:
        return agent.actor_head(agent.actor_body(seen)), None
    features, state = agent.actor_body.step(seen, state)
    return agent.actor_head(features), state


@pytest.mark.parametrize("flags", [{}, {"activation": "tanh"}, {"norm_obs": False}])
@pytest.mark.parametrize("env", ["VectorBox", "VectorMultiDiscrete", "ImageMultiDiscrete"])
def test_acting_in_numpy_is_acting_in_torch(script, env, flags):
    """The actor's outputs to 1e-6 of their size over five steps, and the state of the LSTM."""
    run = make_run(script, env, **flags)
    agent, policy = run.agent, run.agent.numpy_policy()
    assert agent.actor_head.bias.requires_grad
    state = agent.initial_state(4) if is_recurrent(script) else None
    given = () if state is None else (state.numpy(),)
    for _ in range(5):
        rows = run.envs.step(run.envs.action_space.sample())[0]
        with torch.no_grad():
            expected, state = stepwise(agent, rows, state)
        outputs = policy(rows, *given)
        if is_recurrent(script):
            outputs, *given = outputs
            assert_close(torch.as_tensor(given[0]), state, rtol=1e-6, atol=1e-6)
        assert outputs.dtype == np.float32
        assert_close(
            torch.as_tensor(outputs), expected, rtol=1e-6, atol=1e-6 * expected.abs().max()
        )


def test_the_policy_that_acts_sees_what_was_learnt(script):
    """Weights change in place: a policy made afterwards acts by the new ones."""
    run = make_run(script, "VectorBox")
    rows = carried_obs(run.carry)
    state = (run.agent.initial_state(4).numpy(),) if is_recurrent(script) else ()
    before = np.copy(run.agent.numpy_policy()(rows, *state)[0])
    run.script.update(run.agent, run.optimizers, prepare(run), run.args, 0.0)
    after = run.agent.numpy_policy()(rows, *state)[0]
    assert np.abs(after - before).max() > 1e-4


@pytest.mark.parametrize("layer", [torch.nn.SiLU(), torch.nn.LayerNorm(5), torch.nn.Identity()])
def test_layers_that_numpy_does_not_know_run_in_torch(script, layer):
    """A network of one's own acts as it is."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), layer, torch.nn.ReLU())
    x = torch.randn(4, 3)
    assert_close(torch.as_tensor(script.in_numpy(network)(x.numpy())), network(x).detach())


def test_a_layer_without_biases_runs_in_numpy(script):
    """None is no bias."""
    layer = torch.nn.Linear(3, 5, bias=False)
    x = torch.randn(4, 3)
    assert_close(torch.as_tensor(script.in_numpy(layer)(x.numpy())), layer(x).detach())


def test_acting_moves_no_statistics_and_no_parameters(script):
    """Statistics are frozen within a rollout."""
    run = make_run(script, "Counter")
    before = {k: v.clone() for k, v in run.agent.state_dict().items()}
    roll(run)
    for key, value in run.agent.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_only_the_actor_runs_while_acting(script, monkeypatch):
    """Values of the whole rollout come from one pass afterwards: no critic is asked ahead of it."""
    run = make_run(script, "Counter")

    def refuse(*inputs):
        raise AssertionError("a critic was asked")

    for module in (run.agent.critic_body, *run.agent.critic_heads):
        module.register_forward_pre_hook(refuse)
    monkeypatch.setattr(run.agent, "value_outputs", refuse)
    roll(run)


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
        run.agent.action_dist.log_std.fill_(1.5)
    rollout = roll(run)  # the environment asserts that every action is inside the bounds
    assert rollout.actions.abs().max() > 1
    assert rollout.actions.shape == (12, 4, 2)


def test_the_params_kept_are_those_the_action_came_from(script):
    """Means and log-stds of a Gaussian so narrow that the action shows its mean."""
    run = make_run(script, "VectorBox")
    with torch.no_grad():
        run.agent.action_dist.log_std.fill_(-5)
    rollout = roll(run)
    mean, log_std = rollout.params.unbind(-2)
    assert_close(log_std, torch.full_like(log_std, -5))
    deviation = (rollout.actions - mean) / np.exp(-5)
    assert 0.7 < deviation.std() < 1.3
    assert mean.std() > 0.03
    for other in (deviation[1:] - deviation[:1], deviation[:, 1:] - deviation[:, :1]):
        assert other.abs().mean() > 0.5  # each step and each environment has noise of its own


def test_rewards_of_games_are_clipped_at_both_ends(script, monkeypatch):
    """Points that are lost count as much as points that are won."""
    run = make_run(script, "RandomReward")
    monkeypatch.setattr(script.Args, "is_atari", True)
    rewards = roll(run).rewards
    assert (rewards.min(), rewards.max()) == (-1, 1)
    assert ((rewards > -1) & (rewards < 0)).any()


def test_rows_are_sampled_one_by_one(script):
    """Four even actions, 2,000 times the same observation in one call."""
    run = make_run(script, "VectorDiscrete")
    with torch.no_grad():
        run.agent.actor_head.weight.zero_()
        run.agent.actor_head.bias.zero_()
    space = run.envs.single_observation_space
    obs = np.zeros((2000, *space.shape), space.dtype)
    actions, _ = act(run.agent, obs, deterministic=False)
    shares = np.unique(actions, return_counts=True)[1] / 2000
    np.testing.assert_allclose(shares, 1 / run.envs.single_action_space.n, atol=0.05)


def test_samples_have_the_spread_of_the_policy(script):
    """A standard deviation of e^-3 around a mode within the bounds."""
    run = make_run(script, "VectorBox")
    with torch.no_grad():
        run.agent.action_dist.log_std.fill_(-3)
        run.agent.actor_head.weight.zero_()
        run.agent.actor_head.bias.zero_()
    space = run.envs.single_observation_space
    obs = np.zeros((2000, *space.shape), space.dtype)
    actions, _ = act(run.agent, obs, deterministic=False)
    np.testing.assert_allclose(actions[:, 0, 0].std(), np.exp(-3), rtol=0.1)  # far from its bounds


@pytest.mark.parametrize("env", ["DiscreteDiscrete", "NestedMultiBinary", "ImageBox"])
def test_act_works_for_one_observation_and_for_many(script, env):
    """Valid actions for the environment, the same one by one as in a batch, with memory."""
    run = make_run(script, env)
    single = script.make_env(run.args)
    rows = np.stack([single.reset(seed=s)[0] for s in range(3)])
    many, many_state = act(run.agent, rows)
    many, _ = act(run.agent, rows[::-1].copy(), many_state)
    for i in range(3):
        _, state = act(run.agent, rows[i])
        one, _ = act(run.agent, rows[2 - i], state)
        assert single.action_space.contains(one)
        np.testing.assert_allclose(one, many[i], rtol=1e-5, atol=1e-6)
        single.step(one)
        single.reset()
    if hasattr(run.agent.action_dist, "log_std"):  # or all draws may lie beyond the same bound
        run.agent.action_dist.log_std.data.fill_(2)
    drawn = [act(run.agent, rows, deterministic=False)[0] for _ in range(20)]
    assert any(not np.array_equal(drawn[0], other) for other in drawn[1:])


def test_act_remembers_through_the_state_it_returns():
    """The recurrent agent acts differently after another past; without one, as at a start."""
    run = make_run(distributional_ppo_lstm, "VectorBox")
    obs, _ = distributional_ppo_lstm.make_env(run.args).reset(seed=0)
    fresh, state = run.agent.act(obs)
    _, other = run.agent.act(-obs)
    after = [run.agent.act(obs, s)[0] for s in (None, state, other)]
    np.testing.assert_array_equal(fresh, after[0])
    assert abs(after[1] - after[0]).max() > 1e-4
    assert abs(after[2] - after[1]).max() > 1e-4


def test_a_policy_serves_many_steps(script, monkeypatch):
    """An episode of an evaluation makes one. With it the actions are those without."""
    run = make_run(script, "VectorBox", eval_episodes=2)
    obs, _ = script.make_env(run.args).reset(seed=0)
    policy = run.agent.numpy_policy()
    for _ in range(2):
        action, _ = act(run.agent, obs, policy=policy)
        np.testing.assert_array_equal(action, act(run.agent, obs)[0])

    made = []
    monkeypatch.setattr(run.agent, "numpy_policy", lambda: made.append(1) or policy)
    assert script.evaluate(run.agent, run.args)["eval/length_mean"] > 1
    assert len(made) == 2


def test_observations_may_be_lists(script):
    """The same numbers as those of arrays, up to and at the ends of episodes; `act` takes them."""
    rollouts = []
    for env_id in ("Lists-v0", "probes:Walk-v0"):
        run = make_run(script, "Walk", env_id=env_id)
        torch.manual_seed(2)
        rollouts.append(roll(run))
    assert rollouts[0].terminated.any()
    for name in ("obs", "next_obs", "rewards", "actions"):
        assert torch.equal(*(getattr(rollout, name) for rollout in rollouts)), name
    run.args.env_id = "Lists-v0"
    script.evaluate(run.agent, run.args)


def test_a_task_may_have_an_episode_of_its_own(script):
    """Return and length of episodes are those of the steps, not what the task calls so."""
    run = make_run(script, "Walk", env_id="Diary-v0")
    rollout = roll(run)
    sums = rollout.rewards[:9].sum(0).tolist()
    assert [(t, length) for t, _, length in rollout.episodes] == [(8, 9)] * 4
    assert [total for _, total, _ in rollout.episodes] == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_acts_with_its_part_of_the_noise(script, monkeypatch, rank):
    """Actions of two processes are those of one: noise is drawn for all environments."""
    run = make_run(script, "VectorBox")
    with torch.no_grad():
        run.agent.actor_head.weight.zero_()
        run.agent.actor_head.bias.zero_()
    torch.manual_seed(7)
    whole = roll(run).actions
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    monkeypatch.setattr(script, "RANK", rank)
    run.envs = script.make_envs(run.args)
    fresh = SimpleNamespace(carried=None, env_seeds=[1, 2])
    recurrent = is_recurrent(script)
    opened = script.open_episodes(run.envs, *([run.agent] if recurrent else []), fresh)
    run.carry = opened[0] if recurrent else opened
    torch.manual_seed(7)
    assert torch.equal(roll(run).actions, whole[:, 2 * rank : 2 * rank + 2])


def test_what_acts_is_clipped_as_what_is_trained(script):
    """500 is far beyond 10 standard deviations."""
    run = make_run(script, "VectorBox")
    rows = np.float32([[500, -500, 0, 1]] * 4)
    state = run.agent.initial_state(4) if is_recurrent(script) else None
    found = run.agent.numpy_policy()(rows, *(() if state is None else (state.numpy(),)))
    found = found[0] if is_recurrent(script) else found
    with torch.no_grad():
        expected, _ = stepwise(run.agent, rows, state)
    assert_close(torch.as_tensor(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seeds", [False, True])
def test_a_task_leaves_torchs_generator_to_the_run(script, monkeypatch, seeds):
    """It may draw from it, or seed it in each step: what the update draws is the run's own. What
    the task draws is nothing that the update draws, and other numbers in each process."""
    drawn, of_tasks = [], []
    for rude in (False, True):
        run = make_run(script, "Walk")
        step = run.envs.step

        def draw(actions, step=step):
            torch.manual_seed(7) if seeds else of_tasks.append(torch.rand(4))
            return step(actions)

        if rude:
            run.envs.step = draw
        torch.manual_seed(5)
        roll(run)
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)
    assert not any(torch.equal(one, drawn[0]) for one in of_tasks)
    seeds_of_processes = []
    for rank in range(2):
        monkeypatch.setattr(script, "RANK", rank)
        with script.tasks_draw_apart():
            seeds_of_processes.append(torch.initial_seed())
    assert len({*seeds_of_processes}) == 2


def test_a_task_draws_other_numbers_in_each_iteration(script):
    """From torch's generator, which `Run.iterations` seeds. A resume repeats them."""
    found = []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        with script.tasks_draw_apart():
            found.append(torch.initial_seed())
    assert found[0] == found[2]
    assert found[0] != found[1]


class Overwrites(gym.Env):
    """Shows the step in an array of float32 that it uses again. A time limit cuts at 3."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    made: list = []  # noqa: RUF012

    def __init__(self):
        self.buffer = np.zeros(2, np.float32)
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        """At 0."""
        self.buffer[:] = 0
        return self.buffer, {}

    def step(self, action):
        """One further."""
        self.buffer += 1
        return self.buffer, 0.0, False, False, {}


gym.register("Overwrites-v0", Overwrites, max_episode_steps=3)


@pytest.mark.parametrize("masked", [(), (0,)])
def test_a_task_may_use_its_array_again(script, monkeypatch, masked):
    """The successor at the limit is 3, and what comes next is 0. What is masked stays in the task
    as it is."""
    monkeypatch.setattr(Overwrites, "made", [])
    run = make_run(script, "", env_id="Overwrites-v0", masked_obs=masked)
    rollout = roll(run)
    assert rollout.truncated[2].all()
    assert (rollout.next_obs[2, :, 1] == 3).all()
    assert (rollout.obs[3, :, 1] == 0).all()
    run.envs.step(np.zeros(4, int))
    assert all((env.buffer == env.buffer[1]).all() for env in Overwrites.made)
    assert any(env.buffer[0] > 0 for env in Overwrites.made)
