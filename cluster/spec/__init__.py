"""Tree speculation. A step drafts trees of tokens and verifies them with the target. Then it moves the KV of accepted
tokens to the first of the slots that the tree used (compact), and runs the draft over these tokens (extend).
"""
