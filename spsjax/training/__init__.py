"""Training of targets, draft models, feature drafters and stop rules (extra `train`)."""

from spsjax.utils import extras

extras.require("train", "optax", "orbax.checkpoint", "grain", "tensorboardX")
