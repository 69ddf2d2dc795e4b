"""SR(lambda): samples and distributions of the return by sample replacement."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import small_args
from torch import Tensor
from torch.testing import assert_close

import distributional_ppo_categorical as categorical
import distributional_ppo_lstm as lstm

GAMMA = 0.9
T, N = 6, 2
STEPS = list(itertools.product(range(T), range(N)))
# Environment 0: terminated at 2, goes on to the end of the rollout.
# Environment 1: truncated at 1, terminated and truncated at once at 4.
TERMINATED = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]]).T.bool()
TRUNCATED = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0]]).T.bool()
REWARDS = torch.tensor([[1.0, -2, 30, 4, 0, 0.5], [0.3, 7, -1, 2, 50, 3]]).T.double()
K = 3  # quantiles
ATOMS = torch.linspace(-90, 90, 61).double()  # wide enough for all returns
DZ = 3.0  # between two atoms


def next_quantiles() -> Tensor:
    """Anything, (T, N, K), float64."""
    return 5 * torch.randn(T, N, K, dtype=torch.float64, generator=torch.manual_seed(5))


def next_probs() -> Tensor:
    """Anything, (T, N, 61), float64, away from the edges of the support."""
    logits = torch.randn(T, N, 61, dtype=torch.float64, generator=torch.manual_seed(6))
    return (logits - (ATOMS / 12).square()).softmax(-1)


def many(x: Tensor, copies: int) -> Tensor:
    """`copies` of both environments side by side: independent draws in one call."""
    return x.repeat(1, copies, *[1] * (x.dim() - 2))


def end_of(t: int, n: int) -> int:
    """Step at which the episode of step t ends, or the rollout."""
    while t < T - 1 and not (TERMINATED[t, n] or TRUNCATED[t, n]):
        t += 1
    return t


def n_step(t: int, n: int, last: int) -> tuple[float, float]:
    """Discounted rewards of the steps t to `last`, and the factor of what follows s'_last."""
    total = 0.0
    for k in range(t, last + 1):
        total += GAMMA ** (k - t) * float(REWARDS[k, n])
    return total, 0.0 if TERMINATED[last, n] else GAMMA ** (last - t + 1)


def horizons(t: int, n: int, lam: float) -> list[tuple[int, float]]:
    """(last step, probability) of every n-step return in SR(lambda), the last one taking the rest.

    The target stops after step t with probability 1 - lambda, after t + 1 with lambda (1 - lambda)
    and so on; where the episode or the rollout ends nothing is left to draw.
    """
    end = end_of(t, n)
    cut = [(k, lam ** (k - t) * (1 - lam)) for k in range(t, end)]
    return [*cut, (end, lam ** (end - t))]


def mean_probs(lam: float) -> Tensor:
    """Exact mean of sr_lambda_probs: the mixture over horizons, each projected once, by loops."""
    out, probs = np.zeros((T, N, 61)), next_probs().numpy()
    for t, n in STEPS:
        for last, weight in horizons(t, n, lam):
            total, scale = n_step(t, n, last)
            for z, p in zip(ATOMS.tolist(), probs[last, n]):
                position = (total + scale * z + 90) / DZ
                low = min(math.floor(position), 59)
                out[t, n, low] += weight * p * (low + 1 - position)
                out[t, n, low + 1] += weight * p * (position - low)
    return torch.tensor(out)


def samples(lam: float, seed: int = 0, copies: int = 1, rewards: Tensor = REWARDS) -> Tensor:
    """`sr_lambda_targets` on the two environments, (T, N * copies, K)."""
    tensors = (rewards, next_quantiles(), TERMINATED, TRUNCATED)
    generator = torch.Generator().manual_seed(seed)
    return lstm.sr_lambda_targets(*(many(x, copies) for x in tensors), GAMMA, lam, generator)


def probabilities(lam: float, seed: int = 0, copies: int = 1) -> Tensor:
    """`sr_lambda_probs` on the two environments, (T, N * copies, 61)."""
    rewards, probs = many(REWARDS, copies), many(next_probs(), copies)
    ends = (many(TERMINATED, copies), many(TRUNCATED, copies))
    generator = torch.Generator().manual_seed(seed)
    return categorical.sr_lambda_probs(rewards, probs, ATOMS, *ends, GAMMA, lam, generator)


def lambda_returns(next_values: Tensor, lam: float) -> Tensor:
    """A + V of `gae`; the values of s_t for t > 0 are those of the successors before.

    V(s_t) of `gae` is only V(s'_{t-1}) inside an episode; across an end it cancels: A_t + V_t.
    """
    values = torch.cat((torch.zeros(1, N).double(), next_values[:-1]))
    return lstm.gae(REWARDS, values, next_values, TERMINATED, TRUNCATED, GAMMA, lam)[1]


