"""The classic mistakes of private training, as edits of fedsim's own text; see table_mutations."""

import dataclasses
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fedsim"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake: the edits that make it, and the test that should notice."""

    name: str
    tests: str
    """Under tests/."""
    edits: tuple[tuple[str, str, str], ...]
    """(file under fedsim/, text, what it becomes)."""
    flags: tuple[str, ...] = ()
    """Of the training that shows it."""

    def plant(self, package: Path) -> None:
        """Make the mistake in a copy of fedsim. Raises: ValueError: the code has changed."""
        for file, old, new in self.edits:
            text = (package / file).read_text()
            if old not in text:
                raise ValueError(f"mistake={self.name}: expected {old!r} in {file}")
            (package / file).write_text(text.replace(old, new))


def one(name: str, tests: str, file: str, old: str, new: str, *flags: str) -> Mistake:
    """A mistake that one edit makes."""
    return Mistake(name, tests, ((file, old, new),), flags)


def both(name: str, tests: str, old: str, new: str) -> Mistake:
    """The same edit in both algorithms."""
    return Mistake(name, tests, tuple((file, old, new) for file in ("els.py", "uls.py")))


CLIP_THE_SUM = """        norm = np.sqrt(sum(float(np.sum(x**2)) for x in jax.tree.leaves(total)))
        factor = min(1.0, clip.norm * max(len(rows), 1) / max(norm, 1e-30))
        factor /= (clip.norm if clip.normalised else 1.0) * clip.unit(
            sum(x.size for x in jax.tree.leaves(total))
        )
        total = jax.tree.map(lambda x: np.rint(factor * x).astype(np.int64), total)
        return total, Stats.of_all(rows, stats, order)
"""
NOISE = "key=self.key, step=step)"
ADD_UNIT = "total = jax.tree.map(lambda t, z: functools.reduce(jnp.add, list(z), t), total, added)"
ADD_FLOAT = (
    "total = jax.tree.map(lambda t, z: "
    "(t.astype(jnp.float32) + z.astype(jnp.float32).sum(0)).astype(t.dtype), total, added)"
)
PART = "return jax.tree.map(lambda g: g.astype(jnp.float32), grad), loss"
CLIP_PART = "jnp.minimum(1, 1 / jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grad))))"

