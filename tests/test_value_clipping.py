"""Value clipping: predictions kept near the old ones, and the larger of two losses."""

import importlib
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import distributional_ppo_categorical as categorical
import distributional_ppo_lstm as lstm

MODES = ("per_quantile", "mean_only", "mean_and_variance")
DTYPES = (torch.float32, torch.float64)


def tensor(data: list, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(data, dtype=dtype)


ATOMS = tensor([-1, 0, 1, 2, 3])


# -------------------------------------------------------------------------------------- quantiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # q = 0, 3, 9: m = 4, s^2 = (16 + 1 + 25) / 3 = 14; old 1, 2, 0: m = 1, s^2 = 2 / 3; d = 0.5
        ("per_quantile", [1 + 0.0 - 0.5, 2 + 0.5, 0 + 0.5]),
        ("mean_only", [1.5 - 4, 1.5 - 1, 1.5 + 5]),
        # 2 s_old / s = 2 sqrt(1 / 21) = 0.4364358 on the deviations -4, -1, 5
        ("mean_and_variance", [1.5 - 1.7457431, 1.5 - 0.4364358, 1.5 + 2.1821789]),
    ],
)
def test_clip_quantiles_worked_by_hand(mode, expected, dtype):
    """Reference code of Schulman et al. 2017, modes ours: one quantile falls, the mean rises."""
    quantiles = tensor([[0, 3, 9]], dtype)
    old = tensor([[1, 2, 0]], dtype)
    out = lstm.clip_quantiles(quantiles, old, 0.5, mode)
    assert_close(out, tensor([expected], dtype), rtol=1e-6, atol=1e-6)
    assert quantiles.tolist() == [[0, 3, 9]]
    assert old.tolist() == [[1, 2, 0]]


def slow_clip(row: list[float], old: list[float], d: float, mode: str) -> list[float]:
    """One row of quantiles, step by step."""

    def limited(new: float, around: float) -> float:
        return max(around - d, min(around + d, new))

    def moments(x: list[float]) -> tuple[float, float]:
        m = sum(x) / len(x)
        squares = sum((v - m) ** 2 for v in x)
        return m, math.sqrt(squares / len(x) + 1e-12)

    if mode == "per_quantile":
        return [limited(q, o) for q, o in zip(row, old)]
    (m, s), (m_old, s_old) = moments(row), moments(old)
    scale = 1.0
    if mode == "mean_and_variance" and s > 2 * s_old:
        scale = 2 * s_old / s
    return [limited(m, m_old) + (q - m) * scale for q in row]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("K", [1, 2, 7])
def test_clip_quantiles_equals_the_definition(K, mode, dtype):
    """Reference code of Schulman et al. 2017, modes ours: moves up, down, wider, narrower."""
    old = torch.randn(40, K, dtype=dtype)
    wider = torch.logspace(-1, 1, 40, dtype=dtype)[:, None]
    moves = torch.linspace(-1, 1, 40, dtype=dtype)[torch.randperm(40), None]
    quantiles = old * wider + moves
    out = lstm.clip_quantiles(quantiles, old, 0.3, mode)
    rows = zip(quantiles.tolist(), old.tolist())
    expected = [slow_clip(q, o, 0.3, mode) for q, o in rows]
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    assert out.dtype == dtype
    assert_close(out.double(), tensor(expected), rtol=limit, atol=limit)


@pytest.mark.parametrize("mode", MODES)
def test_clip_quantiles_of_one_quantile_is_scalar_value_clipping(mode):
    """Reference code of Schulman et al. 2017: old + clamp(new - old, -d, d), slope 1 or 0."""
    quantiles = tensor([[5], [-5], [0.25], [-0.25]]).requires_grad_()
    out = lstm.clip_quantiles(quantiles + 1, tensor([[1]] * 4), 0.5, mode)
    assert_close(out, tensor([[1.5], [0.5], [1.25], [0.75]]))
    out.sum().backward()
    assert quantiles.grad.tolist() == [[0], [0], [1], [1]]


@pytest.mark.parametrize(("width", "expected"), [(0.1, 0.1), (1.9, 1.9), (3, 2)])
def test_the_width_is_limited_to_twice_the_old_one(width, expected):
    """Ours: 1.9 times as wide stays, 3 times becomes 2, narrower is never widened."""
    old = tensor([[-1, 0, 1]])
    out = lstm.clip_quantiles(width * old, old, 0.5, "mean_and_variance")
    assert_close(out, expected * old)


