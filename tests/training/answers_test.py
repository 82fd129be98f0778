"""Tests of the target's answers to questions: resumed, shared by processes, and trained on."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.bad_input import one_line
from helpers.numpy_models import numpy_spread_model
from helpers.tokenizer_examples import SETTINGS, byte_level

from spsjax import SamplingParams, tokenization
from spsjax.data import documents
from spsjax.data.documents import Sources
from spsjax.data.transcripts import Encoder
from spsjax.runtime.engine import Engine
from spsjax.training import answers
from spsjax.training.answers import AnswersConfig, Sampling
from spsjax.utils import jsonl

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SIZES = AnswersConfig(samples=2, rows=2, slots=96)
SAMPLING = Sampling(SamplingParams(), 5)
QUESTIONS = (
    {"turns": ["if x", "def"]},
    {"messages": [{"role": "system", "content": "0"}, {"role": "user", "content": "return"}]},
    {"prompt": "x" * 90},  # too long
    {"turns": ["x ", "y" * 80]},  # its second question is too long
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = byte_level(tmp_path_factory.mktemp("tokenizer") / "bpe")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(SETTINGS | {"chat_template": TEMPLATE})
    )
    tokenizer = tokenization.load(folder)
    model = numpy_spread_model(tokenizer.vocab_size, eos_ids=(5, 6, 7))
    return dataclasses.replace(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "q.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return str(path)


def write(model, questions, folder, sizes=SIZES, sampling=SAMPLING):
    answers.write(model, None, None, questions, folder, sizes, sampling)


def lines(folder):
    return sorted(line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines())


@pytest.fixture(scope="module")
def written(model, questions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    write(model, questions, folder)
    return folder


def test_answers_are_what_the_target_saw_and_wrote(model, written):
    """Too long questions are left out. The documents of training have the tokens and the mask."""
    records = [json.loads(line) for line in lines(written)]
    assert [(record["id"].split(":")[1], record["sample"]) for record in records] == [
        ("1", 0), ("1", 1), ("2", 0), ("2", 1), ("4", 0), ("4", 1)
    ]  # fmt: skip
    tokenizer, ends = model.tokenizer, {1, 5, 6, 7}
    for record in records:
        messages, ids = record["messages"], record["tokens"]
        roles = [message["role"][0] for message in messages]
        assert roles == list({"1": "uaua", "2": "sua", "4": "ua"}[record["id"].split(":")[1]])
        (start, stop), *_ = record["answers"]
        count = roles.index("a")
        assert ids[:start] == tokenizer.chat(messages[:count]) and stop - start <= 5
        assert stop - start == 5 or ids[stop - 1] in ends
        assert not ends & {*ids[start : stop - 1]}
        said = [id for id in ids[start:stop] if id not in ends]
        assert tokenizer.decode(said) == messages[count]["content"]
        assert record["answers"][-1][1] == len(ids)
    assert records[0]["tokens"] != records[1]["tokens"]  # two samples
    sources = Sources((str(written),))
    read = [document.conversation for document in documents.read(sources, "train")]
    assert len(read) == 6
    encoded = sorted(list(map(list, pair)) for pair in Encoder(tokenizer).encode(read))
    for (ids, mask), record in zip(encoded, sorted(records, key=lambda one: one["tokens"])):
        assert ids == record["tokens"]
        edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
        assert edges.tolist() == record["answers"]


def test_killed_writer_resumes_with_the_same_answers(
    model, questions, written, tmp_path, monkeypatch
):
    """A half-written line is cut, and a conversation that was written is not held again."""
    append, submit, asked = jsonl.append, Engine.submit, []

    def killed(path, record):
        if len(lines(tmp_path)) == 4:
            with open(path, "ab") as file:
                file.write(jsonl.to_line(record)[:50])
            raise KeyboardInterrupt
        append(path, record)

    monkeypatch.setattr(jsonl, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        write(model, questions, tmp_path)
    assert len(lines(tmp_path)) == 5
    monkeypatch.setattr(jsonl, "append", append)
    monkeypatch.setattr(Engine, "submit", lambda *args: asked.append(args) or submit(*args))
    write(model, questions, tmp_path)
    assert lines(tmp_path) == lines(written) and 2 <= len(asked) <= 4
    asked.clear()
    write(model, questions, tmp_path)
    assert lines(tmp_path) == lines(written) and not asked


def test_processes_share_the_questions_and_give_the_same_answers(
    model, questions, written, tmp_path
):
    for part in range(2):
        write(model, questions, tmp_path, dataclasses.replace(SIZES, parts=2, part=part))
    counts = [len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("*.jsonl"))]
    assert counts == [2, 4] and lines(tmp_path) == lines(written)


def test_prompts_need_no_chat_template(model, questions, tmp_path):
    (tmp_path / "bpe").mkdir()
    model.tokenizer.save(tmp_path / "bpe")
    (tmp_path / "bpe" / "tokenizer_config.json").write_text("{}")
    plain = dataclasses.replace(model, tokenizer=tokenization.load(tmp_path / "bpe"))
    with one_line(f"{questions}:1: expected a target with a chat template"):
        write(plain, questions, tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "if x"}')
    write(plain, str(tmp_path / "p.jsonl"), tmp_path / "plain", AnswersConfig(rows=2, slots=96))
    (record,) = map(json.loads, lines(tmp_path / "plain"))
    prompt = plain.tokenizer.encode("if x")
    assert record["tokens"][: len(prompt)] == prompt and record["answers"][0][0] == len(prompt)


def test_other_options_tokenizers_and_files_are_refused(model, questions, written, tmp_path):
    other = dataclasses.replace(SAMPLING, seed=1)
    with one_line("answers-00000-of-00001.jsonl: expected the options", "seed=0, found 1"):
        write(model, questions, written, sampling=other)
    with one_line("part: expected less than parts=2, found 2"):
        AnswersConfig(parts=2, part=2)
    (tmp_path / "q.txt").write_text("Hi")
    with one_line("q.txt: expected a file .jsonl or .jsonl.gz"):
        write(model, str(tmp_path / "q.txt"), tmp_path / "out")
    (tmp_path / "q.jsonl").write_text('{"text": "Hi"}')
    with one_line("q.jsonl:1: expected a field messages, conversations, prompt or turns"):
        write(model, str(tmp_path / "q.jsonl"), tmp_path / "out")
    record = json.loads(lines(written)[0]) | {"tokenizer": "another"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    (document,) = documents.read(Sources((str(tmp_path / "a.jsonl"),)), "train")
    with one_line("a.jsonl:1: tokenizer: expected token ids of", "found 'another'"):
        list(Encoder(model.tokenizer).encode([document.conversation]))