NOISE_AND_SENSITIVITY = (
    one(
        "noise that everyone can draw",
        "test_mechanism.py::test_streams_are_aes_in_counter_mode_keyed_by_hkdf",
        *("keys.py", "info=info).derive(self._secret)", "info=info).derive(bytes(32))"),
    ),
    one(
        "a lattice that depends on the data",
        "test_mechanism.py::test_what_is_released_is_a_rounding_of_the_sum_plus_whole_noise",
        "noise/independent.py",
        "    shift, dtype = release_shift(stddev), released_dtype(stddev)\n",
        "    shift = release_shift(stddev + max(float(np.abs(s).max(initial=0)) for s in sums))\n"
        "    dtype = released_dtype(stddev)\n",
    ),
    one(
        "a seal that tells whether a seed was guessed",
        "test_keys.py::test_a_seal_does_not_follow_from_the_seed",
        "keys.py",
        "sealing or secrets.token_bytes(KEY_BYTES)",
        "sealing or secret",
    ),
    one(
        "a tenth of the noise",
        "test_mechanism.py::test_the_noise_has_the_standard_deviation_of_the_sum_over_the_count",
        *("noise/independent.py", "noisy *= stddev", "noisy *= 0.1 * stddev"),
    ),
    one(
        "noise of the mean, divided once more",
        "test_mechanism.py::test_the_noise_has_the_standard_deviation_of_the_sum_over_the_count",
        *(
            "mechanism.py",
            "** lattice_bits(dimensions)  #",
            "** lattice_bits(dimensions) / count  #",
        ),
    ),
    one(
        "the same noise for all layers",
        "test_mechanism.py::test_the_noise_of_leaves_and_steps_is_independent",
        *("noise/independent.py", "step, first + leaf, number)", "step, 0, number)"),
    ),
    both(
        "the same noise in every step",
        "test_uls.py::test_the_noise_is_fresh_in_every_step_and_repeated_when_a_step_is",
        NOISE,
        "key=self.key, step=0)",
    ),
    both(
        "fresh noise when a step is run again",
        "test_uls.py::test_the_noise_is_fresh_in_every_step_and_repeated_when_a_step_is",
        NOISE,
        'key=self.key, step=__import__("time").time_ns())',
    ),
    one(
        "noise and draws from one random stream",
        "test_keys.py::test_noise_and_sampling_are_independent_streams",
        "noise/independent.py",
        'key.generator("noise", step, first + leaf, number)',
        'key.generator("units", step, *((first + leaf, number) if first + leaf or number else ()))',
    ),
    one(
        "sensitivity C after scaling to norm 1",
        "test_uls.py::test_the_noise_has_the_standard_deviation_c_sigma_over_m",
        "clipping/clip.py",
        "return 1.0 if self.normalised else self.norm",
        "return self.norm",
        *("--clip-norm", "0.1"),
    ),
    one(
        "noise of add-or-remove, called replace-one",
        "test_plan.py::test_the_adjacency_is_named",
        *(
            "plan/labels.py",
            '"add or remove one user"',
            '"replace one user"',
        ),
    ),
    Mistake(
        "division by the realised number",
        "test_uls.py::test_the_sum_is_divided_by_the_expected_count_whatever_was_drawn",
        (
            ("els.py", '"count": self.expected_batch_size', '"count": max(1, len(rows))'),
            ("uls.py", '"count": self.expected_cohort_size', '"count": max(1, len(rows))'),
        ),
    ),
    one(
        "a clip norm that moves, for no extra noise on the gradient",
        "clipping/test_adaptive.py::test_the_gradient_gets_at_most_one_percent_more_noise",
        "clipping/adaptive.py",
        "return (z**-2 - (2 * self.count_stddev) ** -2) ** -0.5 if z else 0.0",
        "return z",
        *("--clip-quantile", "0.5"),
    ),
    one(
        "a clip norm that follows the count without noise",
        "clipping/test_adaptive.py::test_the_count_is_released_with_its_noise",
        "clipping/adaptive.py",
        "noisy_number(within, stddev, rng)",
        "within",
        *("--clip-quantile", "0.5"),
    ),
)

