"""The images: which there are, in which order they come, which part is shown, who decodes it.

`index`, `order` and `augment` are pure and decide everything; `decoders`, of which a run uses one
or two, turn their `Request`s into tensors and decide nothing. `datasets` writes what others publish
as folders and shards that an index can be made of.
"""
