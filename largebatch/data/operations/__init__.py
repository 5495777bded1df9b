"""Operations on the 8-bit pixels of training images: RandAugment, TrivialAugment, ColorJitter.

`draws` draws which operations an image gets and how strong they are, from the seed and its
position; `pillow` applies them to one image on the host, `batched` to a batch on a device, with the
same arithmetic; `applying` chooses between the two and normalises the result.
"""
