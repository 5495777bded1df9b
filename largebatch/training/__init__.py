"""A run on one worker: the loop, the stages around it, and the state that a checkpoint holds.

If you read one file, read `loop`. It is `evaluation`, not evaluate, because a module of that name
would hide the function.
"""

from largebatch.training.evaluation import ClassMetrics as ClassMetrics
from largebatch.training.evaluation import Metrics as Metrics
from largebatch.training.evaluation import evaluate as evaluate