# -------------------------------------------------------------------------- exact or by frequency
@pytest.mark.parametrize("lam", [0.5, 0.9])
def test_mean_over_draws_of_samples_is_the_lambda_return(lam):
    """Nam et al. 2021 (GMAC), SR(lambda): the mean of samples, across both kinds of end."""
    copies = 4000
    out = samples(lam, copies=copies).view(T, copies, N, K)
    error = out.std(1).mean(-1) / copies**0.5
    expected = lambda_returns(next_quantiles().mean(-1), lam)
    difference = out.mean((1, 3)) - expected
    assert (difference.abs() < 4.5 * error + 1e-9).all()


@pytest.mark.parametrize("lam", [0.5, 0.9])
def test_mean_over_draws_of_probabilities_is_the_lambda_return(lam):
    """After Nam et al. 2021 (GMAC), SR(lambda): the mean of atoms, across both kinds of end."""
    copies = 400
    out = (probabilities(lam, copies=copies) @ ATOMS).view(T, copies, N)
    error = out.std(1) / copies**0.5
    expected = lambda_returns(next_probs() @ ATOMS, lam)
    difference = out.mean(1) - expected
    assert (difference.abs() < 4.5 * error + 1e-9).all()


def test_each_particle_is_a_draw_from_the_n_step_returns():
    """Nam et al. 2021 (GMAC), SR(lambda): particle i takes only returns that end in theta_i."""
    out = samples(0.7, copies=5000).view(T, 5000, N, K)
    theta = next_quantiles()
    for (t, n), i in itertools.product(STEPS, range(K)):
        seen = 0
        for last, weight in horizons(t, n, 0.7):
            total, scale = n_step(t, n, last)
            error = out[t, :, n, i] - (total + scale * theta[last, n, i])
            count = int((error.abs() < 1e-9).sum())
            assert count / 5000 == pytest.approx(weight, abs=0.033)  # 4.5 / sqrt(4 * 5000)
            seen += count
        assert seen == 5000


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_samples_of_lambda_0_and_1_are_exact(lam):
    """Nam et al. 2021 (GMAC), SR(lambda): one step to theta(s'_t), or rewards up to the end."""
    out, theta = samples(lam), next_quantiles()
    for t, n in STEPS:
        last = t if lam == 0 else end_of(t, n)
        total, scale = n_step(t, n, last)
        assert_close(out[t, n], total + scale * theta[last, n])


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_probabilities_of_lambda_0_and_1_are_exact(lam):
    """After Nam et al. 2021 (GMAC), SR(lambda): nothing is left to chance, to 1e-12."""
    assert_close(probabilities(lam), mean_probs(lam), rtol=0, atol=1e-12)


def test_values_by_hand():
    """Nam et al. 2021 (GMAC), SR(lambda): lambda 1, environment 0.

    30, then -2 + 0.9 * 30 = 25 and 1 + 0.9 * 25 = 23.5; behind the end 4 + 0.405 + 0.729 theta.
    """
    out = samples(1.0)[:, 0]
    for t, expected in enumerate((23.5, 25.0, 30.0)):
        assert out[t].tolist() == pytest.approx([expected] * K)
    assert_close(out[3], 4.405 + 0.729 * next_quantiles()[5, 0])


