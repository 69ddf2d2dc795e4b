"""Return distributions that are true, and policies that use them: targets, advantages."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import make_run, prepare, roll, small_args
from torch import Tensor
from torch.testing import assert_close

import distributional_ppo_categorical as categorical
import distributional_ppo_lstm as lstm

GAMMA = 0.9
# Two environments, six steps. Environment 0: terminated at 2, goes on to the end of the rollout.
# Environment 1: truncated at 1, terminated and truncated at once at 4.
TERMINATED = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]]).T.bool()
TRUNCATED = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0]]).T.bool()
REWARDS = torch.tensor([[1.0, -2, 30, 4, 0, 0.5], [0.3, 7, -1, 2, 50, 3]]).T.double()
ATOMS = torch.linspace(-90, 90, 61).double()  # wide enough for all returns


def next_quantiles(K: int = 3) -> Tensor:
    """Anything, (6, 2, K), float64."""
    return 5 * torch.randn(6, 2, K, dtype=torch.float64, generator=torch.manual_seed(5))


def next_probs() -> Tensor:
    """Anything, (6, 2, 61), float64, away from the edges of the support."""
    logits = torch.randn(6, 2, 61, dtype=torch.float64, generator=torch.manual_seed(6))
    return (logits - (ATOMS / 12).square()).softmax(-1)


def many(x: Tensor, copies: int) -> Tensor:
    """`copies` of both environments side by side: independent draws in one call."""
    return x.repeat(1, copies, *[1] * (x.dim() - 2))


def end_of(t: int, n: int) -> int:
    """Step at which the episode of step t ends, or the rollout."""
    while t < 5 and not (TERMINATED[t, n] or TRUNCATED[t, n]):
        t += 1
    return t


def n_step(t: int, n: int, last: int) -> tuple[float, float]:
    """Discounted rewards of the steps t to `last`, and the factor of what follows s'_last."""
    total = sum(GAMMA ** (k - t) * float(REWARDS[k, n]) for k in range(t, last + 1))
    return total, 0.0 if TERMINATED[last, n] else GAMMA ** (last - t + 1)


def horizons(t: int, n: int, lam: float) -> list[tuple[int, float]]:
    """(last step, probability) of every n-step return in SR(lambda), the last one taking the rest.

    The target stops after step t with probability 1 - lambda, after t + 1 with lambda (1 - lambda)
    and so on; where the episode or the rollout ends nothing is left to draw.
    """
    end = end_of(t, n)
    cut = [(k, lam ** (k - t) * (1 - lam)) for k in range(t, end)]
    return [*cut, (end, lam ** (end - t))]


def expected_probs(lam: float) -> Tensor:
    """Exact mean of sr_lambda_probs: the mixture over horizons, each projected once, by loops."""
    out, probs = np.zeros((6, 2, 61)), next_probs().numpy()
    for t, n in itertools.product(range(6), range(2)):
        for last, weight in horizons(t, n, lam):
            total, scale = n_step(t, n, last)
            for z, p in zip(ATOMS.tolist(), probs[last, n]):
                position = (total + scale * z + 90) / 3
                low = min(math.floor(position), 59)
                out[t, n, low] += weight * p * (low + 1 - position)
                out[t, n, low + 1] += weight * p * (position - low)
    return torch.tensor(out)


# ------------------------------------------------------------------------------------ SR(lambda)
def quantile_targets(lam: float, seed: int = 0, copies: int = 1, quantiles: Tensor | None = None):
    """`sr_lambda_targets` on the two environments."""
    quantiles = next_quantiles() if quantiles is None else quantiles
    tensors = (many(x, copies) for x in (REWARDS, quantiles, TERMINATED, TRUNCATED))
    return lstm.sr_lambda_targets(*tensors, GAMMA, lam, torch.Generator().manual_seed(seed))


def probs_targets(lam: float, seed: int = 0, copies: int = 1) -> Tensor:
    """`sr_lambda_probs` on the two environments."""
    rewards, probs, *ends = (
        many(x, copies) for x in (REWARDS, next_probs(), TERMINATED, TRUNCATED)
    )
    generator = torch.Generator().manual_seed(seed)
    return categorical.sr_lambda_probs(rewards, probs, ATOMS, *ends, GAMMA, lam, generator)


def lambda_returns(next_values: Tensor, lam: float) -> Tensor:
    """A + V of `gae`; the values of s_t for t > 0 are those of the successors before."""
    values = torch.cat((torch.zeros(1, 2).double(), next_values[:-1]))
    return lstm.gae(REWARDS, values, next_values, TERMINATED, TRUNCATED, GAMMA, lam)[1]


