"""The models of `configs/models` have as many parameters as their sources say."""

import math
import pathlib
import runpy

import jax
import pytest

from spsjax import arguments
from spsjax.models import transformer

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
