"""The mutants of `mutation.py`: faults that survived all tests once."""

import typing


class Mutant(typing.NamedTuple):
    """A fault, and the tests that notice it.

    Attributes:
      file: file below `spsjax/`.
      old: text that occurs once in the file.
      new: the text in its place.
      tests: name of a test file without `_test.py`, and pytest's options.
    """

    file: str
    old: str
    new: str
    tests: str


def of(file: str, tests: str, *changes: tuple[str, str]) -> list[Mutant]:
    """Returns one mutant per change, all of one file and for the same tests."""
    return [Mutant(file, old, new, tests) for old, new in changes]


MUTANTS = [
    *of(
        "decode.py",
        "round -k smallest_size",
        ("used > jnp.asarray(sizes[:-1])", "used >= jnp.asarray(sizes[:-1])"),
        ("jnp.arange(1, N + 1), 0)", "jnp.arange(N), 0)"),
        ("(proposal.tokens >= 0) & ~done[:, None]", "(proposal.tokens >= 0)"),
        ("cut(proposal.parents, count),", "None,"),
        ("cut(proposal.eligible, count),", "None,"),
        ("count if proposal.parents is None else count + 1", "count"),
        ("tuple(map(pad, output.taps))", "output.taps"),
        ("pad(block.positions)", "block.positions"),
        ("pad(output.logits), pad", "output.logits, pad"),
        ("missing)), constant_values=-1)", "missing)))"),
    ),
    *of(
        "decode.py",
        "round -k commit",
        ("offered &= proposal.eligible", "pass"),
        ("jnp.where(active, offered, 0)", "offered"),
        ("& ~ended & (lengths < state.limits)", "& (lengths < state.limits)"),
        ("& ~ended & (lengths < state.limits)", "& ~ended"),
        ("failed = active & ~verdict.valid", "failed = ~verdict.valid"),
        ("verdict.num_tokens - verdict.valid", "verdict.num_tokens - 1"),
        ("is_end &= jnp", "is_end |= jnp"),
    ),
    *of(
        "decode.py",
        "decode -k oracle",
        ("offered = proposal.tokens >= 0", "offered = proposal.tokens >= -1"),
        ("jnp.where(active, offered, 0)", "offered"),
        ("jnp.where(active[:, None], accepted, 0)", "accepted"),
    ),
    *of(
        "generation.py",
        "decode -k equals_greedy_decoding[ngram-3]",
        ("/ max(proposed, 1)", "/ max(histogram.sum() * 3, 1)"),
    ),
    *of(
        "drafters/ngram.py",
        "ngram",
        ("matched * len(slots) + slots", "slots * (matched > 0)"),
        ("matched * len(slots) + slots", "matched * len(slots) - slots"),
        ("run = run & (slots >= back) & ", "run = run & "),
        ("slots < last", "slots <= last"),
        (" % period", ""),
        ("jnp.maximum(last - match, 1)", "jnp.maximum(last - match + 1, 1)"),
        (">= self.min_ngram", ">= 1"),
        ("range(self.max_ngram)", "range(self.max_ngram - 1)"),
    ),
    *of(
        "verifiers/rejection.py",
        "lenience",
        ("+ jnp.log(lenience)", "+ 2 * jnp.log(lenience)"),
        ("close = drafted >= ", "close = drafted > "),
        ("chosen & close & greedy[:, None, None]", "chosen & close"),
        ("greedy = rows.temperature == 0", "greedy = rows.temperature >= 0"),
        ("chosen &= jnp.isfinite(target_probs[:, :-1])", "pass"),
        ("relaxed, target_probs[:, -1:]]", "relaxed, relaxed[:, -1:]]"),
    ),
    *of(
        "verifiers/standalone.py",
        "known_bugs_numerics -k nan_row",
        ("jnp.isfinite(draft) | ~drawn_from", "jnp.isfinite(draft)"),
        ("jnp.isfinite(target) | ~used", "jnp.isfinite(target)"),
        ("reached(parents, proposal.tokens >= 0)", "reached(parents, parents >= 0)"),
    ),
    *of(
        "verifiers/inputs.py",
        "half_precision -k widened",
        ("probs = probs.astype(jnp.promote_types(probs.dtype, jnp.float32))", "pass"),
    ),
    *of(
        "sampling.py",
        "half_precision -k probabilities",
        ("dtype = jnp.promote_types(logits.dtype, jnp.float32)", "dtype = logits.dtype"),
    ),
    *of(
        "models/attention.py",
        "half_precision -k rotary",
        (
            "return jnp.cos(angles), jnp.sin(angles)",
            "return jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)",
        ),
        ("positions_BT[:, :, None, None] *", "positions_BT[:, :, None, None].astype('bfloat16') *"),
    ),
    *of(
        "models/attention.py",
        "half_precision -k attention",
        (
            "        keys_BGSC,\n        preferred_element_type=jnp.float32,\n",
            "        keys_BGSC,\n",
        ),
        (
            "        values_BGSC,\n        preferred_element_type=jnp.float32,\n",
            "        values_BGSC,\n",
        ),
        ("table_HSC, preferred_element_type=jnp.float32)", "table_HSC)"),
        ("query.astype(jnp.float32) * keys", "query * keys"),
        (
            "jnp.concatenate(scores, axis=-1), axis",
            "jnp.concatenate(scores, -1).astype('bfloat16'), axis",
        ),
    ),
    *of(
        "drafters/draft_model.py",
        "core -k one_token",
        ("seen &= row >= first[:, None, None]", "pass"),
        ("(lengths_B < 2).astype", "(lengths_B < 1).astype"),
    ),
    *of(
        "training/checkpoints.py",
        "checkpoints -k again or another_process",
        ("            self._manager.reload()", "            pass"),
        ("multihost.all_true(fault is None)", "(fault is None)"),
        ('fault or "another process could not read it"', "fault"),
    ),
    *of(
        "parallel/sharding.py",
        "sharding -k divide",
        (" and config.vocab_rows % size", " and config.vocab_rows % size > size"),
        (" and config.vocab_rows % size", " and config.vocab_size % size"),
        ('else ("num_heads", "d_ff")', 'else ("num_heads",)'),
        ("config.num_experts and config.num_experts % size == 0", "config.num_experts"),
        ("    if not replicate:\n", "    if True:\n"),
    ),
    *of(
        "parallel/multihost.py",
        "distributed -k all_true or broadcast_int",
        ("bool(np.all(", "bool(np.any("),
        ("ravel()[0]", "ravel()[-1]"),
    ),
    *of(
        "evaluation/journal.py",
        "journal -k more_or_less",
        ("for name in one | other", "for name in one"),
        ("for name in one | other", "for name in other"),
        ("(name in one) != (name in other) or ", ""),
        ("for field in fields if field in values", "for field in fields"),
    ),
    *of(
        "evaluation/significance.py",
        "significance -k ngram",
        ("diags_array(1 / total)", "diags_array(0 * total + 1)"),
        ("counts.append(sign * count)", "counts.append(sign)"),
        ("len(tokens) - n + 1)", "len(tokens) - n)"),
        (
            "np.bincount(columns, np.abs(counts), len(index))",
            "np.bincount(columns, minlength=len(index))",
        ),
        ("float(result.pvalue)", "float(result.pvalue - 1 / (resamples + 1))"),
    ),
    *of(
        "performance/theory.py",
        "theory -k operations",
        ("K * draft_operations + K + 1", "draft_operations + K + 1"),
        ("K * draft_operations + K + 1", "K + 1"),
    ),
    *of(
        "training/losses.py",
        "losses -k without_a_rest",
        ("jnp.maximum(1.0 - total, _LEAST_REST)", "1.0 - total"),
        ("jnp.maximum(1.0 - total, _LEAST_REST)", "jnp.maximum(1.0 - total, 0.0)"),
    ),
    *of(
        "training/target_cache.py",
        "distillation -k more_tokens",
        ("min(self.k, target.config.vocab_size - 1)", "min(self.k, target.config.vocab_size)"),
    ),
    *of(
        "decode.py",
        "decode -k oracle",
        ("state.keys, state.lengths)", "state.keys, 0 * state.lengths)"),
        (
            "root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1",
            "root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 2",
        ),
        ("room = state.limits - state.lengths", "room = state.limits - state.lengths + 1"),
        ("path, lengths - 1, output.hidden)", "path, lengths, output.hidden)"),
        ("done=lengths_B >= limits_B", "done=lengths_B > limits_B"),
        ("cache=cache.at(lengths_B - 1)", "cache=cache.at(lengths_B)"),
    ),
    *of(
        "decode.py",
        "decode -k eos_inside",
        ("astype(jnp.int32) + 1, count)", "astype(jnp.int32), count)"),
        ("failed | ended | (lengths", "failed | (lengths"),
    ),
    *of(
        "decode.py",
        "core -k chunks",
        ("start = jnp.minimum(index * width, T - width)", "start = index * width"),
        ("cache.at(starts).extend(output)", "cache.extend(output)"),
    ),
    *of(
        "cache.py",
        "core -k insert",
        ("theirs[:1]", "theirs[-1:]"),
        ("inserted, distances=self.distances)", "inserted, distances=other.distances)"),
    ),
    *of(
        "cache.py",
        "transformer -k rolled_back",
        ("slots < self.lengths[:, None], slots", "slots <= self.lengths[:, None], slots"),
        (
            "starts = jnp.minimum(self.lengths, last)",
            "starts = jnp.minimum(self.lengths + 1, last)",
        ),
    ),
    *of(
        "verifiers/rejection.py",
        "statistical -k exact_distribution",
        ("K) * denominator < numerator", "K) * denominator < 2 * numerator"),
        ("return jnp.where(empty, target_probs, left)", "return target_probs"),
        ("target_probs - lenience * draft_probs, 0)", "target_probs - draft_probs, 0)"),
        ("lenience * draft_at", "draft_at"),
        ("left = residual(draft_at, target_at, lenience)", "left = target_at"),
        ("jnp.cumprod(accepted, axis=1)", "accepted"),
    ),
    *of(
        "verifiers/rejection.py",
        "known_bugs_sampling -k zero_uniform or residual_of_equal",
        ("K) * denominator < numerator", "K) * denominator <= numerator"),
        ("return jnp.where(empty, target_probs, left)", "return left"),
    ),
    *of(
        "verifiers/verdicts.py",
        "core -k rejection_path",
        ("node <= count_B[:, None], node", "node < count_B[:, None], node"),
    ),
    *of(
        "verifiers/match.py",
        "match",
        (" & verdicts.offered(proposal)", ""),
        ("equal &= jnp.take_along_axis(drawable, parents, axis=1)", "pass"),
    ),
    *of(
        "verifiers/verdicts.py",
        "match",
        ("chosen_BN & ~jnp.any(earlier & chosen_BN[:, None], axis=2)", "chosen_BN"),
        ("earlier & chosen_BN[:, None]", "earlier"),
        ("dtype=jnp.int32) - 1\n", "dtype=jnp.int32)\n"),
    ),
    *of(
        "tree.py",
        "tree",
        ("range(max(N, 1).bit_length())", "range(max(N, 1).bit_length() - 1)"),
        (" | (node == node[:, None])", ""),
        ("dtype=jnp.int32) - 1", "dtype=jnp.int32)"),
        ("jnp.maximum(path_BP, 0)", "path_BP"),
    ),
    *of(
        "sampling.py",
        "sampling -k to_probs",
        (
            "scaled / jnp.where(greedy, 1, columns.temperature)",
            "scaled * jnp.where(greedy, 1, columns.temperature)",
        ),
        ("weights >= columns.min_p", "weights > columns.min_p"),
        ("columns.top_k >= logits.shape[-1]", "columns.top_k >= 1"),
        ("axis=-1, keepdims=True) >= needed", "axis=-1, keepdims=True) > needed"),
        ("jnp.cumsum(ties, axis=-1) <= wanted", "jnp.cumsum(ties, axis=-1) < wanted"),
        (
            "jnp.where(bits >= sign, ~bits, bits | sign)",
            "jnp.where(bits >= sign, bits, bits | sign)",
        ),
        ("jnp.where(x == 0, jnp.zeros_like(x), x)", "x"),
        ("jnp.where(finite, probs, jnp.nan)", "probs"),
        ("(bits - _BITS * (i + 1))", "(bits - _BITS * i - 1)"),
    ),
    *of(
        "sampling.py",
        "sampling -k draw",
        ("jnp.sum(ends <= level, axis=-1)", "jnp.sum(ends < level, axis=-1)"),
        (
            "return jnp.minimum(jnp.sum(ends <= level, axis=-1), last)",
            "return jnp.sum(ends <= level, axis=-1)",
        ),
        ("block * width + ", "block * (width - 1) + "),
        ("_inverse_cdf(inside, uniforms[..., 1])", "_inverse_cdf(inside, uniforms[..., 0])"),
    ),
    *of(
        "sampling.py",
        "known_bugs_sampling -k used_twice",
        ("DRAFT, ACCEPT, NEXT = range(3)", "DRAFT, ACCEPT, NEXT = 0, 1, 1"),
        ("jax.random.fold_in(key, role)", "key"),
    ),
    *of(
        "drafters/draft_model.py",
        "decode -k oracle",
        ("- 1 + level.depth", "+ level.depth"),
        ("block, 1 + fed_as", "block, fed_as"),
    ),
    *of("growth.py", "decode -k oracle", ("parents, node <= k", "parents, node < k")),
    *of(
        "growth.py",
        "falcon -k every_node",
        ("jnp.maximum(k - 1, 0), (B, 1)", "k, (B, 1)"),
        ("start - k + parent if depth > 1", "start - k if depth > 1"),
    ),
    *of(
        "growth.py",
        "heads -k chosen",
        ("enumerate(tree.children[node])", "enumerate(tree.children[node][::-1])"),
    ),
    *of(
        "drafters/falcon.py",
        "falcon -k units or every_node or overlap",
        ("new = slots >= known", "new = slots >= 0"),
        ("old = tree.along(", "old = 0 * tree.along("),
        ("last - known + k, last", "last - known, last"),
        ("jnp.maximum(lengths_B - 1 - k, 0)", "lengths_B - 1"),
        ("nodes.insert(0, tree", "nodes.insert(1, tree"),
        ("& (draft.count > 0)", "& False"),
        ("carries[:, -1].reshape(B, T", "carries[:, 0].reshape(B, T"),
        ("jnp.maximum(index + 1 - k, 0)", "jnp.maximum(index + 2 - k, 0)"),
        ("+ step - k + 1 +", "+ step - k +"),
    ),
    *of(
        "drafters/falcon.py",
        "falcon -k glanc",
        ("_last(carries, k + 1)", "_last(carries, k)"),
        ("jnp.roll(array, -1", "jnp.roll(array, 1"),
    ),
    *of(
        "models/lstm.py",
        "falcon -k units",
        ("forget + 1", "forget"),
        ("carry_BL2D[:, number]", "carry_BL2D[:, 0]"),
        ("x_BTI = carries[-1][:, :, 0]", "x_BTI = carries[-1][:, :, 1]"),
    ),
    *of(
        "training/feature_losses.py",
        "falcon -k glanc",
        ("value *= ~glanced", "pass"),
        ("drafted != wanted", "drafted == wanted"),
    ),
    *of(
        "drafters/mlp_speculator.py",
        "heads",
        ("level.parents, states_BFM", "0 * level.parents, states_BFM"),
        ("** (0.5 / self.num_steps)", "** (1 / self.num_steps)"),
        ("* 0.5**0.5 if self", "if self"),
    ),
    *of(
        "drafters/states.py",
        "eagle -k fresh_prefill",
        ("lengths_B - 2 - starts_B", "lengths_B - 1 - starts_B"),
        ("verdict.num_tokens - 1)", "verdict.num_tokens - 2)"),
    ),
    *of(
        "evaluation/tree_planning.py",
        "heads -k by_rank",
        ("jnp.roll(best, 1 + step", "jnp.roll(best, step"),
        ("each[span].mean", "each.mean"),
    ),
    *of(
        "performance/tree_theory.py",
        "tree_theory -k rank",
        ("reached[path] * rates[len(path), 0]", "reached[path] * rates[0, 0]"),
        ("reached[path[:-1]] * rates[depth, rank]", "reached[path] * rates[depth, rank]"),
    ),
    *of(
        "drafters/suffix.py",
        "suffix",
        ("followed = same & _following(text, depth)[1]", "followed = same"),
        ("better = score > best", "better = score >= best"),
        ("len(places) - 1 - jnp.argmax(counts[::-1])", "jnp.argmax(counts)"),
        ("nodes.probs[node] * counts[place]", "counts[place]"),
        ("nodes.places[parent] & ~same", "nodes.places[parent]"),
        ("open_nodes = nodes.depths < limit", "open_nodes = nodes.depths < 99"),
        ("best < limit(match)", "best < 0.5 * limit(match)"),
    ),
    *of(
        "drafters/copy.py",
        "copy",
        ("unique = jnp.sum(matches) == 1", "unique = jnp.sum(matches) >= 1"),
        ("matches &= end - size >= prompt", "pass"),
        ("later < prompt, later", "later <= prompt, later"),
        ("jnp.where(end < length, later, place)", "later"),
        ("(index < state.prompts[:, None])", "(index >= 0)"),
    ),
    *of(
        "models/products.py",
        "products",
        ("cpu=in_halves", "cpu=jnp.transpose"),
        ("_outer(x, gradient, kernel_DF.dtype)", "_outer(x, gradient, x.dtype)"),
    ),
    *of("drafters/draft_model.py", "verifiers -k two_layers", ("(row == 0", "(row < 0")),
    *of(
        "growth.py",
        "verifiers",
        ("1 + kept[:, None] <= parents", "1 + kept[:, None] < parents"),
        ("scores[..., None] + more", "more"),
        ("parent = chosen // k if depth > 1 else jnp.zeros_like(chosen)", "parent = chosen * 0"),
    ),
    *of(
        "evaluation/tasks/sandbox.py",
        "sandbox -k withstands or number_of_files",
        ("umount -l /old\n", ""),
        ('"--ipc", ', ""),
        (",nr_inodes=1k", ""),
    ),
    *of(
        "evaluation/tasks/_sandbox_child.py",
        "sandbox -k withstands",
        ("(resource.RLIMIT_NOFILE, _MOST_FILES),", ""),
        ("        _refuse_uncounted_memory()\n", ""),
        ("(_EQUAL, 0, last - 2, machine)", "(_EQUAL, 0, 0, machine)"),
        ("last - len(code) - 1, 0, number", "last - len(code) - 2, 0, number"),
    ),
    *of(
        "tokenization/chat_template.py",
        "chat_template -k of_texts or of_its_folder",
        ("_CHARACTERS + 10 * len(json.dumps(variables))", "_CHARACTERS"),
        ('"-P", ', ""),
    ),
]