@pytest.mark.parametrize("lam", [0.5, 0.9])
def test_mean_over_draws_is_the_lambda_return(lam):
    """Across a termination and a truncation, for both kinds, with V the mean of theta.

    V(s_t) of `gae` is only V(s'_{t-1}) inside an episode; across an end it cancels: A_t + V_t.
    """
    copies = 4000
    out = quantile_targets(lam, copies=copies).view(6, copies, 2, 3)
    error = out.std(1) / copies**0.5
    expected = lambda_returns(next_quantiles().mean(-1), lam)
    assert ((out.mean((1, 3)) - expected).abs() < 4.5 * error.mean(-1) + 1e-9).all()
    copies = 400
    out = (probs_targets(lam, copies=copies) @ ATOMS).view(6, copies, 2)
    expected = lambda_returns(next_probs() @ ATOMS, lam)
    assert ((out.mean(1) - expected).abs() < 4.5 * out.std(1) / copies**0.5 + 1e-9).all()


def test_each_particle_is_a_draw_from_the_n_step_returns():
    """Particle i only takes returns that end in theta_i, with the probabilities of the horizons."""
    copies, lam = 5000, 0.7
    out = quantile_targets(lam, copies=copies).view(6, copies, 2, 3)
    theta = next_quantiles()
    for t, n, i in itertools.product(range(6), range(2), range(3)):
        seen = 0
        for last, weight in horizons(t, n, lam):
            total, scale = n_step(t, n, last)
            share = float(
                ((out[t, :, n, i] - total - scale * theta[last, n, i]).abs() < 1e-9).sum()
            )
            seen += share
            assert share / copies == pytest.approx(weight, abs=0.033)  # 4.5 / sqrt(4 * 5000)
        assert seen == copies


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_lambda_0_and_1_are_exact(lam):
    """One step to theta(s'_t), or rewards up to the end of the episode or of the rollout."""
    out, theta = quantile_targets(lam), next_quantiles()
    for t, n in itertools.product(range(6), range(2)):
        last = t if lam == 0 else end_of(t, n)
        total, scale = n_step(t, n, last)
        assert_close(out[t, n], total + scale * theta[last, n])
    assert_close(probs_targets(lam), expected_probs(lam), rtol=0, atol=1e-12)


def test_values_by_hand():
    """lambda 1, environment 0: 1 - 1.8 + 24.3 = 23.5, then 25, 30; 4 + 0.405 + 0.729 theta."""
    out, theta = quantile_targets(1.0)[:, 0], next_quantiles()[5, 0]
    assert_close(out[:3], torch.tensor([[23.5], [25.0], [30.0]]).double().expand(3, 3))
    assert_close(out[3], 4.405 + 0.729 * theta)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_terminal_reward_reaches_all_earlier_targets(lam):
    """Every target ahead of a termination holds it with probability lambda^steps, not 0."""
    copies = 400
    out = quantile_targets(lam, copies=copies).view(6, copies, 2, 3)
    with_more = many(
        REWARDS.clone().index_put_((torch.tensor(2), torch.tensor(0)), t64(130.0)), copies
    )
    tensors = (many(x, copies) for x in (next_quantiles(), TERMINATED, TRUNCATED))
    more = lstm.sr_lambda_targets(with_more, *tensors, GAMMA, lam, torch.Generator().manual_seed(0))
    more = more.view(6, copies, 2, 3)
    for t in range(3):  # 100 more, discounted: 81, 90, 100
        gained = more[t, :, 0] - out[t, :, 0]
        taken = gained > 1
        assert_close(gained[taken], torch.full_like(gained[taken], 100 * GAMMA ** (2 - t)))
        assert float(taken.double().mean()) == pytest.approx(lam ** (2 - t), abs=0.03)
    assert torch.equal(more[3:], out[3:])
    assert torch.equal(more[:, :, 1], out[:, :, 1])


def t64(x) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(x, dtype=torch.float64)


