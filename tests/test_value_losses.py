"""Losses of the critics: quantile regression, and cross-entropy with projected distributions."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import distributional_ppo_categorical as categorical
import distributional_ppo_lstm as lstm

DTYPES = (torch.float32, torch.float64)


def tensor(data: list, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(data, dtype=dtype)


ATOMS = tensor([-1, 0, 1, 2, 3])


def midpoints(num_quantiles: int) -> list[float]:
    return [(i + 0.5) / num_quantiles for i in range(num_quantiles)]


def normal_quantiles(num_quantiles: int) -> Tensor:
    """Exact quantiles of N(0, 1) at the midpoints."""
    return tensor([NormalDist().inv_cdf(tau) for tau in midpoints(num_quantiles)])


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return dict.fromkeys(("rtol", "atol"), 1e-12 if dtype == torch.float64 else 1e-5)


def largest_kept(function, *arguments) -> int:
    """Entries of the largest tensor that a call keeps for its gradient."""
    kept = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*arguments)
    return max(kept)


# ---------------------------------------------------------------------- quantiles: levels, by hand
def test_quantile_midpoints_are_the_centres_of_equal_bins():
    """Dabney et al. 2018a, lemma 2: (i + 0.5) / K.

    Neither i / (K - 1) nor (2 i + 1) / (2 (K + 1)).
    """
    assert lstm.quantile_midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]
    assert lstm.quantile_midpoints(1).tolist() == [0.5]
    assert lstm.quantile_midpoints(51).tolist() == pytest.approx(midpoints(51), rel=1e-6)


HAND = ([[0, 2]], [[1, -1, 4]], [0.25, 0.75])  # quantiles, targets, taus


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kappa", "expected"),
    [
        # u = target - quantile   for q = 0: 1, -1, 4      for q = 2: -1, -3, 2
        # weight |tau - 1{u<0}|   tau 0.25: .25, .75, .25  tau 0.75: .25, .25, .75
        # |u|:  .25 * 1 + .75 * 1 + .25 * 4 = 2   and   .25 * 1 + .25 * 3 + .75 * 2 = 2.5
        (0, 4.5 / 6),
        # L / 1:  .5, .5, 3.5  and  .5, 2.5, 1.5:  .125 + .375 + .875  and  .125 + .625 + 1.125
        (1, (1.375 + 1.875) / 6),
        # L / 2:  .25, .25, 3  and  .25, 2, 1:  .0625 + .1875 + .75  and  .0625 + .5 + .75
        (2, (1.0 + 1.3125) / 6),
    ],
)
def test_quantile_huber_loss_worked_by_hand(kappa, expected, dtype):
    """Dabney et al. 2018b (IQN), eq. 3, divided by kappa; mean over both axes ours."""
    loss = lstm.quantile_huber_loss(*(tensor(x, dtype) for x in HAND), kappa)
    assert loss.dtype == dtype
    assert loss.tolist() == pytest.approx([expected])


def test_gradient_of_the_pinball_loss_worked_by_hand():
    """Dabney et al. 2018a, eq. 8: d/dq = -(tau - 1{u < 0}) / (K J).

    For q = 0: -.25 + .75 - .25 = .25; for q = 2: .25 + .25 - .75 = -.25.
    """
    quantiles, targets, taus = (tensor(x) for x in HAND)
    lstm.quantile_huber_loss(quantiles.requires_grad_(), targets, taus, 0.0).sum().backward()
    assert_close(quantiles.grad, tensor([[0.25, -0.25]]) / 6)


def slow_quantile_huber(
    quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float
) -> list[float]:
    """The double sum, one sample at a time."""
    losses = []
    for row, samples in zip(quantiles.tolist(), targets.tolist()):
        total = 0.0
        for q, tau in zip(row, taus.tolist()):
            for x in samples:
                weight = 1 - tau if x < q else tau
                error = abs(x - q)
                if kappa == 0:
                    total += weight * error
                elif error <= kappa:
                    total += weight * error**2 / (2 * kappa)
                else:
                    total += weight * (error - kappa / 2)
        losses.append(total / (len(row) * len(samples)))
    return losses


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kappa", [0, 0.01, 0.7, 1, 30])
@pytest.mark.parametrize(("K", "J"), [(7, 3), (2, 9), (1, 4), (5, 1), (1, 1)])
def test_quantile_huber_loss_is_the_double_sum(K, J, kappa, dtype):
    """Dabney et al. 2018a, eq. 8 to 10, over kappa: unsorted, with ties, K and J alike or not."""
    quantiles = torch.randn(4, K, dtype=dtype)
    targets = 3 * torch.randn(4, J, dtype=dtype)
    targets[1, 0] = quantiles[1, -1]
    arguments = (quantiles, targets, tensor(midpoints(K), dtype))
    copies = [x.clone() for x in arguments]
    loss = lstm.quantile_huber_loss(*arguments, kappa)
    expected = tensor(slow_quantile_huber(*arguments, kappa))
    assert loss.dtype == dtype
    assert_close(loss.double(), expected, **tolerance(dtype))
    assert all(x.equal(y) for x, y in zip(arguments, copies))


# ----------------------------------------------------------------- quantiles: properties and limits
@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 10.0])
def test_quantile_huber_loss_passes_gradcheck(kappa):
    """Dabney et al. 2018a, eq. 10: quadratic part, linear part, both sides."""
    quantiles = tensor([[0.3, -1.2, 2.1], [0.9, 0.1, -0.4]]).requires_grad_()
    targets = tensor([[1, -1.5], [-2, 0.6]])
    taus = tensor(midpoints(3))
    assert gradcheck(lambda q: lstm.quantile_huber_loss(q, targets, taus, kappa), quantiles)


@pytest.mark.parametrize("kappa", [1e-1, 1e-3, 1e-12, 1e-30])
def test_quantile_huber_loss_meets_the_pinball_loss_as_kappa_goes_to_zero(kappa):
    """Dabney et al. 2018b (IQN), eq. 3: over kappa, at most kappa / 2 away, and finite."""
    quantiles = torch.randn(3, 5, requires_grad=True)
    targets, taus = torch.randn(3, 2), tensor(midpoints(5))
    pinball = lstm.quantile_huber_loss(quantiles, targets, taus, 0.0)
    loss = lstm.quantile_huber_loss(quantiles, targets, taus, kappa)
    assert ((loss - pinball).abs() <= kappa / 2 + 1e-7).all()
    assert torch.autograd.grad(loss.sum(), quantiles)[0].isfinite().all()


@pytest.mark.parametrize(("tau", "expected"), [(0.9, 90), (0.1, 10), (0.25, 25), (0.75, 75)])
def test_pinball_minimiser_is_the_quantile_of_its_level(tau, expected):
    """Dabney et al. 2018a, eq. 8: u = target - predicted, so 0.9 of 0..100 is 90 and not 10."""
    candidates = torch.arange(101.0)[:, None]
    samples = torch.arange(101.0).expand(101, 101)
    losses = lstm.quantile_huber_loss(candidates, samples, tensor([tau], torch.float32), 0.0)
    assert int(losses.argmin()) == expected


@pytest.mark.parametrize("kappa", [0.0, 0.3])
def test_quantile_huber_loss_of_large_returns_keeps_its_digits(kappa):
    """Dabney et al. 2018a, eq. 8 to 10: around 8192, where float32 holds steps of 1 / 1024."""
    quantiles = torch.randint(-2000, 2000, (6, 9)) / 1024
    targets = torch.randint(-2000, 2000, (6, 51)) / 1024
    taus = lstm.quantile_midpoints(9)
    near = lstm.quantile_huber_loss(quantiles, targets, taus, kappa)
    far = lstm.quantile_huber_loss(quantiles + 8192, targets + 8192, taus, kappa)
    assert_close(far, near, rtol=0, atol=1e-6)  # exact inputs, errors of rounding only


def test_pinball_gradient_of_huge_errors_is_finite():
    """Dabney et al. 2018a, eq. 8: u = +-1e6, d loss / d q_i = -tau_i and 1 - tau_i, over K = 2."""
    taus = torch.tensor([0.25, 0.75])
    quantiles = torch.zeros(2, 2, requires_grad=True)
    targets = torch.tensor([[1e6], [-1e6]])
    lstm.quantile_huber_loss(quantiles, targets, taus, 0.0).sum().backward()
    assert_close(quantiles.grad, torch.tensor([[-0.125, -0.375], [0.375, 0.125]]))


@pytest.mark.parametrize("kappa", [0.0, 0.3])
def test_losses_of_the_rows_do_not_mix(kappa):
    """Dabney et al. 2018a, eq. 8 to 10: a permuted batch has permuted losses."""
    quantiles, targets = torch.randn(6, 6), torch.randn(6, 6)
    taus = tensor(midpoints(6), torch.float32)
    losses = lstm.quantile_huber_loss(quantiles, targets, taus, kappa)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = lstm.quantile_huber_loss(quantiles[order], targets[order], taus, kappa)
    assert permuted.equal(losses[order])


@pytest.mark.parametrize("kappa", [0.0, 0.3])
def test_rows_of_garbage_leave_the_other_losses_bit_equal(kappa):
    """Dabney et al. 2018a, eq. 8 to 10: rows appended behind change none ahead of them."""
    quantiles, targets = torch.randn(6, 6), torch.randn(6, 6)
    taus = tensor(midpoints(6), torch.float32)
    losses = lstm.quantile_huber_loss(quantiles, targets, taus, kappa)
    garbage = torch.full((2, 6), 1e9)
    longer = [torch.cat((x, garbage)) for x in (quantiles, targets)]
    assert lstm.quantile_huber_loss(*longer, taus, kappa)[:6].equal(losses)


@pytest.mark.parametrize("kappa", [0, 0.3])
def test_quantile_loss_takes_critics_and_time_as_batch_axes(kappa):
    """Dabney et al. 2018a, eq. 8 to 10: (2, 4, 3, K) beside (4, 3, J), every slice as if alone."""
    quantiles = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    targets = torch.randn(4, 3, 5, dtype=torch.float64)
    taus = tensor(midpoints(6))
    losses = lstm.quantile_huber_loss(quantiles, targets, taus, kappa)
    assert losses.shape == (2, 4, 3)
    for c, t in itertools.product(range(2), range(4)):
        alone = lstm.quantile_huber_loss(quantiles[c, t], targets[t], taus, kappa)
        assert_close(losses[c, t], alone)


@pytest.mark.parametrize("kappa", [0, 1])
def test_quantile_loss_stays_on_the_device(kappa):
    """Dabney et al. 2018a, eq. 8 to 10: nothing is built on the CPU for inputs elsewhere."""
    quantiles = torch.empty(4, 8, device="meta")
    targets = torch.empty(4, 3, device="meta")
    taus = torch.empty(8, device="meta")
    assert lstm.quantile_huber_loss(quantiles, targets, taus, kappa).is_meta


def test_default_flags_recover_the_quantiles_of_a_normal_distribution():
    """Dabney et al. 2018a, eq. 8 to 10: coverage within 2 points, CVaR_0.05 within 5 %.

    A large kappa would learn expectiles. CVaR_0.05 of N(0, 1) is -pdf(-1.645) / 0.05 = -2.0627.
    """
    args = lstm.Args()
    samples = normal_quantiles(999).float()[None]
    taus = lstm.quantile_midpoints(args.num_quantiles)
    quantiles = torch.zeros(1, args.num_quantiles, requires_grad=True)
    optimizer = torch.optim.Adam([quantiles], lr=0.1)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 150)
        optimizer.zero_grad()
        lstm.quantile_huber_loss(quantiles, samples, taus, args.kappa).sum().backward()
        optimizer.step()
    coverage = (samples <= quantiles.detach().T).float().mean(1)
    assert (coverage - taus).abs().max() < 0.02
    assert lstm.cvar(quantiles, 0.05).item() == pytest.approx(-2.0627, rel=0.05)


# ------------------------------------------------------------------------------ atoms: projection
def project_by_loops(probs: Tensor, source: Tensor, target: Tensor) -> np.ndarray:
    """Algorithm 1 of Bellemare et al. 2017 with loops and floor and ceiling."""
    probs, source, target = (x.double().numpy() for x in (probs, source, target))
    source = np.broadcast_to(source, probs.shape)
    dz = (target[-1] - target[0]) / (len(target) - 1)
    out = np.zeros((len(probs), len(target)))
    for b in range(len(probs)):
        for i in range(probs.shape[1]):
            z = min(max(source[b, i], target[0]), target[-1])
            position = (z - target[0]) / dz
            lower = min(math.floor(position), len(target) - 2)
            out[b, lower] += probs[b, i] * (lower + 1 - position)
            out[b, lower + 1] += probs[b, i] * (position - lower)
    return out


def test_projection_by_hand():
    """Bellemare et al. 2017, algorithm 1: on an atom, between atoms, outside on both sides."""
    probs = tensor([[0.1, 0.2, 0.3, 0.4]])
    source = tensor([1.0, 0.25, -7.0, 3.5])
    # 1.0 is atom 2: 0.1 there. 0.25 lies a quarter from atom 1 to 2: 0.15 and 0.05.
    # -7 is clipped to -1: 0.3 at atom 0. 3.5 is clipped to 3: 0.4 at atom 4.
    out = categorical.project_categorical(probs, source, ATOMS)
    assert_close(out, tensor([[0.3, 0.15, 0.15, 0, 0.4]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(7,), (6, 7)])
def test_projection_equals_the_loops(dtype, spread, shape):
    """Bellemare et al. 2017, algorithm 1: a narrow or wide source, shared or one per row."""
    probs = torch.randn(6, 7, dtype=dtype).softmax(-1)
    source = spread * torch.randn(shape, dtype=dtype) + 1
    target = torch.linspace(-2, 3, 11, dtype=dtype)
    out = categorical.project_categorical(probs, source, target)
    assert out.dtype == dtype
    expected = project_by_loops(probs, source, target)
    limit = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(out.double(), expected, atol=limit)
    assert_close(out.sum(-1), torch.ones(6, dtype=dtype))


def test_projection_keeps_the_mean_inside_the_support():
    """Bellemare et al. 2017, algorithm 1: sum p z stays, for sources that need no clipping."""
    probs = torch.randn(5, 9, dtype=torch.float64).softmax(-1)
    source = torch.rand(5, 9, dtype=torch.float64) * 4 - 1
    out = categorical.project_categorical(probs, source, ATOMS)
    assert_close((out * ATOMS).sum(-1), (probs * source).sum(-1))


def test_projection_onto_the_same_atoms_is_the_identity():
    """Bellemare et al. 2017, algorithm 1: in float32 no mass leaks through rounded indices."""
    atoms = torch.linspace(-20, 20, 51)
    probs = torch.randn(8, 51).softmax(-1)
    out = categorical.project_categorical(probs, atoms, atoms)
    assert_close(out, probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("shift", "edge"), [(1e4, 50), (-1e4, 0)])
def test_projection_puts_mass_beyond_the_support_on_its_edge(shift, edge):
    """Bellemare et al. 2017, algorithm 1: clipped, not dropped, from either end of the source."""
    atoms = torch.linspace(-20, 20, 51)
    ends = torch.eye(51)[[0, 50]]
    out = categorical.project_categorical(ends, atoms + shift, atoms)
    assert_close(out, torch.eye(51)[[edge, edge]])


def test_projection_has_gradients_in_probabilities_and_atoms():
    """Bellemare et al. 2017, algorithm 1: finite differences, away from the kinks at the atoms."""
    probs = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    source = tensor([[-0.7, 0.4, 1.3, 2.6], [0.2, 0.3, 2.2, 5.0], [-3.0, 1.6, 1.7, 2.9]])
    facts = (probs, source.requires_grad_(), ATOMS)
    assert gradcheck(categorical.project_categorical, facts)


def test_projection_does_without_all_pairs():
    """Bellemare et al. 2017, algorithm 1: no (B, K, K') tensor is kept for the gradient."""
    probs = torch.rand(3, 40, requires_grad=True)
    source = torch.randn(3, 40, requires_grad=True)
    facts = (probs, source, torch.linspace(-1, 1, 50))
    assert largest_kept(categorical.project_categorical, *facts) <= 3 * 50


def test_projection_of_what_is_no_number_is_no_number():
    """Ours: the finite check of the update names the fault, no index error comes ahead of it."""
    source = tensor([[0.5, math.nan]])
    out = categorical.project_categorical(tensor([[0.5, 0.5]]), source, ATOMS)
    assert out.isnan().any()


# ---------------------------------------------------------------- atoms: encodings, cross-entropy
def test_two_hot_by_hand():
    """Bellemare et al. 2017, algorithm 1, of a point mass: on an atom, between, outside."""
    out = categorical.two_hot(tensor([2.0, 0.3, 9.0, -9.0]), ATOMS)
    expected = [[0, 0, 0, 1, 0], [0, 0.7, 0.3, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert_close(out, tensor(expected))


@pytest.mark.parametrize("target", [0.4, 2.9])
def test_hl_gauss_by_hand(target):
    """Imani & White 2018; Farebrother et al. 2024: masses between the edges -1.5 ... 3.5."""
    normal = NormalDist(target, 0.8)
    edges = [-1.5, -0.5, 0.5, 1.5, 2.5, 3.5]
    inside = normal.cdf(3.5) - normal.cdf(-1.5)
    pairs = itertools.pairwise(edges)
    expected = [(normal.cdf(b) - normal.cdf(a)) / inside for a, b in pairs]
    out = categorical.hl_gauss(tensor([7.0, target]), ATOMS, 0.8)  # beside another target
    assert_close(out[1], tensor(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hl_gauss_of_a_far_target_is_that_of_the_edge(dtype):
    """Farebrother et al. 2024, targets clamped first (ours): no 0 / 0, the loss still pulls."""
    atoms = torch.linspace(-5, 5, 51, dtype=dtype)
    out = categorical.hl_gauss(tensor([1e6, -1e6, 5.0], dtype), atoms, 0.15)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert torch.equal(out[0], out[2])
    assert int(out[1].argmax()) == 0
    assert_close(out.sum(-1), torch.ones(3, dtype=dtype))


def test_cross_entropy_by_hand():
    """Bellemare et al. 2017, algorithm 1: -sum_k p_k log softmax_k.

    The softmax of (0, ln 3) is (1/4, 3/4): the loss is the entropy of (1/4, 3/4).
    """
    target = tensor([[0.25, 0.75]])
    logits = tensor([[0.0, math.log(3)]])
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    loss = categorical.categorical_cross_entropy(target, logits)
    assert float(loss) == pytest.approx(expected)


def test_cross_entropy_is_finite_for_huge_logits():
    """Bellemare et al. 2017, algorithm 1: where softmax rounds to 0, log softmax is -1000."""
    target = torch.tensor([[1.0, 0.0]])
    logits = torch.tensor([[-500.0, 500.0]])
    assert float(categorical.categorical_cross_entropy(target, logits)) == 1000


@pytest.mark.parametrize("script", [lstm, categorical])
@pytest.mark.parametrize(
    ("values", "returns"), [((3,), (3,)), ((3, 1), (3, 1)), ((1, 3, 1), (3, 1)), ((3, 1), (4,))]
)
def test_all_pairs_of_values_and_returns_are_refused(script, values, returns):
    """They would broadcast, and pull every V to the mean return. Critics may have an axis ahead."""
    with pytest.raises(ValueError, match=r"squared_error: values are .*; give \(\.\.\., 1\) and"):
        script.squared_error(torch.zeros(values), torch.zeros(returns))
    assert script.squared_error(torch.zeros(2, 3, 1), torch.ones(3)).tolist() == [[0.5] * 3] * 2
    assert script.squared_error(torch.zeros(2, 1), torch.tensor(2.0)).tolist() == [2.0, 2.0]


def test_each_state_may_have_levels_of_its_own():
    """As IQN draws them: (B, K) gives what each state has alone, also where J is K."""
    draws = torch.Generator().manual_seed(3)
    quantiles, targets, taus = (torch.rand(5, 4, generator=draws) for _ in range(3))
    together = lstm.quantile_huber_loss(quantiles, targets, taus, 0.1)
    alone = [lstm.quantile_huber_loss(*one, 0.1) for one in zip(quantiles, targets, taus)]
    assert_close(together, torch.stack(alone))


def test_quantile_huber_loss_refuses_other_levels_and_thresholds():
    """One level would stand for all quantiles; a threshold below 0 would pass for one of 0."""
    quantiles, targets = torch.zeros(3, 3), torch.zeros(3, 2)
    for taus in (torch.tensor([0.5]), lstm.quantile_midpoints(4), torch.rand(3, 1)):
        with pytest.raises(ValueError, match=r"taus are .* give a level for each"):
            lstm.quantile_huber_loss(quantiles, targets, taus, 1.0)
    with pytest.raises(ValueError, match=r"kappa is -1\.0; it must not be below 0"):
        lstm.quantile_huber_loss(quantiles, targets, lstm.quantile_midpoints(3), -1.0)


@pytest.mark.parametrize(
    ("targets", "quantiles"), [((1, 4), (1, 4, 3)), ((4, 1), (4, 1, 3)), ((5, 2), (4, 3))]
)
def test_samples_of_other_states_are_refused(targets, quantiles):
    """With one critic or one environment lambda-returns would broadcast as if they were samples. A
    critics' axis may stand ahead of the quantiles'."""
    taus = lstm.quantile_midpoints(3)
    with pytest.raises(ValueError, match="quantile_huber_loss: targets are"):
        lstm.quantile_huber_loss(torch.zeros(quantiles), torch.zeros(targets), taus, 1.0)
    loss = lstm.quantile_huber_loss(torch.zeros(2, 4, 3), torch.zeros(4, 5), taus, 1.0)
    assert loss.shape == (2, 4)


def test_all_pairs_of_logits_and_targets_are_refused():
    """Targets (B, 1, K), of returns (B, 1), beside logits (B, K)."""
    with pytest.raises(ValueError, match="categorical_cross_entropy: targets are"):
        categorical.categorical_cross_entropy(torch.zeros(4, 1, 3), torch.zeros(4, 3))
    assert categorical.categorical_cross_entropy(torch.zeros(4, 3), torch.zeros(2, 4, 3)).shape == (
        2,
        4,
    )


def test_one_number_for_each_state_is_no_set_of_samples():
    """Targets (B,) beside quantiles (B, K) would be B samples that all states share. Samples (J,)
    beside the quantiles (K,) of one state are none of the kind."""
    taus = lstm.quantile_midpoints(3)
    quantiles = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"targets are \(2,\) and quantiles \(2, 3\); give"):
        lstm.quantile_huber_loss(quantiles, torch.zeros(2), taus, 1.0)
    assert lstm.quantile_huber_loss(quantiles, torch.zeros(2, 1), taus, 1.0).shape == (2,)
    assert lstm.quantile_huber_loss(quantiles[0], torch.zeros(5), taus, 1.0).shape == ()
