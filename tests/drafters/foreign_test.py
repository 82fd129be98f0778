"""Draft models with tokenizers of their own: tables of two vocabularies, and what is drafted."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from helpers import drafting, enumeration, foreign, reference, table_model
from helpers.bad_input import one_line
from helpers.calls import assert_same_texts, padded
from helpers.models import logits_of, tiny_config
from helpers.numpy_models import numpy_nearby_model, numpy_spread_model, numpy_spread_params
from helpers.tokenizer_examples import byte_fallback

import spsjax
from spsjax import SamplingParams, Tree, decode, loading
from spsjax.drafters import foreign_tables, slem, tli
from spsjax.models.hf import weights as hf_weights
from spsjax.tokenization import strings
from spsjax.verifiers import rejection

VOCAB = 3
TARGET = ("A", "B", "AB")
# Words of a draft beside those of the target: two of three shared, all of them in another order,
# none, and none with other letters, too.
OVERLAPS = {
    "most": (("A", "B", "AA"), TARGET),
    "all": (("AB", "B", "A"), TARGET),
    "none": (("A", "B", "C"), ("AB", "BA", "AA")),
    "no text": (("C", "D", "CD"), TARGET),
}
CASES = [
    pytest.param("tli", "most"),
    *(
        pytest.param(name, overlap, marks=pytest.mark.slow)
        for name, overlap in [("tli", "all"), *(("slem", overlap) for overlap in OVERLAPS)]
    ),
]
GREEDY = SamplingParams(0.0)


@pytest.fixture(autouse=True)
def small_programs():
    with drafting.small_programs():
        yield


def loop(name: str, overlap: str, K=3, new=3) -> enumeration.Loop:
    """Returns the loop of a drafter over random tables; call it in float64."""
    pair = foreign.pair_of(table_model.config(VOCAB), *OVERLAPS[overlap])
    target, draft = (table_model.table(VOCAB, seed) for seed in (0, 1))
    return enumeration.Loop(foreign.of_table(name, K, pair, 1), target, draft, 1 + new)


def target_distribution(loop, **params):
    model = table_model.model_of(loop.target)
    return reference.joint_distribution(model, loop.prompt, loop.limit, **params)


@pytest.mark.parametrize(("name", "overlap"), CASES)
def test_foreign_draft_is_lossless(name, overlap):
    with jax.enable_x64(True):
        studied = loop(name, overlap, new=2 if (name, overlap) == ("tli", "most") else 3)
        distribution = studied.distribution(temperature=1.7)
        expected = target_distribution(studied, temperature=1.7)
    assert enumeration.distance(distribution, expected) < 1e-12


def test_token_outside_the_intersection_has_its_exact_probability():
    """The draft never proposes it, and the residual gives it what the target does."""
    with jax.enable_x64(True):
        studied = loop("tli", "most", K=1, new=1)
        (outside,) = {*range(VOCAB)} - {*foreign.pair_of(studied.program.target).shared}
        distribution = studied.distribution()
        probs = reference.to_probs(table_model.model_of(studied.target)(studied.prompt))
    assert probs[outside] > 0.05
    assert abs(distribution[(outside,)] - probs[outside]) < 1e-12
    assert abs(sum(distribution.values()) - 1) < 1e-12


@pytest.mark.parametrize("name", ["tli", pytest.param("slem", marks=pytest.mark.slow)])
def test_text_with_more_ids_than_fit_is_not_drafted(name):
    """Its text is the target's all the same, and the other row is drafted."""
    target = numpy_spread_model(48)
    loaded = foreign.build(name, numpy_nearby_model(target), 3)
    narrow = dataclasses.replace(loaded.drafter, ids_per_100_tokens=100)
    loaded = dataclasses.replace(loaded, drafter=narrow)
    split = next(iter({*range(48)} - {*foreign.pair_of(target.config).shared}))
    prompts = [[split] * 30, [1, 2, 3]]
    options = {"sampling": GREEDY, "max_new_tokens": 10, "stop_at_eos": False}
    plain = spsjax.generate(target, prompts, **options).tokens
    assert_same_texts(spsjax.generate(target, prompts, loaded, **options).tokens, plain)
    program = decode.Program(target.config, narrow, rejection.Verifier())
    params = loaded.with_target(target.params)
    tokens = drafting.proposed_after(program, params, *padded(prompts, 30, seed=0), 48).tokens
    assert (tokens[0] == -1).all() and tokens[1, 0] >= 0