def test_draws_are_independent_over_particles_steps_and_environments():
    """Whether a particle was replaced correlates with none of the others'."""
    T, N, K = 4, 3000, 4
    # Theta 0 and one reward 1 at the end: X_0 is 1 where all of the 3 draws went on, 0 elsewhere.
    rewards, none = torch.zeros(T, N), torch.zeros(T, N).bool()
    rewards[-1] = 1
    facts = (none, none, 1.0, 0.8, torch.Generator().manual_seed(1))
    out = lstm.sr_lambda_targets(rewards, torch.zeros(T, N, K), *facts)
    assert_close(out[0].mean(0), torch.full((K,), 0.512), rtol=0, atol=0.041)  # 4.5 sqrt(.25/3000)
    correlation = np.corrcoef(np.vstack((out[0].T, out[0].roll(1, 0).T)))
    assert np.abs(correlation - np.eye(2 * K)).max() < 0.085  # 4.5 / sqrt(3000)
    probs = torch.zeros(T, N, 3)
    probs[..., 1] = 1  # on atoms -1, 0, 1
    horizon = categorical.sr_lambda_probs(rewards, probs, torch.tensor([-1.0, 0, 1]), *facts)[
        0, :, 2
    ]
    assert float(horizon.mean()) == pytest.approx(0.512, abs=0.041)
    assert abs(np.corrcoef(horizon, horizon.roll(1))[0, 1]) < 0.085


def test_targets_repeat_with_a_generator_and_leave_the_arguments_alone():
    """Float64 in, float64 out; float32 likewise; another seed gives other targets."""
    for function in (quantile_targets, probs_targets):
        out = function(0.6, seed=3)
        assert out.dtype == torch.float64
        assert torch.equal(out, function(0.6, seed=3))
        assert not torch.equal(out, function(0.6, seed=4))
    tensors = [x.clone() for x in (REWARDS, next_quantiles(), TERMINATED, TRUNCATED)]
    lstm.sr_lambda_targets(*tensors, GAMMA, 0.5)
    for x, y in zip(tensors, (REWARDS, next_quantiles(), TERMINATED, TRUNCATED)):
        assert torch.equal(x, y)
    rewards, probs = REWARDS.float(), next_probs().float()
    ends = (TERMINATED.clone(), TRUNCATED.clone())
    out = categorical.sr_lambda_probs(rewards, probs, ATOMS.float(), *ends, GAMMA, 0.5)
    assert out.dtype == torch.float32
    assert torch.equal(ends[0], TERMINATED)
    assert torch.equal(ends[1], TRUNCATED)
    assert lstm.sr_lambda_targets(rewards, probs, *ends, GAMMA, 0.5).dtype == torch.float32


def test_probabilities_are_projected_once():
    """Mean over draws is the exact mixture, so its variance is within one projection's dz^2 / 4.

    Projecting at each step of the recursion adds up to dz^2 / 4 every time.
    """
    copies, lam = 400, 0.9
    out = probs_targets(lam, copies=copies).view(6, copies, 2, 61)
    assert_close(out.sum(-1), torch.ones(6, copies, 2).double())
    mean, expected = out.mean(1), expected_probs(lam)
    assert ((mean - expected).abs() < 4.5 * out.std(1) / copies**0.5 + 1e-6).all()
    # Lambda 1, 25 rewards of 0.1 dz, gamma 1: the atom at 0 moves by 2.5 dz, once.
    T, dz = 25, 3.0
    probs = torch.zeros(T, 1, 61).double()
    probs[..., 30] = 1
    none = torch.zeros(T, 1).bool()
    rewards = torch.full((T, 1), 0.1 * dz).double()
    out = categorical.sr_lambda_probs(rewards, probs, ATOMS, none, none, 1.0, 1.0)[0, 0]
    mean = float(out @ ATOMS)
    assert mean == pytest.approx(7.5)
    assert float(out @ (ATOMS - mean).square()) == pytest.approx(dz**2 / 4)  # half way: 2.5 dz


# ------------------------------------------------------------------------------------- advantages
def lottery() -> tuple[Tensor, Tensor, Tensor]:
    """Ten quantiles of 1 with probability 0.7, else -4; mean -0.5. As probabilities on atoms."""
    quantiles = t64([-4.0] * 3 + [1.0] * 7).view(1, 1, 10)
    atoms = torch.linspace(-4, 6, 11).double()
    probs = torch.zeros(1, 1, 11).double()
    probs[..., 0], probs[..., 5] = 0.3, 0.7
    return quantiles, probs, atoms


