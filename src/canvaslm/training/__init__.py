"""Training: a plan, an optimiser step, a guard, and a loop that can be killed at any moment."""
