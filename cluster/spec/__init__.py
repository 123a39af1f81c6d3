"""Tree speculation. A step drafts trees, verifies them, moves the accepted KV cells to the front of the window
(compact), and runs the draft over the accepted tokens (extend).
"""