@pytest.mark.parametrize(
    ("outcome", "alpha", "expected"),
    [
        # alpha 0.1: nu = CVaR = -4. u(-4) = -4, u(1) = -4: nothing above nu counts. A = 0.
        (-4.0, 0.1, 0.0), (1.0, 0.1, 0.0),
        # u(-6) = -4 - 2 / 0.1 = -24, which is 20 below the CVaR
        (-6.0, 0.1, -20.0),
        # alpha 0.5: nu = 1, CVaR = (0.3 * -4 + 0.2 * 1) / 0.5 = -2. u(1) = 1, so A = 3;
        # u(-4) = 1 - 5 / 0.5 = -9, so A = -7; in the mean 0.7 * 3 - 0.3 * 7 = 0.
        (1.0, 0.5, 3.0), (-4.0, 0.5, -7.0),
        # 6 counts as nu: no more than 1
        (6.0, 0.5, 3.0),
    ],
)  # fmt: skip
def test_closed_form_of_a_lottery(outcome, alpha, expected):
    """Realised outcomes against a Bernoulli lottery, both kinds."""
    quantiles, probs, atoms = lottery()
    targets = torch.full((1, 1, 1), outcome).double()
    out = lstm.cvar_advantages(targets, quantiles, alpha)
    assert out.shape == (1, 1)
    # Points at 0.25 and 0.35 are joined by a line, which bends the CVaR at 0.5 by a little: the
    # triangle 0.25..0.3..0.35 is antisymmetric and cancels.
    assert float(out) == pytest.approx(expected, abs=1e-9)
    if outcome >= -4:  # on the atoms
        encoded = categorical.two_hot(targets[..., 0], atoms)
        out = categorical.cvar_advantages_categorical(encoded, probs, atoms, alpha)
        assert float(out) == pytest.approx(expected, abs=1e-9)


def test_alpha_1_is_the_difference_of_means():
    """For any targets, one or many."""
    targets, quantiles = torch.randn(5, 2, 4).double(), torch.randn(5, 2, 7).double()
    out = lstm.cvar_advantages(targets, quantiles, 1.0)
    assert_close(out, targets.mean(-1) - quantiles.mean(-1))
    atoms = torch.linspace(-2, 3, 9).double()
    p, q = (torch.randn(5, 2, 9).double().softmax(-1) for _ in range(2))
    out = categorical.cvar_advantages_categorical(p, q, atoms, 1.0)
    assert_close(out, p @ atoms - q @ atoms)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.9])
def test_the_own_distribution_as_target_gives_no_advantage(alpha):
    """Exactly 0 for atoms; for quantiles where alpha K is whole and the function is linear."""
    atoms = torch.linspace(-2, 3, 11).double()
    probs = torch.randn(4, 3, 11).double().softmax(-1)
    out = categorical.cvar_advantages_categorical(probs, probs, atoms, alpha)
    assert_close(out, torch.zeros(4, 3).double())
    line = (3 * torch.arange(20) - 7).double()[torch.randperm(20)].expand(2, 2, 20)
    assert_close(lstm.cvar_advantages(line, line, alpha), torch.zeros(2, 2).double())


def test_advantages_scale_and_shift_with_the_returns():
    """Returns x10 + 3: advantages x10."""
    x, q = torch.randn(3, 2, 5).double(), torch.randn(3, 2, 9).double()
    base = lstm.cvar_advantages(x, q, 0.2)
    assert_close(lstm.cvar_advantages(10 * x + 3, 10 * q + 3, 0.2), 10 * base)
    p, z = q.softmax(-1), torch.linspace(-2, 2, 9).double()
    y = torch.randn(3, 2, 9).double().softmax(-1)
    base = categorical.cvar_advantages_categorical(y, p, z, 0.2)
    assert_close(categorical.cvar_advantages_categorical(y, p, 10 * z + 3, 0.2), 10 * base)


def test_advantages_carry_no_gradient():
    """Neither into the critic nor into the targets."""
    x, q = (torch.randn(3, 2, 5, requires_grad=True) for _ in range(2))
    assert not lstm.cvar_advantages(x, q, 0.2).requires_grad
    p, y = q.softmax(-1), x.softmax(-1)
    out = categorical.cvar_advantages_categorical(y, p, torch.linspace(-2, 2, 5), 0.2)
    assert not out.requires_grad


# --------------------------------------------------------------------------------- CVaR of a sample
def test_empirical_cvar_by_hand(script):
    """Of 1..20. Alpha 0.1: (1 + 2) / 2. Alpha 0.125: 2.5 returns, (1 + 2 + 1.5) / 2.5 = 1.8."""
    returns = torch.arange(20.0, 0.0, -1.0).double()
    assert script.empirical_cvar(returns, 0.1) == pytest.approx(1.5)
    assert script.empirical_cvar(returns, 0.125) == pytest.approx(1.8)
    assert script.empirical_cvar(returns, 1.0) == pytest.approx(10.5)
    assert script.empirical_cvar(returns, 0.001) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------- whole runs
BY_DEFINITION = ("cvar/", "eval/return_cvar", "time/", "charts/SPS", "run_dir")


