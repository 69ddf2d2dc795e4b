"""The update: what moves, what stops it, what it reports."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers import make_run, prepare, roll, seen_minibatches
from torch.testing import assert_close

import distributional_ppo_lstm


def run_update(run, ent_coef=0.0, **flags):
    """One update of a copy of the run's agent, with some flags changed: metrics and the agent."""
    agent = copy.deepcopy(run.agent)
    args = copy.copy(run.args)
    for key, value in flags.items():
        setattr(args, key, value)
    agent.dist.args = args
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate)
    torch.manual_seed(5)
    metrics = run.script.update(agent, optimizer, run.batch, args, ent_coef)
    return metrics, agent


@pytest.fixture
def run(script):
    """A prepared rollout with old values that differ from what the heads predict."""
    run = make_run(script, "VectorMultiDiscrete", learning_rate=1e-2)
    prepare(run)
    prepare(run)
    run.batch.old = run.batch.old + 0.3 * torch.randn_like(run.batch.old)
    return run


@pytest.mark.parametrize("env", ["VectorMultiDiscrete", "VectorBox"])
def test_every_parameter_learns(script, env):
    """Encoder, LSTM and heads of the actor and of both critics get a gradient and move."""
    run = make_run(script, env, num_minibatches=1, update_epochs=1)
    prepare(run)
    before = {k: p.detach().clone() for k, p in run.agent.named_parameters()}
    script.update(run.agent, run.optimizer, run.batch, run.args, 0.01)
    for key, p in run.agent.named_parameters():
        assert p.grad.abs().max() > 0, key
        assert (p - before[key]).abs().max() > 0, key


def test_twin_heads_start_apart(script):
    """Equal twins would stay equal: they see the same targets."""
    run = make_run(script, "VectorDiscrete")
    agent = script.Agent(run.args)
    one, two = (dict(head.named_parameters()) for head in agent.critic.heads)
    weights = [key for key in one if "weight" in key]
    assert len(weights) == 2
    assert all((one[key] - two[key]).abs().max() > 1e-3 for key in weights)


@pytest.mark.parametrize("vf_clip", ["none", "mean_only"])
def test_metrics_are_means_over_the_minibatches(run, vf_clip):
    """Reported numbers recomputed from each minibatch, the weights standing still."""
    args, agent, batch = run.args, run.agent, run.batch
    batch.targets = batch.targets.clone()
    batch.targets[:, 0] += 3  # one sequence with a large loss: no minibatch has the mean
    with seen_minibatches(run) as parts:
        metrics, _ = run_update(run, learning_rate=0.0, ent_coef=0.01, vf_clip=vf_clip)
    args.vf_clip = vf_clip
    rows, shares = [], []
    for mb in parts:
        params = agent.actions(agent.actor(mb.obs, mb.actor_state, mb.episode_start)[0])
        policy = agent.actions.distribution(params)
        ratio = (policy.log_prob(mb.actions) - mb.log_probs).exp()
        loss = -(ratio * mb.advantages).mean()  # ratios are 1: nothing is clipped
        outputs = agent.critic(mb.obs, mb.critic_state, mb.episode_start)
        old = torch.stack([mb.old[:, :, 0], mb.old[:, :, 1]])  # each critic's own
        losses, clipped = agent.dist.loss(outputs, mb.targets, old)
        v_losses = losses.flatten(1).mean(1)
        shares.append(float(clipped.mean()))
        row = [loss, v_losses.mean(), *v_losses, policy.entropy().mean()]
        rows.append(torch.stack(row).detach())
    assert len(rows) == 4
    means = torch.stack(rows).mean(0).tolist()
    tags = ["losses/policy_loss", "losses/value_loss", "twin/loss_1", "twin/loss_2"]
    tags += ["losses/entropy"]
    assert [metrics[tag] for tag in tags] == pytest.approx(means, rel=1e-4, abs=1e-6)
    assert metrics["value/clip_fraction"] == pytest.approx(sum(shares) / 4)
    assert (metrics["value/clip_fraction"] > 0.01) == (vf_clip != "none")
    if vf_clip == "none":  # not the last minibatch's
        assert metrics["losses/value_loss"] != pytest.approx(float(rows[-1][1]), rel=1e-3)
    assert metrics["policy/ratio_first_minibatch_error"] < 1e-5
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/epochs_done"] == 2
    assert metrics["policy/stopped_early"] == 0
    assert metrics["policy/kl_max"] < 1e-6


