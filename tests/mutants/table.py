"""The mutants: each a small wrong turn that somebody could take in good faith, and the test that must notice it.

The groups follow the table at the end of section 7 of the privacy review; each alternative in one of its rows is a
mutant of its own. Rows about code that is not here yet (perturbed objectives) come with it.
"""

from __future__ import annotations

from dataclasses import dataclass

NOISE, LAWS = "privacy/noise.py", "tests/privacy/test_noise.py::"
SEEDED = "privacy/seeded.py"
GRID, MECHANISMS = "privacy/grid.py", "privacy/mechanisms.py"
CALIBRATION, CALIBRATED = "privacy/calibration.py", "tests/privacy/test_calibration.py::"
LOSSES, COMPOSED = "privacy/losses.py", "tests/privacy/test_losses.py::"
VECTORS = "tests/privacy/test_review_vectors.py::"
ACCOUNTING, ACCOUNTED = "privacy/accounting.py", "tests/privacy/test_accounting.py::"
LEDGER, CHARGED = "storage/ledger.py", "tests/storage/test_ledger.py::"
CRASHED = "tests/storage/test_ledger_crash.py::"
KILLERS = "tests/mutants/test_killers.py::"
PARTS = "protocols/parts.py"
ADMM, PROXIMAL = "protocols/admm.py", "tests/protocols/test_admm.py::"
GG, TALKED = "tests/review/test_gg_findings.py::", "tests/conversations/test_admm_conversation.py::"
MASKS, LIES = "tests/secagg/test_masks.py::", "tests/secagg/test_lies.py::"
HTTP_ROUNDS, PHASES = (f"tests/server/test_masked_{name}.py::" for name in ("rounds", "phases"))
ROUNDS, SHARES, GRAPH = (f"tests/secagg/test_{name}.py::" for name in ("rounds", "shamir", "graph"))

DEVICE, MARKED = "tests/device/test_masked_device.py::", "tests/device/test_round_marks.py::"

MOMENTS, MOVED = "privacy/moments.py", "tests/privacy/test_moments.py::"
GRAM = "tests/protocols/test_gram.py::"
SHARED, COHORTS = "tests/privacy/test_skellam.py::", "tests/sim/test_cohorts.py::"
MASKED_SGD = "tests/protocols/test_sgd_masked.py::"
MLP, SCORES, BINARY = (f"models/{name}.py" for name in ("mlp", "scores", "binary"))
CLIPPED = "tests/models/test_clipping.py::"
LOCAL, STEPPED = "protocols/local_updates.py", "tests/protocols/test_local_updates.py::"
NOISES, SCHEDULED = "tests/protocols/test_noise_schedules.py::", "tests/loopback/test_schedule_loop.py::"
MEAN, MEANT = "sim/trusted_mean.py", "tests/sim/test_trusted_mean.py::"
H17, TRUSTED = "tests/review/test_h17_findings.py::", "tests/sim/test_trusted.py::"
PLLP, PL = "protocols/proportions.py", "tests/review/test_pl_findings.py::"
PUBLISHED_PLLP = "sim/published_proportions.py"
RELAY, RELAYED = "server/relay.py", "tests/server/test_relay.py::"
LETTERS, STORED = "storage/server/letters.py", "tests/storage/server/test_server_letters.py::"
PEERING = "tests/device/test_peering.py::"
VALIDATION, LOOKED = "server/validation.py", "tests/server/test_validation.py::"
LOOKS, KEPT = "storage/server/looks.py", "tests/storage/server/test_server_looks.py::"


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in `file` (a path within the package) and becomes `new`; `test` must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def applied(self, source: str) -> str:
        found = source.count(self.old)
        if found != 1:
            raise SystemExit(
                f"mutant {self.name!r}: its old text occurs {found} times in src/crowdml/{self.file}, not once. "
                f"The source has moved on; bring tests/mutants/table.py up to date:\n{self.old}"
            )
        return source.replace(self.old, self.new)


