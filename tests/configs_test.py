"""The models of `configs/models` have as many parameters as their sources say."""

import math
import pathlib
import runpy

import jax
import pytest

from spsjax import arguments, cli, distill, documents, evaluation, teacher, train
from spsjax.models import transformer
from spsjax.models.transformer import param_shapes

FOLDER = pathlib.Path(__file__).parent.parent / "configs" / "models"
BILLIONS = {
    "chinchilla_70b": 70.1,
    "chinchilla_draft_4b": 4.1,
    "llama_2_7b": 6.7,
    "llama_3_8b": 8.0,
}


def test_every_model_s_count_is_tested_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(BILLIONS)


@pytest.mark.parametrize("name", BILLIONS)
def test_a_model_has_the_published_number_of_parameters(name):
    fields = runpy.run_path(FOLDER / f"{name}.py")["get_config"]()
    config = arguments.build("model", transformer.Config, fields)
    shapes = jax.tree.leaves(transformer.param_shapes(config))
    count = sum(math.prod(shape.shape) for shape in shapes)
    digits = len(str(BILLIONS[name]).partition(".")[2])
    assert round(count / 1e9, digits) == BILLIONS[name]


EXPERIMENTS = FOLDER.parent / "experiments"
TRAININGS = ("pystdlib_target", "pystdlib_draft", "chinchilla_target", "chinchilla_draft")


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_s_parts_are_what_they_should_be(name):
    config = runpy.run_path(EXPERIMENTS / f"{name}.py")["get_config"]()
    shipped = "pystdlib_target" if "tokenizer" in config else "pystdlib_draft"
    default = runpy.run_path(EXPERIMENTS / f"{shipped}.py")["get_config"]()
    cli._check_keys(config, default, free=("model",))
    how = arguments.build("o", train.Optimization, config.optimization, steps=config.steps)
    data, model = config.mesh.data, config.mesh.model
    mesh = jax.sharding.AbstractMesh((data, model), ("data", "model"))
    train.check_batch(config.batch, how.accumulate, mesh)
    documents.Sources(**config.data)
    more = {} if "vocab_size" in config.model else {"vocab_size": 32_000, "max_positions": 2048}
    shape = arguments.build("model", transformer.Config, config.model, **more)
    assert config.length <= shape.max_positions
    if "objective" in config:
        distill.Objective(**config.objective)
        distill.Mixture(**config.mixture)
        teacher.Teacher(**config.teacher)
        evaluation.Drafting(**config.trial)
    for field in ("num_heads", "d_ff"):
        assert getattr(shape, field) % model == 0
    if name == "chinchilla_target":  # 1.4T tokens
        assert config.steps * config.batch * config.length == pytest.approx(1.4e12, rel=0.01)


@pytest.mark.parametrize("name", ["distillspec", "wide_shallow"])
def test_a_comparison_changes_what_there_is_and_its_drafts_have_one_size(name):
    config = runpy.run_path(EXPERIMENTS / f"{name}.py")["get_config"]()
    base = runpy.run_path(EXPERIMENTS / f"{config.base}.py")["get_config"]()
    sizes = []
    for changes in (config.start, *config.runs.values()):
        each = base.copy_and_resolve_references().lock()
        each.update(config.common)
        each.update(changes)
        shape = transformer.Config(vocab_size=4096, max_positions=512, **each.model)
        sizes.append(sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(shape))))
    assert max(sizes) / min(sizes) < 1.005
