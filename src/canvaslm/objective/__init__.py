"""Corruption, model and loss meet here alone, for training and evaluation alike."""
