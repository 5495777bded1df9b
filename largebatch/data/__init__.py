"""Training data: index, order, augmentation, decoders and imports.

`index`, `order` and `augment` are pure functions and decide which part of which image is shown
when. `decoders` turn their `Request`s into tensors and decide nothing; a run uses one or two.
`datasets` converts published data sets to folders and shards that can be indexed.
"""