CLIPPING = (
    one(
        "norms and sums of products that accelerators round to 8 bits",
        "clipping/test_precision.py::"
        "test_norms_and_sums_have_no_product_of_reduced_precision[ghost]",
        *("clipping/clip.py", "jnp.matmul(a, b, precision=HIGHEST, ", "jnp.matmul(a, b, "),
    ),
    one(
        "no clipping",
        "clipping/test_clipping.py::"
        "test_plain_clipping_leaves_small_gradients_alone_and_normalised_clipping_divides_by_c",
        "clipping/contribution.py",
        "jnp.maximum(jnp.float32(clip.norm), bound)",
        "jnp.float32(clip.norm)",
    ),
    Mistake(
        "clipping after the sum over users",
        "test_uls.py::test_a_step_equals_the_oracle",
        (
            (
                "engine/engine.py",
                "params, lanes, clip, strategy",
                "params, lanes, Clip(1e30, in_float32=True), strategy",
            ),
            (
                "engine/engine.py",
                "dtype = self._dtype(params, len(rows), clip)",
                "dtype = np.float32",
            ),
            (
                "engine/engine.py",
                "        return total, Stats.of_all(rows, stats, order)\n",
                CLIP_THE_SUM,
            ),
        ),
    ),
    one(
        "clipping a user's examples, not the user",
        "test_uls.py::test_a_step_equals_the_oracle",
        "uls.py",
        "self.group_size, self.key, step)",
        "self.group_size, self.key, step).reshape(-1, 1)",
    ),
    one(
        "norms from products, taken for exact",
        "clipping/test_factors.py::test_the_bound_is_above_the_norm_of_what_is_formed",
        "clipping/factors.py",
        "error = jnp.float32(_error(roundings)) * jnp.square(largest)",
        "error = jnp.float32(0)",
        *("--strategy", "ghost:4"),
    ),
    one(
        "clipping parts of a user, before their sum",
        "clipping/test_clipping.py::test_a_users_gradient_is_complete_before_it_is_clipped",
        *("clipping/scan.py", PART, PART.replace("g.as", f"{CLIP_PART} * g.as")),
        *("--strategy", "scan:1"),
    ),
    one(
        "padding in a user's mean",
        "clipping/test_clipping.py::test_a_mean_is_over_the_real_rows",
        *("clipping/scan.py", "jnp.maximum(real.sum(), 1)", "jnp.maximum(real.size, 1)"),
        *("--group-size", "4"),
    ),
    one(
        "a user's rows repeated to fill the group",
        "test_sampling.py::test_groups_are_a_users_own_examples_without_repeats",
        "sampling/contributions.py",
        "group[:size] = np.arange(start, start + size)",
        "group[:] = start + np.arange(group_size) % max(size, 1)",
        *("--group-size", "4"),
    ),
    one(
        "a gradient that is not finite passes",
        "clipping/test_clipping.py::"
        "test_a_unit_without_a_finite_norm_contributes_exactly_zero_and_is_counted",
        *(
            "clipping/contribution.py",
            "finite = jnp.isfinite(bound) | ~real",
            "finite = bound == bound",
        ),
    ),
    Mistake(
        "a gradient that is not finite repaired, number by number",
        "clipping/test_clipping.py::"
        "test_a_unit_without_a_finite_norm_contributes_exactly_zero_and_is_counted",
        (
            (
                "clipping/contribution.py",
                "norm, bound = norm_and_bound(grad)",
                "grad = jax.tree.map(jnp.nan_to_num, grad)\n    norm, bound = norm_and_bound(grad)",
            ),
        ),
    ),
    one(
        "a norm in half precision underflows",
        "clipping/test_clipping.py::test_norms_do_not_underflow_in_half_precision",
        *("clipping/contribution.py", "leaf.astype(jnp.float32) for leaf", "leaf for leaf"),
    ),
    one(
        "a norm of other numbers than are added",
        "clipping/test_stored.py::test_a_program_without_its_loop_is_not_used",
        "clipping/scan.py",
        "return jax.lax.fori_loop(i, i + some.astype(i.dtype), lambda j, _: compute(j), before)",
        "return compute(i)",
    ),
    one(
        "a running sum in float32",
        "clipping/test_contribution.py::"
        "test_a_long_sum_lacks_what_a_missing_user_added_and_nothing_else",
        *("clipping/scan.py", ADD_UNIT, ADD_FLOAT),
    ),
    one(
        "a norm without its bound",
        "clipping/test_contribution.py::test_no_gradient_contributes_more_than_c",
        "clipping/contribution.py",
        "longest = 2.0 ** lattice_bits(dimensions) - math.sqrt(dimensions) / 2",
        "longest, bound = 2.0 ** lattice_bits(dimensions), norm",
    ),
    one(
        "a loss divided by the tokens of the batch",
        "models/test_transformer.py::test_the_loss_of_an_example_is_the_mean_over_its_predictions",
        "models/language_model.py",
        "return nats / jnp.maximum(predictions, 1)",
        "return nats / jnp.maximum(predictions.sum(), 1)",
        *("--strategy", "scan:2"),
    ),
    one(
        "sizes of draws in a checkpoint",
        "test_train.py"
        "::test_what_may_be_published_has_no_sizes_of_draws_and_no_loss_of_held_out_users",
        *("run/state.py", "if name not in (*APART, ", "if name not in ("),
    ),
    one(
        "units side by side that are not looked at",
        "engine/test_worker.py"
        "::test_units_that_change_what_others_contribute_are_not_computed_side_by_side",
        *(
            "engine/worker.py",
            "if id(program) not in self._checked and not",
            "if id(program) in self._checked and not",
        ),
    ),
    one(
        "a lane with one user's gradient",
        "trust/test_security.py::test_a_lane_has_two_units_or_more",
        *("engine/lanes.py", "len(rows) // least)", "len(rows))"),
    ),
)

