"""What images exist: read and checked once, stored in one file, and compared with its folder.

`folder` lists a folder and finds out whether it has changed, `build` reads the headers, `shards`
the tar files, `file` is what is stored, `index` what a run uses of it, and `sharing` gives worker
0's to the others.
"""
