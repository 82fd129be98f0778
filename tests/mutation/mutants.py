"""Faults in spsjax, each with the gate tests that must fail because of it.

They are faults that a round could have: in the keys and the drawing of tokens, in the verifiers,
and in the loop. One fault stands for one property that the tests claim to prove.
"""

import typing


class Mutant(typing.NamedTuple):
    """A fault, made by changing one text of one file.

    Attributes:
        fault: what is wrong.
        file: path of the file in the repository.
        old: text that occurs once in the file.
        new: text in its place.
        tests: node ids of tests, each of which must fail.
    """

    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def of(file: str, *faults: tuple[str, ...]) -> list[Mutant]:
    """Returns the mutants of a module: what is wrong, two texts, and tests below `tests/`."""
    return [
        Mutant(fault, f"spsjax/{file}", old, new, tuple(f"tests/{test}" for test in tests))
        for fault, old, new, *tests in faults
    ]


ONCE = "decode/keys_test.py::test_"
CONTRACT = "decode/contract_test.py::test_"
ORACLE = "decode/loop_test.py::test_"
TEXTS = "decode/whole_texts_test.py::test_"
COMMIT = "decode/commit_test.py::test_"
PROPOSE = "decode/propose_test.py::test_propose_"
CHUNKS = "decode/chunks_and_rows_test.py::test_"
DRAWS = "drafters/draws_test.py::test_"
WINDOW = "caches/window_test.py::test_"
EXACT = "verifiers/exactness_test.py::test_"
RULES = "verifiers/verifiers_test.py::test_"
SAMPLING = "sampling_test.py::test_"
TREE = "tree_test.py::test_"

KEYS = [
    *of(
        "sampling.py",
        (
            "acceptance and residual share a role",
            "DRAFT, ACCEPT, NEXT = range(3)",
            "DRAFT, ACCEPT, NEXT = 0, 1, 1",
            f"{ONCE}generate_uses_each_number_once[rejection-]",
        ),
        (
            "two rows have one key",
            "jax.random.fold_in(key, row))(",
            "jax.random.fold_in(key, 0 * row))(",
            f"{ONCE}generate_uses_each_number_once[rejection-]",
        ),
        (
            "the roles' numbers are overlapping parts of one sequence",
            "jax.random.uniform(jax.random.fold_in(key, role), (count,), jnp.float32)",
            "jax.random.uniform(key, (count + 5 * role,), jnp.float32)[5 * role :]",
            f"{ONCE}generate_uses_each_number_once[rejection-]",
        ),
    ),
    *of(
        "decode.py",
        (
            "keys of a round do not depend on the length",
            "(state.keys, state.lengths)",
            "(state.keys, 0 * state.lengths)",
            f"{ONCE}generate_uses_each_number_once[rejection-]",
        ),
    ),
    *of(
        "drafters/sample.py",
        (
            "drafts are drawn with the numbers of acceptance",
            "now.keys, sampling.DRAFT, 2 * N)",
            "now.keys, sampling.ACCEPT, 2 * N)",
            f"{DRAWS}drafter_draws_from_what_it_reports[draft_model]",
        ),
        (
            "one number chooses the blocks of all tokens of a draft",
            "sampling.DRAFT, 2 * N).reshape(-1, N, 2)",
            "sampling.DRAFT, 2 * N).reshape(-1, N, 2)\n"
            "    uniforms = uniforms.at[:, :, 0].set(uniforms[:, :1, 0])",
            f"{ORACLE}generate_with_same_random_numbers_equals_oracle[draft_model-300]",
        ),
    ),
    *of(
        "verifiers/verdicts.py",
        (
            "the residual is drawn with the draft's numbers",
            "keys_B, sampling.NEXT, 2)",
            "keys_B, sampling.DRAFT, 2)",
            f"{ONCE}generate_uses_each_number_once[rejection-]",
        ),
    ),
    *of(
        "verifiers/block.py",
        (
            "acceptance has the numbers of the residual",
            "keys_B, sampling.ACCEPT, M - 1)",
            "keys_B, sampling.NEXT, M - 1)",
            f"{EXACT}rules_for_chains_are_lossless[block]",
        ),
    ),
]

