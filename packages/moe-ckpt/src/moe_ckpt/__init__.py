"""FP32 checkpoints on tensorstore that know no topology."""
