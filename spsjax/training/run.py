"""A training run: its corpus, its measurements and the folders of its results."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Collection

import jax
import jax.numpy as jnp

from spsjax import loading
from spsjax.data import corpus
from spsjax.loading import LoadedDrafter, Model
from spsjax.parallel import multihost, sharding
from spsjax.tokenization import Tokenizer
from spsjax.training import metrics, plots, run_folder
from spsjax.training import step as train_step
from spsjax.training.config import TrainingConfig
from spsjax.types import PyTree
from spsjax.utils import atomic_files

# What a run writes into its folder as folders.
_FOLDERS = "checkpoints", "damaged", "data", "drafter", "model"


class Run:
    """The part of a training run that does not depend on what is trained.

    Args:
        config: options of the training.
        folder: folder of the run. A run that it already holds is resumed.
        mesh: mesh of weights and batches; None for one device.
        tokenizer: tokenizer of the corpus; None trains one on the training split.
        vocab_size: vocabulary size of a tokenizer to train.
        ends: token ids that end an assistant's turn, besides the tokenizer's end id.

    Attributes:
        cache: folder of cached outputs of the target.
        batch_sharding: sharding of the rows of a batch.
        train: training examples.
        held_out: held-out examples, evenly spaced, as many as the config asks for.
        held_out_columns: further columns of a table of them: `mask`, unless all tokens count.
        tokenizer: tokenizer of the examples.
        fingerprint: hash of texts, split and tokenizer.

    Raises:
        InputError: an output of the run is a folder or file of another kind, another process uses
            the folder, or the texts are not fit to train on.
    """

    def __init__(
        self,
        config: TrainingConfig,
        folder: run_folder.Folder,
        mesh: jax.sharding.Mesh | None,
        tokenizer: Tokenizer | None,
        vocab_size: int | None,
        ends: Collection[int] = (),
    ):
        self.config, self.folder = config, folder
        self.cache = pathlib.Path(getattr(config, "cache", "") or folder.path / "cache")
        self.batch_sharding = sharding.batch_sharding(mesh)
        self._last_reports: dict[str, str] = {}
        models = (f"{name}/{file}" for name in _FOLDERS[-2:] for file in loading.FILES)
        atomic_files.check_outputs(
            map(folder.path.joinpath, (plots.FILE, *models)),
            (self.cache, *map(folder.path.joinpath, _FOLDERS)),
        )
        self._prepare_corpus(tokenizer, vocab_size, ends)

    def _prepare_corpus(
        self, tokenizer: Tokenizer | None, vocab_size: int | None, ends: Collection[int]
    ) -> None:
        """Tokenizes the corpus in the run's folder, or reads it if the folder has one."""
        path = self.folder.path / "data"
        prepare = functools.partial(
            corpus.prepare,
            path,
            self.config.data,
            self.config.length,
            tokenizer,
            vocab_size,
            # A run that already trained on a corpus must not resume with another one.
            replace=not self.folder.resumable,
            ends=ends,
        )
        self.folder.lock()
        if multihost.is_main_process():
            prepare()
        multihost.barrier("corpus prepared")
        self.train, held_out, self.tokenizer = prepare()
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
        multihost.check_same_everywhere(manifest)
        manifest.pop("listing", None)  # it depends on modification times, the corpus does not
        text = json.dumps(manifest, sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        splits = manifest["splits"]
        print(
            f"{splits['train']['tokens']:,} training tokens in {splits['train']['documents']:,} "
            f"documents, {splits['held_out']['tokens']:,} in {splits['held_out']['documents']:,} "
            "held out"
        )
        rows = metrics.evenly_spaced(self.config.eval_examples, len(held_out))
        self.held_out = held_out[rows]
        self.held_out_columns = {name: rest[rows] for name, rest in held_out.columns.items()}

    def measure(
        self, metrics_of: train_step.PerTokenMetrics, params: PyTree, frozen: PyTree, table
    ) -> dict[str, dict]:
        """Returns the summary of every metric over the texts of a table, as a record."""
        options = self.config.eval_batch, self.batch_sharding
        summaries = metrics.evaluate_batches(metrics_of, params, frozen, table, *options)
        return {name: dataclasses.asdict(summary) for name, summary in summaries.items()}

    def report(self, step: int, group: str, record: dict) -> None:
        """Logs a measurement, which `print_results` prints if it is the last of its group."""
        self.folder.log(step, group, **record)
        texts = [
            f"{name} {metrics.with_interval(value['mean'], value['interval'], 4)}"
            if isinstance(value, dict)
            else f"{name} {value:.4f}"
            for name, value in record.items()
        ]
        self._last_reports[group] = f"{group}: {', '.join(texts)}"

    def print_results(self, best_step: int | None) -> None:
        """Prints the last measurements, and which checkpoint is the best."""
        for line in self._last_reports.values():
            print(line)
        if best_step not in (None, self.config.steps):
            print(f"best checkpoint: step {best_step}. --export={best_step} makes it the model")

    def save_model(self, model: Model) -> None:
        """Writes the folder of a model in the Hugging Face layout."""
        # Cast on the devices: half as many bytes travel to the host.
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
        on_host = dataclasses.replace(model, params=multihost.to_host(rounded))
        if multihost.is_main_process():
            loading.save(self.folder.path / "model", on_host)
        self._announce("model")

    def save_drafter(self, drafter: LoadedDrafter, target: Model) -> None:
        """Writes the folder of a drafter with weights of its own."""
        on_host = dataclasses.replace(drafter, params=multihost.to_host(drafter.params))
        if multihost.is_main_process():
            loading.save_drafter(self.folder.path / "drafter", on_host, target)
        self._announce("drafter")

    def _announce(self, name: str) -> None:
        multihost.barrier(f"{name} saved")
        print(f"{name} in {self.folder.name / name}")
