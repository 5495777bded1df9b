"""Learning rates: `functions` and `cycles` map a step to a rate; `build` reads a recipe's section.

Nothing here imports PyTorch.
"""

from largebatch.schedules.cycles import cosine_cycles as cosine_cycles
from largebatch.schedules.cycles import cosine_cycles2 as cosine_cycles2
from largebatch.schedules.cycles import cosine_cycles_exp as cosine_cycles_exp
from largebatch.schedules.cycles import restarts as restarts
from largebatch.schedules.cycles import sine as sine
from largebatch.schedules.cycles import sine2 as sine2
from largebatch.schedules.cycles import sine_exp as sine_exp
from largebatch.schedules.cycles import triangular as triangular
from largebatch.schedules.cycles import triangular2 as triangular2
from largebatch.schedules.cycles import triangular_exp as triangular_exp
from largebatch.schedules.functions import Schedule as Schedule
from largebatch.schedules.functions import constant as constant
from largebatch.schedules.functions import cosine as cosine
from largebatch.schedules.functions import exponential as exponential
from largebatch.schedules.functions import exponential_rise as exponential_rise
from largebatch.schedules.functions import inverse as inverse
from largebatch.schedules.functions import multistep as multistep
from largebatch.schedules.functions import piecewise as piecewise
from largebatch.schedules.functions import polynomial as polynomial
from largebatch.schedules.functions import sigmoid as sigmoid
from largebatch.schedules.functions import skip as skip
from largebatch.schedules.functions import spline as spline
from largebatch.schedules.functions import step as step
from largebatch.schedules.functions import warmup as warmup
