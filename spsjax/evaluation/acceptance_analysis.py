"""Where drafts are accepted, token by token and exactly; and why greedy texts part, if they do."""

import collections
import dataclasses
import functools
import keyword
import re
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spsjax import decode, generation, sampling
from spsjax.loading import Model
from spsjax.models import transformer
from spsjax.parallel import multihost, sharding
from spsjax.sampling import SamplingParams
from spsjax.tokenization import Tokenizer

INDENT, KEYWORD, NAME, NUMBER, PUNCTUATION = "indent", "keyword", "name", "number", "punctuation"
_WORDS = re.compile(r"(?P<indent>\s+)|(?P<number>\d[\w.]*)|(?P<name>\w+)|(?P<punctuation>.)")
ENTROPIES = 0.1, 0.5, 1.0, 2.0, 3.0  # nats: the inner bounds of the classes


@dataclasses.dataclass(frozen=True)
class Positions:
    """What is known of each token of a text before it is drawn.

    Attributes:
        acceptance: [N] chance that the draft's token is accepted there, `theory.acceptance`.
        entropy: [N] of the target's own distribution, before any warping, in nats.
        margin: [N] the target's highest logit less its second.
    """

    acceptance: np.ndarray
    entropy: np.ndarray
    margin: np.ndarray


@dataclasses.dataclass(frozen=True)
class Share:
    """Tokens of one class: how many of all, and their mean acceptance."""

    share: float
    acceptance: float


def positions(
    target: Model,
    draft: Model | None,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
) -> Positions:
    """Of `tokens` after a prompt, by one pass of each model over the whole text.

    Without a draft, acceptance is that of the target itself, 1.
    """
    draft = draft or target
    text = np.asarray([*prompt, *tokens], np.int32)
    rows = 1 if target.mesh is None else target.mesh.shape["data"]
    padded = np.zeros((rows, decode.num_slots(len(text))), np.int32)
    padded[:, : len(text)] = text
    with target.in_mesh():
        padded, columns = jax.device_put(
            (padded, params.rows(rows)), sharding.batch_sharding(target.mesh)
        )
        found = _columns(target.config, draft.config, target.params, draft.params, padded, columns)
    place = slice(len(prompt) - 1, len(text) - 1)  # a token is drawn from what comes before it
    return Positions(*(column[0, place] for column in multihost.to_host(found)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _columns(target_config, draft_config, target_params, draft_params, tokens_BT, rows):
    def logits(config, params):
        output = transformer.apply(config, params, tokens_BT)
        return sharding.gather_vocab(output.logits)

    mine = logits(target_config, target_params)
    target_BTV = sampling.to_probs(mine, rows)
    size = target_BTV.shape[-1]
    draft_BTV = sampling.to_probs(logits(draft_config, draft_params)[..., :size], rows)
    draft_BTV = jnp.pad(draft_BTV, [(0, 0), (0, 0), (0, size - draft_BTV.shape[-1])])
    acceptance = jnp.minimum(target_BTV, draft_BTV).sum(-1)
    logs = jax.nn.log_softmax(mine.astype(jnp.float32))
    entropy = -(jnp.exp(logs) * logs).sum(-1)
    best = jax.lax.top_k(logs, 2)[0]
    return acceptance, entropy, best[..., 0] - best[..., 1]


def classes(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], code: bool
) -> list[str]:
    """The class of each token, by the word that its first visible character is part of.

    Words are those of the new text. `code`: whether Python's keywords are a class of their own.
    """
    whole = generation.continuation(tokenizer, prompt, tokens)
    kinds = [INDENT] * len(whole)
    for match in _WORDS.finditer(whole):
        kind = match.lastgroup
        if code and kind == NAME and keyword.iskeyword(match.group()):
            kind = KEYWORD
        kinds[match.start() : match.end()] = [kind] * (match.end() - match.start())
    found, start = [], 0
    for count in range(1, len(tokens) + 1):
        grown = generation.continuation(tokenizer, prompt, tokens[:count])
        end = min(len(grown.rstrip("\ufffd")), len(whole))
        visible = [kinds[i] for i in range(start, end) if not whole[i].isspace()]
        found.append(visible[0] if visible else INDENT)
        start = max(start, end)
    return found


def shares(names: Iterable[str], acceptance: Iterable[float]) -> dict[str, Share]:
    """Class -> its share of the tokens and mean acceptance, in the order of their names."""
    values = collections.defaultdict(list)
    for name, value in zip(names, acceptance, strict=True):
        values[name].append(float(value))
    total = sum(map(len, values.values()))
    return {
        name: Share(len(mine) / total, sum(mine) / len(mine))
        for name, mine in sorted(values.items())
    }


def entropy_class(entropy: float) -> str:
    """The class of a distribution's entropy."""
    index = int(np.searchsorted(ENTROPIES, entropy, side="right"))
    bounds = ("0", *map(str, ENTROPIES))
    return (
        f"{bounds[index]}+" if index == len(ENTROPIES) else f"{bounds[index]}-{bounds[index + 1]}"
    )


def by_class(
    target: Model,
    draft: Model,
    texts: Sequence[tuple[list[int], list[int]]],
    params: SamplingParams,
    code: bool,
    progress: Callable[[Sequence], Iterable] = iter,
) -> tuple[dict[str, Share], dict[str, Share]]:
    """Acceptance by class of token, and by the target's entropy, in texts after their prompts.

    `texts` are pairs of token ids; `code` is as for `classes`.
    """
    kinds, entropies, acceptance = [], [], []
    for prompt, tokens in progress(texts):
        known = positions(target, draft, prompt, tokens, params)
        kinds += classes(target.tokenizer, prompt, tokens, code)
        entropies += map(entropy_class, known.entropy)
        acceptance += known.acceptance.tolist()
    return shares(kinds, acceptance), shares(entropies, acceptance)


@dataclasses.dataclass(frozen=True)
class Parting:
    """The first token at which two greedy texts of one prompt differ.

    Attributes:
        place: how many tokens they share.
        margin: the target's highest logit less its second there.
    """

    place: int
    margin: float


def parting(
    target: Model, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> Parting | None:
    """Where two texts part, and how nearly equal the target's two best tokens are; None: nowhere.

    A text that ends where the other goes on has parted there, unless it has only run out of budget
    or of context, which is for the caller to know.
    """
    if list(one) == list(other):
        return None
    pairs = zip(one, other)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    longer = one if len(one) > shared else other
    greedy = SamplingParams(temperature=0.0)
    margins = positions(target, None, prompt, longer[: shared + 1], greedy).margin
    return Parting(shared, float(margins[-1]))
