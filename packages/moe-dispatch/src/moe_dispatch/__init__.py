"""Row-wise expert-parallel dispatch and combine."""
