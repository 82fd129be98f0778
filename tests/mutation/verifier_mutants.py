"""Faults in verifiers, of the kind of `mutants`: one or two per module."""

from helpers.mutants import read

MUTANTS = read(r"""
verifiers/rejection.py
- a number of 0 accepts impossible tokens
    K) * denominator < numerator
    K) * denominator <= numerator
    verifiers/one_round_test.py::test_rejection_with_zero_uniform_emits_possible_tokens
- the residual is the target
    next_probs = residual(draft_at, target_at, lenience)
    next_probs = target_at
    verifiers/one_round_test.py::test_residual_is_normalised_without_softmax
- lenience of greedy rows applies to sampled ones
    chosen & close & greedy_B[:, None, None]
    chosen & close
    verifiers/lenience_test.py::test_sampled_rows_keep_their_distribution_under_lenience
verifiers/block.py
- prefixes weigh what their last token weighs
    scaled = weights[-1] * target_at
    scaled = target_at
    verifiers/exactness_test.py::test_rules_for_chains_are_lossless[block]
verifiers/siblings.py
- all rows have the tree of the first
    parents, offered = verdicts.parents_of(proposal),
    parents, offered = verdicts.parents_of(proposal)[:1] + 0 * proposal.tokens,
    verifiers/standalone_test.py::test_rows_may_have_trees_of_other_shapes[recursive]
- a token that may not be accepted leaves less to its siblings
    set(jnp.where(present, residual, target))
    set(residual)
    verifiers/exactness_test.py::test_siblings_after_one_that_is_not_eligible_are_verified_losslessly[recursive]
verifiers/recursive.py
- the last accepted sibling is taken
    verdicts.first_siblings(parents, accepted))
    accepted)
    verifiers/exactness_test.py::test_rules_for_trees_are_lossless[0-0-1-2-recursive-False]
verifiers/traversal.py
- the last node that passes is taken
    jnp.min(jnp.where(passed, order, M), axis=1)
    jnp.max(jnp.where(passed, order, -1), axis=1)
    verifiers/exactness_test.py::test_rules_for_chains_are_lossless[traversal]
verifiers/kseq.py
- children are accepted as if there were one
    target_at / (rho_at * jnp.where(present, draft_at, 1))
    target_at / jnp.where(present, draft_at, 1)
    verifiers/exactness_test.py::test_rules_for_trees_are_lossless[0-0-1-2-kseq-False]
- children that may not be accepted count
    ' & present[:, None]'
    ''
    verifiers/exactness_test.py::test_siblings_after_one_that_is_not_eligible_are_verified_losslessly[kseq]
verifiers/multipath.py
- paths are cut off where the longest ends
    jnp.min(jnp.where(started, sizes, N), axis=1, initial=N)
    jnp.max(jnp.where(started, sizes, 0), axis=1, initial=0)
    verifiers/exactness_test.py::test_paths_are_cut_off_where_the_shortest_ends
verifiers/match.py
- tokens that may not be accepted match
    ' & verdicts.offered(proposal)'
    ''
    verifiers/match_test.py::test_match_takes_the_first_of_twins_and_skips_holes
- draws from no distribution match
    equal &= jnp.take_along_axis(drawable, parents, axis=1)
    pass
    verifiers/match_test.py::test_matching_stops_at_a_node_without_a_distribution
verifiers/verdicts.py
- of twins both are taken
    chosen_BN & ~jnp.any(earlier & chosen_BN[:, None], axis=2)
    chosen_BN
    verifiers/match_test.py::test_match_takes_the_first_of_twins_and_skips_holes
- the path of a chain ends one node early
    node <= count_B[:, None], node
    node < count_B[:, None], node
    decode/chunks_and_rows_test.py::test_rejection_path_is_root_and_accepted_nodes
verifiers/top_k.py
- the last of the k best tokens is not good enough
    probs >= jnp
    probs > jnp
    verifiers/verifiers_test.py::test_top_k_acceptance_by_hand[2]
verifiers/typical.py
- the threshold grows with the entropy
    jnp.exp(-entropy))
    jnp.exp(entropy))
    verifiers/verifiers_test.py::test_typical_acceptance_takes_the_most_probable_of_the_longest_paths
verifiers/approximate.py
- of the longest paths the first is taken
    jnp.where(longest, path_log_probs, -jnp.inf)
    longest
    verifiers/verifiers_test.py::test_typical_acceptance_takes_the_most_probable_of_the_longest_paths
verifiers/lenience.py
- the bias has no lenience in what is kept
    target_probs / lenience)
    target_probs)
    models/half_precision_test.py::test_distributions_of_half_precision_are_widened[float16]
verifiers/inputs.py
- half precision stays as it is
    probs = probs.astype(jnp.promote_types(probs.dtype, jnp.float32))
    pass
    models/half_precision_test.py::test_distributions_of_half_precision_are_widened[float16]
verifiers/standalone.py
- distributions after absent tokens count
    jnp.isfinite(target) | ~used
    jnp.isfinite(target)
    verifiers/standalone_test.py::test_distributions_of_absent_tokens_may_be_anything[match]
""")
