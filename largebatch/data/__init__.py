"""The pictures: which there are, in which order they come, which part is shown, who decodes it.

`index`, `order` and `augment` are pure and decide everything; `dali`, `torchvision`, `cached`,
`on_device` and `synthetic`, of which a run uses one or two, turn their `Request`s into tensors and
decide nothing.
"""

from largebatch.data.augment import clean_request as clean_request
from largebatch.data.augment import train_request as train_request
from largebatch.data.augment import training_samples as training_samples
