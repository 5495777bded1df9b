"""Final Polishing: BatchNorm statistics, measured exactly on clean training data.

`statistics` has the pass over the data, `moments` the exact sums that it pools over batches and
workers.
"""

from largebatch.polish.statistics import Drift as Drift
from largebatch.polish.statistics import polish as polish
from largebatch.tracking.events import LayerDrift as LayerDrift
