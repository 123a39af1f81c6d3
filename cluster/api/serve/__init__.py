"""The Ray Serve application: its settings, its deployments, and the streams between them."""