DRAWING = [
    *of(
        "sampling.py",
        (
            "temperature multiplies",
            "scaled / jnp.where(greedy, 1, columns.temperature)",
            "scaled * jnp.where(greedy, 1, columns.temperature)",
            f"{SAMPLING}to_probs_equals_sorted_reference[spread-129]",
        ),
        (
            "one token of equal ones too few",
            "jnp.cumsum(ties, axis=-1) <= wanted",
            "jnp.cumsum(ties, axis=-1) < wanted",
            f"{SAMPLING}to_probs_equals_sorted_reference[ties-129]",
        ),
        (
            "logits that are not finite give a distribution",
            "jnp.where(finite, probs, jnp.nan)",
            "probs",
            f"{SAMPLING}to_probs_of_non_finite_logit_is_all_nan[1.0-nan]",
        ),
        (
            "tokens of no weight are drawn",
            "jnp.sum(ends <= level, axis=-1)",
            "jnp.sum(ends < level, axis=-1)",
            f"{SAMPLING}draw_at_extreme_uniforms_skips_zero_weights",
        ),
        (
            "block and token are drawn with one number",
            "_inverse_cdf(inside, uniforms[..., 1])",
            "_inverse_cdf(inside, uniforms[..., 0])",
            f"{SAMPLING}draw_inverts_cumulative_sums[129]",
        ),
    ),
    *of(
        "drafters/sample.py",
        (
            "a token is drawn with the numbers of the one before",
            "jnp.int32), uniforms[1:]",
            "jnp.int32), uniforms[:-1]",
            f"{DRAWS}drafter_draws_from_what_it_reports[draft_model]",
        ),
        (
            "siblings are drawn with replacement",
            "jnp.where(taken, 0, now)",
            "now",
            f"{DRAWS}tree_draws_from_what_it_reports[False]",
        ),
        (
            "tokens of a chain do not see themselves",
            "parents, node <= k)",
            "parents, node < k)",
            f"{CHUNKS}first_drafts_after_one_token_are_the_drafts_own",
        ),
        (
            "parents in a dynamic tree are one too low",
            "1 + kept[:, None] <= parents",
            "1 + kept[:, None] < parents",
            f"{RULES}dynamic_tree_keeps_the_most_probable_paths[2-5]",
        ),
        (
            "a path in a dynamic tree is as probable as its last token",
            "scores[..., None] + more",
            "more",
            f"{RULES}dynamic_tree_keeps_the_most_probable_paths[2-5]",
        ),
    ),
    *of(
        "drafters/draft_model.py",
        (
            "the draft model's cache gets one position of the draft again and again",
            "state.write(drafted.block, path, lengths",
            "state.write(drafted.block, 0 * path, lengths",
            f"{CONTRACT}state_after_commit_equals_a_fresh_prefill[False-draft_model]",
        ),
        (
            "after a prompt of one token, drafts see a token that is not there",
            "seen &= row >= first[:, None, None]",
            "pass",
            f"{CHUNKS}first_drafts_after_one_token_are_the_drafts_own",
        ),
    ),
]

