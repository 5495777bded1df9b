"""The study of polishing after training on images that are further from clean ones."""