MUTANTS: tuple[Mutant, ...] = (
    # --- scale or sigma halved; sqrt(2) confusion; variance for sd ---
    Mutant(
        "laplace scale halved",
        NOISE,
        "    m = _block(scale)\n",
        "    scale = scale / 2\n    m = _block(scale)\n",
        f"{LAWS}test_mean_absolute_laplace_noise_is_the_scale[scale0]",
    ),
    Mutant(
        "laplace scale over sqrt 2",
        NOISE,
        "    m = _block(scale)\n",
        "    scale = scale * Fraction(7071, 10000)\n    m = _block(scale)\n",
        f"{LAWS}test_mean_absolute_laplace_noise_is_the_scale[scale0]",
    ),
    Mutant(
        "gaussian sigma halved",
        NOISE,
        "_tabled(DiscreteGaussian(sigma))",
        "_tabled(DiscreteGaussian(sigma / 2))",
        f"{LAWS}test_sample_deviation_of_gaussian_noise_is_sigma[sigma0]",
    ),
    Mutant(
        "gaussian variance for sigma",
        NOISE,
        "_tabled(DiscreteGaussian(sigma))",
        "_tabled(DiscreteGaussian(min(sigma**2, Fraction(LARGEST))))",
        f"{LAWS}test_sample_deviation_of_gaussian_noise_is_sigma[sigma0]",
    ),
    Mutant(
        "skellam share of half the deviation",
        NOISE,
        "Skellam(variance / draws))",
        "Skellam(variance / draws / 4))",
        f"{LAWS}test_sample_variance_of_skellam_noise_is_its_variance_even_beyond_one_draw[variance0]",
    ),
    Mutant(
        "simulated laplace scale halved",
        SEEDED,
        "self._sample(DiscreteLaplace(scale), like)",
        "self._sample(DiscreteLaplace(scale / 2), like)",
        f"{KILLERS}test_seeded_noise_has_the_scale_that_it_was_asked_for",
    ),
    Mutant(
        "simulated noise with too many zeros",
        SEEDED,
        "mass[1:] *= 2  # of |X|",
        "mass[1:] *= 1",
        f"{KILLERS}test_seeded_noise_is_zero_as_often_as_its_law_says",
    ),
    Mutant(
        "calibrated laplace scale halved",
        CALIBRATION,
        "return Fraction(sensitivity) / Fraction(epsilon)",
        "return Fraction(sensitivity) / Fraction(epsilon) / 2",
        f"{VECTORS}test_H1_laplace_scale",
    ),
    Mutant(
        "calibrated sigma over sqrt 2",
        CALIBRATION,
        "Fraction(sensitivity) ** 2 / (2 * Fraction(rho))",
        "Fraction(sensitivity) ** 2 / (4 * Fraction(rho))",
        f"{CALIBRATED}test_a_sigma_that_is_rational_is_not_rounded",
    ),
    Mutant(
        "calibrated variance for sigma",
        CALIBRATION,
        "return Fraction(math.isqrt(scaled - 1) + 1, 2**shift)",
        "return Fraction(scaled, 4**shift)",
        f"{CALIBRATED}test_a_sigma_that_is_rational_is_not_rounded",
    ),
    Mutant(
        "calibrated sigma rounded down",
        CALIBRATION,
        "math.isqrt(scaled - 1) + 1",
        "math.isqrt(scaled - 1)",
        f"{CALIBRATED}test_a_sigma_that_is_rational_is_not_rounded",
    ),
    Mutant(
        "rho rounded up",
        CALIBRATION,
        "    rho = math.floor(largest / unit) * unit\n"
        "    while exact(Total.of([ZCDP(rho)]).epsilon(delta)) > budget:"
        "  # the float conversion has its own safety margin\n"
        "        rho -= unit\n",
        "    rho = math.ceil(largest / unit) * unit\n",
        f"{KILLERS}test_a_rho_made_for_a_budget_is_within_it",
    ),
    # --- 4/b to 2/b; 2 sqrt(2) to sqrt(2); label counts 2 to 1; b to n_s ---
    Mutant(
        "4/b to 2/b: one clip for two",
        MECHANISMS,
        "L1(Fraction(2 * self.clip), self.adjacency)",
        "L1(Fraction(self.clip), self.adjacency)",
        f"{KILLERS}test_the_noise_of_a_grid_laplace_is_worth_its_epsilon_on_the_worst_neighbours",
    ),
    Mutant(
        "2 sqrt 2 to sqrt 2: one clip for two",
        MECHANISMS,
        "L2(Fraction(2 * self.clip), self.adjacency)\n\n    @cached_property\n    def sigma",
        "L2(Fraction(self.clip), self.adjacency)\n\n    @cached_property\n    def sigma",
        f"{KILLERS}test_the_noise_of_a_grid_gaussian_is_worth_its_rho_on_the_worst_neighbours",
    ),
    Mutant(
        "4/b to 2/b: l1 bound of a softmax gradient halved",
        "models/softmax.py",
        "(2.0 if norm",
        "(1.0 if norm",
        f"{KILLERS}test_no_gradient_is_longer_than_its_bound",
    ),
    Mutant(
        "2 sqrt 2 to sqrt 2: l2 bound of a softmax gradient is 1",
        "models/softmax.py",
        "else math.sqrt(2.0))",
        "else 1.0)",
        f"{KILLERS}test_no_gradient_is_longer_than_its_bound",
    ),
    Mutant(
        "bound of a linear gradient without its width",
        "models/linear.py",
        "return self.width * radius",
        "return radius",
        f"{KILLERS}test_no_gradient_is_longer_than_its_bound",
    ),
    # --- what is clipped, and what a bias adds ---
    Mutant(
        "ghost norm without the biases",
        MLP,
        "(_square(a) + 1) * _square(slope)",
        "_square(a) * _square(slope)",
        f"{CLIPPED}test_the_length_of_a_gradient_counts_its_weights_and_its_biases[biases]",
    ),
    Mutant(
        "ghost norm without what enters a layer",
        MLP,
        "(_square(a) + 1) * _square(slope)",
        "_square(slope)",
        f"{CLIPPED}test_the_length_of_a_gradient_counts_its_weights_and_its_biases[weights]",
    ),
    Mutant(
        "ghost norm of the last layer alone",
        MLP,
        "for a, slope in zip(entering, slopes, strict=True))\n            factor",
        "for a, slope in zip(entering[-1:], slopes[-1:], strict=True))\n            factor",
        f"{CLIPPED}test_each_share_of_a_clipped_sum_is_the_gradient_or_as_long_as_the_clip",
    ),
    Mutant(
        "derivative of tanh without its square",
        MLP,
        "back * (1 - a * a)",
        "back * (1 - a)",
        f"{CLIPPED}test_a_perceptrons_gradient_is_the_slope_of_its_loss",
    ),
    Mutant(
        "derivative of a sigmoid without its first factor",
        MLP,
        "back * (a * (1 - a))",
        "back * (1 - a)",
        f"{CLIPPED}test_a_perceptrons_gradient_is_the_slope_of_its_loss",
    ),
    Mutant(
        "a ReLU that lets every slope back",
        MLP,
        "return xp.where(a > 0, back, 0)",
        "return xp.where(a >= 0, back, 0)",
        f"{CLIPPED}test_a_perceptrons_gradient_is_the_slope_of_its_loss",
    ),
    Mutant(
        "short gradients stretched to the clip",
        SCORES,
        "clip / xp.maximum(xp.sqrt(xp.where(usable, squares, 0)), clip)",
        "clip / xp.sqrt(xp.where(usable, squares, 1))",
        f"{CLIPPED}test_each_share_of_a_clipped_sum_is_the_gradient_or_as_long_as_the_clip",
    ),
    Mutant(
        "a clipped sum that is not clipped",
        SCORES,
        "clip / xp.maximum(xp.sqrt(xp.where(usable, squares, 0)), clip)",
        "xp.minimum(1, clip / clip)",
        f"{CLIPPED}test_each_share_of_a_clipped_sum_is_the_gradient_or_as_long_as_the_clip",
    ),
    Mutant(
        "clipped by the slope alone",
        SCORES,
        "shrinking(squares * (slope * slope",
        "shrinking((slope * slope",
        f"{CLIPPED}test_each_share_of_a_clipped_sum_is_the_gradient_or_as_long_as_the_clip",
    ),
    Mutant(
        "a squared slope that vanishes hides a length",
        MLP,
        "return (rows * rows).sum(-1) + rows.shape[-1] * np.finfo(rows.dtype).tiny",
        "return (rows * rows).sum(-1)",
        f"{CLIPPED}test_a_slope_whose_square_vanishes_is_clipped_all_the_same",
    ),
    Mutant(
        "an unknown label moves a perceptron",
        MLP,
        "return xp.where(known, odds / odds",
        "return xp.where(known | True, odds / odds",
        f"{CLIPPED}test_what_cannot_be_used_adds_nothing_to_a_clipped_sum",
    ),
    Mutant(
        "l2 bound with a bias is that without",
        BINARY,
        "else math.hypot(radius, 1)",
        "else radius",
        f"{CLIPPED}test_no_gradient_is_longer_than_its_bound_with_a_bias_and_some_come_near",
    ),
    Mutant(
        "l1 bound with a bias is that without",
        BINARY,
        "return radius + 1 if norm",
        "return radius if norm",
        f"{CLIPPED}test_no_gradient_is_longer_than_its_bound_with_a_bias_and_some_come_near",
    ),
    # --- counts ---
    Mutant(
        "label counts 2 to 1",
        "protocols/sgd.py",
        "L1(Fraction(2)), epsilon",
        "L1(Fraction(1)), epsilon",
        f"{KILLERS}test_a_check_in_moves_by_no_more_than_its_noise_hides_and_by_nearly_that_much[discrete-laplace-l1]",
    ),
    Mutant(
        "counts in many cells noised for one",
        MECHANISMS,
        "if cells > 1 and self.sensitivity.bound < 2:",
        "if cells > 1 and self.sensitivity.bound < 1:",
        f"{KILLERS}test_counts_in_several_cells_are_never_noised_for_one",
    ),
    Mutant(
        "error count noised for two",
        "protocols/sgd.py",
        "L1(Fraction(1)), proved",
        "L1(Fraction(2)), proved",
        f"{KILLERS}test_a_check_in_moves_by_no_more_than_its_noise_hides_and_by_nearly_that_much[discrete-laplace-l1]",
    ),
    Mutant(
        "a sample in several cells",
        MECHANISMS,
        'norm="l1", clip=1)\n        return total + noise.discrete_laplace',
        'norm="l1", clip=4)\n        return total + noise.discrete_laplace',
        f"{KILLERS}test_the_noise_of_counts_is_worth_its_epsilon_on_the_worst_neighbours[3]",
    ),
    Mutant(
        "b to n_s: a batch of all that waits",
        "buffer.py",
        "for _ in range(self._batch)",
        "for _ in range(len(self._waiting))",
        f"{KILLERS}test_a_batch_always_has_as_many_samples_as_the_task_says_and_each_serves_once",
    ),
    Mutant(
        "randomised response after the paper",
        MECHANISMS,
        "odds = math.exp(-float(self.epsilon))",
        "odds = math.exp(-float(self.epsilon) / 2)",
        f"{KILLERS}test_randomised_response_keeps_a_label_as_often_as_its_epsilon_allows[3]",
    ),
    Mutant(
        "randomised response keeps one word too many",
        MECHANISMS,
        "like=labels) < self.keep",
        "like=labels) <= self.keep",
        f"{KILLERS}test_randomised_response_keeps_exactly_the_words_below_its_probability",
    ),
    # --- exp/log swap; float noise; `random` for the operating system's entropy ---
    Mutant(
        "exp for log",
        NOISE,
        "        negative = self._draw(signs, size)[0]\n",
        "        negative = self._draw(signs, size)[0]\n"
        "        g = np.rint(float(scale) * np.exp((g + 1) / (g.max(initial=0) + 2) - 0.35)).astype(np.int64)\n",
        f"{LAWS}test_noise_fills_forty_equiprobable_cells_as_its_law_says[DiscreteLaplace(scale=Fraction(301, 3))]",
    ),
    Mutant(
        "float noise",
        NOISE,
        ".astype(np.int32).reshape(np.shape(like))",
        ".astype(np.float32).reshape(np.shape(like))",
        f"{LAWS}test_a_uniform_choice_is_uniform[3]",
    ),
    Mutant(
        "random for the entropy of the system",
        NOISE,
        "bytes] = os.urandom",
        'bytes] = __import__("random").randbytes',
        f"{LAWS}test_entropy_comes_from_the_operating_system_and_there_is_no_seed",
    ),
    Mutant(
        "one draw for all coordinates",
        NOISE,
        "words = self._words(size)\n        if size",
        "words = np.resize(self._words(min(size, 1)), size)\n        if size",
        f"{LAWS}test_mean_absolute_laplace_noise_is_the_scale[scale0]",
    ),
    Mutant(
        "ties decided too soon",
        NOISE,
        "prefix - table[place] < 2:",
        "prefix - table[place] < 0:",
        f"{LAWS}test_a_draw_that_ties_with_a_threshold_is_decided_by_its_later_bits",
    ),
    Mutant(
        "ties decided too soon among many",
        NOISE,
        "prefix - law.array[found] < _TWO",
        "prefix - law.array[found] < np.uint64(0)",
        f"{LAWS}test_many_draws_are_decided_as_one_is",
    ),
    Mutant(
        "small numbers favoured",
        NOISE,
        "fair = 2**64 - 2**64 % n",
        "fair = 2**64",
        f"{LAWS}test_words_that_would_favour_small_numbers_are_drawn_again",
    ),
    Mutant(
        "noise shared by two releases",
        SEEDED,
        "        self.draw += 1\n",
        "",
        f"{KILLERS}test_two_releases_of_a_step_never_share_their_noise",
    ),
    # --- noise added before clipping; nan passed on; what the grid rests on ---
    Mutant(
        "laplace noise added before clipping",
        MECHANISMS,
        "return total + noise.discrete_laplace(self.scale, like=total)\n\n\ndef _contributions",
        "noisy = total + noise.discrete_laplace(self.scale, like=total)\n"
        '        return self.grid.sum(self.grid.decode(noisy)[None], norm="l1", clip=self.clip)'
        "\n\n\ndef _contributions",
        f"{KILLERS}test_noise_is_added_after_clipping[GridLaplace]",
    ),
    Mutant(
        "gaussian noise added before clipping",
        MECHANISMS,
        'norm="l2", clip=self.clip)\n        return total + noise.discrete_gaussian(self.sigma, like=total)',
        'norm="l2", clip=self.clip)\n        noisy = total + noise.discrete_gaussian(self.sigma, like=total)\n'
        '        return self.grid.sum(self.grid.decode(noisy)[None], norm="l2", clip=self.clip)',
        f"{KILLERS}test_noise_is_added_after_clipping[GridGaussian]",
    ),
    Mutant(
        "a contribution that is not clipped",
        GRID,
        "factor = xp.where(size > clip, clip / xp.maximum(size, clip), 1.0)",
        "factor = 1.0",
        f"{KILLERS}test_a_row_that_is_too_long_is_shortened_and_not_dropped",
    ),
    Mutant(
        "the grid rounds where it should truncate",
        GRID,
        "steps = (scaled * factor).astype(xp.int32)",
        "steps = xp.rint(scaled * factor).astype(xp.int32)",
        f"{KILLERS}test_the_grid_truncates_toward_zero_and_so_never_raises_a_norm",
    ),
    Mutant(
        "integer norms not checked",
        GRID,
        "return xp.where(within & usable, steps, 0).sum(0, dtype=xp.int32)",
        "return xp.where(usable, steps, 0).sum(0, dtype=xp.int32)",
        f"{KILLERS}test_a_row_that_floats_take_for_short_enough_counts_as_zero",
    ),
    Mutant(
        "nan passed on by the grid",
        GRID,
        "return xp.where(within & usable, steps, 0)",
        "return xp.where(within | (size != size), steps, 0)",
        f"{KILLERS}test_a_row_with_an_entry_that_is_not_finite_counts_as_zero[nan]",
    ),
    Mutant(
        "grid: integers wrap round on an accelerator",
        GRID,
        'return rows.dtype == np.int32 and rows.shape[-1] * (clip + 1) ** (1 if norm == "l1" else 2) < 2**31',
        'return rows.dtype.kind in "iu"',
        "tests/privacy/test_grid.py::"
        "test_integers_of_any_type_stay_within_the_clip_where_their_norm_would_wrap_round[46000-int32-l2-jax]",
    ),
    Mutant(
        "nan passed on by the buffer",
        "buffer.py",
        "x if np.isfinite(x).all() else np.zeros_like(x)",
        "x",
        f"{KILLERS}test_a_sample_that_is_not_finite_waits_as_the_zero_sample[nan]",
    ),
    Mutant(
        "nan passed on by a model",
        "models/softmax.py",
        "usable = (residual == residual).all(-1, keepdims=True)",
        "usable = (residual == residual).all(-1, keepdims=True) | True",
        f"{KILLERS}test_no_published_weights_make_a_gradient_that_is_no_number[nan-softmax]",
    ),
    # --- a sample used twice with one charge ---
    Mutant(
        "sample used twice: a second answer from the same batch",
        "protocols/sgd.py",
        "return Step(None, (Send(SERVER, Gradient(",
        "return Step(waiting, (Send(SERVER, Gradient(",
        f"{KILLERS}test_a_repeated_publication_is_not_answered_from_the_same_samples",
    ),
    Mutant(
        "sample used twice: the buffer keeps what it gave",
        "buffer.py",
        "self._waiting.popleft() for _ in range(self._batch)",
        "self._waiting[i] for i in range(self._batch)",
        f"{KILLERS}test_a_batch_always_has_as_many_samples_as_the_task_says_and_each_serves_once",
    ),
    Mutant(
        "sample used twice: a retry is drawn anew under the old charge",
        LEDGER,
        "return found.fetchone() is not None",
        "return found is None",
        f"{CHARGED}test_resending_the_same_bytes_is_free_and_drawing_again_is_a_second_charge",
    ),
    Mutant(
        "sample used twice: a second pass is charged like the first",
        "storage/spans.py",
        "paid = sums.add(paid, span[2])",
        "paid = span[2]",
        f"{CHARGED}test_parts_of_one_check_in_cost_each_sample_only_what_used_it",
    ),
    Mutant(
        "sample used twice: equal charges count once",
        LEDGER,
        "return Total.of([loss]).scaled(times)",
        "return Total.of([loss])",
        f"{CHARGED}test_five_uses_of_one_span_cost_five_and_the_sixth_is_refused_at_a_budget_of_five",
    ),
    Mutant(
        "serials handed out twice",
        LEDGER,
        "(first + n, self.device)",
        "(first, self.device)",
        f"{CHARGED}test_serials_are_per_device_and_never_handed_out_twice",
    ),
    Mutant(
        "overlapping rows of a check-in not added",
        "protocol.py",
        "lost for covers, lost in rows if covers.start <= edge < covers.stop",
        "lost for covers, lost in rows if covers.start == edge",
        f"{KILLERS}test_a_sample_pays_for_everything_that_used_it",
    ),
    # --- T epsilon summed as epsilon; the accountant's neighbours; conversions ---
    Mutant(
        "T epsilon summed as epsilon",
        LOSSES,
        "self.pure + other.pure,",
        "max(self.pure, other.pure),",
        f"{KILLERS}test_releases_one_after_the_other_add_up",
    ),
    Mutant(
        "T passes priced as one",
        LOSSES,
        "Total(n * self.pure,",
        "Total(self.pure,",
        f"{VECTORS}test_H2_five_passes_cost_five_times_epsilon",
    ),
    Mutant(
        "T rho summed as rho",
        LOSSES,
        "self.zcdp + other.zcdp,",
        "max(self.zcdp, other.zcdp),",
        f"{KILLERS}test_releases_one_after_the_other_add_up",
    ),
    Mutant(
        "epsilon^2 for epsilon^2 / 2",
        LOSSES,
        "squares=epsilon * epsilon / 2",
        "squares=epsilon * epsilon",
        f"{COMPOSED}test_many_small_pure_losses_cost_less_as_zcdp_than_added",
    ),
    Mutant(
        "epsilon^2 / 4 for epsilon^2 / 2",
        LOSSES,
        "squares=epsilon * epsilon / 2",
        "squares=epsilon * epsilon / 4",
        f"{COMPOSED}test_many_small_pure_losses_cost_less_as_zcdp_than_added",
    ),
    Mutant(
        "group privacy b for b^2",
        LOSSES,
        "return ZCDP(k * k * rho)",
        "return ZCDP(k * rho)",
        f"{VECTORS}test_R10_one_check_in_of_20_samples_at_0_9_costs_the_device_27_8",
    ),
    Mutant(
        "the device pays for one sample",
        LOSSES,
        "return Pure(k * epsilon)",
        "return Pure(epsilon)",
        f"{VECTORS}test_H8_a_device_of_60_samples_pays_60_times_epsilon",
    ),
    Mutant(
        "a filter that looks before the release and not after",
        LOSSES,
        "after = total + cost",
        "after = total + Total()",
        f"{COMPOSED}test_a_filter_allows_pure_losses_up_to_their_exact_sum",
    ),
    Mutant(
        "a filter that refuses the last release it could allow",
        LOSSES,
        "after.pure <= self.epsilon",
        "after.pure < self.epsilon",
        f"{COMPOSED}test_a_filter_allows_pure_losses_up_to_their_exact_sum",
    ),
    Mutant(
        "add/remove accountant on replace-one: Renyi",
        ACCOUNTING,
        "multiplier = multiplier / 2.0",
        "multiplier = multiplier / 1.0",
        f"{ACCOUNTED}test_replace_one_doubles_the_sensitivity_whichever_accountant_is_asked",
    ),
    Mutant(
        "add/remove accountant on replace-one: loss distributions",
        ACCOUNTING,
        "relation = library.NeighboringRelation[neighbours.name]",
        "relation = library.NeighboringRelation.ADD_OR_REMOVE_ONE",
        f"{ACCOUNTED}test_replace_one_doubles_the_sensitivity_whichever_accountant_is_asked",
    ),
    Mutant(
        "classical gaussian at epsilon 10: not refused",
        CALIBRATION,
        "if epsilon >= 1.0 and not as_published:",
        "if epsilon >= 100.0 and not as_published:",
        f"{CALIBRATED}test_the_classical_formula_is_refused_where_it_is_not_proved",
    ),
    Mutant(
        "classical gaussian at epsilon 10: in the place of the analytic one",
        CALIBRATION,
        "return _first(lambda sigma: sigma > 0.0 and gdp_delta(epsilon, 1.0 / sigma) <= delta, 1.0)",
        "return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon",
        f"{VECTORS}test_row_analytic_sigma[setting3-0.541087]",
    ),
    Mutant(
        "shuffled batches accounted as Poisson",
        ACCOUNTING,
        "if sampler is Sampler.POISSON and 0.0 < rate <= 1.0:",
        "if sampler is not Sampler.EVERYTHING and 0.0 < rate <= 1.0:",
        f"{ACCOUNTED}test_shuffled_and_consecutive_batches_are_never_accounted_as_poisson",
    ),
    # --- the label-triggered check-in ---
    Mutant(
        "label-triggered check-in: no check-out while the label stays",
        "protocol.py",
        "return Step(event.batch, (CheckOut(),))",
        "labels = event.batch._value.y\n    return Step(event.batch, (CheckOut(),) if labels[0] != labels[-1] else ())",
        f"{KILLERS}test_what_a_device_does_has_the_same_shape_on_all_neighbours",
    ),
    Mutant(
        "label-triggered check-in: a handler looks into the batch",
        "protocol.py",
        "return Step(event.batch, (CheckOut(),))",
        "labels = event.batch._value.y\n    return Step(event.batch, (CheckOut(),) if labels[0] != labels[-1] else ())",
        "tests/test_source.py::test_only_the_door_looks_into_a_private_value[protocol.py]",
    ),
    Mutant(
        "a private value decides a branch",
        "privacy/private.py",
        'raise LeakError("A Private value decides no branch: what a device does must not depend on its samples.")',
        "return bool(self._value)",
        "tests/privacy/test_private.py::test_a_private_value_decides_no_branch",
    ),
    # --- the door and the seal ---
    Mutant(
        "the door does not record",
        "privacy/door.py",
        "self.passages.append(Passage(row, mechanism, private.part, self.trip))",
        "Passage(row, mechanism, private.part, self.trip)",
        "tests/privacy/test_door.py::test_what_passes_the_door_is_a_release_and_a_passage",
    ),
    Mutant(
        "the door lets out rows that were not priced",
        "privacy/door.py",
        "if not private.part.within(mechanism.covers):",
        "if private.part.size > mechanism.covers.size:",
        "tests/privacy/test_door.py::test_rows_that_the_table_does_not_cover_are_refused[part3]",
    ),
    Mutant(
        "the door lets a row out twice and prices it once",
        "privacy/door.py",
        "if any(passage.row == row for passage in self.passages):",
        "if len(self.passages) > len(self.table):",
        "tests/privacy/test_door.py::test_a_row_is_let_out_once_a_step_since_it_is_priced_once",
    ),
    Mutant(
        "the door lets out what is not one row a sample",
        "privacy/door.py",
        "if rows != (wanted,):",
        "if rows == ():",
        "tests/privacy/test_door.py::test_a_value_that_has_not_one_row_a_sample_is_refused",
    ),
    Mutant(
        "the seal does not check the stamp",
        "messages.py",
        "value._stamp is not door.stamp",
        "value._stamp is None",
        f"{KILLERS}test_a_release_of_another_step_is_not_sealed",
    ),
    Mutant(
        "the seal lets a Private through",
        "messages.py",
        "    if isinstance(value, Private):\n",
        "    if isinstance(value, Private) and door.table is None:\n",
        f"{KILLERS}test_a_private_value_is_not_sealed",
    ),
    Mutant(
        "a message may have a field of a plain type",
        "messages.py",
        "if _is_public(hint) or _is(Release, hint) or _is(Masked, hint):",
        "if _is_public(hint) or _is(Release, hint) or _is(Masked, hint) or hint is int:",
        f"{KILLERS}test_a_message_with_a_field_of_a_plain_type_cannot_be_declared",
    ),
    Mutant(
        "a release made by hand",
        "privacy/private.py",
        'if not isinstance(stamp, Stamp):\n            raise LeakError(\n                "A Release',
        'if stamp is Ellipsis:\n            raise LeakError(\n                "A Release',
        "tests/privacy/test_private.py::test_a_release_made_by_hand_is_refused",
    ),
    Mutant(
        "a mapped value may be split",
        "privacy/private.py",
        "        if not self._rows:\n",
        "        if self._rows is None:\n",
        "tests/privacy/test_private.py::test_a_value_that_was_mapped_cannot_be_split_since_its_rows_may_have_mixed",
    ),
    # --- the ledger ---
    Mutant(
        "charge after send",
        LEDGER,
        "            if step is not None:\n                self._add(",
        "            for seq, body in (outbox or {}).items():\n"
        '                write("insert into outbox (device, task, seq, body) values (?, ?, ?, ?)",'
        " (self.device, task, seq, body))\n"
        '            outbox = write("commit") and write("begin immediate") and None\n'
        "            if step is not None:\n                self._add(",
        f"{CRASHED}test_a_file_cut_between_any_two_writes_of_a_step_holds_the_step_whole_or_not_at_all",
    ),
    Mutant(
        "sent and never charged",
        LEDGER,
        "executemany(_INSERT_CHARGE, [(*_row(charge), self.device) for charge in charges])",
        "executemany(_INSERT_CHARGE, [])",
        f"{CHARGED}test_a_charge_comes_back_as_it_was_written",
    ),
    Mutant(
        "nothing asked of the budget",
        LEDGER,
        "            self._check(task, charges, budgets, step, None, 0 if take is None else len(take))\n",
        "",
        f"{CHARGED}test_five_uses_of_one_span_cost_five_and_the_sixth_is_refused_at_a_budget_of_five",
    ),
    Mutant(
        "the sample cap forgets what was given",
        LEDGER,
        "if new > max(0, samples_left):",
        "if new > budget.samples:",
        f"{CHARGED}test_a_hundred_fresh_check_ins_leave_the_dearest_sample_raise_the_device_and_stop_at_the_sample_cap",
    ),
    Mutant(
        "the sample cap refuses the last batch",
        LEDGER,
        "if new > max(0, samples_left):",
        "if new >= max(0, samples_left):",
        f"{CHARGED}test_five_uses_of_one_span_cost_five_and_the_sixth_is_refused_at_a_budget_of_five",
    ),
    Mutant(
        "charges of a step checked one by one",
        LEDGER,
        "        self.shape = _shape(map(_priced, charges))[1]\n",
        "        self.shape = _shape(map(_priced, charges[:1]))[1]\n",
        f"{CHARGED}test_two_charges_of_one_step_are_checked_together",
    ),
    Mutant(
        "a charge may be edited",
        "storage/device/0003_charge.sql",
        "create trigger charge_is_never_edited before update on charge\n"
        "begin select raise(abort, 'a charge is never edited'); end;",
        "",
        f"{CHARGED}test_what_was_written_is_never_edited_deleted_or_replaced",
    ),
    Mutant(
        "not written through to the disk",
        LEDGER,
        '"synchronous = full"',
        '"synchronous = off"',
        f"{CRASHED}test_a_ledger_is_written_through_to_the_disk",
    ),
    # --- found by review: the dearest sample, bare values, wrapped integers ---
    Mutant(
        "the dearest sample is found at one use",
        "protocol.py",
        "    scaled = [total.scaled(uses) for total in totals]\n"
        "    return max(scaled, key=lambda total: total.epsilon(delta), default=Total.of([]))",
        "    return max(totals, key=lambda total: total.epsilon(delta), default=Total.of([])).scaled(uses)",
        "tests/test_protocol.py::test_which_sample_is_dearest_depends_on_the_uses_and_on_delta",
    ),
    Mutant(
        "the dearest sample is found at a fixed delta",
        "protocol.py",
        "    return max(scaled, key=lambda total: total.epsilon(delta), default=Total.of([]))",
        "    return max(scaled, key=lambda total: total.epsilon(1e-6), default=Total.of([]))",
        "tests/test_protocol.py::test_which_sample_is_dearest_depends_on_the_uses_and_on_delta",
    ),
    Mutant(
        "the seal takes a bare value for a release",
        "messages.py",
        "            if optional is None or isinstance(value, kind) or (value is None and optional):",
        "            if kind is Release or optional is None or isinstance(value, kind) or (value is optional is None):",
        "tests/test_messages.py::test_a_bare_value_in_a_released_field_is_refused",
    ),
    Mutant(
        "an entry that wraps round passes the norm check",
        GRID,
        "        rows = rows.astype(xp.result_type(rows.dtype, xp.float32))  # half a float would overflow below\n",
        "",
        "tests/privacy/test_grid.py::test_half_floats_and_entries_at_the_edge_of_an_integer_stay_within_the_clip[l2]",
    ),
    # --- mask sign dropped, mask reused, tag missing; and what a device must refuse ---
    Mutant(
        "mask sign dropped",
        "secagg/device.py",
        "1 if me < peer else -1",
        "1",
        f"{MASKS}test_both_ends_of_a_pair_have_one_key_and_opposite_signs",
    ),
    Mutant(
        "pair mask without its tag",
        "secagg/masks.py",
        'derive(secret, salt, "pair", low, high, tag)',
        'derive(secret, salt, "pair", low, high)',
        f"{MASKS}test_G9_the_same_keys_in_another_round_cohort_or_task_give_another_mask",
    ),
    Mutant(
        "self-mask without its tag",
        "secagg/masks.py",
        'derive(seed, salt, "self", device, tag)',
        'derive(seed, salt, "self", device)',
        f"{MASKS}test_G9_the_same_keys_in_another_round_cohort_or_task_give_another_mask",
    ),
    Mutant(
        "mask reused in every round",
        "secagg/masks.py",
        "pack([self.task, self.round, self.view])",
        "pack([self.task, self.view])",
        f"{MASKS}test_G9_the_same_keys_in_another_round_cohort_or_task_give_another_mask",
    ),
    Mutant(
        "mask reused in every cohort",
        "secagg/masks.py",
        "pack([self.task, self.round, self.view])",
        "pack([self.task, self.round])",
        f"{LIES}test_masks_of_devices_that_were_shown_different_cohorts_do_not_cancel",
    ),
    Mutant(
        "no self-mask",
        "secagg/device.py",
        "keys = [(masks.self_key(seed, salt, me, field.tag), 1)]",
        "keys = []",
        f"{MASKS}test_G10_a_late_message_after_reconstruction_is_uniform_given_all_that_the_server_holds",
    ),
    Mutant(
        "points of low order pass",
        "secagg/device.py",
        "        masks.check_point(advert.pair)\n",
        "",
        f"{LIES}test_a_neighbour_with_a_point_of_low_order_is_refused",
    ),
    Mutant(
        "the same round twice",
        "secagg/device.py",
        "if round <= after:",
        "if round < after:",
        f"{LIES}test_the_same_round_twice_or_an_earlier_one_is_refused[1]",
    ),
    Mutant(
        "a phase is answered twice",
        "secagg/device.py",
        "    if state.phase != phase:\n",
        "    if False:\n",
        f"{LIES}test_a_replayed_phase_is_refused_at_every_step",
    ),
    Mutant(
        "a cohort of any size",
        "secagg/cohort.py",
        "if rest or not terms.smallest <= devices <= terms.largest:",
        "if rest:",
        f"{LIES}test_G11_a_cohort_of_one_is_refused",
    ),
    Mutant(
        "any publication under one mask",
        "secagg/cohort.py",
        "pack([self.hash, publication, sharers])",
        "pack([self.hash, sharers])",
        f"{LIES}test_a_different_publication_to_one_device_leaves_its_vector_and_the_sum_masked",
    ),
    Mutant(
        "the publication's version stands for it",
        "wire/rounds.py",
        "pack([version, kind, body])",
        "pack([version, kind])",
        f"{DEVICE}test_a_device_that_is_shown_another_model_than_its_cohort_is_in_no_sum",
    ),
    Mutant(
        "a second draw in a round that given.log knows",
        "device/rounds.py",
        "commit.marked_round(ledger.device) >= self._last:",
        "commit.marked_round(ledger.device) > self._last:",
        f"{MARKED}test_a_round_in_which_given_log_knows_of_a_draw_is_over[7-False]",
    ),
    Mutant(
        "a device signs anew what it sends again",
        "device/rounds.py",
        'await self._ask("POST", self._path, said)',
        'await self._ask("POST", self._path, self._sealed(state, self._statement()))',
        f"{DEVICE}test_what_is_sent_again_is_what_was_signed_though_the_device_gave_more_since[agreed-acknowledged]",
    ),
    Mutant(
        "a device keeps to an older round",
        "device/rounds.py",
        "if view.round < self._last:",
        "if view.round < 0:",
        f"{DEVICE}test_an_older_round_is_waited_out_and_nothing_is_said_in_it",
    ),
    Mutant(
        "a device follows any number",
        "device/rounds.py",
        "int(self._clock.now() * 1000)) + LEAP:",
        "int(self._clock.now() * 1000)) + 2**63:",
        f"{DEVICE}test_a_round_far_above_all_that_a_server_can_have_come_to_is_waited_out",
    ),
    Mutant(
        "a draw that came to nothing is drawn again",
        "device/rounds.py",
        "DRAWN = (MASKED, AGREED, REVEALED)",
        "DRAWN = (AGREED, REVEALED)",
        f"{DEVICE}test_a_round_that_is_abandoned_after_the_draw_is_not_refunded",
    ),
    Mutant(
        "a phase that came again is no lie",
        "device/rounds.py",
        "if PHASES.index(view.phase) < PHASES.index(SAID[phase]):",
        "if PHASES.index(view.phase) < 0:",
        f"{DEVICE}test_a_lie_is_told_to_the_owner_and_ends_that_round_alone[a phase again]",
    ),
    Mutant(
        "the draw is charged, and its round not kept",
        "device/runner.py",
        "[envelope], drawn(state))",
        "[envelope], None)",
        f"{DEVICE}test_after_a_restart_a_batch_serves_as_often_as_is_left[charged-True]",
    ),
    Mutant(
        "a device masks without a publication",
        "device/rounds.py",
        "publication_hash(*view.publication))",
        'b"")',
        f"{DEVICE}test_a_cohort_of_five_sums_once",
    ),
    Mutant(
        "nobody is blamed",
        "secagg/server.py",
        "            blame[_off(shown[owner], chosen[owner])] += 1",
        "            _off(shown[owner], chosen[owner])",
        f"{PHASES}test_who_reveals_wrong_shares_is_named_to_the_operator_and_to_no_device",
    ),
    Mutant(
        "a cohort without oneself",
        "secagg/device.py",
        "if own is None or roster.adverts[own] != decode(Advert, state.sent).hash:",
        "if own is None:",
        f"{LIES}test_a_cohort_with_other_keys_for_the_device_itself_is_refused",
    ),
    Mutant(
        "unsigned keys pass",
        "secagg/device.py",
        " or not advert.verify(terms.task):",
        ":",
        f"{LIES}test_G11_a_neighbour_with_keys_that_it_did_not_sign_is_refused",
    ),
    Mutant(
        "the wrong kind of share is revealed",
        "secagg/device.py",
        "if survivors[peer] else content[: shamir.SHARE_SIZE]",
        "if not survivors[peer] else content[: shamir.SHARE_SIZE]",
        f"{ROUNDS}test_no_holder_reveals_both_kinds_of_share_of_one_device",
    ),
    Mutant(
        "a quorum of one fewer",
        "secagg/device.py",
        "    if found < roster.plan.quorum:",
        "    if found < roster.plan.quorum - 1:",
        f"{LIES}test_signatures_that_are_missing_forged_repeated_or_the_devices_own_do_not_count",
    ),
    Mutant(
        "one's own signature counts",
        "secagg/device.py",
        "if signer == own or not survivors[signer]",
        "if not survivors[signer]",
        f"{LIES}test_signatures_that_are_missing_forged_repeated_or_the_devices_own_do_not_count",
    ),
    Mutant(
        "a missing device reveals",
        "secagg/device.py",
        "    if not survivors[own]:",
        "    if False:",
        f"{LIES}test_a_device_that_is_called_missing_signs_nothing_and_reveals_nothing",
    ),
    Mutant(
        "a sum of too few is revealed",
        "secagg/device.py",
        "    if survivors.sum() < roster.plan.survivors or around",
        "    if around",
        f"{LIES}test_G7_too_few_survivors_are_refused[8-7]",
    ),
    Mutant(
        "threshold without colluders",
        "secagg/graph.py",
        "quorum = (devices + colluders) // 2 + 1",
        "quorum = devices // 2 + 1",
        f"{GRAPH}test_the_threshold_of_a_complete_graph_is_the_least_with_2t_above_n_plus_colluders[100-10-70-56]",
    ),
    Mutant(
        "one side of the circle may be bought",
        "secagg/graph.py",
        "threshold = max((k + 1 + everywhere) // 2 + 1, k // 2 + one_side + 1)",
        "threshold = (k + 1 + everywhere) // 2 + 1",
        f"{GRAPH}test_k_and_t_hold_what_they_state_by_exact_probabilities[1000-50-800]",
    ),
    Mutant(
        "shares of a constant",
        "secagg/shamir.py",
        "for coefficients in (*higher[::-1], limbs[0]):",
        "for coefficients in (*(higher[::-1] * np.uint64(0)), limbs[0]):",
        f"{SHARES}test_fewer_shares_than_the_threshold_are_uniform",
    ),
    Mutant(
        "rebuilt secrets are not checked",
        "secagg/server.py",
        " and _is_right(adverts[owner], secret, survived=bool(survivors[owner]))",
        "",
        f"{ROUNDS}test_a_seed_that_is_not_the_one_signed_for_is_not_used",
    ),
    Mutant(
        "late masked vectors are folded",
        "secagg/server.py",
        "    if state.phase != phase:\n",
        "    if False:\n",
        f"{ROUNDS}test_a_late_masked_vector_is_refused_and_changes_nothing",
    ),
    Mutant(
        "any sum is plausible",
        "secagg/server.py",
        "if largest > left * field.bound + field.slack:",
        "if False:",
        f"{ROUNDS}test_one_device_that_sends_random_elements_makes_the_round_abandoned",
    ),
    # --- second moments ---
    Mutant(
        "moments: sqrt(4.5) taken for sqrt(2)",
        MOMENTS,
        "root_up(Fraction(9, 2) * clip**4)",
        "root_up(Fraction(2) * clip**4)",
        f"{MOVED}test_replacing_a_sample_moves_the_moments_by_at_most_the_sensitivity",
    ),
    Mutant(
        "moments: two for features that may be negative",
        MOMENTS,
        "return Fraction(2 * clip**2) if positive else",
        "return Fraction(2 * clip**2) if True else",
        f"{MOVED}test_the_sensitivity_is_attained_at_half_opposite_features_with_one_label",
    ),
    Mutant(
        "moments: a quarter of the variance off the diagonal",
        MOMENTS,
        "source.skellam(each / 2, like",
        "source.skellam(each / 4, like",
        f"{MOVED}test_noise_off_the_diagonal_has_half_the_variance[system]",
    ),
    Mutant(
        "moments: the larger variance in the terms beyond the Gaussian",
        MOMENTS,
        "small = Fraction(l2) ** 2, Fraction(variance) / 2",
        "small = Fraction(l2) ** 2, Fraction(variance)",
        f"{MOVED}test_the_loss_takes_the_smaller_variance_beyond_the_gaussian_term",
    ),
    Mutant(
        "moments: rounded instead of truncated",
        MOMENTS,
        "whole = np.trunc(scaled",
        "whole = np.rint(scaled",
        f"{MOVED}test_moments_are_exact_products_of_truncated_integers",
    ),
    Mutant(
        "moments: long rows are lost instead of shrunk",
        MOMENTS,
        "np.maximum(size, self.clip))).astype",
        "1.0)).astype",
        f"{MOVED}test_what_is_longer_than_the_clip_is_shrunk_to_it_and_not_lost",
    ),
    Mutant(
        "moments: a device pays for one sample",
        MOMENTS,
        "return self._loss(self.covers.size, self.honest)",
        "return self._loss(1, self.honest)",
        f"{MOVED}test_all_samples_of_a_device_move_them_by_as_many_times_as_much",
    ),
    Mutant(
        "gram: a task for devices calibrated to a sample",
        "protocols/gram.py",
        'samples = settings.batch if privacy.unit == "device" else 1',
        "samples = 1",
        f"{GRAM}test_a_device_pays_the_epsilon_of_a_task_that_protects_devices",
    ),
    Mutant(
        "gram: noise for all who may come, not for the honest",
        "protocols/gram.py",
        "privacy.delta) / masking.honest",
        "privacy.delta) / masking.cohort",
        f"{GRAM}test_a_sample_pays_the_epsilon_of_the_task_and_no_more[1]",
    ),
    Mutant(
        "gram: moments said again to a repeated publication",
        "protocols/gram.py",
        "return Step(None, (Send(SERVER, Moments(moments)),))",
        "return Step(waiting, (Send(SERVER, Moments(moments)),))",
        f"{GRAM}test_a_device_says_its_moments_once_and_charges_one_row",
    ),
    # --- rounds on the server: who is heard, and what stays ---
    Mutant(
        "a total is heard from a device",
        "server/rounds.py",
        "        if envelope.kind != Masked.kind:\n",
        "        if not envelope.kind:\n",
        f"{HTTP_ROUNDS}test_a_device_of_a_masked_task_checks_in_nothing_but_masked_vectors[sqlite-sgd/total/1]",
    ),
    Mutant(
        "bodies of masked vectors outlive their round",
        "storage/server/rounds.py",
        "            self._forget_bodies(connection, number, row.number)\n",
        "",
        f"{PHASES}test_a_phase_closes_at_its_deadline_with_those_who_answered[mask-3-survivors]",
    ),
    Mutant(
        "a restart adds the vectors of a kept sum again",
        "server/rounds.py",
        "body, last, loose = kept.sum or bytes(self.terms.size), kept.folded, 0",
        "body, last, loose = bytes(self.terms.size), kept.folded, 0",
        f"{PHASES}test_bodies_go_when_the_sum_that_has_them_is_kept_and_a_restart_has_the_same_sum",
    ),
    Mutant(
        "a cohort is told of the newest publication instead of its own",
        "server/rounds.py",
        "        published = under.publication\n",
        "        published = self.offer()\n",
        f"{PHASES}test_everybody_in_a_cohort_works_with_the_same_publication",
    ),
    # Shares of noise, and what leaves under masks
    Mutant(
        "a share of noise is that of a whole sum",
        "protocols/sgd.py",
        "privacy.delta, privacy.uses) / honest",
        "privacy.delta, privacy.uses)",
        f"{MASKED_SGD}test_each_row_s_share_is_what_its_price_asks_over_the_fewest_honest_devices",
    ),
    Mutant(
        "a share of noise is a part of the largest cohort's",
        "protocols/sgd.py",
        "privacy.delta, privacy.uses) / honest",
        "privacy.delta, privacy.uses) / masking.cohort",
        f"{MASKED_SGD}test_each_row_s_share_is_what_its_price_asks_over_the_fewest_honest_devices",
    ),
    Mutant(
        "colluders count as honest",
        "task.py",
        "return self.minimum - self.colluders",
        "return self.minimum",
        f"{MASKED_SGD}test_each_row_s_share_is_what_its_price_asks_over_the_fewest_honest_devices",
    ),
    Mutant(
        "every use of a sample costs the whole price",
        "protocols/sgd.py",
        "privacy.delta, privacy.uses) / honest",
        "privacy.delta) / honest",
        f"{MASKED_SGD}test_each_row_s_share_is_what_its_price_asks_over_the_fewest_honest_devices",
    ),
    Mutant(
        "collusion costs nothing",
        "protocol.py",
        'return getattr(mechanism, "alone", None) or mechanism.loss',
        "return mechanism.loss",
        "tests/test_protocol.py::test_a_masked_quote_has_both_prices",
    ),
    Mutant(
        "the floor is not looked at",
        "protocol.py",
        "        if left > task.masking.floor:\n",
        "        if left > 1000 * task.masking.floor:\n",
        "tests/test_protocol.py::test_the_floor_refuses_a_task_that_leaves_too_little_if_everyone_else_colludes",
    ),
    Mutant(
        "an l1 sensitivity as small as the l2 one",
        MECHANISMS,
        "return min(Fraction(math.isqrt(math.ceil(length * l2 * l2)) + 1), l2 * l2)",
        "return min(l2, l2 * l2)",
        f"{SHARED}test_integers_move_in_l1_by_no_more_than_their_l2_allows",
    ),
    Mutant(
        "skellam noise charged as a gaussian's",
        CALIBRATION,
        "order * square / (2 * v) + excess",
        "order * square / (2 * v)",
        f"{SHARED}test_the_divergences_of_the_review",
    ),
    Mutant(
        "counts of many samples move as those of one",
        MECHANISMS,
        "skellam_loss(root_up(l1 * samples), l1,",
        "skellam_loss(root_up(l1), l1,",
        f"{SHARED}test_counts_move_by_no_more_than_they_are_charged_for_whatever_is_replaced",
    ),
    Mutant(
        "rounding a vector costs nothing",
        MECHANISMS,
        "return min(stability / self.grid.step + root, 2 * self.reach * root)",
        "return min(stability / self.grid.step, 2 * self.reach * root)",
        f"{SHARED}test_a_rounded_vector_moves_by_its_stability_and_the_root_of_its_length_and_nearly_by_that",
    ),
    Mutant(
        "a vector may be longer than the table prices",
        MECHANISMS,
        "    if cells != row.length:\n",
        "    if cells < row.length:\n",
        f"{SHARED}test_a_vector_of_another_length_than_the_table_prices_is_refused",
    ),
    Mutant(
        "the door lets a share of noise out as a release",
        "privacy/door.py",
        "        if mechanism.observer is Observer.AGGREGATE:\n",
        "        if mechanism.observer is Observer.DEVICES:\n",
        "tests/privacy/test_door.py::test_a_share_of_noise_is_no_release",
    ),
    Mutant(
        "a masked value has bytes",
        "messages.py",
        '        raise LeakError("A Masked value has no bytes of its own',
        "        return _packed(np.asarray(value._summand))\n"
        '        raise LeakError("A Masked value has no bytes of its own',
        "tests/test_messages.py::test_what_leaves_under_masks_passes_the_seal_s_checks_and_has_no_bytes",
    ),
    Mutant(
        "a masked value fits a public field",
        "messages.py",
        '    if isinstance(value, Masked):\n        raise LeakError(f"{where}',
        '    if value is Masked:\n        raise LeakError(f"{where}',
        "tests/test_messages.py::test_a_masked_value_fits_no_other_field",
    ),
    Mutant(
        "a total is divided by a cohort of one",
        "protocols/sgd.py",
        "return _apply(task, state, total, total.devices)",
        "return _apply(task, state, total, 1)",
        f"{MASKED_SGD}test_a_total_is_one_step_along_the_mean_over_the_survivors_samples",
    ),
    Mutant(
        "vanished devices count as survivors",
        "sim/cohorts.py",
        "devices = feed[-1].sum().astype(jnp.int32)",
        "devices = jnp.int32(feed[-1].size)",
        f"{COHORTS}test_a_round_with_too_few_survivors_leaves_the_model_and_is_paid_for",
    ),
    Mutant(
        "what a vanished device said is added up",
        "sim/cohorts.py",
        "_split(jnp.where(alive, each, 0), low[name])",
        "_split(each, low[name])",
        f"{COHORTS}test_a_compiled_round_is_a_real_one_without_its_masks",
    ),
    Mutant(
        "a round of too few is summed",
        "sim/cohorts.py",
        "held = (devices < masking.minimum) | (ended > 0)",
        "held = ended > 0",
        f"{COHORTS}test_a_round_with_too_few_survivors_leaves_the_model_and_is_paid_for",
    ),
    Mutant(
        "a device is twice in one cohort",
        "sim/cohorts.py",
        "more = order[~np.isin(order, waiting)][: cohort - len(waiting)]",
        "more = order[: cohort - len(waiting)]",
        f"{COHORTS}test_no_cohort_holds_a_device_twice_and_no_batch_a_sample",
    ),
    # --- proximal rounds: stability, private state, the solver ---
    Mutant(
        "one sample parts two runs by half as much",
        ADMM,
        "    return 2 * gradient_bound / rho * solved(rate, rho, steps)",
        "    return gradient_bound / rho * solved(rate, rho, steps)",
        f"{PROXIMAL}test_a_replaced_sample_moves_an_update_by_no_more_than_its_sensitivity_and_nearly_by_it[2.0-8-logistic]",
    ),
    Mutant(
        "samples are not brought into their ball",
        PARTS,
        "    return whole * (bound / xp.maximum(size, bound))",
        "    return whole",
        f"{TALKED}test_a_sample_that_is_too_long_is_brought_to_the_bound_and_a_broken_one_counts_as_zero",
    ),
    Mutant(
        "local steps twice as long as is stable",
        ADMM,
        "    largest = 1 / (steepest + rho)",
        "    largest = 4 / (steepest + rho)",
        f"{GG}test_g5_plain_hinge_steps_jump_at_the_kink_and_are_refused_and_too_long_steps_too",
    ),
    Mutant(
        "uses are not counted",
        PARTS,
        "privacy.delta, releases) / masking.honest",
        "privacy.delta, 1) / masking.honest",
        f"{TALKED}test_every_smooth_loss_has_a_price_that_all_uses_together_keep[changes0]",
    ),
    Mutant(
        "noise for those who were asked",
        PARTS,
        "releases) / masking.honest",
        "releases) / (masking.honest + 2)",
        f"{TALKED}test_every_smooth_loss_has_a_price_that_all_uses_together_keep[changes0]",
    ),
    Mutant(
        "a device goes on from where it was",
        ADMM,
        "    return moved.reshape(-1)\n",
        "    fixed.table.setdefault('kept', moved) if isinstance(fixed.table, dict) else None\n"
        "    return (moved + (fixed.table['kept'] if xp is np else 0)).reshape(-1)\n",
        f"{TALKED}test_an_update_is_where_fixed_gradient_steps_from_the_centre_end",
    ),
    Mutant(
        "a centre from anywhere",
        ADMM,
        "    centre = bring(xp, weights.astype(wide), float(fixed.settings.radius))",
        "    centre = weights.astype(wide)",
        f"{TALKED}test_a_centre_beyond_its_ball_is_brought_to_it_on_the_device_too",
    ),
    Mutant(
        "regulariser twice as strong",
        ADMM,
        "    return shrunk / (1 + t * fixed.l2)",
        "    return shrunk / (1 + 2 * t * fixed.l2)",
        f"{TALKED}test_the_consensus_step_minimises_11_for_l1_l2_and_the_elastic_net[0.0-0.3]",
    ),
    Mutant(
        "old answers count",
        ADMM,
        "    return age <= (2**31 - 1 if fixed.settings.delay is None else fixed.settings.delay)",
        "    return age <= 2**31 - 1",
        f"{TALKED}test_bounded_delay_an_answer_to_an_old_centre_moves_nothing",
    ),
    # --- local updates: L3, L5, L8, L9 ---
    Mutant(
        "local updates: a device pays for one sample of many",
        MECHANISMS,
        "return 1 if row.whole else row.covers.size",
        "return 1",
        f"{STEPPED}test_a_sum_of_several_contributions_promises_nothing_to_a_device",
    ),
    Mutant(
        "local updates: one sample of the batch, not of its minibatch",
        LOCAL,
        "most / (settings.size * float(reach))",
        "most / (settings.batch * float(reach))",
        f"{STEPPED}test_a_sample_of_a_smooth_convex_loss_moves_them_as_far_as_the_review_says",
    ),
    Mutant(
        "local updates: half the stability",
        LOCAL,
        "return 2 * _slope(model, bound) * most",
        "return _slope(model, bound) * most",
        f"{STEPPED}test_a_sample_of_a_smooth_convex_loss_moves_them_as_far_as_the_review_says",
    ),
    Mutant(
        "local updates: long steps called stable",
        LOCAL,
        "settings.local_steps > 1 and c * (smooth + l2) > 2",
        "settings.local_steps > 1 and c * (smooth + l2) > 200",
        f"{STEPPED}test_a_clip_below_the_slope_and_long_steps_void_stability[rate]",
    ),
    Mutant(
        "local updates: a clipped loss called convex",
        LOCAL,
        "if settings.clip is not None and float(settings.clip) < _slope(model, bound):",
        "if False:",
        f"{STEPPED}test_a_clip_below_the_slope_and_long_steps_void_stability[clip]",
    ),
    Mutant(
        "local updates: T_d check-ins for the price of one",
        LOCAL,
        "return task.privacy.uses * max(1, budget.samples // settings.batch)",
        "return 1",
        f"{STEPPED}test_a_device_pays_the_epsilon_of_the_task_for_all_its_check_ins",
    ),
    Mutant(
        "local updates: what is dropped still counts",
        LOCAL,
        "counts = xp.ones_like(current) if weigh else current",
        "counts = xp.ones_like(current)",
        f"{STEPPED}test_a_check_in_of_an_old_round_counts_for_nothing_and_stands_in_for_nobody",
    ),
    Mutant(
        "local updates: weights that are not finite are published",
        LOCAL,
        "goes = happens & good",
        "goes = happens",
        f"{STEPPED}test_weights_that_are_not_finite_stop_the_task_and_the_last_good_ones_stay",
    ),
    Mutant(
        "local updates: the path is divided by its steps alone",
        LOCAL,
        "return (rates * after).sum(), left[0]",
        "return rates.sum(), left[0]",
        f"{STEPPED}test_a_device_moves_its_weights_as_far_as_the_review_says[1.0-1.302643]",
    ),
    Mutant(
        "local updates: noise for all that were asked",
        LOCAL,
        "return skellam_variance(l2, l1_of(l2, length), epsilon, privacy.delta, times) / masking.honest",
        "return skellam_variance(l2, l1_of(l2, length), epsilon, privacy.delta, times) / masking.cohort",
        f"{STEPPED}test_the_noise_of_a_device_is_calibrated_to_twice_its_clip[skellam]",
    ),
    # --- noise that changes over check-ins ---
    Mutant(
        "schedules: the factor of a check-in is not squared",
        MECHANISMS,
        "return replace(row, clip=level, rho=share**2 * row.rho)",
        "return replace(row, clip=level, rho=share * row.rho)",
        f"{NOISES}test_a_check_in_s_row_has_the_noise_of_all_and_the_sensitivity_of_its_share[gaussian]",
    ),
    Mutant(
        "schedules: pure epsilon as if it were zCDP",
        LOCAL,
        "return sum((share**power for share in sorted(shares, reverse=True)[:times]), Fraction(0))",
        "return sum((share**2 for share in sorted(shares, reverse=True)[:times]), Fraction(0))",
        f"{NOISES}test_l8_the_prices_of_a_schedule_s_check_ins_add_up_to_the_task_s_epsilon[laplace-growing]",
    ),
    Mutant(
        "schedules: the price of the first check-in for all",
        "privacy/door.py",
        "return at(self.mechanism, int(self.trip))",
        "return at(self.mechanism, 0)",
        f"{NOISES}test_the_ledger_charges_each_check_in_its_own_price",
    ),
    Mutant(
        "schedules: the price of the last check-in for all",
        "privacy/door.py",
        "return at(self.mechanism, int(self.trip))",
        "return at(self.mechanism, len(getattr(self.mechanism, 'levels', '0')) - 1)",
        f"{SCHEDULED}test_a_device_s_ledger_holds_the_price_of_every_check_in_of_its_schedule",
    ),
    Mutant(
        "schedules: a budget is asked for the first check-in's price every time",
        "device/runner.py",
        "self._dearest if self._losses is not None else self._price(self._trips)",
        "self._dearest",
        f"{SCHEDULED}test_a_device_that_stops_and_returns_goes_on_in_its_schedule",
    ),
    Mutant(
        "schedules: the server's numbers say which check-in it is",
        "device/runner.py",
        "        self._seq = seq\n",
        "        self._seq = self._trips = seq\n",
        f"{SCHEDULED}test_no_answer_of_a_server_has_a_share_of_the_schedule_given_twice[refused]",
    ),
    Mutant(
        "schedules: after a lost ledger the last message's number says which check-in it is",
        "device/runner.py",
        'if scheduled and member.recovered and "trips" not in kept:',
        "if False:",
        f"{SCHEDULED}test_after_a_lost_ledger_no_share_of_the_schedule_is_given_again",
    ),
    Mutant(
        "schedules: the quote scales one check-in",
        MECHANISMS,
        "        return mechanism.total(check_ins, loss)",
        "        return mechanism.total(1, loss).scaled(check_ins)",
        f"{NOISES}test_l8_the_prices_of_a_schedule_s_check_ins_add_up_to_the_task_s_epsilon[gaussian-growing]",
    ),
    Mutant(
        "schedules: a sample pays for the cheapest check-ins",
        MECHANISMS,
        "tuple(sorted(self.levels, reverse=True))",
        "tuple(sorted(self.levels))",
        f"{NOISES}test_l8_the_prices_of_a_schedule_s_check_ins_add_up_to_the_task_s_epsilon[stable-growing]",
    ),
    Mutant(
        "schedules: the whole update at the price of a share",
        MECHANISMS,
        "xp.where(level > 0, contributions, 0) * share.astype(contributions.dtype)",
        "xp.where(level > 0, contributions, 0)",
        f"{NOISES}test_a_vector_that_is_priced_by_stability_is_given_in_its_share",
    ),
    Mutant(
        "schedules: a share is clipped as the whole",
        MECHANISMS,
        'norm="l1" if laplace else "l2", clip=xp.maximum(level, 1))',
        'norm="l1" if laplace else "l2", clip=row.clip)',
        f"{NOISES}test_however_long_a_contribution_is_its_share_is_clipped_to_the_share_of_the_clip[gaussian]",
    ),
    Mutant(
        "schedules: after the last check-in it goes on with the last",
        MECHANISMS,
        "place = xp.minimum(xp.asarray(trip), len(self.levels))",
        "place = xp.minimum(xp.asarray(trip), len(self.levels) - 1)",
        f"{NOISES}test_what_a_device_can_move_is_what_its_check_in_is_priced_for[10-growing]",
    ),
    # --- a trusted server's mean: L1, L9 ---
    Mutant(
        "trusted mean: of whoever came",
        MEAN,
        "enough = heard >= self.least",
        "enough = heard >= 1",
        f"{MEANT}test_l9_a_mean_of_fewer_than_b_s_is_never_let_out_and_nothing_is_divided_by_zero[1]",
    ),
    Mutant(
        "trusted mean: half the sensitivity",
        MEAN,
        "return 2 * self.clip / self.least",
        "return self.clip / self.least",
        f"{MEANT}test_one_of_enough_devices_moves_the_mean_by_its_sensitivity_at_most_and_can_reach_it",
    ),
    Mutant(
        "trusted mean: an update as long as it likes",
        MEAN,
        "clipped = updates * jnp.minimum(1, self.clip / jnp.maximum(sizes, 1e-30))",
        "clipped = updates * jnp.minimum(1, 1e9 / jnp.maximum(sizes, 1e-30))",
        f"{MEANT}test_one_of_enough_devices_moves_the_mean_by_its_sensitivity_at_most_and_can_reach_it",
    ),
    Mutant(
        "trusted mean: rounds for the price of one",
        MEAN,
        "math.sqrt(rounds / (2 * float(rho_for(epsilon, delta))))",
        "math.sqrt(1 / (2 * float(rho_for(epsilon, delta))))",
        f"{MEANT}test_gaussian_noise_has_the_deviation_that_its_loss_asks_for",
    ),
    # --- the library of 2017 and its baselines, priced ---
    Mutant(
        "published: a replaced device moves its weights once",
        "sim/published_local.py",
        "whole = _capped(settings, 2 * reach.sum(1), dimension)",
        "whole = _capped(settings, reach.sum(1), dimension)",
        f"{H17}test_l8_a_thousand_releases_cost_what_the_review_says_if_gradients_had_been_clipped[0.1-10.0-2.2-0.7]",
    ),
    Mutant(
        "published: Laplace noise is charged as Gaussian",
        "sim/published_local.py",
        "rho, pure = squares, math.sqrt(2 * dimension)",
        "rho, pure = squares / 2, math.sqrt(2 * dimension)",
        f"{H17}test_l8_laplace_noise_of_one_deviation_costs_up_to_twice_the_zcdp_of_gaussian_noise",
    ),
    Mutant(
        "published: a sample moves the step that uses it alone",
        "sim/published_local.py",
        "moves = _capped(settings, 2 * (reach / each + after), dimension)",
        "moves = _capped(settings, 2 * reach / each, dimension)",
        f"{H17}test_l5_a_sample_pays_for_the_steps_that_follow_its_own",
    ),
    Mutant(
        "correlated noise: who comes back shares none of it",
        "sim/trusted.py",
        "apart = participations == 1 or separation >= self.bands",
        "apart = True",
        f"{TRUSTED}test_sensitivity_of_one_device_is_the_longest_column_and_more_for_those_who_come_back",
    ),
    Mutant(
        "correlated noise: masked cohorts may have it",
        "sim/trusted.py",
        "if observer is Observer.AGGREGATE:",
        "if observer is None:",
        f"{TRUSTED}test_under_masks_and_on_devices_correlated_noise_is_refused[Observer.AGGREGATE-masks]",
    ),
    Mutant(
        "CSDP: a replaced device moves a sum by one clip",
        "experiments/federated.py",
        "return made.loss(2 * self.clip,",
        "return made.loss(self.clip,",
        "tests/experiments/test_federated.py::test_csdp_is_charged_for_every_round_of_a_device_and_not_for_luck",
    ),
    # --- label proportions: p-LLP 2 -> 1; normalise in loop; sample used twice with one charge ---
    Mutant(
        "proportions: a replaced measurement moves one count",
        PLLP,
        "return CountLaplace(L1(Fraction(2)), epsilon, everything, promise)",
        "return CountLaplace(L1(Fraction(1)), epsilon, everything, promise)",
        f"{PL}test_p2_the_published_scale_costs_two_epsilon_and_ours_what_it_says",
    ),
    Mutant(
        "proportions: counts leave as they are",
        MECHANISMS,
        'norm="l1", clip=1)\n        return total + noise.discrete_laplace(self.scale, like=total)',
        'norm="l1", clip=1)\n        return total',
        f"{PL}test_p2_noise_that_a_device_draws_has_the_variance_of_two_over_epsilon",
    ),
    Mutant(
        "proportions: noise is drawn again for each peer",
        PLLP,
        "    return Step(after, (Send(to, said),))\n",
        '    each = [replace(said, counts=ctx.release("counts", rows)) for _ in to]\n'
        "    return Step(after, tuple(Send(one, new) for one, new in zip(sorted(to), each)))\n",
        f"{PL}test_p4_all_peers_get_the_same_bytes_and_the_batch_is_charged_once",
    ),
    Mutant(
        "proportions: alpha has all of epsilon in its exponent",
        PLLP,
        "alpha = float(np.exp(-1 / float(row.scale)))",
        "alpha = float(np.exp(-2 / float(row.scale)))",
        f"{PL}test_p2_alpha_and_variance_are_the_reviews[0.1-0.951229-None-799.8334]",
    ),
    Mutant(
        "published: normalised in the loop where it should be once",
        PUBLISHED_PLLP,
        "        if normalise == IN_LOOP:\n",
        "        if normalise:\n",
        f"{PL}test_p1_normalised_once_only_a_row_that_was_clipped_as_a_whole_repeats_and_neighbours_share_it",
    ),
    Mutant(
        "published: ten folds are charged as one",
        PUBLISHED_PLLP,
        "else 2 * epsilon * uses",
        "else 2 * epsilon",
        f"{PL}test_p4_the_papers_evaluation_costs_18_epsilon_and_its_claim_is_1",
    ),
    Mutant(
        "figures: a measurement is charged for one fold, and counted in all but one",
        "experiments/sachweh.py",
        "    return (3 if case.quick else FOLDS) - 1\n",
        "    return 1\n",
        "tests/experiments/test_sachweh_figures.py::test_every_row_is_tested_in_one_fold_and_counted_in_all_others[True]",
    ),
    Mutant(
        "figures: equal bins are cut by the readings that devices hold",
        "experiments/sachweh.py",
        "np.quantile(np.concatenate(self.readings.public),",
        "np.quantile(self.readings.values.ravel(),",
        "tests/experiments/test_sachweh_figures.py::test_edges_of_equal_bins_come_from_public_readings_alone",
    ),
    Mutant(
        "windows: a reading that is no number leaves its row out",
        "features/series.py",
        "    return _short(x), series[len(series) - count :].copy()\n",
        "    kept = np.isfinite(series[len(series) - count :])\n"
        "    return _short(x[kept]), series[len(series) - count :][kept]\n",
        f"{PL}test_p3_a_measurement_is_the_label_of_one_row_of_one_batch_however_wide_the_windows",
    ),
    Mutant(
        "relay: a device speaks from any place",
        RELAY,
        "        if int(message.place) != held:\n",
        "        if False:\n",
        f"{RELAYED}test_a_bad_peer_is_refused_and_nothing_is_counted_or_relayed[sqlite-changes0-wrong-place]",
    ),
    Mutant(
        "relay: a letter goes to whom its sender likes",
        RELAY,
        "        if signed.envelope.to != self._to[held]:\n",
        "        if not signed.envelope.to:\n",
        f"{RELAYED}test_a_bad_peer_is_refused_and_nothing_is_counted_or_relayed[sqlite-changes7-wrong-recipient]",
    ),
    Mutant(
        "relay: a reader believes the key that the server names",
        "wire/letters.py",
        "        if not is_sound(self.key) or not found.verify(self.key):\n",
        "        if not is_sound(self.key):\n",
        "tests/wire/test_letter_bytes.py::test_a_letter_that_somebody_touched_is_nobodys[0]",
    ),
    Mutant(
        "relay: letters of a revoked device go on",
        LETTERS,
        "            .where(device.c.revoked_at.is_(None), device.c.public_key.is_not(None))\n",
        "            .where(device.c.public_key.is_not(None))\n",
        f"{STORED}test_who_is_revoked_or_withdraws_is_read_no_more_and_leaves_its_place[sqlite]",
    ),
    Mutant(
        "relay: letters pile up",
        LETTERS,
        "                if oldest is not None:\n",
        "                if oldest is not None and oldest < 0:\n",
        f"{STORED}test_a_letter_is_written_with_its_entry_and_the_newest_of_each_place_stay[sqlite]",
    ),
    Mutant(
        "relay: a withdrawn device leaves its letters behind",
        "storage/server/store.py",
        "            connection.execute(letter.delete().where(letter.c.device == row.number))\n",
        "",
        f"{STORED}test_who_is_revoked_or_withdraws_is_read_no_more_and_leaves_its_place[sqlite]",
    ),
    Mutant(
        "relay: a device takes a place that is held",
        LETTERS,
        "            elif row.device is None or row.revoked_at is not None or row.withdrawn_at is not None:\n",
        "            elif True:\n",
        f"{STORED}test_a_place_has_one_device_and_a_device_one_place_of_a_task[sqlite]",
    ),
    Mutant(
        "peering: whoever speaks first from a place is believed without the relay",
        "device/letters.py",
        "        if place not in self.post.keys:\n",
        "        if False:\n",
        f"{PEERING}test_what_is_no_letter_to_this_device_gets_a_clear_status_and_changes_nothing"
        "[a place that nobody introduced]",
    ),
    Mutant(
        "peering: a letter on two ways is heard twice",
        "device/letters.py",
        "        return place in self.post.marks and self.post.marks[place].has(signed.envelope.seq, self._wide)\n",
        "        return False\n",
        f"{PEERING}test_what_was_heard_from_its_sender_is_not_heard_again_from_the_relay_after_a_restart",
    ),
    Mutant(
        "peering: a letter leaves before the server has it",
        "device/runner.py",
        '            answer = await self._ask("POST", f"{self.path}/check-in", message.waiting.body, MSGPACK)\n',
        "            self.carry(message.waiting.body)\n            await asyncio.sleep(1)\n"
        '            answer = await self._ask("POST", f"{self.path}/check-in", message.waiting.body, MSGPACK)\n',
        f"{PEERING}test_a_device_brings_what_the_server_acknowledged_and_nothing_else",
    ),
    # --- the server's own ledger, of looks at rows of the operator's ---
    Mutant(
        "a look has half the noise that it is charged for",
        VALIDATION,
        "        return CountLaplace(L1(Fraction(1), Adjacency.REPLACE_SAMPLE), epsilon, covers, MISTAKES)\n",
        "        return CountLaplace(L1(Fraction(1), Adjacency.REPLACE_SAMPLE), 2 * epsilon, covers, MISTAKES)\n",
        f"{LOOKED}test_the_noise_of_a_count_is_one_over_epsilon_and_of_distances_two_bounds_over_epsilon",
    ),
    Mutant(
        "distances are clipped at half of what they reach",
        VALIDATION,
        "        middle = row.clip\n",
        "        middle = 0\n",
        f"{LOOKED}test_distances_reach_from_nothing_to_twice_the_bound_whatever_the_model_says",
    ),
    Mutant(
        "the sum of distances is blurred for one bound",
        VALIDATION,
        "    return GridLaplace(clip, epsilon, Grid(step), covers, DISTANCES)\n",
        "    return GridLaplace(clip, 2 * epsilon, Grid(step), covers, DISTANCES)\n",
        f"{LOOKED}test_the_noise_of_a_count_is_one_over_epsilon_and_of_distances_two_bounds_over_epsilon",
    ),
    Mutant(
        "a look at private rows is not charged",
        LOOKS,
        "        total += many * _loss(loss).epsilon\n",
        "        total += _loss(loss).epsilon\n",
        f"{KEPT}test_looks_end_when_the_budget_is_spent_exactly_and_a_larger_one_lets_them_go_on[sqlite]",
    ),
    Mutant(
        "each task has the whole budget of the same rows",
        LOOKS,
        "        budget = found[0].terms.budget\n        if seen.loss is not None and (budget is None or "
        "found[0].spent + seen.loss.epsilon > budget):\n",
        "        budget = found[0].terms.budget\n        mine = sum(1 for _ in connection.execute(sa.select(look)"
        ".where(here)))\n        if seen.loss is not None and (budget is None or "
        "(mine + 1) * seen.loss.epsilon > budget):\n",
        f"{KEPT}test_rows_lose_to_all_tasks_together[sqlite]",
    ),
    Mutant(
        "a restart draws again for a version that was looked at",
        LOOKS,
        "        if before is not None:\n            return _look(before)\n",
        "        if before is not None:\n            return seen\n",
        f"{KEPT}test_a_version_that_was_looked_at_shows_what_it_showed_and_is_charged_once[sqlite]",
    ),
    Mutant(
        "what was private is shown as public later",
        LOOKS,
        "        if known is not None and known.kind != terms.kind:\n",
        '        if known is not None and known.kind == "public" != terms.kind:\n',
        f"{KEPT}test_what_was_private_never_becomes_public_and_what_was_public_has_no_price[sqlite]",
    ),
    Mutant(
        "a restored server goes on with the charges of its backup",
        "storage/server/database.py",
        "    _halt_looks(copy)\n",
        "",
        f"{KEPT}test_a_restored_server_looks_at_no_private_rows_before_its_operator_says_so",
    ),
)
