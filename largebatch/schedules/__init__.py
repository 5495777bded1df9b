"""Learning rates: `functions` map a step to a rate; `build` reads a recipe's section.

Nothing here imports PyTorch.
"""

from largebatch.schedules.functions import Schedule as Schedule
from largebatch.schedules.functions import constant as constant
from largebatch.schedules.functions import cosine as cosine
from largebatch.schedules.functions import cosine_cycles as cosine_cycles
from largebatch.schedules.functions import exponential as exponential
from largebatch.schedules.functions import exponential_rise as exponential_rise
from largebatch.schedules.functions import inverse as inverse
from largebatch.schedules.functions import multistep as multistep
from largebatch.schedules.functions import piecewise as piecewise
from largebatch.schedules.functions import polynomial as polynomial
from largebatch.schedules.functions import sine as sine
from largebatch.schedules.functions import skip as skip
from largebatch.schedules.functions import step as step
from largebatch.schedules.functions import triangular as triangular
from largebatch.schedules.functions import warmup as warmup
