"""A checkpoint: its files read, the model's own code loaded and met at the library's two seams, the reference."""
