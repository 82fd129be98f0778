"""XSum: one-sentence summaries of BBC articles (Narayan et al. 2018, arXiv 1808.08745), 1-shot."""

import dataclasses
from typing import ClassVar

from spsjax.benchmarks.tasks import base
from spsjax.errors import InputError
from spsjax.sampling import SamplingParams
from spsjax.utils import extras

with extras.needed("eval"):
    from rouge_score import rouge_scorer


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """As in Chen et al. 2023, table 1: 128 tokens after one solved example, nucleus and greedy."""

    path: str  # path of a JSON-lines file with `document` and `summary`
    shots: str  # path of such a file, whose first row is the solved example
    # Number of words of an article that are used; 0 for all. A small context needs few.
    words: int = 0
    max_new_tokens: int = 128  # token budget per answer

    settings: ClassVar = {
        "nucleus": SamplingParams(top_p=0.8),
        "greedy": SamplingParams(temperature=0.0),
    }

    def examples(self):
        fields = {"document": str, "summary": str}
        if self.words < 0:
            raise InputError(f"words: expected a number >= 0, found {self.words}")
        _, shot = next(base.read_rows(self.shots, fields))
        solved = f"{self._question(shot['document'])} {shot['summary'].strip()}\n\n"
        for number, row in base.read_rows(self.path, fields):
            prompt = solved + self._question(row["document"])
            yield base.Example(f"xsum {number}", (prompt,), {"summary": row["summary"].strip()})

    def answer(self, example, text):
        return base.before_any(text.strip(), ["\n"])

    def scores(self, example, answers):
        rouge = [rouge_2(example.reference["summary"], answer) for answer in answers]
        return {"ROUGE-2": sum(rouge) / len(rouge)}

    def _question(self, document: str) -> str:
        words = document.split()
        return f"Article: {' '.join(words[: self.words or None])}\nSummary in one sentence:"


def rouge_2(reference: str, text: str) -> float:
    """Returns the F1 of bigrams (Lin 2004), stemmed as in ROUGE-1.5.5 of the published scores."""
    return _SCORER.score(reference, text)["rouge2"].fmeasure


_SCORER = rouge_scorer.RougeScorer(["rouge2"], use_stemmer=True)