def test_small_rewards_survive_large_later_ones():
    """R^(1) of a step is its reward, 0.01, whatever the episode pays later: 10,000 at its end. A
    difference of sums in float32 would have an error of 0.001."""
    T, atoms = 3, torch.zeros(2)
    rewards = torch.tensor([0.01, 0.0, 1e4])[:, None]
    nowhere = torch.zeros(T, 1).bool()
    probs = torch.full((T, 1, 2), 0.5)
    returns, _ = categorical.sr_lambda_atoms(rewards, probs, atoms, nowhere, nowhere, 0.99, 0.0)
    assert returns.dtype == torch.float32
    assert returns[0, 0].tolist() == pytest.approx([0.01, 0.01], rel=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_terminal_reward_reaches_all_earlier_targets(lam):
    """Nam et al. 2021 (GMAC), SR(lambda): targets ahead hold it with probability lambda^steps."""
    copies = 400
    rewards = REWARDS.clone()
    rewards[2, 0] += 100
    base = samples(lam, copies=copies).view(T, copies, N, K)
    more = samples(lam, copies=copies, rewards=rewards).view(T, copies, N, K)
    for t in range(3):  # 100 more, discounted: 81, 90, 100
        gained = (more - base)[t, :, 0]
        taken = gained > 1
        assert_close(gained[taken], torch.full_like(gained[taken], 100 * GAMMA ** (2 - t)))
        share = float(taken.double().mean())
        assert share == pytest.approx(lam ** (2 - t), abs=0.03)
    assert torch.equal(more[3:], base[3:])
    assert torch.equal(more[:, :, 1], base[:, :, 1])


# ------------------------------------------------------------------------------------------ draws
def one_reward(steps: int, envs: int) -> tuple[Tensor, Tensor]:
    """Reward 1 at the end of one long episode, and a mask of no ends."""
    rewards = torch.zeros(steps, envs)
    rewards[-1] = 1
    return rewards, torch.zeros(steps, envs).bool()


def test_draws_of_samples_are_independent_over_particles_steps_and_environments():
    """Nam et al. 2021 (GMAC), SR(lambda): X_0 is 1 where all of 3 draws went on, else 0."""
    envs = 3000
    particles = 4
    rewards, none = one_reward(4, envs)
    draws = torch.Generator().manual_seed(1)
    theta = torch.zeros(4, envs, particles)
    first = lstm.sr_lambda_targets(rewards, theta, none, none, 1.0, 0.8, draws)[0]
    share = torch.full((particles,), 0.512)  # 0.8^3
    assert_close(first.mean(0), share, rtol=0, atol=0.041)  # 4.5 sqrt(.25 / 3000)
    correlation = np.corrcoef(np.vstack((first.T, first.roll(1, 0).T)))
    assert np.abs(correlation - np.eye(2 * particles)).max() < 0.085  # 4.5 / sqrt(3000)


def test_draws_of_probabilities_are_independent_over_steps_and_environments():
    """After Nam et al. 2021 (GMAC), SR(lambda): one horizon for each step and environment."""
    envs = 3000
    rewards, none = one_reward(4, envs)
    draws = torch.Generator().manual_seed(1)
    probs = torch.zeros(4, envs, 3)
    probs[..., 1] = 1
    atoms = torch.tensor([-1.0, 0, 1])
    out = categorical.sr_lambda_probs(rewards, probs, atoms, none, none, 1.0, 0.8, draws)
    reached = out[0, :, 2]
    assert float(reached.mean()) == pytest.approx(0.512, abs=0.041)
    assert abs(np.corrcoef(reached, reached.roll(1))[0, 1]) < 0.085


@pytest.mark.parametrize("function", [samples, probabilities])
def test_targets_repeat_with_a_generator(function):
    """Nam et al. 2021 (GMAC), SR(lambda): another seed gives other targets, in float64."""
    out = function(0.6, seed=3)
    assert out.dtype == torch.float64
    assert torch.equal(out, function(0.6, seed=3))
    assert not torch.equal(out, function(0.6, seed=4))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_draws_for_its_environments_what_one_process_would(script, rank, monkeypatch):
    """Four environments in one process, or two in each of two: the same targets, no draw twice."""
    args = small_args(script, "Counter", num_envs=4)
    dist = script.ValueDistribution(args)
    outputs = torch.randn(5, 2, dist.num_outputs).repeat(1, 2, 1)  # the second two are alike
    rewards = torch.randn(5, 2).double().repeat(1, 2)
    ends = [x[:5].repeat(1, 2) for x in (TERMINATED, TRUNCATED)]

    def draw(columns: slice) -> Tensor:
        terminated, truncated = (x[:, columns] for x in ends)
        rollout = SimpleNamespace(
            rewards=rewards[:, columns], terminated=terminated, truncated=truncated
        )
        torch.manual_seed(3)
        targets = dist.sample_targets(rollout, outputs[:, columns], gae_lambda=0.6)
        return targets if script is lstm else torch.cat(targets, -1)  # returns and probabilities

    whole = draw(slice(0, 4))
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    monkeypatch.setattr(script, "RANK", rank)
    own = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(draw(own), whole[:, own])
    assert not torch.equal(whole[:, :2], whole[:, 2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_leave_the_arguments_alone(dtype):
    """Nam et al. 2021 (GMAC), SR(lambda), as a pure function that keeps the dtype."""
    data = (REWARDS.to(dtype), next_quantiles().to(dtype), TERMINATED, TRUNCATED)
    copies = [x.clone() for x in data]
    assert lstm.sr_lambda_targets(*copies, GAMMA, 0.5).dtype == dtype
    assert all(torch.equal(x, y) for x, y in zip(data, copies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_leave_the_arguments_alone(dtype):
    """After Nam et al. 2021 (GMAC), SR(lambda), as a pure function that keeps the dtype."""
    floats = [x.to(dtype) for x in (REWARDS, next_probs(), ATOMS)]
    data = (*floats, TERMINATED, TRUNCATED)
    copies = [x.clone() for x in data]
    assert categorical.sr_lambda_probs(*copies, GAMMA, 0.5).dtype == dtype
    assert all(torch.equal(x, y) for x, y in zip(data, copies))


# ------------------------------------------------------------------------------------- projection
def test_mean_of_probabilities_is_the_mixture_projected_once():
    """After Nam et al. 2021 (GMAC), with Bellemare et al. 2017, algorithm 1, once per target."""
    copies = 400
    lam = 0.9
    out = probabilities(lam, copies=copies).view(T, copies, N, 61)
    assert_close(out.sum(-1), torch.ones(T, copies, N).double())
    error = out.std(1) / copies**0.5
    difference = out.mean(1) - mean_probs(lam)
    assert (difference.abs() < 4.5 * error + 1e-6).all()


def test_variance_grows_by_one_projection_and_not_by_one_per_step():
    """Ours: projecting at each step of the recursion would add up to dz^2 / 4 every time.

    Lambda 1, 25 rewards of 0.1 dz, gamma 1: the atom at 0 moves by 2.5 dz, once, half way.
    """
    probs = torch.zeros(25, 1, 61).double()
    probs[..., 30] = 1
    none = torch.zeros(25, 1).bool()
    rewards = torch.full((25, 1), 0.1 * DZ).double()
    out = categorical.sr_lambda_probs(rewards, probs, ATOMS, none, none, 1.0, 1.0)[0, 0]
    mean = float(out @ ATOMS)
    assert mean == pytest.approx(7.5)
    assert float(out @ (ATOMS - mean).square()) == pytest.approx(DZ**2 / 4)


def test_a_draw_of_zero_is_a_draw():
    """Nam et al. 2021 (GMAC), SR(lambda): with lambda 0 every n is 1, also where log u is -inf."""
    data = (REWARDS, next_probs(), ATOMS, TERMINATED, TRUNCATED, GAMMA, 0.0)
    shape = REWARDS.shape
    zeros, ones = (
        categorical.sr_lambda_atoms(*data, draws=torch.full(shape, u, dtype=torch.float64))
        for u in (0.0, 0.5)
    )
    for one, other in zip(zeros, ones):
        assert_close(one, other)


def test_a_draw_of_zero_is_a_draw_of_quantiles_too():
    """With lambda 0 every sample ends after one step."""
    theta = torch.arange(36, dtype=torch.float64).view(*REWARDS.shape, -1)
    data = (REWARDS, theta, TERMINATED, TRUNCATED, GAMMA, 0.0)
    zeros, halves = (
        lstm.sr_lambda_targets(*data, draws=torch.full(theta.shape, u, dtype=torch.float64))
        for u in (0.0, 0.5)
    )
    assert_close(zeros, halves)


def test_rewards_that_are_integers_are_refused():
    """Discounted sums would be cut to whole numbers."""
    data = (REWARDS.long(), next_probs(), ATOMS, TERMINATED, TRUNCATED, GAMMA, 0.5)
    with pytest.raises(TypeError, match=r"rewards are torch\.int64, not floats"):
        categorical.sr_lambda_atoms(*data)


@pytest.mark.parametrize("name", ["rewards", "predictions", "terminated", "truncated"])
@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x[:, :1], lambda x: x[:0]])
def test_other_shapes_are_refused(name, change):
    """One step less, as beside a buffer of T + 1 values, or one environment that stands for all."""
    theta = torch.zeros(*REWARDS.shape, 3, dtype=torch.float64)
    for function, predictions, atoms in (
        (lstm.sr_lambda_targets, theta, []),
        (categorical.sr_lambda_atoms, next_probs(), [ATOMS]),
    ):
        data = dict(rewards=REWARDS, predictions=predictions)
        data |= dict(terminated=TERMINATED, truncated=TRUNCATED)
        data[name] = change(data[name])
        first, second, *masks = data.values()
        with pytest.raises(ValueError, match=f"^{function.__name__}: the shapes of rewards"):
            function(first, second, *atoms, *masks, GAMMA, 0.5)
    with pytest.raises(TypeError, match=r"quantiles are torch\.int64, not floats"):
        lstm.sr_lambda_targets(REWARDS, theta.long(), TERMINATED, TRUNCATED, GAMMA, 0.5)


def test_masks_of_bytes_are_refused():
    """~1 of a byte is 254, which would be a discount."""
    theta = torch.zeros(*REWARDS.shape, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match="must be tensors of bool"):
        lstm.sr_lambda_targets(REWARDS, theta, TERMINATED.byte(), TRUNCATED, GAMMA, 0.5)
