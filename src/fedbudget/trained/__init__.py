"""A model that was trained, to be used: predictions for new samples, and files for other programs."""