def test_metrics_move_with_the_policy(run):
    """While the policy moves, ratios spread, KL grows, and its maximum exceeds its mean.
    No warning: torch gives one where a metric still holds the graph of its minibatch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics, _ = run_update(run, learning_rate=0.05, update_epochs=3)
    assert metrics["policy/ratio_std"] > 0.01
    assert metrics["losses/clipfrac"] > 0
    assert metrics["policy/kl_max"] > metrics["policy/kl_exact"] > 0
    assert metrics["policy/ratio_first_minibatch_error"] < 1e-5
    assert metrics["losses/approx_kl"] > 0
    ratio = metrics["policy/kl_exact"] / metrics["losses/approx_kl"]  # a mean and its estimate
    assert 1 / 3 < ratio < 3


def test_gradient_norms_are_those_of_the_loss(script):
    """One step on the whole rollout: norms by autograd, actor and critic apart."""
    run = make_run(script, "VectorDiscrete", num_minibatches=1, update_epochs=1, vf_coef=0.7)
    run.args.max_grad_norm = 0.05  # below the norm of either part
    batch = prepare(run)
    agent, args = run.agent, run.args
    params = agent.actions(agent.actor(batch.obs, batch.actor_state, batch.episode_start)[0])
    policy = agent.actions.distribution(params)
    ratio = (policy.log_prob(batch.actions) - batch.log_probs).exp()
    outputs = agent.critic(batch.obs, batch.critic_state, batch.episode_start)
    losses, _ = agent.dist.loss(outputs, batch.targets, batch.old.movedim(2, 0))
    loss = -(ratio * batch.advantages).mean() - 0.02 * policy.entropy().mean()
    loss = loss + 0.7 * losses.mean()
    loss.backward()
    parts = (agent.actor.parameters(), agent.critic.parameters())
    actor, critic = (sum(float(p.grad.square().sum()) for p in part) ** 0.5 for part in parts)
    metrics = script.update(agent, run.optimizer, batch, args, 0.02)
    assert metrics["grad/actor"] == pytest.approx(actor, rel=1e-3)
    assert metrics["grad/critic"] == pytest.approx(critic, rel=1e-3)
    assert metrics["grad/norm"] == pytest.approx((actor**2 + critic**2) ** 0.5, rel=1e-3)
    total = sum(float(p.grad.square().sum()) for p in agent.parameters()) ** 0.5
    assert total == pytest.approx(min(args.max_grad_norm, metrics["grad/norm"]), rel=1e-3)


def test_kl_stop_comes_ahead_of_the_step(run):
    """A limit below 0 stops in the first minibatch: nothing moves, every metric is there."""
    metrics, agent = run_update(run, target_kl=-1.0)
    for old, new in zip(run.agent.parameters(), agent.parameters(), strict=True):
        assert torch.equal(old, new)
    assert metrics["policy/stopped_early"] == 1
    assert metrics["policy/epochs_done"] == 0
    assert metrics["grad/norm"] == metrics["grad/actor"] == metrics["grad/critic"] == 0
    assert metrics.keys() == run_update(run)[0].keys()


def test_kl_stop_takes_the_steps_before_it(run):
    """After the first step the KL is positive: a tiny limit allows exactly one step."""
    metrics, agent = run_update(run, target_kl=1e-6)
    assert metrics["policy/epochs_done"] == pytest.approx(1 / run.args.num_minibatches)
    assert metrics["policy/stopped_early"] == 1
    assert metrics["policy/kl_max"] > 1e-6
    moved = [not torch.equal(a, b) for a, b in zip(run.agent.parameters(), agent.parameters())]
    assert all(moved)
    again, _ = run_update(run, target_kl=1e6)  # the budget of epochs is not used up for later
    assert again["policy/epochs_done"] == run.args.update_epochs


def test_with_an_early_stop_all_environments_still_get_used(script):
    """One minibatch per update, several updates: the shuffled order reaches every environment."""
    run = make_run(script, "Counter", num_envs=4, num_minibatches=4, target_kl=1e-9)
    used = set()
    for _ in range(25):
        prepare(run)
        first = run.agent.normalize_obs(run.rollout.obs)[0, :, 0]
        with seen_minibatches(run) as parts:  # the first one makes the one step
            script.update(run.agent, run.optimizer, run.batch, run.args, 0.0)
        used.add(int((first - parts[0].obs[0, 0, 0]).abs().argmin()))
    assert used == {0, 1, 2, 3}


CHANGES = {
    "clip_coef": 1e-3,
    "min_entropy_penalty": 1.0,
    "vf_coef": 2.0,
    "max_grad_norm": 0.01,
    "update_epochs": 1,
    "num_minibatches": 1,
}


@pytest.mark.parametrize("flag", CHANGES)
def test_a_flag_of_the_update_changes_the_update(run, flag):
    """No option gets lost on the way."""
    floor = {"min_entropy": 5.0}  # above the entropy, so that its penalty can act
    _, base = run_update(run, **floor)
    _, changed = run_update(run, **{**floor, flag: CHANGES[flag]})
    gaps = [(a - b).abs().max() for a, b in zip(base.parameters(), changed.parameters())]
    assert max(gaps) > 0


def test_entropy_enters_the_loss_once(run):
    """Two coefficients: the policies differ; the same one twice: they do not."""
    (_, zero), (_, some), (_, same) = (run_update(run, ent_coef=c) for c in (0.0, 0.1, 0.1))
    pairs = list(zip(zero.actor.parameters(), some.actor.parameters(), same.actor.parameters()))
    assert any(not torch.equal(a, b) for a, b, _ in pairs)
    assert all(torch.equal(b, c) for _, b, c in pairs)


def flip(run, flag, value):
    """Batch and metrics of the same rollout with one flag changed."""
    other = copy.deepcopy({"agent": run.agent, "args": run.args})
    setattr(other["args"], flag, value)
    other["agent"].dist.args = other["args"]
    batch, _, metrics = run.script.prepare_batch(
        other["agent"], copy.copy(run.rollout), run.before, other["args"]
    )
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
    run.before = run.carry
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
    run.before = run.carry
    bias = {}
    for mode in ("min_quantile", "min", "mean"):
        _, metrics = flip(run, "twin_reduce", mode)
        bias[mode] = float(metrics["value/p50"])
    assert bias["min_quantile"] < bias["mean"]
    assert float(metrics["twin/abs_difference"]) > 0
    assert 0 <= float(metrics["twin/critic1_is_min"]) <= 1


def test_a_single_critic_runs_and_has_no_twin(script):
    """num_critics 1: no difference, every step its own minimum."""
    run = make_run(script, "VectorDiscrete", num_critics=1)
    prepare(run)
    metrics = script.update(run.agent, run.optimizer, run.batch, run.args, 0.0)
    assert len(run.agent.critic.heads) == 1
    assert float(run.metrics["twin/abs_difference"]) == 0
    assert float(run.metrics["twin/critic1_is_min"]) == 1
    assert metrics["twin/loss_1"] == metrics["twin/loss_2"]


@pytest.mark.parametrize("value_target", ["lambda_return", "sr_lambda"])
def test_statistics_take_in_targets_and_values(value_target):
    """Merged moments of what the rollout gave, written out; the count is capped.
    Mean and spread of a target's samples stand for all of them: the moments are the same."""
    script = distributional_ppo_lstm
    run = make_run(script, "Counter")
    agent, moments = run.agent, run.agent.dist.moments
    prepare(run)
    roll(run)
    run.before = run.carry
    mean, var, count = (float(x) for x in (moments.mean, moments.var, moments.count))
    std = (var + 1e-8) ** 0.5
    batch, _ = flip(run, "norm_returns", False)
    targets = batch.targets[..., 0].double() * std + mean
    raw, _ = flip(run, "norm_adv", False)
    values = targets - raw.advantages.double()
    run.args.value_target = value_target
    torch.manual_seed(8)  # sr_lambda draws
    batch, _ = flip(run, "norm_returns", False)
    samples = batch.targets.double() * std + mean  # (L, M, J)
    assert samples.shape[-1] == (1 if value_target == "lambda_return" else 7)
    n = 4 * values.numel()  # two for the target and two for the value of every step
    torch.manual_seed(8)
    script.prepare_batch(agent, copy.copy(run.rollout), run.before, run.args)
    both, squares = samples + values[..., None], samples.square() + values[..., None].square()
    expected_mean = (count * mean + n * float(both.mean()) / 2) / (count + n)
    square = count * (var + mean**2) + n * float(squares.mean()) / 2
    expected_var = square / (count + n) - expected_mean**2
    assert float(moments.mean) == pytest.approx(expected_mean, rel=1e-5)
    assert float(moments.var) == pytest.approx(expected_var, rel=1e-4)
    assert float(moments.count) == count + n
    assert moments.max_count == 40 * run.args.batch_size