LOOP = [
    *of(
        "decode.py",
        (
            "a text is one token longer than its limit",
            "room = state.limits - state.lengths",
            "room = state.limits - state.lengths + 1",
            f"{COMMIT}commit_ignores_nan_after_the_end_of_a_text",
        ),
        (
            "the end of sequence is cut off",
            "astype(jnp.int32) + 1, count)",
            "astype(jnp.int32), count)",
            f"{COMMIT}commit_ignores_nan_after_the_end_of_a_text",
        ),
        (
            "a row fails although its text has ended",
            "& ~ended & (lengths < state.limits)",
            "& (lengths < state.limits)",
            f"{COMMIT}commit_ignores_nan_after_the_end_of_a_text",
        ),
        (
            "a round without a last token counts one token less",
            "verdict.num_tokens - verdict.valid",
            "verdict.num_tokens - 1",
            f"{COMMIT}commit_ignores_nan_after_the_end_of_a_text",
        ),
        (
            "the cache gets the first nodes of a tree, not the path",
            "path = None if proposal.parents is None else verdict.path",
            "path = None",
            f"{TEXTS}tree_matching_is_lossless",
        ),
        (
            "the cache is as long as the text",
            "block, path, lengths - 1, output.hidden)",
            "block, path, lengths, output.hidden)",
            f"{TEXTS}no_drafter_is_autoregressive_sampling",
        ),
        (
            "nodes below depth K are accepted",
            "_node_depths(proposal) <= drafter.num_speculative_tokens",
            "_node_depths(proposal) <= drafter.num_speculative_tokens + 1",
            f"{PROPOSE}of_a_tree_lets_only_whole_paths_up_to_k_be_accepted",
        ),
        (
            "drafts are deeper than the pacer wants",
            "jnp.where(too_deep, -1, proposal.tokens)",
            "proposal.tokens",
            f"{PROPOSE}of_a_tree_drops_what_a_row_does_not_want",
        ),
        (
            "nodes that the drafter wants scored only are accepted",
            "        eligible &= proposal.eligible",
            "        pass",
            f"{PROPOSE}of_a_tree_lets_only_whole_paths_up_to_k_be_accepted",
        ),
        (
            "a chain goes on after a token that is not eligible",
            "jnp.where(proposal.eligible, proposal.tokens, -1)",
            "proposal.tokens",
            f"{PROPOSE}of_a_chain_drops_tokens_that_are_not_eligible[None-expected0]",
        ),
        (
            "positions in a tree are numbers of nodes",
            "state.cache.lengths[:, None] + tree.depths(proposal.parents)",
            "state.cache.lengths[:, None] + jnp.arange(1 + drafts.shape[1])",
            f"{TEXTS}tree_matching_is_lossless",
        ),
        (
            "nodes of a tree see all earlier ones",
            "ancestors = tree.ancestors(proposal.parents)",
            "ancestors = tree.ancestors(tree.chain(*drafts.shape))",
            f"{TEXTS}tree_matching_is_lossless",
        ),
        (
            "the last chunk of a prompt begins too late",
            "    start = jnp.minimum(start, T - width)\n",
            "",
            f"{CHUNKS}last_chunk_stays_within_the_cache[1-32]",
        ),
        (
            "a chunk that repeats tokens is written behind them",
            "cache = cache.at(starts).extend(output)",
            "cache = cache.extend(output)",
            f"{CHUNKS}last_chunk_stays_within_the_cache[20-64]",
        ),
    ),
    *of(
        "scoring.py",
        (
            "a round is scored one node short",
            "jnp.arange(1, N + 1), 0)",
            "jnp.arange(N), 0)",
            f"{COMMIT}smallest_size_gives_what_the_whole_pass_gives[chain]",
        ),
        (
            "padding has positions",
            "pad(block.positions, value=-1)",
            "pad(block.positions)",
            f"{COMMIT}smallest_size_gives_what_the_whole_pass_gives[tree]",
        ),
    ),
    *of(
        "types.py",
        (
            "drafts follow the last but one token",
            "self.tokens, self.lengths[:, None] - 1, axis=1)",
            "self.tokens, self.lengths[:, None] - 2, axis=1)",
            f"{TEXTS}draft_model_is_lossless",
        ),
    ),
    *of(
        "tree.py",
        (
            "ancestors are looked for half as far up",
            "range(max(N, 1).bit_length())",
            "range(max(N, 1).bit_length() - 1)",
            f"{TREE}ancestors_and_depths_equal_walks_to_the_root[7]",
        ),
        (
            "a walk leaves nodes before those of earlier branches",
            "jnp.where(above, before[:, None], 0), axis=2)",
            "jnp.where(above, 0 * before[:, None], 0), axis=2)",
            f"{EXACT}rules_for_trees_are_lossless[0-0-1-2-traversal-False]",
        ),
    ),
    *of(
        "caches/dense.py",
        (
            "the slot after the last token is seen",
            "slots < self.lengths[:, None], slots",
            "slots <= self.lengths[:, None], slots",
            f"{TEXTS}no_drafter_is_autoregressive_sampling",
        ),
    ),
    *of(
        "caches/window.py",
        (
            "nodes that were rejected are written",
            "& (positions < lengths_B[:, None]) & lasts",
            "& lasts",
            f"{WINDOW}path_of_a_tree_is_written_and_the_rest_is_not",
        ),
    ),
    *of(
        "caches/rows.py",
        (
            "the last row of a state is inserted",
            "theirs[:1]",
            "theirs[-1:]",
            f"{CHUNKS}insert_takes_the_first_row_of_a_padded_state",
        ),
    ),
]

MUTANTS = (*KEYS, *DRAWING, *LOOP)