SAMPLING = (
    one(
        "the cap on a user's examples ignored",
        "test_sampling.py::test_contributions_are_limited_to_the_group_size",
        *(
            "sampling/contributions.py",
            "np.diff(offsets) > group_size)",
            "np.diff(offsets) > 10**9)",
        ),
    ),
    one(
        "the cap on a user's examples not accounted",
        "test_els.py::test_the_event_is_theorem_1_with_the_cap_as_contributions",
        *("els.py", "max_contributions=self.group_size", "max_contributions=1"),
    ),
    Mistake(
        "the largest user's number of examples accounted, not the cap",
        "test_els.py::test_the_event_is_theorem_1_with_the_cap_as_contributions",
        (
            (
                "els.py",
                "        self.key = drawing or key\n",
                "        self.key, self.users = drawing or key, users\n",
            ),
            (
                "els.py",
                "max_contributions=self.group_size",
                "max_contributions=min(self.group_size, max(int(b - a) for a, b in "
                "zip(self.users.offsets, self.users.offsets[1:])))",
            ),
        ),
        ("--group-size", "12"),
    ),
    Mistake(
        "a user's pool drawn again in every step",
        "test_els.py::test_a_step_equals_the_oracle",
        (
            (
                "els.py",
                "        self.key = drawing or key\n",
                "        self.key, self.users = drawing or key, users\n",
            ),
            (
                "els.py",
                "return without_padding(self.pool[batch])[:, None]",
                'key = type(self.key)(self.key._derive("pool", (step,)) * 2)\n'
                "        own = self.users, self.group_size, key\n"
                '        pool = pool_of(*own, "add-or-remove")\n'
                "        if len(self.pool) != len(pool):\n"
                '            pool = pool_of(*own, "zero-out")\n'
                "        return without_padding(pool[batch])[:, None]",
            ),
        ),
    ),
    one(
        "draws of a fixed size, accounted as Poisson",
        "test_sampling.py::test_the_size_of_a_draw_is_binomial",
        "sampling/poisson.py",
        "count = binomial(num_units, prob, rng)",
        "count = round(num_units * prob)",
    ),
    one(
        "draws cut to a largest size",
        "test_sampling.py::test_the_size_of_a_draw_is_binomial",
        "sampling/poisson.py",
        "count = binomial(num_units, prob, rng)",
        "count = min(round(num_units * prob), binomial(num_units, prob, rng))",
    ),
    one(
        "users redrawn in every step, accounted as of a group in turn",
        "test_cyclic.py::test_no_user_takes_part_in_two_steps_of_a_cycle",
        *("sampling/cyclic.py", "members = order[starts[group] : starts[group + 1]]"),
        "members = order",
        *("--sampling", "cyclic", "--bands", "4"),
    ),
    one(
        "shuffling, reported as Poisson",
        "test_plan.py::test_the_plan_says_what_is_run_and_what_is_accounted",
        *("plan/making.py", "sampling_run=method.sampler.name", 'sampling_run="poisson"'),
        *("--sampling", "shuffle"),
    ),
    one(
        "an assumed population without its label",
        "test_plan.py::test_an_assumed_population_is_labelled_as_one",
        "plan/labels.py",
        '    if (assumed_population := plan.get("assumed_population")) is not None:',
        '    if (assumed_population := plan.get("assumed_population")) == "never":',
        *("--assumed-population", "400"),
    ),
    one(
        "one user's text among numbers, by which all are ordered as texts",
        "data/building/test_one_user_less.py::test_all_others_stay_as_they_are",
        "data/building/orders.py",
        "            raise self._refused(others)\n        if",
        '            return pa.StructArray.from_arrays([self.texts], names=["text"])\n        if',
    ),
    one(
        "large whole numbers ordered as floats",
        "data/building/test_one_user_less.py::"
        "test_numbers_are_in_exact_order_whatever_stands_beside_them",
        "data/building/orders.py",
        "    rest = whole - number.astype(np.int64)\n",
        "    rest = np.zeros_like(whole)\n",
    ),
    one(
        "ids of several files cast to the type of the first",
        "library/test_lists_of_files.py::test_the_order_of_the_files_changes_nobodys_id",
        *("library/tables.py", "_as_texts(plain(batch[user]), ids)", "plain(batch[user])"),
    ),
    one(
        "padding that holds somebody's row",
        "library/test_own_task.py::test_a_users_rows_reach_no_one_elses_unit_through_padding",
        "library/own_task.py",
        "leaf, leaf.dtype.type(0))",
        "leaf, leaf)",
    ),
)

