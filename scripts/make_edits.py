"""Writes texts to train a target on that corrects typos: the counterpart of the task `edit`.

python scripts/make_edits.py --output=runs/edits.jsonl --characters=160 --shuffled
python scripts/train_target.py --config=configs/experiments/edit_target.py --workdir=runs/edit

Each text is a passage of the standard library with a typo, a line that says so, and the passage
itself. Held-out documents are left out. With --shuffled every passage is there a second time with
its words in another order: such a text can only be copied, not guessed.
"""

import json
from collections.abc import Iterator

import _environment  # noqa: F401 (must be first: names a package that is missing)
from absl import flags

from spsjax.cli import main
from spsjax.data import documents
from spsjax.errors import InputError
from spsjax.evaluation.tasks import edit
from spsjax.utils import atomic_files

_OUTPUT = flags.DEFINE_string("output", None, "File of JSON lines to write.")
_CHARACTERS = flags.DEFINE_integer("characters", 500, "Most characters of a passage.", 1)
_SHUFFLED = flags.DEFINE_bool("shuffled", False, "Also write passages of shuffled words.")
main.require("output")


def run():
    main.check_writable(_OUTPUT.value)
    texts = [
        broken + edit.MARK + fixed
        for split, document in documents.Split(documents.Sources(("stdlib",)))
        if split == "train"
        for broken, fixed in _pairs(document)
    ]
    if not texts:
        raise InputError("characters: expected passages with words, found none")
    atomic_files.write(_OUTPUT.value, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    print(f"{len(texts):,} texts in {_OUTPUT.value}")


def _pairs(document: documents.Document) -> Iterator[tuple[str, str]]:
    """Yields passages with a typo, each with the passage itself."""
    for name, broken, fixed in edit.edits(document, _CHARACTERS.value):
        yield broken, fixed
        if _SHUFFLED.value:
            other = edit.with_shuffled_words(fixed, name)
            yield edit.with_typo(other, name), other


if __name__ == "__main__":
    main.run(run)
