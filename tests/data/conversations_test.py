"""Tests of conversations as training text: their forms, and which tokens the assistant writes."""

import gzip
import itertools
import json
import types

import numpy as np
import pytest
import tokenizers
from helpers.bad_input import one_line
from helpers.tokenizer_examples import SETTINGS, byte_level, save_with

from spsjax import tokenization
from spsjax.data import conversations, corpus, documents, pipeline
from spsjax.data.documents import Sources
from spsjax.data.transcripts import Encoder, Transcript

ASK, SAY = {"role": "user", "content": "return x"}, {"role": "assistant", "content": "x + 1"}
TALK = [ASK, SAY, {"role": "user", "content": "if x:"}, {"role": "assistant", "content": "pass"}]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}END{% endgeneration %}\n{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_with(tmp_path_factory):
    """Returns a function from a chat template to a small tokenizer that has it."""
    folder = byte_level(tmp_path_factory.mktemp("tokenizer") / "bpe")

    def load(template):
        settings = SETTINGS | {"chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return tokenization.load(folder)

    return load


def encoded(tokenizer, record, ends=()):
    """Returns ids and mask of the conversation in a record."""
    (result,) = Encoder(tokenizer, ends).encode([conversations.parse(record, "a.jsonl:7")])
    return list(result[0]), list(result[1])


def answers(tokenizer, ids, mask):
    """Returns the ids of each answer."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [ids[start:stop] for start, stop in edges.reshape(-1, 2)]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TALK},
        {"conversations": TALK},
        {
            "conversations": [
                {"from": "gpt" if m["role"] == "assistant" else "human", "value": m["content"]}
                for m in TALK
            ]
        },
    ],
)
def test_answers_of_every_form_end_with_the_end_of_turn(tokenizer_with, record):
    """Context and answers are tokenized apart. A line break after the end is not the answer's."""
    tokenizer = tokenizer_with(CHATML)
    ids, mask = encoded(tokenizer, record)
    written = [[*tokenizer.encode(text, False), 1] for text in ("x + 1", "pass")]
    assert answers(tokenizer, ids, mask) == written
    parts = ("<|user|>return x</s>\n<|assistant|>", 0, "\n<|user|>if x:</s>\n<|assistant|>", 1)
    parts = [written[x] if isinstance(x, int) else tokenizer.encode(x, False) for x in parts]
    assert ids == [*itertools.chain(*parts)]


def test_boundary_within_a_token_is_that_of_generation(tokenizer_with):
    """A token of the whole text may span it, as "return". The model never sees that one."""
    role = "{{ 'retu' if m.role == 'assistant' else m.role }}"
    template = CHATML.replace("<|{{ m.role }}|>", role).replace("<|assistant|>", "retu")
    tokenizer = tokenizer_with(template)
    talk = [ASK, {"role": "assistant", "content": "rn 0"}]
    ids, mask = encoded(tokenizer, {"messages": talk})
    prompt, answer = tokenizer.chat(talk[:1]), [*tokenizer.encode("rn 0", False), 1]
    assert ids == prompt + answer and mask == [0] * len(prompt) + [1] * len(answer)
    assert ids != tokenizer.encode("userreturn x</s>\nreturn 0</s>", False)  # it can fail


def test_marks_of_a_template_are_used_with_the_end_after_them(tokenizer_with):
    """With </s> behind the mark or within it, and a text that would not be a prefix."""
    for end in ("{% endgeneration %}</s>\n", "</s>\n{% endgeneration %}"):
        template = MARKED.replace("END{% endgeneration %}\n", end)
        tokenizer = tokenizer_with(template.replace("{% if add_gen", "!{% if add_gen"))
        ids, mask = encoded(tokenizer, {"messages": TALK})
        written = [[*tokenizer.encode(text, False), 1] for text in ("x + 1", "pass")]
        assert answers(tokenizer, ids, mask) == written
        assert ids[-1] == 1 and tokenizer.decode(ids) == (
            "<|user|>return x\n<|assistant|>x + 1\n<|user|>if x:\n<|assistant|>pass"
        )


def test_template_that_changes_earlier_answers_repeats_the_context(tokenizer_with):
    """As templates that drop earlier thoughts do: the second answer follows what the model sees."""
    short = "{{ m.content if loop.last or m.role == 'user' else '-' }}"
    tokenizer = tokenizer_with(CHATML.replace("{{ m.content }}", short))
    ids, mask = encoded(tokenizer, {"messages": TALK})
    first, second = tokenizer.chat(TALK[:1]), tokenizer.chat(TALK[:3])
    answer, end = tokenizer.encode("x + 1", False), [1]
    assert ids == [*first, *answer, *end, *second, *tokenizer.encode("pass", False), *end]
    assert "<|assistant|>-" in tokenizer.decode(second)
    assert sum(mask) == len(answer) + len(tokenizer.encode("pass", False)) + 2


def test_template_with_another_text_before_answers_is_refused(tokenizer_with):
    tokenizer = tokenizer_with(CHATML + "<think>")
    with one_line("a.jsonl:7: expected a chat template that writes the same text", "<think>"):
        encoded(tokenizer, {"messages": TALK})


def test_other_ids_may_end_a_turn(tokenizer_with):
    """A model's end of turn is not always its tokenizer's end id. The first of them counts."""
    template = CHATML.replace("</s>", "<s>").replace("{% endif %}", "{% else %}</s>{% endif %}")
    tokenizer = tokenizer_with(template)
    for ends, after in (((0,), "<s>"), ((), "<s>\n</s>")):
        ids, mask = encoded(tokenizer, {"messages": TALK[:2]}, ends)
        after = [*tokenizer.encode("x + 1", False), *tokenizer.encode(after, False)]
        assert answers(tokenizer, ids, mask) == [after]


def test_end_of_turn_may_be_a_token_that_is_not_special(tokenizer_with, tmp_path):
    bpe = tokenizer_with(CHATML.replace("</s>", "<end>"))
    path = save_with(bpe, tmp_path) / "tokenizer.json"
    model = tokenizers.Tokenizer.from_file(str(path))
    model.add_tokens(["<end>"])
    model.save(str(path))
    end, tokenizer = model.token_to_id("<end>"), tokenization.load(tmp_path)
    ids, mask = encoded(tokenizer, {"messages": TALK[:2]}, (end,))
    assert answers(tokenizer, ids, mask) == [[*tokenizer.encode("x + 1", False), end]]


def test_space_that_a_tokenizer_adds_is_not_before_an_answer():
    """As with the SentencePiece tokenizers of Llama 2, which put one before every text."""

    def encode(text, whole=True):
        return [*map(ord, " " + text)]

    pieces = {code: chr(code) for code in range(128)}
    tokenizer = types.SimpleNamespace(eos_id=None, pieces=pieces, encode=encode)
    assert Encoder(tokenizer).continued("the") == [*map(ord, "the")]


def test_template_without_answers_is_refused(tokenizer_with):
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
    tokenizer = tokenizer_with(template + "{% endfor %}")
    with one_line("a.jsonl:7: expected a chat template that writes answers"):
        encoded(tokenizer, {"messages": TALK})


def test_prompt_and_completion_need_no_template(tokenizer_with):
    record = {"prompt": "return x", "completion": " + 1"}
    tokenizer = tokenizer_with(None)
    ids, mask = encoded(tokenizer, record)
    prompt, answer = tokenizer.encode("return x"), tokenizer.encode(" + 1", False)
    assert ids == [*prompt, *answer, 1] and mask == [0] * len(prompt) + [1] * (len(answer) + 1)
    with one_line("expected a chat template, found none"):
        encoded(tokenizer, {"messages": TALK})
    tokenizer = tokenizer_with(CHATML)
    ids, _ = encoded(tokenizer, record)
    assert ids[: -len(answer) - 1] == tokenizer.chat(TALK[:1])


def test_transcript_goes_on_where_the_target_ended(tokenizer_with):
    """An answer that was cut has no end of its own: the template's does not count."""
    tokenizer = tokenizer_with(CHATML)
    encoder, prompts = Encoder(tokenizer), ("<|user|>a</s>\n<|assistant|>", "b</s>\n<|user|>c")
    for end, count in ((1, 1), (None, 1), (0, 2)):
        transcript = Transcript(encoder)
        transcript.ask(prompts[0])
        ids = tokenizer.encode("b", False)
        transcript.answer(ids if end is None else [*ids, end], "b", end)
        transcript.ask("".join(prompts))
        assert tokenizer.decode(transcript.ids).count("<|user|>a") == count
        assert transcript.context == tokenizer.encode("".join(prompts), False)
        assert sum(transcript.mask) == 1 + (end is not None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"turns": ["Hi"]}, "expected a conversation with answers, found questions only"),
        ({"turns": "Hi"}, "turns: expected a list of texts, found 'Hi'"),
        ({"turns": [3]}, "expected the text of a question, found 3"),
        ({"messages": [{"content": "Hi"}]}, r"messages\[0\]: expected a role"),
        ({"messages": []}, "expected messages, found none"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "expected texts in valid Unicode"),
        ({"conversations": [{"from": "bot", "value": "Hi"}]}, r"conversations\[0\]: expected from"),
        ({"prompt": "Hi", "completion": ""}, "expected the text of an answer, found ''"),
        ({"messages": TALK, "tokens": [1, 2], "answers": [[1, 3]], "tokenizer": "x"},
         "tokens, answers: expected ids and ranges, found an answer from 1 to 3 in 2"),
        ({"other": 3}, "expected a field 'text', found other"),
    ],
)  # fmt: skip
def test_bad_line_is_named_with_file_and_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n' + json.dumps(line).encode()))
    with pytest.raises(pipeline.InputError, match=f"^{path}:2: {message}"):
        list(documents.read(Sources((str(path),)), "train"))


