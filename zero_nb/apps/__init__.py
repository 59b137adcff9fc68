"""Programs, not library: the training job, the command line and the benchmark."""
