"""What does a network say about the clean tokens, given noisy ones and their context?"""
