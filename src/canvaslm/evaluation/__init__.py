"""What the two models are worth on held-out text, and what they cost."""