def proposals(name: str, most: int):
    """Yields pair, prompt, tokens and distributions of a proposal, and the draft's logits.

    `most` are the most tokens of a prompt in one pass: the last pass repeats some.
    """
    target = numpy_spread_model(48)
    draft = numpy_nearby_model(target)
    loaded, logits = foreign.build(name, draft, 3), logits_of(draft)
    program = decode.Program(target.config, loaded.drafter, rejection.Verifier())
    program = dataclasses.replace(program, prefill_tokens=most)
    split = [*{*range(48)} - {*foreign.pair_of(target.config).shared}][:3]
    prompts = [[3, 4, *split, 5, 3, 4], [9], [1, *split[:1], 1], split]
    params = loaded.with_target(target.params)
    proposal = drafting.proposed_after(program, params, *padded(prompts, 8, seed=0), 32)
    for row, prompt in enumerate(prompts):
        probs = None if proposal.probs is None else proposal.probs[row]
        yield foreign.pair_of(draft.config), prompt, proposal.tokens[row].tolist(), probs, logits


@pytest.mark.parametrize("most", (1024, 5))
def test_tli_draws_from_the_shared_part_of_the_draft(most):
    """It is renormalised, and the draft reads the ids of each token."""
    for pair, prompt, tokens, probs, logits in proposals("tli", most):
        ids = [id for token in prompt for id in pair.to_draft[token].tolist() if id >= 0]
        assert len(ids) > len(prompt) or prompt == [9]
        for token, actual in zip(tokens, probs):
            expected = np.zeros(48)
            weights = np.exp(logits(ids)[[*pair.shared.values()]])
            expected[[*pair.shared]] = weights / weights.sum()
            np.testing.assert_allclose(actual, expected, atol=1e-4)
            ids.append(pair.shared[token])


@pytest.mark.parametrize("most", (1024, 5))
def test_slem_proposes_the_greedy_text_of_the_draft(most):
    for pair, prompt, tokens, probs, logits in proposals("slem", most):
        assert probs is None
        ids = [id for token in prompt for id in pair.to_draft[token].tolist() if id >= 0]
        drafted = []
        for _ in tokens:
            drafted.append(int(np.argmax(logits([*ids, *drafted]))))
        expected = strings.longest_matches(pair.of_target, codes_of(pair, drafted))[:3]
        assert tokens == expected + [-1] * (3 - len(expected))


def codes_of(pair: foreign_tables.Pair, drafted) -> bytes:
    """Returns the text of draft tokens up to one without a string."""
    texts = [pair.of_draft.of.get(token, b"") for token in drafted]
    return b"".join(texts[: [*map(bool, texts), False].index(False)])


def test_text_is_cut_into_the_longest_tokens(bpe, sp):
    """The device does what the host does, for random drafts of any length."""
    draft, target = (
        types.SimpleNamespace(config=tiny_config(tokenizer.vocab_size), tokenizer=tokenizer)
        for tokenizer in (bpe, sp)
    )
    pair, K = foreign_tables.Pair(draft, target), 5
    drafter, tables = slem.from_pair(pair)
    drafted = np.random.default_rng(0).integers(0, bpe.vocab_size, (64, K))
    drafted[::3] = np.where(np.arange(K) < np.arange(22)[:, None] % K, drafted[::3], -1)
    drafted[1::3] = [bpe.encode("    return", whole=False)[:1] * K] * 21
    drafted[2::3, 2] = bpe.eos_id
    tokens = jax.jit(drafter.cut)(jax.tree.map(jnp.asarray, tables), drafted)
    ends = 0
    for row, actual in zip(drafted.tolist(), tokens.tolist()):
        if pair.ends[1] in row:  # drawn only as the end
            row, ends = row[: row.index(pair.ends[1])], ends + 1
            actual = actual[: actual.index(pair.ends[0])] if pair.ends[0] in actual else actual
        expected = strings.longest_matches(pair.of_target, codes_of(pair, row))
        assert actual == (expected + [-1] * K)[: len(actual)]
    assert ends > 10


