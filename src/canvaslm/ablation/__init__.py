"""Ablations with controls: what is asked before a run, and what may be concluded after it."""
