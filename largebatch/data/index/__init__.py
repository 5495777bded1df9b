"""The index of images: built and checked once, stored in one file, compared with its folder."""