def test_end_of_a_draft_is_the_end_of_the_target(bpe, sp):
    draft, target = (
        types.SimpleNamespace(config=tiny_config(tokenizer.vocab_size), tokenizer=tokenizer)
        for tokenizer in (sp, bpe)
    )
    pair = foreign_tables.Pair(draft, target)
    assert pair.shared[bpe.eos_id] == sp.eos_id and bpe.eos_id != sp.eos_id
    drafter, tables = slem.from_pair(pair)
    drafted = jnp.asarray([[*sp.encode("x", whole=False)[:1], sp.eos_id]])
    tokens = drafter.cut(jax.tree.map(jnp.asarray, tables), drafted)
    assert tokens.tolist() == [[pair.of_target.ids[b"x"], bpe.eos_id]]


@pytest.mark.parametrize("turned", (False, True))
def test_tokens_become_ids_with_the_same_bytes(bpe, sp, tmp_path, turned):
    """Also parts of characters, pieces of bytes, spaces before a text and special tokens."""
    spaced = byte_fallback(tmp_path / "spaced")  # puts a space before each text
    for one, other in ((bpe, sp), (bpe, spaced), (sp, spaced)):
        draft, target = (
            types.SimpleNamespace(config=tiny_config(tokenizer.vocab_size), tokenizer=tokenizer)
            for tokenizer in ((other, one) if turned else (one, other))
        )
        pair = foreign_tables.Pair(draft, target)
        assert len(pair.of_target.of) >= 256 and len(pair.shared) >= 256
        for id, text in pair.of_target.of.items():
            ids = [piece for piece in pair.to_draft[id].tolist() if piece >= 0]
            assert b"".join(pair.of_draft.of[piece] for piece in ids) == text
        for id, same in pair.shared.items():
            assert pair.to_draft[id, 0] == same and (pair.to_draft[id, 1:] == -1).all()
            assert pair.of_target.of.get(id) == pair.of_draft.of.get(same)
        if target.tokenizer is not spaced:
            assert (pair.to_draft[target.tokenizer.bos_id] == -1).all()
        assert pair.begin == tuple(draft.tokenizer.encode(""))


def test_control_tokens_of_both_are_the_draft_s():
    """Such as marks of turns. An end that the draft model does not have is none."""
    words = ("A", "B", "<turn>", "<end>")
    target, draft = (
        types.SimpleNamespace(
            config=tiny_config(3 if turned else 4),
            tokenizer=foreign.tokenizer(
                (words[2], *words[:2], words[3]) if turned else words,
                bos_token="<turn>",
                eos_token="<end>",
            ),
        )
        for turned in (False, True)
    )
    pair = foreign_tables.Pair(draft, target)
    assert pair.shared == {0: 1, 1: 2, 2: 0} and pair.ends is None
    assert pair.to_draft[:3, 0].tolist() == [1, 2, 0]
    slem.from_pair(pair)


def test_text_is_read_as_its_tokenizer_reads_it():
    """Without the space that this one puts before a text. Longest matches are the last resort."""
    words = ["\u2581", *"abc", "bc", "\u2581a", "\u2581ab"]
    merges = [("b", "c"), ("\u2581", "a"), ("\u2581a", "b")]
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: id for id, word in enumerate(words)}, merges)
    )
    model.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Prepend("\u2581"),
            tokenizers.normalizers.Replace(" ", "\u2581"),
        ]
    )
    model.decoder = tokenizers.decoders.Replace("\u2581", " ")
    spaced = foreign.loaded(model)
    own = strings.strings(spaced, len(words))
    for text, expected in ((b" abc", [5, 4]), (b"abc", [1, 4]), (b" ab", [6]), (b"a?b", [1, 2])):
        assert strings.pieces_of(spaced, own, text) == expected
    assert strings.longest_matches(own, b" abc") == [6, 3]