CLAIMS = (
    one(
        "noise calibrated for half of the steps",
        "test_plan.py::test_the_calibrated_noise_meets_the_target_and_no_more",
        "plan/making.py",
        "num_steps=privacy.num_steps,\n        b",
        "num_steps=-(-privacy.num_steps // 2),\n        b",
    ),
    one(
        "epsilon copied from the target",
        "test_train.py::test_epsilon_comes_from_the_ledger",
        "training/trainer.py",
        "epsilon = claimed_epsilon(self.run.run_dir, self.plan)",
        "epsilon = self.plan.target_epsilon / 2",
    ),
    one(
        "a run that may be stopped by looking at it, claimed for the steps until there",
        "trust/test_stopping.py::test_no_rule_of_stopping_gets_more_than_the_claim",
        "plan/records.py",
        "left = max(0, plan.num_steps - done)",
        "left = 0",
    ),
    one(
        "a stopped run that the budget counts only as far as it came",
        "budget/test_spending.py"
        "::test_a_run_that_was_stopped_counts_whole_where_one_may_have_looked",
        "budget/spending.py",
        "fixed = [phase for each in reserving for phase in each.reserved or []]",
        "fixed = [phase for each in counted for phase in each.released or []]",
    ),
    one(
        "an add-or-remove claim that hides what it takes as known",
        "trust/test_report.py::test_the_claim_says_what_is_taken_as_known",
        "trust/claim.py",
        '"taking as known how many users and texts there are"',
        '"by the theorem"',
    ),
    one(
        "steps that begin, whatever their noise makes them cost",
        "test_train.py"
        "::test_noise_that_costs_more_than_was_asked_for_ends_a_run_before_its_first_step",
        "training/start.py",
        "        expect_affordable(plan, planned)\n",
        "",
    ),
    one(
        "noise as a file of the cache says",
        "accounting/test_calibration.py"
        "::test_a_value_in_the_cache_that_was_changed_is_as_if_absent[noise_multiplier]",
        "accounting/calibration.py",
        "if (kept := _kept(path)) is not None and meets(kept):",
        "if (kept := _kept(path)) is not None:",
    ),
    one(
        "another gradient under the same noise after a crash",
        "trust/test_replay.py::test_what_was_released_is_replayed_where_bits_would_be_others",
        "training/trainer.py",
        "before = released.kept(run_dir, step, what.noisy, str(ledger.digest(step)))",
        "before = what",
    ),
    one(
        "other settings accepted on resume",
        "run/test_directory.py::test_a_changed_setting_is_refused_by_name",
        "run/directory.py",
        'if name not in OPERATIONAL | {"seed"} and value != before.get(name) and not left_out:',
        "if False:",
    ),
    one(
        "other data accepted on resume",
        "test_train.py::test_other_data_is_refused_on_resume",
        "run/directory.py",
        "same = stored.identity.data_seal == now.identity.data_seal",
        "same, now = True, dataclasses.replace(now, identity=stored.identity)",
    ),
    one(
        "the key in whatever prints it",
        "test_keys.py::test_the_key_is_in_no_representation",
        *("keys.py", 'return "SecretKey(hidden)"', 'return f"SecretKey({self._secret.hex()})"'),
    ),
    one(
        "the seed among the settings of the run",
        "test_train.py::test_the_key_is_in_no_file_but_its_own",
        "run/directory.py",
        'for name, value in as_dict(self.run).items() if name != "seed"}',
        "for name, value in as_dict(self.run).items()}",
    ),
)

