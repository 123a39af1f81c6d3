"""Two C kernels over the tokens of each request: one appends the tokens that a step has committed; the other looks up
the tokens that followed an earlier occurrence of the request's last tokens (n-gram lookup).
"""