def test_strings_are_bytes_in_every_alphabet(bpe, sp, tmp_path):
    for tokenizer in (bpe, sp, byte_fallback(tmp_path / "spaced")):
        own = strings.strings(tokenizer, tokenizer.vocab_size)
        assert own.ids[b" "] != own.ids[b"\n"]
        assert all(bytes([byte]) in own.ids for byte in range(256))
        for text in (b"a", b" ", b"\n", b"x"):
            assert tokenizer.decode([own.ids[b"b"], own.ids[text]]).encode()[-1:] == text
    # SentencePiece has "\n" as a piece, and as a byte that no text is encoded to.
    assert sp.pieces[strings.strings(sp, sp.vocab_size).ids[b"\n"]] == "\n"


def test_tokenizer_without_bytes_is_refused():
    class Other:
        path = "other"

    with one_line("other: expected", "found Other"):
        strings.strings(Other(), 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, bpe, sp):
    """Folders of a target and of a draft with another tokenizer."""
    paths = {}
    for name, tokenizer in (("target", bpe), ("draft", sp)):
        paths[name] = tmp_path_factory.mktemp("foreign") / name
        config = tiny_config(tokenizer.vocab_size)
        hf_weights.save(paths[name], config, numpy_spread_params(config, 0), "float32")
        tokenizer.save(paths[name])
    return paths


def test_draft_with_another_tokenizer_is_taken_and_a_line_says_how(folders):
    target = loading.load(folders["target"])
    with pytest.warns(UserWarning, match='vocabulary="tli"') as lines:
        loaded = spsjax.load_drafter(folders["draft"], target)
    assert len(lines) == 1 and isinstance(loaded.drafter, tli.Drafter)
    options = {"sampling": GREEDY, "max_new_tokens": 8, "stop_at_eos": False}
    plain = spsjax.generate(target, ["def f(x)"], **options)
    for name in (f"slem:{folders['draft']}", f"tli:int8:{folders['draft']}"):
        drafter = spsjax.load_drafter(name, target)
        assert drafter.name == name
        out = spsjax.generate(target, ["def f(x)"], drafter, 3, **options)
        assert_same_texts(out.tokens, plain.tokens)
    other = loading.load(folders["draft"])
    with one_line("expected the target's texts"):
        spsjax.generate(other, ["def"], loaded)


def test_pair_that_shares_few_strings_drafts_by_text(folders, monkeypatch):
    target = loading.load(folders["target"])
    monkeypatch.setattr(loading.vocabularies, "_LEAST_SHARE", 1.1)
    with pytest.warns(UserWarning, match='vocabulary="slem"'):
        loaded = spsjax.load_drafter(folders["draft"], target)
    assert isinstance(loaded.drafter, slem.Drafter)


def test_vocabulary_that_cannot_be_used_is_refused(folders, tmp_path):
    target = loading.load(folders["target"])
    load = functools.partial(spsjax.load_drafter, target=target)
    draft = folders["draft"]
    with one_line("vocabulary: expected 'slem', 'tli' or None, found 'nonsense'"):
        load(draft, vocabulary="nonsense")
    with one_line("vocabulary: expected a draft model for 'tli', found ngram"):
        load("ngram", vocabulary="tli")
    with one_line("tree: expected none"):
        load(draft, vocabulary="tli", tree=Tree.branching(2))
    with one_line("vocabulary: expected a draft model", "found pystdlib/eagle3, a drafter of"):
        spsjax.load_drafter("pystdlib/eagle3", loading.load("pystdlib/target"), vocabulary="tli")
    with one_line("expected a draft with the target's tokenizer"):
        load(f"window:64:{draft}")
    with one_line("expected one method for its vocabulary, found two"):
        load(f"tli:{draft}", vocabulary="slem")
    config = tiny_config(48)
    bare = numpy_spread_model(48)
    with one_line("drafter tiny: draft: expected a tokenizer"):
        loading.as_drafter(bare, target, vocabulary="slem")
    with one_line("target: expected a tokenizer"):
        loading.as_drafter(target, bare, vocabulary="slem")
    pair = foreign.pair_of(config, tuple("abcd"), tuple("efgh"))
    with one_line("vocabulary: expected tokens that both", 'Take "slem"'):
        tli.from_pair(pair)
