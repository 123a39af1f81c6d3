"""Training of targets and EAGLE-3 drafts; uses models, not the engine."""
