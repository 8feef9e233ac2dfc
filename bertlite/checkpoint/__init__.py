"""Checkpoints: find the files, read them, rename and check the tensors, load models and save them."""
