"""Learning rates: `functions` from the step to a rate, and `build`, which makes one of a recipe.

Nothing here imports PyTorch.
"""

from largebatch.schedules.functions import Schedule as Schedule
from largebatch.schedules.functions import constant as constant
from largebatch.schedules.functions import cosine as cosine
from largebatch.schedules.functions import cosine_cycles as cosine_cycles
from largebatch.schedules.functions import exponential as exponential
from largebatch.schedules.functions import inverse as inverse
from largebatch.schedules.functions import multistep as multistep
from largebatch.schedules.functions import piecewise as piecewise
from largebatch.schedules.functions import polynomial as polynomial
from largebatch.schedules.functions import sine as sine
from largebatch.schedules.functions import sine2 as sine2
from largebatch.schedules.functions import sine_exp as sine_exp
from largebatch.schedules.functions import skip as skip
from largebatch.schedules.functions import step as step
from largebatch.schedules.functions import triangular as triangular
from largebatch.schedules.functions import triangular2 as triangular2
from largebatch.schedules.functions import triangular_exp as triangular_exp
from largebatch.schedules.functions import warmup as warmup
