"""Train Mixture-of-Experts language models, from a laptop to a cluster."""