def run(script, tmp_path, env: str = "RandomReward", **flags) -> dict[str, float]:
    """All metrics of a short run that repeat and do not depend on alpha by definition."""
    metrics = script.train(small_args(script, env, run_dir=str(tmp_path), **flags))
    return {k: v for k, v in metrics.items() if not k.startswith(BY_DEFINITION)}


def test_weight_0_and_alpha_1_are_the_neutral_run_bit_for_bit(script, tmp_path):
    """And any other weight is not."""
    facts = {"value_target": "sr_lambda", "total_timesteps": 144}
    neutral = run(script, tmp_path, **facts)
    assert run(script, tmp_path, **facts, cvar_alpha=0.3) == neutral
    assert run(script, tmp_path, **facts, cvar_alpha=1.0, cvar_weight=0.7) == neutral
    assert run(script, tmp_path, **facts, cvar_alpha=0.3, cvar_weight=0.7) != neutral


def test_the_risk_term_reaches_the_policy_and_not_the_critics(script):
    """One batch: advantages are the mixture of section 8, targets and old values bit-equal."""
    batches, raw = {}, {}
    for weight in (0.0, 0.4, 1.0):
        facts = {"norm_adv": False, "value_target": "sr_lambda", "cvar_alpha": 0.3}
        one = make_run(script, "Counter", cvar_weight=weight, **facts)
        torch.manual_seed(0)
        roll(one)
        torch.manual_seed(1)
        batch, _, metrics = script.prepare_batch(one.agent, one.rollout, one.carry, one.args)
        assert metrics["cvar/weight"] == weight
        batches[weight], raw[weight] = batch, batch.advantages
    assert_close(raw[0.4], 0.6 * raw[0.0] + 0.4 * raw[1.0], rtol=1e-4, atol=1e-3)
    assert (raw[0.0] - raw[1.0]).abs().max() > 1
    for weight in (0.4, 1.0):
        assert torch.equal(batches[weight].targets, batches[0.0].targets)
        assert torch.equal(batches[weight].old, batches[0.0].old)


def test_sr_lambda_trains_on_its_samples(script):
    """The batch holds a distribution for each step that goes on, not the lambda-return alone."""
    encoded = {}
    for target in ("lambda_return", "sr_lambda"):
        facts = {"target_encoding": "two_hot", "gamma": 0.95, "gae_lambda": 0.5}
        one = make_run(script, "Counter", value_target=target, **facts)
        encoded[target] = prepare(one).targets
        out = script.update(one.agent, one.optimizer, one.batch, one.args, 0.0)
        assert math.isfinite(out["losses/value_loss"])
    if script is lstm:
        assert [x.shape[-1] for x in encoded.values()] == [1, 7]
        varied = encoded["sr_lambda"].std(-1) > 0
    else:  # a point takes two atoms
        assert (encoded["lambda_return"] > 1e-6).sum(-1).max() <= 2
        varied = (encoded["sr_lambda"] > 1e-6).sum(-1) > 2
    assert 0.3 < varied.float().mean() < 1  # after a termination one value is left


@pytest.mark.parametrize(
    ("target", "lam", "right"), [("sr_lambda", 0.8, True), ("lambda_return", 0.5, False)]
)
def test_predicted_spread_is_that_of_returns(script, tmp_path, target, lam, right):
    """Ten N(0, 1) rewards, gamma 0.9: std of the return sqrt((1 - 0.81^10) / 0.19) = 2.150.

    The spread of lambda-returns is smaller, at lambda 0.5 by nearly half.
    """
    args = small_args(
        script, "RandomReward", run_dir=str(tmp_path), total_timesteps=25_600, num_envs=16,
        num_steps=40, num_quantiles=24, num_atoms=51, num_critics=1, gamma=0.9, gae_lambda=lam,
        value_target=target, learning_rate=1e-2, num_minibatches=4, update_epochs=2,
        hidden_size=16, lstm_hidden_size=8, eval_episodes=1, checkpoint_every=0,
    )  # fmt: skip
    agent, _ = script.load_agent(script.train(args)["run_dir"])
    obs = agent.normalize_obs(torch.zeros(1, 1, 1))
    start = torch.ones(1, 1, dtype=torch.bool)
    with torch.no_grad():
        outputs = agent.critic(obs, agent.initial_state(1), start)[0, 0]
    std = float(agent.dist.describe(outputs)["std"])
    if right:
        assert std == pytest.approx(2.150, rel=0.1)
    else:
        assert std < 0.75 * 2.150
