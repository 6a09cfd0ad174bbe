"""How does a prompt become text: canvas by canvas, or token by token?"""