def test_values_outside_of_a_gradient_never_reach_the_actor(run):
    """The value loss trains the critic alone, the policy loss the actor alone."""
    _, no_value = run_update(run, vf_coef=0.0, max_grad_norm=1e9)
    _, base = run_update(run, max_grad_norm=1e9)
    for a, b in zip(no_value.actor.parameters(), base.actor.parameters(), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(no_value.critic.parameters(), run.agent.critic.parameters(), strict=True):
        assert torch.equal(a, b)


def test_initial_weights_are_orthogonal(script):
    """Gains: 1 for the LSTM, 0.01 for the policy, 0.1 for value outputs, sqrt(2) elsewhere."""
    agent = script.Agent(make_run(script, "VectorDiscrete").args)
    gains = {"lstm": 1.0, "actor.heads": 0.01}
    gains |= {f"critic.heads.{c}.2": 0.1 for c in range(2)}
    for name, p in agent.named_parameters():
        if "bias" in name:
            assert p.eq(0).all(), name
            continue
        gain = next((g for part, g in gains.items() if part in name), 2**0.5)
        small = p @ p.T if p.shape[0] <= p.shape[1] else p.T @ p
        assert_close(small, gain**2 * torch.eye(len(small)), rtol=1e-4, atol=1e-5)


def test_every_term_of_the_loss_goes_the_right_way(run):
    """Repeated updates lower the value loss, raise entropy, lift it to its floor, and follow A."""
    longer = {"update_epochs": 8, "max_grad_norm": 1e9}
    before, _ = run_update(run, update_epochs=1, num_minibatches=1)
    _, agent = run_update(run, **longer)
    batch = run.batch

    def losses(agent):
        outputs = agent.critic(batch.obs, batch.critic_state, batch.episode_start)
        return (
            agent.dist.loss(outputs, batch.targets, batch.old.movedim(2, 0))[0].flatten(1).mean(1)
        )

    def policy(agent):
        outputs = agent.actor(batch.obs, batch.actor_state, batch.episode_start)
        return agent.actions.distribution(agent.actions(outputs[0]))

    assert (losses(agent) < losses(run.agent)).all()
    entropy = float(policy(run.agent).entropy().mean().detach())
    assert before["losses/entropy"] == pytest.approx(entropy, rel=1e-5)
    for flags in ({"ent_coef": 10.0}, {"min_entropy": 99.0, "min_entropy_penalty": 10.0}):
        _, agent = run_update(run, **longer, **flags)
        assert float(policy(agent).entropy().mean().detach()) > entropy + 0.02
    _, agent = run_update(run, **longer, clip_coef=10.0)
    gain = policy(agent).log_prob(batch.actions) - batch.log_probs
    assert (gain * batch.advantages).mean() > 0.01


def test_gradient_norms_are_means_over_the_steps(run):
    """Weights standing still, one epoch of the whole batch or three: the same norms."""
    flags = {"learning_rate": 0.0, "num_minibatches": 1}
    one, _ = run_update(run, update_epochs=1, **flags)
    three, _ = run_update(run, update_epochs=3, **flags)
    for tag in ("grad/norm", "grad/actor", "grad/critic"):
        assert three[tag] == pytest.approx(one[tag], rel=1e-4)


def test_first_minibatch_error_is_the_largest_deviation(run):
    """One stored log-probability 0.1 too low: that ratio is e^0.1 ahead of the first step."""
    run.batch.log_probs = run.batch.log_probs.clone()
    run.batch.log_probs[0, 0] -= 0.1
    metrics, _ = run_update(run, num_minibatches=1, learning_rate=0.0)
    error, n = 2.718281828**0.1 - 1, run.batch.log_probs.numel()
    assert metrics["policy/ratio_first_minibatch_error"] == pytest.approx(error, rel=1e-3)
    assert metrics["policy/ratio_mean"] == pytest.approx(1 + error / n, rel=1e-5)
    spread = error * ((1 / n) * (1 - 1 / n)) ** 0.5  # of one entry among n
    assert metrics["policy/ratio_std"] == pytest.approx(spread, rel=1e-3)
    assert metrics["policy/kl_max"] < 1e-6
