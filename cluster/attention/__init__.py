"""The attention primitive: query rows attend a request's committed tokens and the nodes of its tree, under an ancestor
mask. Each backend has a file of its own.
"""
