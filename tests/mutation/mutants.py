"""Faults in spsjax, each with the gate tests that must fail because of it.

They are faults that a round could have: in the keys and the drawing of tokens, in the verifiers,
and in the loop. One fault stands for one property that the tests claim to prove.
"""

from helpers.mutants import read

KEYS = read(r"""
sampling/randomness.py
- acceptance and residual share a role
    DRAFT, ACCEPT, NEXT = range(3)
    DRAFT, ACCEPT, NEXT = 0, 1, 1
    decode/keys_test.py::test_generate_uses_each_number_once[rejection-]
- two rows have one key
    jax.random.fold_in(key, row))(
    jax.random.fold_in(key, 0 * row))(
    decode/keys_test.py::test_generate_uses_each_number_once[rejection-]
- the roles' numbers are overlapping parts of one sequence
    jax.random.uniform(jax.random.fold_in(key, role), (count,), jnp.float32)
    jax.random.uniform(key, (count + 5 * role,), jnp.float32)[5 * role :]
    decode/keys_test.py::test_generate_uses_each_number_once[rejection-]
decode/step.py
- keys of a round do not depend on the length
    (state.keys, state.lengths)
    (state.keys, 0 * state.lengths)
    decode/keys_test.py::test_generate_uses_each_number_once[rejection-]
drafters/sample.py
- one number chooses the blocks of all tokens of a draft
    2 * N).reshape(-1, N, 2)
    '2 * N).reshape(-1, N, 2)\n    uniforms = uniforms.at[:, :, 0].set(uniforms[:, :1, 0])'
    decode/loop_test.py::test_generate_with_same_random_numbers_equals_oracle[draft_model-300]
verifiers/block.py
- acceptance has the numbers of the residual
    keys_B, sampling.ACCEPT, M - 1)
    keys_B, sampling.NEXT, M - 1)
    verifiers/exactness_test.py::test_rules_for_chains_are_lossless[block]
""")

DRAWING = read(r"""
sampling/probs.py
- one token of equal ones too few
    jnp.cumsum(ties, axis=-1) <= num_ties
    jnp.cumsum(ties, axis=-1) < num_ties
    sampling_test.py::test_to_probs_equals_sorted_reference[ties-to_probs-129]
- logits that are not finite give a distribution
    jnp.where(finite, probs, jnp.nan)
    probs
    sampling_test.py::test_to_probs_of_non_finite_logit_is_all_nan[1.0-nan]
sampling/drawing.py
- tokens of no weight are drawn
    jnp.sum(ends <= level, axis=-1)
    jnp.sum(ends < level, axis=-1)
    sampling_test.py::test_draw_at_extreme_uniforms_skips_zero_weights
- block and token are drawn with one number
    _inverse_cdf(inside, uniforms[..., 1])
    _inverse_cdf(inside, uniforms[..., 0])
    sampling_test.py::test_draw_inverts_cumulative_sums[129]
drafters/sample.py
- siblings are drawn with replacement
    jnp.where(taken, 0, now)
    now
    drafters/draws_test.py::test_tree_draws_from_what_it_reports[False]
- tokens of a chain do not see themselves
    parents, node <= k)
    parents, node < k)
    decode/chunks_and_rows_test.py::test_first_drafts_after_one_token_are_the_drafts_own
- parents in a dynamic tree are one too low
    1 + best[:, None] <= parents
    1 + best[:, None] < parents
    verifiers/verifiers_test.py::test_dynamic_tree_keeps_the_most_probable_paths[2-5]
drafters/draft_model.py
- the draft model's cache gets one position of the draft again and again
    state.write(drafted.block, path, lengths
    state.write(drafted.block, 0 * path, lengths
    decode/contract_test.py::test_state_after_commit_equals_a_fresh_prefill[False-draft_model]
- after a prompt of one token, drafts see a token that is not there
    visible &= row >= first[:, None, None]
    pass
    decode/chunks_and_rows_test.py::test_first_drafts_after_one_token_are_the_drafts_own
""")

