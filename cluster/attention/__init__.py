"""The one attention primitive: q rows over committed pages plus a window under an ancestor mask."""