def test_corpus_has_a_mask_of_the_answers(tokenizer_with, tmp_path):
    """Windows without an answer are dropped, and all answers to a question are in one split."""
    tokenizer, questions = (
        tokenizer_with(CHATML),
        [ASK | {"content": f"x = {n}"} for n in range(30)],
    )
    talks = ([questions[n // 2], SAY | {"content": f"{n} "}] for n in range(60))
    lines = [json.dumps({"messages": talk}) + "\n" for talk in talks]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "0.txt").write_text("import os")
    sources = Sources((str(tmp_path / "?.*"),))
    train, held_out, _ = corpus.prepare(tmp_path / "data", sources, 4, tokenizer)
    tokens, mask = train.tokens.tolist(), train.mask.tokens.tolist()
    first, *counted = answers(tokenizer, tokens, mask)
    assert first == [*tokenizer.encode("import os"), 1]
    assert all(ids[-1] == 1 for ids in counted)
    kept = answers(tokenizer, held_out.tokens.tolist(), held_out.mask.tokens.tolist())
    trained, kept = ({int(tokenizer.decode(ids)) for ids in part} for part in (counted, kept))
    assert kept and len(trained) % 2 == 0
    assert not {n // 2 for n in kept} & {n // 2 for n in trained}
    labels = train.mask[:][:, 1:]
    assert labels.any(axis=1).all() and sum(mask) - 5 <= labels.sum() < labels.size
    assert len(train) < (len(tokens) - 1) // 4
    sources = Sources(sources.train, loss="all")
    everything, _, _ = corpus.prepare(tmp_path / "all", sources, 4, tokenizer)
    assert everything.mask is None and everything.tokens.tolist() == tokens


def test_cut_mask_of_a_corpus_is_refused(tokenizer_with, tmp_path):
    tokenizer, path = tokenizer_with(CHATML), tmp_path / "a.jsonl"
    records = ({"prompt": text, "completion": 9 * "return "} for text in "abc")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = tmp_path / "data", Sources((str(path),)), 4, tokenizer
    corpus.prepare(*arguments)
    mask = tmp_path / "data" / "train.mask"
    mask.write_bytes(mask.read_bytes()[:-1])
    with one_line(f"{mask}: expected "):
        corpus.prepare(*arguments)


def test_question_of_a_held_out_file_is_not_trained_on(tmp_path):
    """Whatever the answer. A conversation's name is that of its question, in any file."""
    for name, numbers in (("train", (0, 1)), ("held_out", (1, 2))):
        talks = ([ASK | {"content": f"{n}"}, SAY | {"content": f"{name} {n}"}] for n in numbers)
        lines = [json.dumps({"messages": talk}) + "\n" for talk in talks]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = Sources((f"{tmp_path}/train.jsonl",), (f"{tmp_path}/held_out.jsonl",))
    splits = [(split, document.text) for split, document in documents.Split(sources)]
    assert splits == [
        ("train", "0\ntrain 0"),
        ("copy", "1\ntrain 1"),
        ("held_out", "1\nheld_out 1"),
        ("held_out", "2\nheld_out 2"),
    ]
    names = [
        [one.name for one in documents.read(sources, split)] for split in ("train", "held_out")
    ]
    assert names[0][1] == names[1][0] and len({*names[0], *names[1]}) == 3
