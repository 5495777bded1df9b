"""Short runs that answer a question about one recipe: speed, critical batch, learning rate.

`estimate` and `calibrate` time updates on this machine, `rehearsal` counts what
an update does on a cluster, `critical_batch` and `lr_range` train for a few updates, `batch` uses
all of these to choose a batch, and `initial` writes a first recipe for a folder of images.
"""
