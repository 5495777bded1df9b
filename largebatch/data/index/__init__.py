"""The index of images: built and checked once, stored in one file, compared with its folder.

`folder` lists a folder, `headers` measures an image, `shards` reads tar files, `index` is what a
run uses, and `verify` compares the images with checksums.
"""
