"""Faults in verifiers, of the kind of `mutants`: one or two per module."""

from mutants import of

EXACT = "verifiers/exactness_test.py::test_"
ROUND = "verifiers/one_round_test.py::test_"
RULES = "verifiers/verifiers_test.py::test_"
MATCH = "verifiers/match_test.py::test_"
ALONE = "verifiers/standalone_test.py::test_"
LENIENCE = "verifiers/lenience_test.py::test_"
CHUNKS = "decode/chunks_and_rows_test.py::test_"

MUTANTS = (
    *of(
        "verifiers/rejection.py",
        (
            "a number of 0 accepts impossible tokens",
            "K) * denominator < numerator",
            "K) * denominator <= numerator",
            f"{ROUND}rejection_with_zero_uniform_emits_possible_tokens",
        ),
        (
            "the residual is the target",
            "left = residual(draft_at, target_at, lenience)",
            "left = target_at",
            f"{ROUND}residual_is_normalised_without_softmax",
        ),
        (
            "lenience of greedy rows applies to sampled ones",
            "chosen & close & greedy[:, None, None]",
            "chosen & close",
            f"{LENIENCE}sampled_rows_keep_their_distribution_under_lenience",
        ),
    ),
    *of(
        "verifiers/block.py",
        (
            "prefixes weigh what their last token weighs",
            "scaled = weights[-1] * target_at",
            "scaled = target_at",
            f"{EXACT}rules_for_chains_are_lossless[block]",
        ),
    ),
    *of(
        "verifiers/siblings.py",
        (
            "all rows have the tree of the first",
            "parents, alive = verdicts.parents_of(proposal),",
            "parents, alive = verdicts.parents_of(proposal)[:1] + 0 * proposal.tokens,",
            f"{ALONE}rows_may_have_trees_of_other_shapes[recursive]",
        ),
        (
            "a token that may not be accepted leaves less to its siblings",
            "set(jnp.where(alive, left, target))",
            "set(left)",
            f"{EXACT}siblings_after_one_that_is_not_eligible_are_verified_losslessly[recursive]",
        ),
    ),
    *of(
        "verifiers/recursive.py",
        (
            "the last accepted sibling is taken",
            "verdicts.first_siblings(parents, accepted))",
            "accepted)",
            f"{EXACT}rules_for_trees_are_lossless[0-0-1-2-recursive-False]",
        ),
    ),
    *of(
        "verifiers/traversal.py",
        (
            "the last node that passes is taken",
            "jnp.min(jnp.where(passed, turn, M), axis=1)",
            "jnp.max(jnp.where(passed, turn, -1), axis=1)",
            f"{EXACT}rules_for_chains_are_lossless[traversal]",
        ),
    ),
    *of(
        "verifiers/kseq.py",
        (
            "children are accepted as if there were one",
            "target_at / (rho_at * jnp.where(alive, draft_at, 1))",
            "target_at / jnp.where(alive, draft_at, 1)",
            f"{EXACT}rules_for_trees_are_lossless[0-0-1-2-kseq-False]",
        ),
        (
            "children that may not be accepted count",
            " & alive[:, None]",
            "",
            f"{EXACT}siblings_after_one_that_is_not_eligible_are_verified_losslessly[kseq]",
        ),
    ),
    *of(
        "verifiers/multipath.py",
        (
            "paths are cut off where the longest ends",
            "jnp.min(jnp.where(started, sizes, N), axis=1, initial=N)",
            "jnp.max(jnp.where(started, sizes, 0), axis=1, initial=0)",
            f"{EXACT}paths_are_cut_off_where_the_shortest_ends",
        ),
    ),
    *of(
        "verifiers/match.py",
        (
            "tokens that may not be accepted match",
            " & verdicts.offered(proposal)",
            "",
            f"{MATCH}match_takes_the_first_of_twins_and_skips_holes",
        ),
        (
            "draws from no distribution match",
            "equal &= jnp.take_along_axis(drawable, parents, axis=1)",
            "pass",
            f"{MATCH}matching_stops_at_a_node_without_a_distribution",
        ),
    ),
    *of(
        "verifiers/verdicts.py",
        (
            "of twins both are taken",
            "chosen_BN & ~jnp.any(earlier & chosen_BN[:, None], axis=2)",
            "chosen_BN",
            f"{MATCH}match_takes_the_first_of_twins_and_skips_holes",
        ),
        (
            "the path of a chain ends one node early",
            "node <= count_B[:, None], node",
            "node < count_B[:, None], node",
            f"{CHUNKS}rejection_path_is_root_and_accepted_nodes",
        ),
    ),
    *of(
        "verifiers/top_k.py",
        (
            "the last of the k best tokens is not good enough",
            "probs >= jnp",
            "probs > jnp",
            f"{RULES}top_k_acceptance_by_hand[2]",
        ),
    ),
    *of(
        "verifiers/typical.py",
        (
            "the threshold grows with the entropy",
            "jnp.exp(-entropy))",
            "jnp.exp(entropy))",
            f"{RULES}typical_acceptance_takes_the_most_probable_of_the_longest_paths",
        ),
    ),
    *of(
        "verifiers/approximate.py",
        (
            "of the longest paths the first is taken",
            "jnp.where(longest, of_path, -jnp.inf)",
            "longest",
            f"{RULES}typical_acceptance_takes_the_most_probable_of_the_longest_paths",
        ),
    ),
    *of(
        "verifiers/lenience.py",
        (
            "the bias has no lenience in what is kept",
            "target_probs / lenience)",
            "target_probs)",
            "models/half_precision_test.py::test_distributions_of_half_precision_are_widened[float16]",
        ),
    ),
    *of(
        "verifiers/inputs.py",
        (
            "half precision stays as it is",
            "probs = probs.astype(jnp.promote_types(probs.dtype, jnp.float32))",
            "pass",
            "models/half_precision_test.py::test_distributions_of_half_precision_are_widened[float16]",
        ),
    ),
    *of(
        "verifiers/standalone.py",
        (
            "distributions after absent tokens count",
            "jnp.isfinite(target) | ~used",
            "jnp.isfinite(target)",
            f"{ALONE}distributions_of_absent_tokens_may_be_anything[match]",
        ),
    ),
)