@pytest.mark.parametrize(
    ("new", "old", "factor"),
    [
        # equal old quantiles: s_old = 1e-6, s = 1e-6 sqrt(16 + 1)
        (4e-6, 0, 2 / math.sqrt(17)),
        # old ones 4e-6 from their mean, new ones 12e-6: 1e-6 sqrt(17) and 1e-6 sqrt(145)
        (12e-6, 4e-6, 2 * math.sqrt(17 / 145)),
    ],
)
def test_the_variance_floor_is_1e_12(new, old, factor):
    """Ours: s = sqrt(variance + 1e-12), so that the gradient of equal quantiles is finite."""
    quantiles = tensor([[-new, new]])
    out = lstm.clip_quantiles(quantiles, tensor([[-old, old]]), 0.5, "mean_and_variance")
    assert_close(out, quantiles * factor, rtol=1e-9, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_clip_quantiles_passes_gradcheck(mode):
    """Reference code of Schulman et al. 2017, modes ours: clipped above, below, not at all."""
    old = tensor([[0.1, 0.5, -0.3], [0, 1, 2], [1, -1, 0.5], [0.2, 0.1, 0]])
    quantiles = tensor([[3, 5, -1], [-4, -3.5, -3.1], [1.1, -1.07, 0.4], [0.9, 0.16, -0.7]])
    quantiles.requires_grad_()
    assert gradcheck(lambda q: lstm.clip_quantiles(q, old, 0.25, mode), quantiles)


@pytest.mark.parametrize("mode", MODES)
def test_clip_quantiles_has_a_finite_gradient_for_equal_quantiles(mode):
    """Ours: the width has an infinite slope at 0 without its floor."""
    quantiles = torch.full((2, 5), 0.7, requires_grad=True)
    out = lstm.clip_quantiles(quantiles, torch.zeros(2, 5), 0.2, mode)
    out.square().sum().backward()
    assert quantiles.grad.isfinite().all()


def test_clip_quantiles_refuses_an_unknown_mode():
    """Ours: ValueError that names the mode, instead of some default."""
    with pytest.raises(ValueError, match="mean_onyl"):
        lstm.clip_quantiles(torch.zeros(1, 2), torch.zeros(1, 2), 0.2, "mean_onyl")


@pytest.mark.parametrize("mode", MODES)
def test_clip_quantiles_takes_critics_and_time_as_batch_axes(mode):
    """Reference code of Schulman et al. 2017, modes ours: (2, 4, 3, K), every row as if alone."""
    quantiles, old = torch.randn(2, 2, 4, 3, 6, dtype=torch.float64)
    together = lstm.clip_quantiles(quantiles, old, 0.3, mode)
    rows = (quantiles.reshape(-1, 6), old.reshape(-1, 6))
    alone = lstm.clip_quantiles(*rows, 0.3, mode)
    assert_close(together.flatten(0, 2), alone)


@pytest.mark.parametrize("mode", MODES)
def test_clip_quantiles_stays_on_the_device(mode):
    """Reference code of Schulman et al. 2017, modes ours: nothing is built on the CPU."""
    quantiles = torch.empty(4, 8, device="meta")
    assert lstm.clip_quantiles(quantiles, quantiles, 0.2, mode).is_meta


# ------------------------------------------------------------------------------------------ atoms
@pytest.mark.parametrize(
    ("old", "expected"),
    [
        # shifted by 0.7 - 1.2 = -0.5: half a bin, each mass splits evenly over two atoms
        (0.4, [0.1, 0.35, 0.35, 0.15, 0.05]),
        # inside of 1.4 +- 0.3: untouched
        (1.4, [0, 0.2, 0.5, 0.2, 0.1]),
        # shifted up by 1.7 - 1.2 = 0.5: half of the mass at 3 would be beyond the edge
        (2.0, [0, 0.1, 0.35, 0.35, 0.2]),
    ],
)
def test_clipping_of_atoms_shifts_the_distribution(old, expected):
    """Reference code of Schulman et al. 2017, for atoms ours: mean 1.2, d = 0.3."""
    probs = tensor([[0, 0.2, 0.5, 0.2, 0.1]])  # mean 0.5 + 0.4 + 0.3 = 1.2
    out = categorical.clip_categorical(probs, tensor([old]), 0.3, ATOMS)
    assert_close(out, tensor([expected]))


def test_the_mean_of_clipped_atoms_is_at_the_edge_of_its_range():
    """Reference code of Schulman et al. 2017, for atoms ours: 0.4 + 0.3 for a mean of 1.2."""
    probs = tensor([[0, 0.2, 0.5, 0.2, 0.1]])
    out = categorical.clip_categorical(probs, tensor([0.4]), 0.3, ATOMS)
    assert_close((out * ATOMS).sum(-1), tensor([0.7]))


@pytest.mark.parametrize(
    ("share", "variance"), [(0, 0.09), (0.25, 0.0975), (0.5, 0.1), (0.75, 0.0975)]
)
def test_clipping_of_atoms_adds_variance_up_to_a_quarter_of_a_squared_bin(share, variance):
    """Ours: rounding a shift of f bins to atoms adds f (1 - f) dz^2, at half a bin dz^2 / 4.

    Here dz = 0.2, and a variance of 0.09 becomes up to 0.100; the mean is exact.
    """
    atoms = torch.linspace(-5, 5, 51, dtype=torch.float64)
    probs = torch.zeros(1, 51, dtype=torch.float64)
    probs[0, [20, 25, 30]] = tensor([0.045, 0.91, 0.045])  # at -1, 0, 1: variance 0.09
    shift = -0.2 * (3 + share)
    out = categorical.clip_categorical(probs, tensor([shift - 0.2]), 0.2, atoms)
    mean = (out * atoms).sum()
    assert float(mean) == pytest.approx(shift)
    assert float((out * (atoms - mean) ** 2).sum()) == pytest.approx(variance)


def test_clipping_of_atoms_has_a_gradient():
    """Reference code of Schulman et al. 2017, for atoms ours: finite differences, by the shift."""
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    old = tensor([0.33, 1.21, 0.87, 1.04])

    def clipped(x: Tensor) -> Tensor:
        return categorical.clip_categorical(x.softmax(-1), old, 0.1, ATOMS)

    assert gradcheck(clipped, (logits,))


# ------------------------------------------------------------------------------- the loss of atoms
def atom_loss(logits: Tensor, target: Tensor, old_means: Tensor, atoms: Tensor,
              mode: str = "mean_only") -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses (B,) of logits (B, K) on one target (K,), float64, and which ones d = 0.2 clips."""
    support = {"num_atoms": len(atoms), "v_min": float(atoms[0]), "v_max": float(atoms[-1])}
    flags = {"vf_clip": mode, "vf_clip_coef": 0.2, "value_from": "distribution"}
    dist = categorical.ValueDistribution(categorical.Args(**support, **flags)).double()
    targets = target.expand(1, len(logits), -1)
    returns = torch.full((len(logits),), torch.nan)  # of a V that is not there
    loss, changed = dist.loss(logits[None], targets, returns, old_means[None, :, None])
    return loss[0], changed[0]


def between_atoms(height: float) -> Tensor:
    """Logits (10_001, 5) of sharp predictions every 1e-4 of the way from the atom 1 to the atom 2.

    Every atom has at least e^-height beside; no two logits differ by more than 1.01 * height.
    """
    x = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    rest = torch.full_like(x, math.exp(-height))
    return torch.stack((rest, rest, 1 - x + rest, x + rest, rest), -1).log()


@pytest.mark.parametrize("returned", [-0.6, 0, 0.5, 1, 1.3, 2, 2.9])
@pytest.mark.parametrize("encoding", ["two_hot", "hl_gauss"])
@pytest.mark.parametrize("old", [0.5, 1.3, 2.4])
def test_the_gradient_of_clipped_atoms_is_bounded(old, encoding, returned):
    """Ours: sharp predictions anywhere between two atoms, clipped to 0.7, 1.1 to 1.5, or 2.2.

    An unclipped cross-entropy has the gradient p - target, of L1 norm 2 at most. The shift of a
    target changes it by the difference of neighbouring logits at most, 9 here, times the gradient
    of the mean, of L1 norm sum p |z - m| = 2 x (1 - x): 2 + 4.5 in the middle, 2 + 0.9 next to an
    atom. The log of a projected share s would have 1 / s, up to thousands.
    """
    logits = between_atoms(9.0).requires_grad_()
    target = categorical.two_hot(tensor([returned]), ATOMS)
    if encoding == "hl_gauss":
        target = categorical.hl_gauss(tensor([returned]), ATOMS, 0.75)
    loss, changed = atom_loss(logits, target, torch.full((10_001,), old).double(), ATOMS)
    assert changed.sum() > 3000
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    size = gradient.abs().sum(-1)
    assert size.max() < 6.6
    assert max(size[:526].max(), size[-526:].max()) < 2.96  # 2 x (1 - x) up to 0.1


@pytest.mark.parametrize("returned", [0.2, 0.5, 1.3, 2.5])
def test_the_loss_of_clipped_atoms_is_continuous_where_clipping_begins(returned):
    """Ours: the old mean 1e-4 further away changes it by 1e-4 times the slope, 9.1, at most.

    Predictions of mean m within 0.2 of the old one are not clipped: theirs is the plain loss.
    """
    distances = torch.linspace(-0.3, 0.3, 6001, dtype=torch.float64)  # m - m_old
    logits = between_atoms(9.0)[3000].expand(6001, -1)
    target = categorical.two_hot(tensor([returned]), ATOMS)
    facts = (logits, target, logits.softmax(-1) @ ATOMS - distances, ATOMS)
    loss, changed = atom_loss(*facts)
    plain, _ = atom_loss(*facts, "none")
    assert loss.diff().abs().max() < 9.1e-4
    inside = distances.abs() < 0.2 - 1e-9
    assert_close(loss[inside], plain[inside], rtol=1e-12, atol=1e-12)
    assert changed[inside].sum() == 0
    assert changed[distances.abs() > 0.2 + 1e-5].all()
    assert (loss > plain + 0.1).any()


@pytest.mark.parametrize("returned", [-5.0, -1.0, 0.1, 1.5, 5.0])
@pytest.mark.parametrize("moved", [0.31, 0.5, 1.27])
def test_the_loss_of_clipped_atoms_is_that_of_the_shifted_prediction(moved, returned):
    """Reference code of Schulman et al. 2017, for atoms ours: N(0.3, 0.6^2) on bins of 0.2.

    Its mean moved by more than d = 0.2; the shifted prediction is N(0.3 - moved + 0.2, 0.6^2). The
    target's rounding adds up to dz^2 / 4 = 0.01 of variance: 0.01 / (2 * 0.36), 0.014 nats. No
    floor of probabilities bends the loss of returns that are 8 standard deviations off.
    """
    atoms = torch.linspace(-8, 8, 81, dtype=torch.float64)
    target = categorical.hl_gauss(tensor([returned]), atoms, 0.15)

    def prediction(mean: float) -> Tensor:
        return -(atoms[None] - mean).square() / (2 * 0.36)

    loss, changed = atom_loss(prediction(0.3), target, tensor([0.3 - moved]), atoms)
    means = (0.3, 0.5 - moved)
    plain, shifted = (-float((target * prediction(m).log_softmax(-1)).sum()) for m in means)
    assert changed == 1
    assert float(loss) == pytest.approx(max(plain, shifted), abs=0.02)
    assert (shifted > plain) == (returned > 0.4 - moved / 2)  # their middle


# ------------------------------------------------------------------------ the larger of two losses
def test_clipped_value_loss_is_the_maximum_per_sample_and_critic(script):
    """Reference code of Schulman et al. 2017: the maximum comes before any averaging.

    Mean 23 / 6 here; the maximum of the two means would be 16 / 6.
    """
    loss = tensor([[1, 5, -2], [4, 0, 3]])
    clipped = tensor([[3, 4, 2], [1, 6, 0]])
    out = script.clipped_value_loss(loss, clipped)
    assert out.tolist() == [[3, 5, 2], [4, 6, 3]]
    assert script.clipped_value_loss(clipped[0], loss[0]).tolist() == [3, 5, 2]
    with pytest.raises(ValueError, match=r"clipped_value_loss: losses are \(3,\) and \(3, 1\)"):
        script.clipped_value_loss(loss[0], loss[0][:, None])
    assert out.mean() > max(loss.mean(), clipped.mean()) + 0.5


def test_clipped_value_loss_takes_the_gradient_of_the_larger_loss(script):
    """Reference code of Schulman et al. 2017: unclipped predictions get none where it is less."""
    loss = tensor([1, 5]).requires_grad_()
    clipped = tensor([3, 4]).requires_grad_()
    script.clipped_value_loss(loss, clipped).sum().backward()
    assert loss.grad.tolist() == [0, 1]
    assert clipped.grad.tolist() == [1, 0]


def test_a_double_maximum_of_2_675_would_be_2_925_with_a_third_alternative(script):
    """Reference code of Schulman et al. 2017: two alternatives; a third one inflates the loss."""
    # two critics (rows), two samples       maximum of two       maximum of three
    loss = tensor([[1.0, 3.2], [4.0, 0.6]])
    clipped = tensor([[2.5, 2.0], [1.5, 1.0]])  # 2.5 3.2 4 1   / 4 = 2.675
    another = tensor([[1.5, 3.7], [4.5, 0.8]])  # 2.5 3.7 4.5 1 / 4 = 2.925
    double = script.clipped_value_loss(loss, clipped)
    assert double.tolist() == [[2.5, 3.2], [4.0, 1.0]]
    assert float(double.mean()) == pytest.approx(2.675)
    assert float(torch.max(double, another).mean()) == pytest.approx(2.925)
    # averaged over the critics first: 2.5 1.9 against 2.0 1.5, mean 2.2
    late = script.clipped_value_loss(loss.mean(0), clipped.mean(0))
    assert float(late.mean()) == pytest.approx(2.2)


# ------------------------------------------------------------------------------------------- units
@pytest.mark.parametrize("mode", MODES)
def test_the_clipped_loss_does_not_depend_on_the_units_of_the_reward(mode):
    """Ours, d in normalised returns: rewards times 10, the same loss once statistics are refit."""
    old, new = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = 40 * torch.randn(5, 3, dtype=torch.float64) + 15
    taus = lstm.quantile_midpoints(7).double()
    losses = []
    for scale in (1, 10):
        moments = lstm.RunningMoments()
        moments.update(scale * targets)
        z = moments.normalize(scale * 20 * new)
        x = moments.normalize(scale * targets)
        clipped = lstm.clip_quantiles(z, moments.normalize(scale * 20 * old), 0.2, mode)
        both = [lstm.quantile_huber_loss(q, x, taus, 0.1) for q in (z, clipped)]
        losses.append(lstm.clipped_value_loss(*both))
        assert (clipped - z).abs().max() > 0.1
    assert_close(losses[0], losses[1])


def task(std: float) -> tuple[Tensor, Tensor, lstm.RunningMoments]:
    """Old and new quantiles (200, 7) of a task with returns of mean 5 std, and its statistics.

    The means move by about 0.25 std, the width by up to a factor of 4.
    """
    draws = torch.Generator().manual_seed(4)
    old = torch.randn(200, 7, dtype=torch.float64, generator=draws)
    moves = 0.25 * torch.randn(200, 1, dtype=torch.float64, generator=draws)
    wider = 4 ** (2 * torch.rand(200, 1, dtype=torch.float64, generator=draws) - 1)
    moments = lstm.RunningMoments()
    moments.update(std * tensor([4, 6]))  # mean 5 std, deviation std
    mean = old.mean(-1, keepdim=True)
    new = mean + moves + wider * (old - mean)
    return std * (old + 5), std * (new + 5), moments


def blocked(clipped: Tensor, new: Tensor, std: float) -> float:
    """Share of the predictions that clipping changes."""
    changed = ((clipped - new).abs() > 1e-9 * std).any(-1)
    return float(changed.double().mean())


@pytest.mark.parametrize("mode", MODES)
def test_value_clipping_blocks_the_same_share_at_every_scale_of_returns(mode):
    """Ours, d in normalised returns: std 1, 10 and 100 give one share, neither 0 nor 1."""
    shares = []
    for std in (1, 10, 100):
        old, new, moments = task(std)
        z, z_old = moments.normalize(new), moments.normalize(old)
        shares.append(blocked(lstm.clip_quantiles(z, z_old, 0.2, mode), z, 1))
    assert shares[0] == shares[1] == shares[2]
    assert 0.1 < shares[0] < 1


def test_a_bare_coefficient_on_raw_returns_would_freeze_the_critic():
    """Ours, why d is in normalised returns: raw at std 100, a mean moves at most 0.2 per update."""
    shares = []
    for std in (1, 10, 100):
        old, new, _ = task(std)
        raw = lstm.clip_quantiles(new, old, 0.2, "mean_only")
        shares.append(blocked(raw, new, std))
        moved = raw.mean(-1) - old.mean(-1)
        assert moved.abs().max() <= 0.2 + 1e-9
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.98


@pytest.mark.parametrize("std", [1, 10, 100])
def test_value_clipping_of_atoms_blocks_the_same_share_at_every_scale_of_returns(std):
    """Ours, d in normalised returns: old means of 50 states at any std, expected by their moves."""
    draws = torch.Generator().manual_seed(4)
    probs = torch.randn(50, 5, dtype=torch.float64, generator=draws).softmax(-1)
    moves = torch.linspace(-0.6, 0.7, 50, dtype=torch.float64)  # of the mean, in normalised returns
    moments = categorical.RunningMoments()
    moments.update(std * tensor([4, 6]))  # mean 5 std, deviation std
    stored = moments.denormalize(probs @ ATOMS - moves)  # decoded, in the task's units
    old = moments.normalize(stored)
    clipped = categorical.clip_categorical(probs, old, 0.2, ATOMS)
    changed = ((clipped - probs).abs() > 1e-9).any(-1)
    assert changed.tolist() == (moves.abs() > 0.2).tolist()
    assert 0.5 < changed.double().mean() < 0.8


def test_the_loss_of_atoms_clips_the_same_samples_at_every_scale_of_returns():
    """As training does it: means that were stored in the task's units, with a standard deviation of
    1, 10 and 100. What moved by more than d is clipped, and the losses are the same ones."""
    draws = torch.Generator().manual_seed(4)
    outputs = torch.randn(1, 50, 5, generator=draws)
    targets = torch.randn(50, 5, generator=draws).softmax(-1)
    moves = torch.linspace(-0.6, 0.7, 50)
    flags = {"num_atoms": 5, "v_min": -1.0, "v_max": 3.0, "value_from": "distribution"}
    args = categorical.Args(vf_clip="mean_only", vf_clip_coef=0.2, **flags)
    losses = []
    for std in (1, 10, 100):
        dist = categorical.ValueDistribution(args)
        dist.moments.update(std * tensor([4, 6]))
        means = outputs.softmax(-1) @ dist.support
        old = dist.moments.normalize(dist.moments.denormalize(means.double() - moves)).float()
        loss, clipped = dist.loss(outputs, targets, torch.zeros(50), old[..., None])
        assert clipped[0].bool().tolist() == (moves.abs() > 0.2).tolist()
        losses.append(loss)
    assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    assert_close(losses[2], losses[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["distributional_ppo_lstm", "distributional_ppo_categorical"])
def test_rounding_is_not_counted_as_clipping(name):
    """Values of a task in hundreds, moved by less than the limit: `value/clip_fraction` is 0. With
    a limit that all of them exceed, it is 1."""
    script = importlib.import_module(name)
    kind = {"vf_clip": "mean_and_variance"} if script is lstm else {"vf_clip": "mean_only"}
    generator = torch.manual_seed(0)
    counted = []
    for limit in (0.2, 1e-4):
        args = script.Args(
            norm_returns=False, vf_clip_coef=limit, value_from="distribution", **kind
        )
        dist = script.ValueDistribution(args)
        if script is lstm:
            old = 300 * torch.randn(1, 50, args.num_quantiles, generator=generator)
            outputs, targets = old + 0.1, torch.zeros(50, 1)
        else:
            dist.support *= 100
            outputs = torch.randn(1, 50, args.num_atoms, generator=generator)
            old = dist.mean(outputs).float()[..., None] + 0.1
            targets = dist.encode_targets(dist.point_targets(torch.zeros(50)))
        counted.append(dist.loss(outputs, targets, torch.zeros(50), old)[1].mean())
    assert counted == [0, 1]


@pytest.mark.parametrize(("old", "returned"), [(-0.5, 1.3), (2.4, 0.4)])
def test_the_gradient_of_clipped_atoms_is_that_of_their_loss(old, returned):
    """Ours: finite differences, where the clipped loss is the larger one."""
    logits = tensor([[0, 1, 2, 0.5, -1]]).requires_grad_()
    target = categorical.two_hot(tensor([returned]), ATOMS)
    facts = (target, tensor([old]), ATOMS)
    assert atom_loss(logits, *facts)[0] > atom_loss(logits, *facts, "none")[0]
    assert gradcheck(lambda x: atom_loss(x, *facts)[0], logits)


# ------------------------------------------------------------------ gradients through both losses
def gradient_of_loss(dist, outputs: list, targets: Tensor, returned: float, old: list) -> Tensor:
    """That of one state and one critic, (K,) or (K + 1,)."""
    outputs = torch.tensor([[outputs]], requires_grad=True)
    loss, _ = dist.loss(outputs, targets, torch.tensor([returned]), torch.tensor([[old]]))
    loss.sum().backward()
    return outputs.grad[0, 0]


def test_the_clipped_loss_of_quantiles_has_a_gradient():
    """Quantiles 0 and 2 at 1/4 and 3/4, their mean 1, the old mean 0, limit 0.2, target 3. The loss
    is (0.75 + 0.75) / 2, that of the clipped quantiles -0.8 and 1.2 is (0.95 + 1.35) / 2. The
    latter has the gradient (-1/8, -3/8) by the clipped quantiles, less its mean by what moves."""
    flags = {"num_quantiles": 2, "kappa": 0.0, "vf_clip": "mean_only", "norm_returns": False}
    dist = lstm.ValueDistribution(lstm.Args(value_from="distribution", **flags))
    found = gradient_of_loss(dist, [0.0, 2.0], torch.tensor([[3.0]]), 3.0, [-1.0, 1.0])
    assert_close(found, torch.tensor([0.125, -0.125]))


def test_the_clipped_loss_of_atoms_has_the_gradient_of_the_shift():
    """Atoms -1 to 3 with p = 0.1, 0.2, 0.4, 0.2, 0.1 have the mean 1. With the old mean 0 and the
    limit 0.2 the shift is -0.8, so that the target 1 lies at 1.8: 0.2 on atom 1 and 0.8 on atom 2.
    The loss -0.2 log 0.4 - 0.8 log 0.2 exceeds -log 0.4. A shift by s more adds s log(0.4 / 0.2),
    and ds is the sum of p (z - 1) dlogits: p - moved + p (z - 1) log 2."""
    flags = {"num_atoms": 5, "v_min": -1.0, "v_max": 3.0, "vf_clip": "mean_only"}
    args = categorical.Args(value_from="distribution", norm_returns=False, **flags)
    dist = categorical.ValueDistribution(args)
    p = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])
    on_one = torch.tensor([[0.0, 0, 1, 0, 0]])
    found = gradient_of_loss(dist, p.log().tolist(), on_one, 1.0, [0.0])
    assert_close(found, torch.tensor([-0.0386, 0.0614, 0.2, -0.4614, 0.2386]), atol=1e-4, rtol=0)


def test_the_clipped_loss_of_v_has_a_gradient():
    """V is 0.1, within 0.2 of the old 0, so both losses are 0.5 (0.1 - 1)^2: the gradient is -0.9,
    half by each. In the feed-forward script V moves by a tenth of its output."""
    flags = {"value_from": "mean_head", "norm_returns": False, "vf_clip": "mean_only"}
    dist = lstm.ValueDistribution(lstm.Args(num_quantiles=2, **flags))
    found = gradient_of_loss(dist, [0.0, 0.0, 0.1], torch.zeros(1, 1), 1.0, [0.0, 0.0, 0.0])
    assert float(found[-1]) == pytest.approx(-0.9)
    dist = categorical.ValueDistribution(categorical.Args(num_atoms=3, **flags))
    found = gradient_of_loss(dist, [0.0, 0.0, 0.0, 1.0], torch.ones(1, 3) / 3, 1.0, [0.0, 0.0])
    assert float(found[-1]) == pytest.approx(-0.09)