VERIFIERS = read(r"""
verifiers/rejection.py
- a number of 0 accepts impossible tokens
    K) * denominator < numerator
    K) * denominator <= numerator
    verifiers/one_round_test.py::test_rejection_with_zero_uniform_emits_possible_tokens
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
verifiers/verdicts.py
- the path of a chain ends one node early
    node <= count_B[:, None], node
    node < count_B[:, None], node
    decode/chunks_and_rows_test.py::test_rejection_path_is_root_and_accepted_nodes
""")

LOOP = read(r"""
decode/step.py
- a text is one token longer than its limit
    room = state.limits - state.lengths
    room = state.limits - state.lengths + 1
    decode/commit_test.py::test_commit_ignores_nan_after_the_end_of_a_text
- the end of sequence is cut off
    astype(jnp.int32) + 1, count)
    astype(jnp.int32), count)
    decode/commit_test.py::test_commit_ignores_nan_after_the_end_of_a_text
- the cache gets the first nodes of a tree, not the path
    path = None if proposal.parents is None else verdict.path
    path = None
    decode/whole_texts_test.py::test_tree_matching_is_lossless
- the cache is as long as the text
    block, path, lengths - 1, output.hidden)
    block, path, lengths, output.hidden)
    decode/whole_texts_test.py::test_no_drafter_is_autoregressive_sampling
- nodes below depth K are accepted
    sizes.node_depths(proposal) <= drafter.num_speculative_tokens
    sizes.node_depths(proposal) <= drafter.num_speculative_tokens + 1
    decode/propose_test.py::test_propose_of_a_tree_lets_only_whole_paths_up_to_k_be_accepted
- drafts are deeper than the schedule wants
    jnp.where(too_deep, -1, proposal.tokens)
    proposal.tokens
    decode/propose_test.py::test_propose_of_a_tree_drops_what_a_row_does_not_want
- positions in a tree are numbers of nodes
    state.cache.lengths[:, None] + tree.depths(proposal.parents)
    state.cache.lengths[:, None] + jnp.arange(1 + drafts.shape[1])
    decode/whole_texts_test.py::test_tree_matching_is_lossless
decode/prompt.py
- the last chunk of a prompt begins too late
    '    start = jnp.minimum(start, T - width)\n'
    ''
    decode/chunks_and_rows_test.py::test_last_chunk_stays_within_the_cache
decode/sizes.py
- a round is scored one node short
    jnp.arange(1, N + 1), 0)
    jnp.arange(N), 0)
    decode/commit_test.py::test_smallest_size_gives_what_the_whole_pass_gives[chain]
types.py
- drafts follow the last but one token
    self.tokens, self.lengths[:, None] - 1, axis=1)
    self.tokens, self.lengths[:, None] - 2, axis=1)
    decode/whole_texts_test.py::test_draft_model_is_lossless
tree.py
- ancestors are looked for half as far up
    range(max(N, 1).bit_length())
    range(max(N, 1).bit_length() - 1)
    tree_test.py::test_ancestors_and_depths_equal_walks_to_the_root[7]
- a walk leaves nodes before those of earlier branches
    jnp.where(above, before[:, None], 0), axis=2)
    jnp.where(above, 0 * before[:, None], 0), axis=2)
    verifiers/exactness_test.py::test_rules_for_trees_are_lossless[0-0-1-2-traversal-False]
models/caches/dense.py
- the slot after the last token is seen
    slots < self.lengths[:, None], slots
    slots <= self.lengths[:, None], slots
    decode/whole_texts_test.py::test_no_drafter_is_autoregressive_sampling
models/caches/rows.py
- the last row of a state is inserted
    new[:1]
    new[-1:]
    decode/chunks_and_rows_test.py::test_insert_takes_the_first_row_of_a_padded_state
""")

MUTANTS = (*KEYS, *DRAWING, *VERIFIERS, *LOOP)
