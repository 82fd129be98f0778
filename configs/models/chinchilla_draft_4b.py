"""The draft of Chen et al. 2023 (arXiv 2302.01318), Table 2: 4.1B parameters.

python scripts/compile.py --topology=v5p:2x2x4 --config=configs/experiments/chinchilla_70b.py

It has a tenth of the target's layers and three quarters of its width, because on many chips each
layer adds collectives. Other choices are those of `chinchilla_70b.py`. There are no public weights.
Hardware: meant for the target's 16 chips.
"""

from spsjax.cli import sections
from spsjax.models.config import sizes

get_config = sections.changed(__file__, "chinchilla_70b.py", **sizes(8, 6144, 4 * 6144, 48, 48))
