"""The index of images: built and checked once, stored in one file, compared with its folder.

`folder` lists a folder and detects changes, `build` reads the headers of images, `shards` those of
tar files, `file` is the file format, `index` is what a run uses, and `sharing` sends worker 0's
index to the others.
"""
