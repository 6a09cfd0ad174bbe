"""Time to clean share, clean tokens to noisy ones, predictions to nats."""
