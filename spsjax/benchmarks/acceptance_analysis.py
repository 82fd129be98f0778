"""Exact acceptance rates token by token, and the first differences between greedy texts."""

import collections
import dataclasses
import functools
import keyword
import re
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import sampling
from spsjax.benchmarks import text_pass
from spsjax.loading import Model
from spsjax.sampling import SamplingParams
from spsjax.tokenization import Tokenizer
from spsjax.tokenization.base import incremental_text
from spsjax.utils.progress import Progress

INDENT, KEYWORD, NAME, NUMBER, PUNCTUATION = "indent", "keyword", "name", "number", "punctuation"
_WORDS = re.compile(r"(?P<indent>\s+)|(?P<number>\d[\w.]*)|(?P<name>\w+)|(?P<punctuation>.)")
ENTROPIES = 0.1, 0.5, 1.0, 2.0, 3.0  # in nats: bounds between the entropy classes


@dataclasses.dataclass(frozen=True)
class Positions:
    """Figures of the distributions from which each token of a text is drawn.

    Attributes:
        acceptance: [N] probability that a draft token is accepted there (`theory.acceptance`).
        entropy: [N] entropy of the target's distribution in nats, before sampling parameters.
        margin: [N] difference between the target's two highest logits.
    """

    acceptance: np.ndarray
    entropy: np.ndarray
    margin: np.ndarray


@dataclasses.dataclass(frozen=True)
class Share:
    """Share of one class among all tokens, and the mean acceptance rate of its tokens."""

    share: float
    acceptance: float


def positions(
    target: Model,
    draft: Model | None,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
) -> Positions:
    """Returns the figures of `tokens` after a prompt, from one pass per model over the text.

    Without a draft, the target is its own draft and the acceptance rate is 1.
    """
    models = target, draft or target
    configs, weights = ([getattr(model, name) for model in models] for name in ("config", "params"))
    columns = functools.partial(_columns, *configs, *weights)
    return Positions(*text_pass.of_tokens(columns, target, prompt, tokens, params))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _columns(target_config, draft_config, target_params, draft_params, tokens_BT, rows):
    logits_BTV = text_pass.logits(target_config, target_params, tokens_BT)
    vocab = logits_BTV.shape[-1]  # the draft's may be padded or smaller
    drafted_BTV = text_pass.logits(draft_config, draft_params, tokens_BT, vocab)
    probs_TV = (sampling.to_probs(logits, rows)[0] for logits in (logits_BTV, drafted_BTV))
    acceptance_T = jnp.minimum(*probs_TV).sum(-1)
    logs_TV = jax.nn.log_softmax(logits_BTV[0].astype(jnp.float32))
    entropy_T = -(jnp.exp(logs_TV) * logs_TV).sum(-1)
    best_T2 = jax.lax.top_k(logs_TV, 2)[0]
    return acceptance_T, entropy_T, best_T2[..., 0] - best_T2[..., 1]


def token_classes(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], code: bool
) -> list[str]:
    """Returns the class per token: that of the word with the token's first visible character.

    Words are those of the new text, without the prompt. With `code`, Python's keywords are a class
    of their own.
    """
    text = incremental_text(tokenizer, prompt, tokens)
    class_of_character = [INDENT] * len(text)
    for match in _WORDS.finditer(text):
        name = match.lastgroup
        if code and name == NAME and keyword.iskeyword(match.group()):
            name = KEYWORD
        class_of_character[match.start() : match.end()] = [name] * len(match.group())
    classes, start = [], 0
    for count in range(1, len(tokens) + 1):
        prefix = incremental_text(tokenizer, prompt, tokens[:count])
        # An incomplete character at the end decodes to U+FFFD; it belongs to the token that
        # completes it.
        end = min(len(prefix.rstrip("\ufffd")), len(text))
        visible = [class_of_character[i] for i in range(start, end) if not text[i].isspace()]
        classes.append(visible[0] if visible else INDENT)
        start = max(start, end)
    return classes


def shares(classes: Iterable[str], acceptance: Iterable[float]) -> dict[str, Share]:
    """Returns the share and the mean acceptance rate per class, in alphabetical order."""
    values = collections.defaultdict(list)
    for name, value in zip(classes, acceptance, strict=True):
        values[name].append(float(value))
    total = sum(map(len, values.values()))
    return {
        name: Share(len(group) / total, sum(group) / len(group))
        for name, group in sorted(values.items())
    }


def entropy_class(entropy: float) -> str:
    """Returns the name of the class of an entropy."""
    index = int(np.searchsorted(ENTROPIES, entropy, side="right"))
    bounds = ("0", *map(str, ENTROPIES))
    if index == len(ENTROPIES):
        return f"{bounds[index]}+"
    return f"{bounds[index]}-{bounds[index + 1]}"


def acceptance_by_class(
    target: Model,
    draft: Model,
    texts: Sequence[tuple[list[int], list[int]]],
    params: SamplingParams,
    code: bool,
    progress: Progress = iter,
) -> tuple[dict[str, Share], dict[str, Share]]:
    """Returns acceptance rates by class of the token, and by entropy of the target.

    The texts are pairs of a prompt and its continuation. With `code`, Python's keywords are a class
    of their own.
    """
    classes, entropies, acceptance = [], [], []
    for prompt, tokens in progress(texts):
        figures = positions(target, draft, prompt, tokens, params)
        classes += token_classes(target.tokenizer, prompt, tokens, code)
        entropies += map(entropy_class, figures.entropy)
        acceptance += figures.acceptance.tolist()
    return shares(classes, acceptance), shares(entropies, acceptance)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """First difference between two greedy texts of one prompt."""

    position: int  # number of tokens that the texts share
    # Difference between the target's two highest logits there. A tiny margin means that rounding
    # decided.
    margin: float


def divergence(
    target: Model, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """Returns the first difference between two texts, or None if they are equal.

    A text that ends earlier diverges at its end. The caller must know whether the budget or the
    context ended it.
    """
    if list(one) == list(other):
        return None
    pairs = zip(one, other)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    longer = one if len(one) > shared else other
    greedy = SamplingParams(temperature=0.0)
    margins = positions(target, None, prompt, longer[: shared + 1], greedy).margin
    return Divergence(shared, float(margins[-1]))
