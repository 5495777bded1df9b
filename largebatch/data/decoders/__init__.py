"""From requests to tensors: DALI, torchvision, a cache of pixels, and images that are made up.

`reader` reads the bytes ahead and `prefetch` fills in batches ahead, for all that do so in threads.
"""
