"""Final Polishing: BatchNorm statistics, measured exactly on clean training data.

`statistics` runs the passes over the data; `moments` computes exact sums over batches and workers.
"""

from largebatch.callable_module import make_callable
from largebatch.polish.statistics import Drift as Drift
from largebatch.polish.statistics import polish as polish
from largebatch.tracking.events import LayerDrift as LayerDrift

make_callable(__name__, polish)
