"""What is wrong with the user's own run, and what comes first?"""
