"""The attention primitive: query rows over committed pages plus a window under an ancestor mask. One backend a file."""