ADMISSION, DRAWS = "budget/test_admission.py::", "test_other_draws.py::"
COPIES = (
    one(
        "an older copy of a killed run taken for the run",
        ADMISSION + "test_an_older_copy_of_a_killed_run_is_refused",
        *("budget/marks.py", "if (steps := len(chains) - 1) < self.steps:", "if not (steps := 1):"),
    ),
    one(
        "a step shown before the ledger of the data has it",
        DRAWS + "test_a_copy_of_a_killed_run_does_not_go_on_with_other_gradients",
        *("run/ledger.py", "            note(self._directory, self.num_steps, self.chain)\n", ""),
    ),
    one(
        "a killed run counted with what its directory shows",
        ADMISSION + "test_a_killed_run_counts_whole_whatever_its_directory_shows",
        "budget/admission.py",
        "return Charge(entry, entry.planned, _state(entry))",
        "return Charge(entry, run_ledger.phases(run_ledger.read(Path(entry.place))), KILLED)",
    ),
    one(
        "turns drawn anew by other packages",
        DRAWS
        + "test_turns_that_other_packages_draw_otherwise_are_refused_and_the_same_ones_are_not",
        "training/start.py",
        "same = drawn_once(method, stored.plan.num_steps, opened.key) == stored.plan.drawn_once",
        "same = True",
    ),
    one(
        "noise taken back that nobody added",
        DRAWS + "test_rows_of_noise_that_would_be_others_are_refused",
        *("training/trainer.py", "ledger.noise_row(step) in (None, seal)", "seal"),
    ),
    one(
        "a group size drawn before it is paid for",
        "test_dry_run.py::"
        "test_a_private_draw_is_counted_before_anything_is_refused_that_follows_from_it",
        *("plan/completion.py", "            pay(delta)\n", "            pass\n"),
    ),
)

HELD_OUT = "budget/test_evaluation_in_training.py::"
EVALUATIONS = (
    one(
        "a held-out loss without the noise that is claimed",
        HELD_OUT + "test_what_is_released_has_the_noise_of_the_plan_and_a_user_moves_it_by_little",
        "noise/mean_loss.py",
        "released = noisy_number(total, stddev * PER_UNIT, rng) / PER_UNIT",
        "released = total / PER_UNIT",
    ),
    one(
        "all evaluations of a training for the price of one",
        HELD_OUT + "test_the_plan_pays_for_every_evaluation_that_there_can_be",
        "plan/evaluations.py",
        "sigma, _ = noise_of(privacy.eval_epsilon, delta, count)",
        "sigma, _ = noise_of(privacy.eval_epsilon, delta)",
    ),
    Mistake(
        "another held-out loss under the same noise after a crash",
        HELD_OUT + "test_a_step_is_released_once",
        (
            ("training/held_out.py", "if step in released.losses:", "if False:"),
            ("run/evaluations.py", "if step not in self.losses:", "if True:"),
        ),
    ),
)

MISTAKES = (*NOISE_AND_SENSITIVITY, *CLIPPING, *SAMPLING, *CLAIMS, *COPIES, *EVALUATIONS)
